"""What a worker is told: one JSON document. Written by the asset, read by the worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class StageJob:
    """One stage to run. `inputs` maps names to {"artifact", "type"}; `identity_inputs` is what the
    identity was computed over; `config` is the stage's whole block of the recipe as JSON."""

    stage: str
    pipeline: str
    identity: str
    source_hash: str
    recipe_part: Mapping[str, Any]
    config: Mapping[str, Any]
    seed: int
    inputs: Mapping[str, Mapping[str, str]]
    identity_inputs: Mapping[str, str]
    store_url: str
    imported: bool = False
    num_processes: int = 1
    run_id: str = ""
    campaign: str = ""
    device: str = "cpu"
    devices: int = 1
    usd_per_hour: float = 0.0
    stage_limit_usd: float | None = None
    lineage: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> StageJob:
        """The job that `as_json` wrote."""
        return cls(**document)
