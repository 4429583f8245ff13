"""What a stage is given and what it gives back. No torch, no Dagster.

A stage module has one entry point, `run(context: StageContext) -> StageResult`. It reads its inputs
from folders, writes its artifact into `context.out`, and reports as it goes through
`context.progress`. It knows nothing of the store, of Dagster or of where it runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from llm_assets.gates.statistics import Interval
from llm_assets.interruption import Interruption


class Progress(Protocol):
    """Where a stage reports to while it runs. Cheap: may be called at every step."""

    def step(
        self,
        step: int,
        total: int,
        *,
        loss: float | None = None,
        tokens: int | None = None,
        **metrics: float,
    ) -> None:
        """Step `step` of `total` is done. `tokens`: processed since the stage started."""

    def say(self, text: str) -> None:
        """One line for a person: which part of the stage runs now. What begins with "measuring"
        serves gates and report cards only, up to the next line, and its time counts as theirs."""


@dataclass(frozen=True, kw_only=True)
class StageInput:
    """One input artifact: its read-only folder, its type and its metadata."""

    path: Path
    type: str
    artifact: str
    metadata: Mapping[str, Any] = field(default_factory=dict)


class SaveCopies(Protocol):
    """In-training saves beyond this machine. Asked by the first of several processes."""

    def bring(self, settings: Any) -> None:
        """Before saves are looked for: fetch the newest one that can be gone on from, if this
        machine has none as new. `settings`: the stage's checkpoint block."""

    def offer(self, save: str) -> None:
        """A save was proved healthy: copy it in the background."""

    def told(self) -> list[str]:
        """What became of copies since the last call."""

    def finish(self, wait_s: float) -> None:
        """End the copying; wait so long for the newest save to be copied."""


def _never() -> None:
    return None


@dataclass(frozen=True, kw_only=True)
class StageContext:
    """All that a stage may depend on.

    `config` is the stage's block of the recipe (see recipe.py). `inputs` maps the input names of
    graph.py to artifacts. `out` is an empty folder that becomes the artifact. `scratch` is deleted
    after the stage. `checkpoints` survives a crash and is the same folder for the same identity.
    `identity`: what in-training saves belong to; `environment`: what they say of where they were
    made. `should_stop`: why the stage must save and stop now (its money is spent); None: go on.
    Cheap enough for every step. `interruption`: whether the process was told to end. `copies`: of
    saves, where these would be lost with the machine.
    """

    stage: str
    pipeline: str
    config: Any
    seed: int
    inputs: Mapping[str, StageInput]
    out: Path
    scratch: Path
    checkpoints: Path
    progress: Progress
    lineage: Mapping[str, Any] = field(default_factory=dict)
    should_stop: Callable[[], str | None] = _never
    identity: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    interruption: Interruption = field(default_factory=Interruption)
    copies: SaveCopies | None = None


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A headline metric: `value`, and the number of items `n` that it is a mean of, if any."""

    value: float
    n: int | None = None


def with_ends(name: str, value: float, interval: Interval, n: int | None) -> dict[str, Metric]:
    """A metric with both ends of its interval, as `confident` gates read them; without them where
    the interval is not finite."""
    found = {name: Metric(value=value, n=n)}
    if math.isfinite(interval.low) and math.isfinite(interval.high):
        found[f"{name}_low"] = Metric(value=interval.low, n=n)
        found[f"{name}_high"] = Metric(value=interval.high, n=n)
    return found


@dataclass(frozen=True, kw_only=True)
class StageResult:
    """What a stage gives back beside the files in `context.out`.

    `metadata` goes into the artifact's tree and so into its hash: only what is a function of the
    inputs (never times, hosts or paths). All else goes into the record: `metrics` (gates read
    these), `series` (curves: name to [[step, value], ...]), `samples` (rows that a person reads),
    `tables` (name to rows), `tokens` (trained or processed), `flops` (if the stage counted them).
    """

    metrics: Mapping[str, Metric]
    metadata: Mapping[str, Any] = field(default_factory=dict)
    series: Mapping[str, Sequence[tuple[int, float]]] = field(default_factory=dict)
    samples: Sequence[Mapping[str, Any]] = ()
    tables: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    tokens: int = 0
    flops: float = 0.0
