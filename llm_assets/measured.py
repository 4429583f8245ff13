"""What the gates of a plan's stages compare: the metrics of the record, and what was measured.

One road for the assets' checks, the guards, the plan, the report card and the manifest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
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
from llm_assets.manifests import load_manifest
from llm_assets.planning import Plan
from llm_assets.store import open_store
from llm_assets.store.digest import ArtifactHash
from llm_assets.store.protocol import Record, Store


def waits_for(stage: str, metric: str) -> str | None:
    """The stage whose artifact a measured metric of `stage` needs beside its own; None without."""
    found = gated(stage, [metric])
    return "evals" if found and found[0].against == "evals" else None


def measured_metrics(
    plan: Plan, name: str, store: Store, gates: Iterable[str]
) -> dict[str, dict[str, Any]]:
    """What gates of a stage compare and was measured: metric to {"value", "n", "table"}, or to why
    it is absent."""
    if plan.stages[name].record is None or plan.stages[name].artifact is None:
        return {}
    metrics: dict[str, dict[str, Any]] = {}
    for measurement in gated(name, gates):
        task = _task(plan, name, measurement, store)
        if isinstance(task, Task):
            metrics.update(_found(store, task, measurement.stages[name]))
        else:
            metrics.update({metric: dict(task) for metric in measurement.stages[name]})
    return metrics


def measure_missing(plan: Plan, names: Iterable[str], store: Store, *, alone: bool = False) -> None:
    """Make the measurements that gates of these stages need and the store lacks. `alone`: only
    those that need no other stage. WorkerError when one gives no result."""
    tasks = []
    for name in names:
        if plan.stages[name].record is None or plan.stages[name].artifact is None:
            continue
        for measurement in gated(name, plan.recipe.gates.get(name, {})):
            if alone and measurement.against == "evals":
                continue
            task = _task(plan, name, measurement, store)
            if isinstance(task, Task):
                tasks.append(task)
    make(store, tasks)


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
        reference, why = production_data(store, plan.recipe.pipeline, name)
        if reference is None:
            return {"absent": NO_REFERENCE, "why": f"no reference: {why}"}
        return Task(measurement=measurement, inputs={"data": artifact, "reference": reference})
    return Task(measurement=measurement, inputs={"data": artifact})


def _found(store: Store, task: Task, names: Iterable[str]) -> dict[str, Any]:
    """Metrics with their tables; of a measurement that was not made yet, that it was not."""
    body = find(store, task)
    if body is None:
        absent = {"absent": NOT_MEASURED, "why": "not measured yet: the next run measures it"}
        return dict.fromkeys(names, absent)
    tables = body["tables"]
    return {
        name: {**metric, "table": tables.get(name, ())} for name, metric in body["metrics"].items()
    }


def without_tables(metrics: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Metrics as a manifest keeps them: the rows behind a number stand in the store already."""
    return {
        name: {key: value for key, value in metric.items() if key != "table"}
        for name, metric in metrics.items()
    }


def production_data(store: Store, pipeline: str, stage: str) -> tuple[str | None, str]:
    """The data set that the model in production was trained on, or why there is none."""
    release = store.ref(f"{pipeline}/production")
    if release is None:
        return None, f"{pipeline} has nothing in production"
    found = _stages_of(store.url, release).get(stage)
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


def data_behind(store: Store, record: Record) -> dict[str, str]:
    """The data sets that a record's artifact was trained on, its ancestors' included: name to
    artifact. Reads the records of the store."""
    givers = {entry.output: entry for entry in store.all_records()}
    found: dict[str, str] = {}
    waiting, seen = [record], set()
    while waiting:
        for name, artifact in waiting.pop().inputs.items():
            if name in BY_NAME["drift"].stages:
                found.setdefault(name, artifact)
            above = givers.get(ArtifactHash(artifact))
            if above is not None and artifact not in seen:
                seen.add(artifact)
                waiting.append(above)
    return found
