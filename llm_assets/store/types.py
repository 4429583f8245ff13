"""The check of an artifact's type on the way in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llm_assets.artifacts import ARTIFACT_TYPES, check_artifact
from llm_assets.errors import RefusedError, message


def check_type(folder: Path, type: str, metadata: Mapping[str, Any]) -> None:
    """RefusedError for an unknown type; ModelError when the folder is not what its type says."""
    if type not in ARTIFACT_TYPES:
        raise RefusedError(
            message(
                where=str(folder),
                found=f"the type {type!r}",
                rule=f"an artifact's type is one of {', '.join(sorted(ARTIFACT_TYPES))}",
                remedy="give one of these",
            )
        )
    check_artifact(folder, type, metadata)
