"""Estimates of a stage, corrected by what the same stage took before on the same device.

Without records an estimate is first principles: start-up, host work, and operations at the default
utilization (work.py, estimate.py). With records it is their wall time. The model is

    wall = fixed + slope x work

where work is what first principles say without start-up. Records whose work is that of the new run
answer directly, by their median. Otherwise the two coefficients come from the records: a line
through the medians of the smallest and the largest work when these differ enough, else the start-up
is taken for the fixed part and the rest is scaled. Neither coefficient is ever negative. So a tiny
stage, which is mostly imports, and a large one, which is mostly arithmetic, are both met.

How far earlier estimates were off is computed, not remembered: each record is estimated from the
ones before it, the first one from first principles.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from llm_assets.costs.devices import Device, find_device, parse_label
from llm_assets.costs.estimate import DEFAULT_UTILIZATION, from_wall
from llm_assets.costs.work import InputsInfo, StageWork, stage_work
from llm_assets.errors import RecipeError
from llm_assets.jobs import PROCESSES, RESUMED
from llm_assets.recipe import RateSettings
from llm_assets.stage_settings import StageBlocks
from llm_assets.store.protocol import Record

NEWEST = 12
"""Older records say little about today's code and machine."""

_SAME_WORK = 0.05
_APART = 1.5  # largest over smallest work, from where a line through them means something
_FIXED_SHARE = 0.9  # of a record's wall time that start-up may explain, at the most

WorkOf = Callable[[Record], StageWork | None]


@dataclass(frozen=True, kw_only=True)
class StageEstimate:
    """What one stage is expected to take.

    `source`: `first principles`, or `measured: n earlier runs`. `error_share`: how far earlier
    estimates were off, as a share of what was measured (median); None when there is no earlier run.
    `utilization`: of peak, as assumed, or as those runs reached it.
    """

    stage: str
    flops: float
    tokens: int
    wall_s: float
    gpu_hours: float
    cost_usd: float
    source: str
    error_share: float | None
    utilization: float
    num_records: int = 0

    def as_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "cost_usd": self.cost_usd,
            "wall_s": self.wall_s,
            "gpu_hours": self.gpu_hours,
            "flops": self.flops,
            "tokens": self.tokens,
            "source": self.source,
            "error_share": self.error_share,
            "utilization": self.utilization,
        }


@dataclass(frozen=True, kw_only=True)
class _Point:
    """A record: work in seconds from first principles, and the wall seconds it really took."""

    work_s: float
    wall_s: float


def device_of(rates: RateSettings) -> Device:
    """The device that a recipe's rates name, with their overrides."""
    return find_device(
        rates.device,
        where="rates.device",
        peak_tflops=rates.peak_tflops,
        memory_gib=rates.memory_gib,
    )


def computing(device: Device, devices: int, processes: int | None) -> int:
    """Of `devices` that are paid, those that compute: all cores of a machine, or one device a
    process. None: nobody said how many processes there were, so all."""
    return devices if device.is_cpu or processes is None else min(devices, processes)


def learned_utilization(
    records: Sequence[Record], stage: str, device: str, *, peak_tflops: float | None = None
) -> tuple[float, int, float] | None:
    """Share of the device's peak that earlier records of a stage reached, start-up included.

    Gives the median, the number of records and their spread (standard deviation over median). None
    without records that counted operations on this device.
    """
    wanted = find_device(device, peak_tflops=peak_tflops)
    shares = []
    for record in _newest(records, stage, wanted.name):
        if record.flops > 0:
            peak = wanted.peak_tflops * 1e12 * _computed_on(record, wanted)
            shares.append(record.flops / (record.wall_s * peak))
    if not shares:
        return None
    middle = statistics.median(shares)
    spread = statistics.stdev(shares) / middle if len(shares) > 1 else 0.0
    return middle, len(shares), spread


def estimate_stage(
    stage: str,
    settings: Any,
    inputs_info: InputsInfo,
    rates: RateSettings,
    records: Sequence[Record] = (),
    *,
    work_of: WorkOf | None = None,
    processes: int | None = None,
) -> StageEstimate:
    """What a stage will take, from its block of the recipe and earlier records of any stage.

    `work_of` gives the work of an earlier record; without it that is worked out from the record's
    part of the recipe with the inputs of now (`recorded_work`). `processes`: of the worker; devices
    beyond them are paid and idle. RecipeError when the work can't be
    known and there is no record to go by either.
    """
    device = device_of(rates)
    utilization = rates.utilization or DEFAULT_UTILIZATION
    imported = getattr(settings, "import_", None) is not None
    alike = [record for record in records if _is_import(record) == imported]
    earlier = _newest(alike, stage, device.name)
    try:
        work = stage_work(stage, settings, inputs_info)
    except RecipeError:
        if not earlier:
            raise
        # Nothing to scale by: the same again.
        return _repeat(stage, earlier, device, rates)
    known = work_of or (lambda record: recorded_work(record, inputs_info))
    points = []
    for record in earlier:
        found = known(record) or work
        seconds = found.variable_s(
            device, utilization=utilization, devices=_computed_on(record, device)
        )
        points.append(_Point(work_s=seconds, wall_s=record.wall_s))
    busy = computing(device, rates.devices, processes)
    own = work.variable_s(device, utilization=utilization, devices=busy)
    wall_s = _wall(points, own, work.startup_s)
    cost = from_wall(
        wall_s, flops=work.flops, devices=rates.devices, usd_per_hour=rates.usd_per_hour
    )
    if points and wall_s > 0:
        peak = device.peak_tflops * 1e12 * busy
        utilization = work.flops / (wall_s * peak)
    return StageEstimate(
        stage=stage,
        flops=work.flops,
        tokens=work.tokens,
        wall_s=wall_s,
        gpu_hours=cost.gpu_hours,
        cost_usd=cost.cost_usd,
        source=_source(len(points)),
        error_share=_error_share(points, work.startup_s),
        utilization=utilization,
        num_records=len(points),
    )


def recorded_work(record: Record, info: InputsInfo) -> StageWork | None:
    """The work of an earlier record: its part of the recipe, with inputs as `info` has them.

    None when that part can't be read as today's settings.
    """
    field = StageBlocks.model_fields.get(record.stage)
    try:
        if field is None:
            return stage_work(record.stage, None, info)
        document = json.dumps({record.stage: dict(record.recipe)})
        settings = getattr(StageBlocks.model_validate_json(document), record.stage)
        return stage_work(record.stage, settings, info)
    except (ValidationError, RecipeError):
        return None


def _computed_on(record: Record, device: Device) -> int:
    """Devices that computed what a record says."""
    _, count = parse_label(record.device)
    said = record.environment.get(PROCESSES)
    return computing(device, count, int(said) if said else None)


def _is_import(record: Record) -> bool:
    """It took a checkpoint from elsewhere, which says nothing about training one."""
    return set(record.recipe) == {"import"}


def _source(num_records: int) -> str:
    if not num_records:
        return "first principles"
    return f"measured: {num_records} earlier run{'s' if num_records > 1 else ''}"


def _newest(records: Sequence[Record], stage: str, device: str) -> list[Record]:
    """Records of a stage on a device, oldest first, the newest ones only. One that went on from a
    save took the time of a part of its work, so it teaches nothing."""
    found = [
        record
        for record in records
        if record.stage == stage
        and record.wall_s > 0
        and parse_label(record.device)[0] == device
        and RESUMED not in record.environment
    ]
    return sorted(found, key=lambda record: record.created_at)[-NEWEST:]


def _repeat(
    stage: str, records: list[Record], device: Device, rates: RateSettings
) -> StageEstimate:
    wall_s = statistics.median(record.wall_s for record in records)
    flops = statistics.median(record.flops for record in records)
    points = [_Point(work_s=0.0, wall_s=record.wall_s) for record in records]
    cost = from_wall(wall_s, flops=flops, devices=rates.devices, usd_per_hour=rates.usd_per_hour)
    return StageEstimate(
        stage=stage,
        flops=flops,
        tokens=round(statistics.median(record.tokens for record in records)),
        wall_s=wall_s,
        gpu_hours=cost.gpu_hours,
        cost_usd=cost.cost_usd,
        source=_source(len(records)),
        error_share=_error_share(points[1:], points[0].wall_s) if len(points) > 1 else None,
        utilization=flops / (wall_s * device.peak_tflops * 1e12 * rates.devices),
        num_records=len(records),
    )


def _wall(points: Sequence[_Point], work_s: float, startup_s: float) -> float:
    """Wall seconds of a run whose work is `work_s`; first principles without points."""
    if not points:
        return startup_s + work_s
    same = [entry.wall_s for entry in points if _is_same(entry.work_s, work_s)]
    if same:
        return statistics.median(same)
    fixed, slope = _line(points, startup_s)
    return fixed + slope * work_s


def _is_same(one: float, other: float) -> bool:
    return abs(one - other) <= _SAME_WORK * max(one, other)


def _line(points: Sequence[_Point], startup_s: float) -> tuple[float, float]:
    """Fixed seconds and slope, neither negative."""
    small = min(entry.work_s for entry in points)
    large = max(entry.work_s for entry in points)
    if small > 0 and large / small >= _APART:
        low = statistics.median(e.wall_s for e in points if _is_same(e.work_s, small))
        high = statistics.median(e.wall_s for e in points if _is_same(e.work_s, large))
        slope = (high - low) / (large - small)
        if slope > 0 and low - slope * small >= 0:
            return low - slope * small, slope
    wall_s = statistics.median(entry.wall_s for entry in points)
    work_s = statistics.median(entry.work_s for entry in points)
    if work_s <= 0:
        return wall_s, 1.0
    fixed = min(startup_s, _FIXED_SHARE * wall_s)
    return fixed, (wall_s - fixed) / work_s


def _error_share(points: Sequence[_Point], startup_s: float) -> float | None:
    """Median of |estimate - measured| / measured, each record estimated from those before it.

    The first record counts, from first principles, only while it is the only one.
    """
    errors = [
        abs(_wall(points[:place], point.work_s, startup_s) - point.wall_s) / point.wall_s
        for place, point in enumerate(points)
    ]
    if len(errors) > 1:
        errors = errors[1:]
    return statistics.median(errors) if errors else None
