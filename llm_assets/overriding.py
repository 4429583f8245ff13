"""Overrides: a person lets one artifact through one gate that it failed. Kind `overrides`.

An override is written once and never changed. It counts for that gate of that artifact only, is
shown as a warning wherever the gate is, and stands in the manifest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from llm_assets.identity import digest_of
from llm_assets.signing import add_once, check_signed, now
from llm_assets.store.digest import ArtifactHash
from llm_assets.store.protocol import Store

KIND = "overrides"
INPUT = "override."
"""What the names of overrides among the inputs of `release` begin with."""


def overrides_of(store: Store, artifact: ArtifactHash) -> dict[str, dict[str, Any]]:
    """Gate name to the override that somebody recorded for this artifact."""
    return {str(body["gate"]): body for _, body in store.entries(KIND, f"{artifact}/")}


def override_inputs(store: Store, artifacts: Iterable[str]) -> dict[str, str]:
    """The overrides of these artifacts as inputs of an identity: a release decides again when one
    was added."""
    wanted = set(artifacts)
    return {
        f"{INPUT}{key}": digest_of(body)
        for key, body in store.entries(KIND)
        if body.get("artifact") in wanted
    }


def override(
    store: Store,
    *,
    artifact: ArtifactHash,
    stage: str,
    gate: str,
    pipeline: str,
    verdict: Mapping[str, Any],
    reviewer: str,
    reason: str,
) -> Mapping[str, Any]:
    """Record an override; the one that stands already when there is one. `verdict`: the gate's, as
    it is overridden. UserError without a reviewer or a reason."""
    check_signed(f"override of {stage}.{gate}", reviewer=reviewer, reason=reason)
    body = {
        "gate": gate,
        "stage": stage,
        "artifact": str(artifact),
        "pipeline": pipeline,
        "reviewer": reviewer,
        "reason": reason,
        "verdict": dict(verdict),
        "at": now(),
    }
    return add_once(store, KIND, f"{artifact}/{gate}", body)
