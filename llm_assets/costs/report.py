"""The ledger summed by run, stage, pipeline, campaign or day; as a table, JSON or CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from llm_assets.costs.devices import find_device
from llm_assets.costs.entries import LedgerEntry, Usage, total_usage
from llm_assets.errors import UserError

By = Literal["run", "stage", "pipeline", "campaign", "day"]
GROUPINGS: tuple[By, ...] = ("run", "stage", "pipeline", "campaign", "day")
_WASTED = ("failed", "cancelled", "killed", "lost")
COLUMNS = (
    "attempts",
    "running",
    "seconds",
    "gpu_hours",
    "cost_usd",
    "wasted_usd",
    "estimate_usd",
    "tokens",
    "flops",
    "utilization",
    "energy_j",
)


@dataclass(frozen=True, kw_only=True)
class CostRow:
    """What one group of attempts used.

    `wasted_usd`: of attempts that failed, were cancelled or killed. `estimate_usd`: what was
    estimated for those that are done, None when an estimate is missing; by day there is none.
    `peak_flops`: what the devices could have done in the time of the attempts that count
    operations; None when a device is unknown.
    """

    name: str
    attempts: int
    running: int
    usage: Usage
    wasted_usd: float
    estimate_usd: float | None
    peak_flops: float | None

    @property
    def utilization(self) -> float | None:
        """Share of the devices' peak, over attempts that count operations."""
        if not self.peak_flops or self.usage.flops <= 0:
            return None
        return self.usage.flops / self.peak_flops

    def as_json(self, by: str) -> dict[str, Any]:
        """Plain JSON: the group's name under `by`, then COLUMNS."""
        return {
            by: self.name,
            "attempts": self.attempts,
            "running": self.running,
            **self.usage.as_json(),
            "wasted_usd": self.wasted_usd,
            "estimate_usd": self.estimate_usd,
            "utilization": self.utilization,
        }


def _peak_flops(entry: LedgerEntry, usage: Usage) -> float | None:
    if usage.flops <= 0:
        return 0.0
    try:
        return usage.gpu_hours * 3600.0 * find_device(entry.info.device).peak_tflops * 1e12
    except UserError:
        return None


def _row(name: str, parts: list[tuple[LedgerEntry, Usage]], *, with_estimate: bool) -> CostRow:
    peaks = [_peak_flops(entry, usage) for entry, usage in parts]
    done = [entry for entry, _ in parts if entry.status == "done"]
    estimates = [entry.info.estimate_usd for entry in done if entry.info.estimate_usd is not None]
    complete = with_estimate and bool(done) and len(estimates) == len(done)
    return CostRow(
        name=name,
        attempts=len(parts),
        running=sum(entry.status == "running" for entry, _ in parts),
        usage=total_usage(usage for _, usage in parts),
        wasted_usd=sum((usage.cost_usd for entry, usage in parts if entry.status in _WASTED), 0.0),
        estimate_usd=sum(estimates) if complete else None,
        peak_flops=None if None in peaks else sum(peak for peak in peaks if peak is not None),
    )


def _parts(entry: LedgerEntry, by: By) -> Iterator[tuple[str, Usage]]:
    if by == "day":
        yield from entry.days.items()
    else:
        names = {
            "run": entry.info.run_id or "(no run)",
            "stage": entry.info.stage,
            "pipeline": entry.info.pipeline,
            "campaign": entry.info.campaign,
        }
        yield names[by], entry.usage


def cost_rows(entries: Iterable[LedgerEntry], by: By) -> list[CostRow]:
    """One row a group: days in order, all else by cost, the dearest first. An attempt that ran
    over midnight (UTC) counts on both days."""
    groups: dict[str, list[tuple[LedgerEntry, Usage]]] = {}
    for entry in entries:
        for name, usage in _parts(entry, by):
            groups.setdefault(name, []).append((entry, usage))
    rows = [_row(name, parts, with_estimate=by != "day") for name, parts in groups.items()]
    if by == "day":
        return sorted(rows, key=lambda row: row.name)
    return sorted(rows, key=lambda row: (-row.usage.cost_usd, row.name))


def total_row(entries: Iterable[LedgerEntry]) -> CostRow:
    """All attempts in one row."""
    return _row("total", [(entry, entry.usage) for entry in entries], with_estimate=True)


def as_csv(rows: Iterable[CostRow], by: By) -> str:
    """A header and one line a row; an unknown value is empty."""
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=[by, *COLUMNS], lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow(row.as_json(by))
    return text.getvalue()
