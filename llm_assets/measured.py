"""What the gates of a plan's stages compare: the metrics of the record, and what was measured.

One road for the assets' checks, the guards, the plan, the report card and the manifest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from llm_assets.gates.measurements import (
    BY_NAME,
    Measurement,
    Task,
    drift_of,
    find,
    gated,
    make,
)
from llm_assets.gates.thresholds import NO_REFERENCE, NOT_MEASURED, GateResult, evaluate
from llm_assets.graph import STAGES, stages_off, wire
from llm_assets.history import History
from llm_assets.manifests import load_manifest
from llm_assets.planning import Plan
from llm_assets.recipe import GateSettings, Recipe
from llm_assets.store import open_store
from llm_assets.store.digest import ArtifactHash
from llm_assets.store.protocol import Record, Store


@dataclass(frozen=True, kw_only=True)
class PinGate:
    """A drift gate of a pinned stage: that of a data set above it, asked of today's data against
    those that the pinned artifact was trained on."""

    data: str
    metric: str
    limits: GateSettings


def pin_gates(recipe: Recipe, stage: str) -> dict[str, PinGate]:
    """The gates that a pin adds to its stage, by name: DATA_METRIC, such as corpus_length_drift.
    None where nothing takes the artifact. A pin goes back to an older checkpoint; adopting one asks
    the same (see `data_drift`)."""
    if getattr(getattr(recipe.stages, stage, None), "pin", None) is None:
        return {}
    if not any(stage in node.sources.values() for node in wire(recipe).values()):
        return {}
    present = set(STAGES) - set(stages_off(recipe))
    return {
        f"{data}_{metric}": PinGate(data=data, metric=metric, limits=limits)
        for data in BY_NAME["drift"].stages
        if data in present and _is_above(data, stage)
        for metric, limits in recipe.gates.get(data, {}).items()
        if metric in BY_NAME["drift"].stages[data]
    }


def waiting_pins(plan: Plan) -> list[str]:
    """Pinned stages with a gate on the drift of a data set that runs, or may run."""
    return [
        name
        for name, entry in plan.stages.items()
        if entry.status == "pinned"
        and any(gate.data in plan.rerun for gate in pin_gates(plan.recipe, name).values())
    ]


def _is_above(data: str, stage: str) -> bool:
    """The data set stands above the stage in the design's graph, where nothing is pinned."""
    return any(entry.name == data or _is_above(data, entry.name) for entry in STAGES[stage].inputs)


def waits_for(recipe: Recipe, stage: str, metric: str) -> str | None:
    """The stage whose artifact a measured metric of `stage` needs beside its own; None without."""
    pinned = pin_gates(recipe, stage).get(metric)
    if pinned is not None:
        return pinned.data
    found = gated(stage, [metric])
    return "evals" if found and found[0].against == "evals" else None


def measured_metrics(
    plan: Plan, name: str, store: Store, gates: Iterable[str]
) -> dict[str, dict[str, Any]]:
    """What gates of a stage compare and was measured: metric to {"value", "n", "table"}, or to why
    it is absent."""
    if plan.stages[name].artifact is None:
        return {}
    metrics: dict[str, dict[str, Any]] = {}
    for task, names in _tasks(plan, name, store, gates):
        if isinstance(task, Task):
            metrics.update(_found(store, task, names))
        else:
            metrics.update({name: dict(task) for name in names.values()})
    return metrics


def measured_s(plan: Plan, name: str, store: Store, gates: Iterable[str]) -> float:
    """Seconds that the measurements for a stage's gates took when they were made."""
    if plan.stages[name].artifact is None:
        return 0.0
    bodies = [
        find(store, task) for task, _ in _tasks(plan, name, store, gates) if isinstance(task, Task)
    ]
    return sum(float(body["wall_s"]) for body in bodies if body is not None)


def measure_missing(plan: Plan, names: Iterable[str], store: Store, *, alone: bool = False) -> None:
    """Make the measurements that gates of these stages need and the store lacks. `alone`: only
    those that need no other stage. WorkerError when one gives no result."""
    tasks = []
    for name in names:
        if plan.stages[name].artifact is None:
            continue
        gates = [*plan.recipe.gates.get(name, {}), *pin_gates(plan.recipe, name)]
        if alone:
            gates = [gate for gate in gates if waits_for(plan.recipe, name, gate) is None]
        found = _tasks(plan, name, store, gates)
        tasks += [task for task, _ in found if isinstance(task, Task)]
    make(store, tasks)


def _tasks(
    plan: Plan, name: str, store: Store, gates: Iterable[str]
) -> list[tuple[Task | dict[str, str], Mapping[str, str]]]:
    """The measurements that these gates of a stage ask for, or why there can be none yet, each with
    the metrics that it gives, by their names in the measurement."""
    asked = list(gates)
    found: list[tuple[Task | dict[str, str], Mapping[str, str]]] = [
        (_task(plan, name, entry, store), {metric: metric for metric in entry.stages[name]})
        for entry in gated(name, asked)
    ]
    pinned = {gate: entry for gate, entry in pin_gates(plan.recipe, name).items() if gate in asked}
    for data in dict.fromkeys(entry.data for entry in pinned.values()):
        names = {entry.metric: gate for gate, entry in pinned.items() if entry.data == data}
        found.append((_pin_task(plan, name, data), names))
    return found


def _pin_task(plan: Plan, name: str, data: str) -> Task | dict[str, str]:
    """Today's data against those that a pinned artifact was trained on."""
    record, now = plan.stages[name].record, plan.stages[data].artifact
    behind = {} if record is None else data_behind(plan.history, record)
    if data not in behind:
        why = f"no reference: no record says which {data} it was trained on"
        return {"absent": NO_REFERENCE, "why": why}
    if now is None:
        return {
            "absent": NOT_MEASURED,
            "why": f"{data} has no valid record under this recipe; materialize it too",
        }
    return Task(measurement=BY_NAME["drift"], inputs={"data": str(now), "reference": behind[data]})


def _task(plan: Plan, name: str, measurement: Measurement, store: Store) -> Task | dict[str, str]:
    """The measurement of a stage's artifact, or why there can be none yet."""
    artifact = str(plan.stages[name].artifact)
    if measurement.against == "evals":
        evals = plan.stages["evals"].artifact
        if evals is None:
            return {
                "absent": NOT_MEASURED,
                "why": "evals has no valid record under this recipe; materialize it too",
            }
        return Task(measurement=measurement, inputs={"data": artifact, "evals": str(evals)})
    if measurement.against == "production":
        reference, why = production_data(plan, store, name)
        if reference is None:
            return {"absent": NO_REFERENCE, "why": f"no reference: {why}"}
        return Task(measurement=measurement, inputs={"data": artifact, "reference": reference})
    return Task(measurement=measurement, inputs={"data": artifact})


def _found(store: Store, task: Task, names: Mapping[str, str]) -> dict[str, Any]:
    """Metrics with their tables; of a measurement that was not made yet, that it was not."""
    body = find(store, task)
    if body is None:
        absent = {"absent": NOT_MEASURED, "why": "not measured yet: the next run measures it"}
        return dict.fromkeys(names.values(), absent)
    tables = body["tables"]
    return {
        names[name]: {**metric, "table": tables.get(name, ())}
        for name, metric in body["metrics"].items()
        if name in names
    }


def without_tables(metrics: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Metrics as a manifest keeps them: the rows behind a number stand in the store already."""
    return {
        name: {key: value for key, value in metric.items() if key != "table"}
        for name, metric in metrics.items()
    }


def production_data(plan: Plan, store: Store, stage: str) -> tuple[str | None, str]:
    """The data set that the model in production was trained on, or why there is none. Where it
    stands behind a pinned checkpoint, the records of the store say it."""
    pipeline = plan.recipe.pipeline
    release = store.ref(f"{pipeline}/production")
    if release is None:
        return None, f"{pipeline} has nothing in production"
    stages = _stages_of(store.url, release)
    found = stages.get(stage)
    for artifact in stages.values() if found is None else ():
        for record in plan.history.givers(artifact)[-1:]:
            found = found or data_behind(plan.history, record).get(stage)
    if found is None:
        return None, f"the model in production was made without {stage}"
    if not store.has(ArtifactHash.parse(found)):
        return None, f"the store has {stage} {found[:12]} of the model in production no more"
    return found, ""


@lru_cache(maxsize=64)
def _stages_of(store_url: str, release: ArtifactHash) -> Mapping[str, str]:
    """Stage to artifact of a release. Its manifest never changes."""
    body = load_manifest(open_store(store_url), release).stages
    return {name: str(entry["artifact"]) for name, entry in body.items()}


def data_drift(plan: Plan, store: Store, trained_on: Mapping[str, str]) -> list[GateResult]:
    """The recipe's drift gates on today's data sets against those that an older checkpoint was
    trained on (see `data_behind`): for whoever resumes from it or rolls back to it.

    Results are named STAGE.METRIC. A save of the same identity has the same data by construction.
    """
    results = []
    for name, reference in sorted(trained_on.items()):
        now = plan.stages[name].artifact
        drift = BY_NAME["drift"].stages.get(name, ())
        gates = {key: g for key, g in plan.recipe.gates.get(name, {}).items() if key in drift}
        if now is None or not gates:
            continue
        metrics = drift_of(store, now, ArtifactHash.parse(reference))
        results += [
            replace(result, name=f"{name}.{result.name}") for result in evaluate(metrics, gates)
        ]
    return results


def data_behind(history: History, record: Record) -> dict[str, str]:
    """The data sets that a record's artifact was trained on, its ancestors' included: name to
    artifact."""
    found: dict[str, str] = {}
    waiting, seen = [record], set()
    while waiting:
        for name, artifact in waiting.pop().inputs.items():
            if name in BY_NAME["drift"].stages:
                found.setdefault(name, artifact)
            if artifact not in seen:
                seen.add(artifact)
                waiting += history.givers(artifact)[-1:]
    return found
