"""A record as Dagster metadata: what people look at in the UI."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from dagster import AssetCheckResult, AssetCheckSeverity, AssetKey, MetadataValue, TableRecord

from llm_assets.costs.devices import find_device, parse_label
from llm_assets.costs.learning import StageEstimate
from llm_assets.curves import curve_markdown
from llm_assets.errors import UserError
from llm_assets.gates.thresholds import NO_REFERENCE, GateResult, is_confident
from llm_assets.store.protocol import Record

_MAX_ROWS = 50
_MAX_CELL = 2000
_FIRST_COLUMNS = ("file", "prompt", "question", "before", "after", "served", "in_process")


def record_metadata(record: Record) -> dict[str, Any]:
    """A record as the UI lists it, in this order: time and cost, headline metrics, curves, tables
    and samples, and then what identifies it."""
    metadata: dict[str, Any] = {
        "wall_s": _float(record.wall_s),
        "measure_s": _float(record.measure_s),
        "cost_usd": _float(record.cost_usd),
    }
    if record.tokens:
        metadata["tokens"] = MetadataValue.int(record.tokens)
        if record.wall_s > 0:
            metadata["tokens_per_s"] = _float(record.tokens / record.wall_s)
    if record.flops:
        metadata["flops"] = _float(record.flops)
        utilization = reached_utilization(record)
        if utilization is not None:
            metadata["utilization"] = _float(utilization)
    for name, metric in record.metrics.items():
        metadata[f"metric/{name}"] = _float(float(metric["value"]))
    for name, points in record.series.items():
        if len(points) > 1:
            metadata[f"curve/{name}"] = MetadataValue.md(curve_markdown(points, name))
    for name, rows in record.tables.items():
        if rows:
            metadata[f"table/{name}"] = _table(rows)
    if record.samples:
        metadata["samples"] = _table(record.samples)
    return {
        **metadata,
        "identity": MetadataValue.text(record.identity),
        "source_hash": MetadataValue.text(record.source_hash),
        "inputs": MetadataValue.json(dict(record.inputs)),
        "device": MetadataValue.text(record.device),
        "trained_at": MetadataValue.text(record.created_at),
        "trained_in_run": MetadataValue.text(record.run_id),
        "libraries": MetadataValue.json(dict(record.libraries)),
        "environment": MetadataValue.json(dict(record.environment)),
    }


def _float(value: float) -> MetadataValue[Any]:
    """Six digits: the UI shows all that it is given."""
    return MetadataValue.float(float(f"{value:.6g}"))


def page_metadata(page: Path) -> dict[str, Any]:
    """The page of an eval report: its link, and its path, since a browser that shows the UI from
    another machine, or forbids links to files, opens neither."""
    return {
        "report": MetadataValue.url(page.resolve().as_uri()),
        "report_path": MetadataValue.path(page.resolve()),
    }


def reached_utilization(record: Record) -> float | None:
    """Share of the devices' peak over the whole stage; None where the device is unknown."""
    name, count = parse_label(record.device)
    if record.wall_s <= 0 or not name:
        return None
    try:
        peak = find_device(name).peak_tflops * 1e12 * count
    except UserError:
        return None
    return record.flops / (record.wall_s * peak)


def progress_metadata(event: Mapping[str, Any], estimate: StageEstimate | None) -> dict[str, Any]:
    """What a running stage reports, for an observation of its asset."""
    metadata: dict[str, Any] = {
        name: MetadataValue.float(float(value))
        for name, value in event.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    if event.get("text"):
        metadata["text"] = MetadataValue.text(str(event["text"]))
    if estimate is not None:
        metadata["estimate_usd"] = MetadataValue.float(estimate.cost_usd)
    return metadata


def _table(rows: Iterable[Mapping[str, Any]]) -> MetadataValue[Any]:
    kept = list(rows)[:_MAX_ROWS]
    found = dict.fromkeys(name for row in kept for name in row)
    # A record keeps its keys in alphabetical order; people read from the question on.
    columns = [*(name for name in _FIRST_COLUMNS if name in found), *found]
    columns = list(dict.fromkeys(columns))
    return MetadataValue.table(
        [TableRecord({name: _cell(row.get(name)) for name in columns}) for row in kept]
    )


def _cell(value: Any) -> Any:
    if value is None:
        return ""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    if isinstance(value, bool | int):
        return value
    text = str(value)
    return text if len(text) <= _MAX_CELL else text[:_MAX_CELL] + "…"


def threshold_text(metric: str, gate: Mapping[str, Any], *, blocks: bool = True) -> str:
    """What a gate asks, for people. `blocks`: see checks.py."""
    held = "" if blocks else "; when it fails, the release is a HOLD"
    return f"{metric}: {_limits(metric, gate)}{held}"


def _limits(metric: str, gate: Mapping[str, Any]) -> str:
    limits = [f"{bound} {gate[bound]:g}" for bound in ("min", "max") if gate.get(bound) is not None]
    confident = ", with 95 % confidence" if is_confident(metric, gate) else ""
    return f"{' and '.join(limits)}{confident}"


def check_result(
    key: AssetKey, result: GateResult, override: Mapping[str, Any] | None
) -> AssetCheckResult:
    """A gate's verdict as an asset check. What does not pass and does not block is a warning: an
    overridden gate, and a comparison for which nothing stands yet."""
    metadata: dict[str, Any] = {
        "verdict": result.verdict,
        "why": result.why,
        "threshold": _limits(result.name, result.threshold),
    }
    # The UI plots every number over the runs, and sorts by name.
    if result.value is not None:
        metadata["value"] = _float(result.value)
    if result.n is not None:
        metadata["items"] = f"{result.n:,}"
    if result.interval is not None:
        low, high = result.interval.low, result.interval.high
        metadata["interval_95"] = f"{low:.4g} to {high:.4g}"
        metadata["value_high"] = _float(high)
        metadata["value_low"] = _float(low)
    if result.table:
        metadata["rows"] = _table(result.table)
    if override is not None:
        metadata["override"] = (
            f"by {override['reviewer']}, {override.get('at', '')}: {override['reason']}"
        )
    mild = override is not None or result.verdict == NO_REFERENCE
    return AssetCheckResult(
        passed=result.passed,
        asset_key=key,
        check_name=result.name,
        severity=AssetCheckSeverity.WARN if mild else AssetCheckSeverity.ERROR,
        description=result.why,
        metadata=metadata,
    )
