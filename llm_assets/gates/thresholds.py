"""Compares headline metrics with the thresholds of a recipe. Pure: no Dagster, no store.

A gate passes only on data. A metric that is missing, not a number, or a mean of no items fails.
A comparison for which nothing stands yet (no model in production) has a verdict of its own: it lets
the artifact through with a warning, and is never counted as passed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from llm_assets.gates.statistics import Interval, wilson

Verdict = Literal["pass", "fail", "undecided", "no data", "no reference", "not measured"]
NO_REFERENCE: Verdict = "no reference"
NOT_MEASURED: Verdict = "not measured"


@dataclass(frozen=True, kw_only=True)
class GateResult:
    """One gate's verdict. `pass` and `no reference` let the artifact through.

    `undecided`: the gate is `confident` and its threshold lies inside the 95 % interval, so there
    are too few items to decide. `no reference`: there is nothing yet to compare with. `not
    measured`: the number comes from a measurement that was not made yet. `table`: rows that a
    person reads beside the verdict.
    """

    name: str
    verdict: Verdict
    value: float | None
    n: int | None
    threshold: Mapping[str, Any]
    why: str
    interval: Interval | None = None
    table: Sequence[Mapping[str, Any]] = field(default=(), compare=False)

    @property
    def passed(self) -> bool:
        """The verdict is `pass`."""
        return self.verdict == "pass"

    @property
    def blocks(self) -> bool:
        """The artifact is no input of anything, unless somebody overrides the gate."""
        return self.verdict not in ("pass", NO_REFERENCE)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON, for manifests and check metadata."""
        interval = self.interval
        return {
            "name": self.name,
            "passed": self.passed,
            "blocks": self.blocks,
            "verdict": self.verdict,
            "value": self.value,
            "n": self.n,
            "interval": None if interval is None else [interval.low, interval.high],
            "threshold": dict(self.threshold),
            "why": self.why,
        }


def evaluate(metrics: Mapping[str, Any], gates: Mapping[str, Any]) -> list[GateResult]:
    """Every gate's verdict, in name order.

    `metrics`: name to {"value", "n"} (a Metric does as well), and "table" where there is one; or
    {"absent": a verdict, "why"} for a number that cannot be there yet. `gates`: metric name to
    {"min", "max", "confident"} (a GateSettings does as well); both bounds belong to the passing
    side.
    A confident gate compares the bound of the metric's 95 % interval; see `interval_of`. A gate
    that does not say so is confident on a regression; see `is_regression`.
    """
    return [_evaluate_one(name, metrics, _plain(gates[name])) for name in sorted(gates)]


def is_regression(name: str) -> bool:
    """The metric is a difference from a reference: `_delta` stands in its name."""
    return "_delta" in name


def is_confident(name: str, threshold: Mapping[str, Any]) -> bool:
    """Whether a gate compares the bound of the interval: what it says, else for regressions."""
    said = threshold.get("confident")
    return is_regression(name) if said is None else bool(said)


def _evaluate_one(
    name: str, metrics: Mapping[str, Any], threshold: Mapping[str, Any]
) -> GateResult:
    low, high = threshold.get("min"), threshold.get("max")
    entry = _plain(metrics.get(name, {}))
    value, n, missing = _datum(name, metrics)
    interval = None if value is None else interval_of(name, metrics)

    def result(verdict: Verdict, why: str) -> GateResult:
        return GateResult(
            name=name,
            verdict=verdict,
            value=value,
            n=n,
            threshold=threshold,
            why=why,
            interval=interval,
            table=entry.get("table", ()),
        )

    if low is None and high is None:
        return result("fail", "the gate has neither min nor max")
    if entry.get("absent") in (NO_REFERENCE, NOT_MEASURED):
        return result(entry["absent"], str(entry["why"]))
    if value is None:
        return result("no data", f"{missing}; no gate passes by having no data")
    if not is_confident(name, threshold):
        if low is not None and value < low:
            return result("fail", f"{_say(value, n)} is below min {low:g}")
        if high is not None and value > high:
            return result("fail", f"{_say(value, n)} is above max {high:g}")
        return result("pass", f"{_say(value, n)} is within {_limits(low, high)}")
    if interval is None:
        return result("no data", f"{_say(value, n)} has no interval, and the gate asks for one")
    return result(*_confident(value, n, interval, low, high))


def _confident(
    value: float, n: int | None, interval: Interval, low: float | None, high: float | None
) -> tuple[Verdict, str]:
    said = f"{_say(value, n)}, 95 % interval {interval.low:.4g} to {interval.high:.4g}"
    if low is not None and interval.high < low:
        return "fail", f"{said}, is below min {low:g}"
    if high is not None and interval.low > high:
        return "fail", f"{said}, is above max {high:g}"
    if low is not None and interval.low < low:
        return "undecided", f"{said}, holds min {low:g}: too few items to decide"
    if high is not None and interval.high > high:
        return "undecided", f"{said}, holds max {high:g}: too few items to decide"
    return "pass", f"{said}, is within {_limits(low, high)}"


def _datum(name: str, metrics: Mapping[str, Any]) -> tuple[float | None, int | None, str]:
    """(value, n, what is missing). The value is None when there is nothing to compare."""
    if name not in metrics:
        return None, None, "the stage gave no such metric"
    entry = _plain(metrics[name])
    value, n = entry.get("value"), entry.get("n")
    if value is None or isinstance(value, bool) or not isinstance(value, (int, float)):
        return None, n, f"the metric's value is {value!r}"
    if not math.isfinite(value):
        return None, n, f"the metric's value is {value}"
    if n is not None and n < 1:
        return None, n, "the metric is a mean of no items"
    return float(value), n, ""


def interval_of(name: str, metrics: Mapping[str, Any]) -> Interval | None:
    """The 95 % interval of a metric: `<name>_low` and `<name>_high` where the stage gives them,
    else Wilson's for a value in [0, 1] with its n; None for any other."""
    value, n, _ = _datum(name, metrics)
    if value is None:
        return None
    low, _, _ = _datum(f"{name}_low", metrics)
    high, _, _ = _datum(f"{name}_high", metrics)
    if low is not None and high is not None:
        return Interval(low, high)
    if n is not None and 0 <= value <= 1:
        return wilson(value * n, n)
    return None


def _plain(entry: Any) -> Mapping[str, Any]:
    """A mapping of what may also be a dataclass or a pydantic model."""
    if isinstance(entry, Mapping):
        return entry
    if hasattr(entry, "model_dump"):
        dumped: Mapping[str, Any] = entry.model_dump()
        return dumped
    return {key: getattr(entry, key) for key in ("value", "n") if hasattr(entry, key)}


def _say(value: float, n: int | None) -> str:
    return f"{value:.4g}" if n is None else f"{value:.4g} (n = {n})"


def _limits(low: float | None, high: float | None) -> str:
    parts = [] if low is None else [f"min {low:g}"]
    return " and ".join(parts if high is None else [*parts, f"max {high:g}"])
