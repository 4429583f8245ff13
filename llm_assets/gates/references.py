"""A stage's metrics against those of production, or of the last good record: when it is checked.

No part of any identity: a promotion makes nothing stale. Two names ask for it. `M_delta_production`
is the metric M minus that of the release that is in production. `M_delta`, where the stage itself
has no such metric, is M minus that of the last good artifact: the one in production, else the
newest earlier record of the stage in this pipeline whose gates pass. Both were measured on the same
data, or there is no reference.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llm_assets.gates.statistics import Interval, difference
from llm_assets.gates.thresholds import NO_REFERENCE, evaluate, interval_of
from llm_assets.planning import Plan
from llm_assets.stages.eval_scoring import compare_reports
from llm_assets.store.digest import ArtifactHash
from llm_assets.store.protocol import Record, Store

PRODUCTION = "_delta_production"
_DELTA = "_delta"
# What a stage is measured on: two records are comparable when it is the same.
_MEASURED_ON = ("shards", "instructions", "preferences", "evals")


@dataclass(frozen=True, kw_only=True)
class Reference:
    """What a stage is compared with. `name`: for people."""

    name: str
    artifact: ArtifactHash
    metrics: Mapping[str, Any]
    inputs: Mapping[str, str]


def reference_metrics(
    plan: Plan, name: str, store: Store, gates: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    """The metrics that the gates of a stage ask for and its record can't have, as `evaluate` takes
    them: with both ends of their intervals, or with why there is no reference."""
    mine = plan.stages[name].record
    if mine is None:
        return {}
    asked = [gate for gate in gates if gate.endswith((PRODUCTION, _DELTA))]
    asked = [gate for gate in asked if gate not in mine.metrics]
    found: dict[str, dict[str, Any]] = {}
    for suffix in (PRODUCTION, _DELTA):
        wanted = [gate for gate in asked if gate.endswith(suffix)]
        if not wanted:
            continue
        reference = production(plan, name, store)
        if reference is None and suffix == _DELTA:
            reference = _last_good(plan, name, store, mine, gates)
        problem = _problem(plan, mine, reference, suffix)
        if reference is None or problem:
            found.update({gate: _absent(problem) for gate in wanted})
        elif name == "eval_report":
            found.update(_of_reports(store, mine, reference, wanted, suffix))
        else:
            for gate in wanted:
                found.update(_of_metrics(mine, reference, gate, suffix))
    return found


def production(plan: Plan, name: str, store: Store) -> Reference | None:
    """The stage as it stands in the manifest of the release that is in production."""
    release = store.ref(f"{plan.recipe.pipeline}/production")
    if release is None:
        return None
    manifest = json.loads((store.fetch(release) / "manifest.json").read_bytes())
    entry = manifest["stages"].get(name)
    if not entry or not entry.get("metrics"):
        return None
    return Reference(
        name=f"production {release[:12]}",
        artifact=ArtifactHash.parse(entry["artifact"]),
        metrics=entry["metrics"],
        inputs=entry["inputs"],
    )


def _last_good(
    plan: Plan, name: str, store: Store, mine: Record, gates: Mapping[str, Mapping[str, Any]]
) -> Reference | None:
    """The newest earlier record of the stage that passes the gates which ask for no reference."""
    own = {gate: limits for gate, limits in gates.items() if not gate.endswith(_DELTA)}
    own = {gate: limits for gate, limits in own.items() if not gate.endswith(PRODUCTION)}
    for slim in reversed(plan.history.all_of(name)):
        if slim.created_at >= mine.created_at or slim.output == mine.output:
            continue
        for record in store.records(slim.identity):
            if record.output == slim.output and all(
                result.passed for result in evaluate(record.metrics, own)
            ):
                return Reference(
                    name=f"{record.output[:12]} of {record.created_at[:10]}",
                    artifact=record.output,
                    metrics=record.metrics,
                    inputs=record.inputs,
                )
    return None


def _problem(plan: Plan, mine: Record, reference: Reference | None, suffix: str) -> str:
    """Why there is nothing to compare with; empty when there is."""
    if reference is None:
        if suffix == PRODUCTION:
            return f"{plan.recipe.pipeline} has no release in production with this stage"
        return "no earlier record of this stage passes its gates"
    for data in _MEASURED_ON:
        if mine.inputs.get(data) != reference.inputs.get(data):
            return f"{reference.name} was measured on other {data}"
    return ""


def _of_metrics(
    mine: Record, reference: Reference, gate: str, suffix: str
) -> dict[str, dict[str, Any]]:
    """A difference of two metrics whose items were not kept. The interval takes them as measured
    on different items, which is on the safe side where they were the same."""
    base = gate.removesuffix(suffix)
    one, other = mine.metrics.get(base), reference.metrics.get(base)
    if one is None:
        return {}
    if other is None:
        return {gate: _absent(f"{reference.name} has no {base}")}
    value, n = float(one["value"]) - float(other["value"]), one.get("n")
    found: dict[str, dict[str, Any]] = {gate: {"value": value, "n": n}}
    ours, theirs = interval_of(base, mine.metrics), interval_of(base, reference.metrics)
    if ours is not None and theirs is not None:
        interval = difference(float(one["value"]), ours, float(other["value"]), theirs)
        found.update(_ends(gate, interval, n))
    return found


def _of_reports(
    store: Store, mine: Record, reference: Reference, wanted: list[str], suffix: str
) -> dict[str, dict[str, Any]]:
    """Differences item by item: both reports keep every answer to the same items."""
    ours, theirs = (
        json.loads((store.fetch(artifact) / "report.json").read_bytes())
        for artifact in (mine.output, reference.artifact)
    )
    compared = compare_reports(ours, theirs)
    found: dict[str, dict[str, Any]] = {}
    for gate in wanted:
        row = compared.get(gate.removesuffix(suffix))
        if row is None:
            found.update(_of_metrics(mine, reference, gate, suffix))
            continue
        found[gate] = {"value": row["delta"], "n": row["num_items"]}
        interval = Interval(row["delta_low"], row["delta_high"])
        found.update(_ends(gate, interval, row["num_items"]))
    return found


def _absent(why: str) -> dict[str, Any]:
    return {"absent": NO_REFERENCE, "why": f"nothing to compare with: {why}"}


def _ends(gate: str, interval: Interval, n: int | None) -> dict[str, dict[str, Any]]:
    return {
        f"{gate}_low": {"value": interval.low, "n": n},
        f"{gate}_high": {"value": interval.high, "n": n},
    }
