"""The verdict on a save, kept beside it in `health.json` and bound to its manifest."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from llm_assets.checkpoints.manifest import Manifest, body_hash, write_json

HEALTH = "health.json"

Verdict = Literal["healthy", "light", "review", "corrupt"]


@dataclass(frozen=True, kw_only=True)
class Health:
    """healthy: may be gone on from. light: whole, weights only. review: whole, but a person should
    look (`reasons`). corrupt: not what was written (`reasons`). `checks`: "ok", or why not."""

    verdict: Verdict
    checks: Mapping[str, str]
    manifest_sha256: str
    reasons: tuple[str, ...] = ()
    checked_at: str = field(
        default_factory=lambda: datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    )


def write_health(save: Path, health: Health) -> None:
    """Write `health.json`, sealed with its own hash."""
    write_json(save / HEALTH, health_document(health))


def health_document(health: Health) -> dict[str, Any]:
    """The verdict as a document with its own hash."""
    document = {**asdict(health), "reasons": list(health.reasons)}
    return {**document, "sha256": body_hash(document)}


def read_health(save: Path, manifest: Manifest) -> Health | None:
    """The verdict that belongs to this manifest; None when there is none or it is damaged."""
    try:
        return parse_health(json.loads((save / HEALTH).read_bytes()), manifest)
    except (OSError, ValueError):
        return None


def parse_health(document: Any, manifest: Manifest) -> Health | None:
    """The verdict of a document of `health_document`, if it belongs to this manifest."""
    try:
        body = {key: value for key, value in document.items() if key != "sha256"}
        if document["sha256"] != body_hash(body):
            return None
        health = Health(**{**body, "reasons": tuple(body["reasons"])})
    except (TypeError, KeyError, AttributeError):
        return None
    return health if health.manifest_sha256 == manifest.sha256 else None
