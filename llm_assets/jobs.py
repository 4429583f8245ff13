"""What a worker is told: one JSON document. Written by the asset, read by the worker."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

RESUMED = "resumed_at_tokens"
"""In a record's environment: its attempt went on from a save, so its time is that of a part."""
PROCESSES = "processes"
"""In a record's environment: how many processes trained."""


@dataclass(frozen=True, kw_only=True)
class StageJob:
    """One stage to run.

    `inputs` maps names to {"artifact", "type"}; `identity_inputs` is what the
    identity was computed over; `config` is the stage's whole block of the recipe as JSON.

    `work_flops` and `work_tokens`: what costs/work.py expects of it. `reservation`: the run's, on
    which the attempt draws. `skip_records`: records of the identity that are no answer, because
    their artifact is damaged. `replay`: the replay that this belongs to, whose own records are its
    only answers.
    """

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
    estimate_usd: float | None = None
    work_flops: float = 0.0
    work_tokens: int = 0
    reservation: str = ""
    skip_records: int = 0
    replay: str = ""
    lineage: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> StageJob:
        """The job that `as_json` wrote."""
        return cls(**document)
