"""The one road of a stage, without Dagster: hit, guards, job. The asset adds the launching.

See "The one way that data flows" in docs/architecture.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from llm_assets.errors import GateFailedError, GuardError
from llm_assets.gates.references import reference_metrics
from llm_assets.gates.thresholds import GateResult, evaluate, is_confident
from llm_assets.graph import STAGES, ancestors, processes_of
from llm_assets.jobs import StageJob
from llm_assets.measured import (
    measure_missing,
    measured_metrics,
    measured_s,
    pin_gates,
    without_tables,
)
from llm_assets.overriding import overrides_of
from llm_assets.planning import Plan, StagePlan, recipe_part
from llm_assets.recipe import Recipe
from llm_assets.store.protocol import Record, Store

if TYPE_CHECKING:
    from llm_assets.costs.learning import StageEstimate


def gates_of(recipe: Recipe, stage: str) -> dict[str, dict[str, Any]]:
    """The thresholds of a stage by metric, as plain JSON. A release that HOLDs always fails, and a
    pinned stage is asked for the drift of the data sets above it too."""
    gates = {}
    pinned = {name: entry.limits for name, entry in pin_gates(recipe, stage).items()}
    for metric, gate in {**recipe.gates.get(stage, {}), **pinned}.items():
        limits = gate.model_dump(mode="json")
        gates[metric] = {**limits, "confident": is_confident(metric, limits)}
    if stage == "release":
        gates.setdefault("ship", {"min": 1.0, "max": None, "confident": False})
    return gates


def checked_metrics(plan: Plan, name: str, store: Store) -> dict[str, dict[str, Any]]:
    """What the gates of a stage compare beside the metrics of its record: computed when they are
    checked, and no part of any identity."""
    gates = gates_of(plan.recipe, name)
    return {
        **reference_metrics(plan, name, store, gates),
        **measured_metrics(plan, name, store, gates),
    }


def gate_results(plan: Plan, name: str, store: Store) -> list[GateResult]:
    """The verdict of every gate of a stage that has an artifact. One that was made elsewhere, and
    is pinned here, has no metrics: it passes none of the gates that ask for some."""
    gates = gates_of(plan.recipe, name)
    record = plan.stages[name].record
    if plan.stages[name].artifact is None or not gates:
        return []
    metrics = {} if record is None else record.metrics
    return evaluate({**metrics, **checked_metrics(plan, name, store)}, gates)


def gates_s(plan: Plan, name: str, store: Store) -> float:
    """Seconds that the gates of a stage cost: measuring in the stage, and beside it."""
    record = plan.stages[name].record
    if record is None or plan.stages[name].artifact is None:
        return 0.0
    own = record.measure_s if plan.stages[name].status == "hit" else 0.0
    return own + measured_s(plan, name, store, gates_of(plan.recipe, name))


def failed_gates(plan: Plan, name: str, store: Store) -> list[GateResult]:
    """Gates of a stage that its artifact fails and that nobody overrode."""
    artifact = plan.stages[name].artifact
    if artifact is None:
        return []
    failed = [result for result in gate_results(plan, name, store) if result.blocks]
    if not failed:
        return []
    overridden = overrides_of(store, artifact)
    return [result for result in failed if result.name not in overridden]


def check_upstream(plan: Plan, name: str, store: Store) -> None:
    """GuardError unless all that stands above a stage is there and let through by its gates.

    Dagster stops a run at a failed check; a later run of what stands below it would start all the
    same. What a gate needs and nobody measured yet is measured here. `release` reports failed gates
    instead of refusing: HOLD with each reason is its answer.
    """
    missing = [above.name for above in plan.upstream(name) if above.artifact is None]
    if missing:
        raise GuardError(
            f"{plan.recipe.pipeline}/{name}: {', '.join(missing)} has no valid record under "
            "this recipe\n  rule: a stage takes what the recipe as it stands now gives\n"
            f"  next: select it too: --select '+{plan.recipe.pipeline}/{name}', or `llm-assets run`"
        )
    measure_missing(plan, [above.name for above in plan.upstream(name)], store)
    if name == "release":
        return
    for above in plan.upstream(name):
        for result in failed_gates(plan, above.name, store):
            raise GateFailedError(
                f"{plan.recipe.pipeline}/{name}: gate {result.name} of {above.name} failed on "
                f"{above.artifact}: {result.why}\n"
                f"  rule: an artifact whose gate failed is no input\n"
                f"  next: mend {above.name} and run it again, or let this artifact through: "
                f"llm-assets override {above.name}.{result.name} --artifact {above.artifact} "
                '--reviewer NAME --reason "..."'
            )


def release_lineage(plan: Plan, store: Store) -> dict[str, Any]:
    """What the release stage writes into the manifest."""
    from llm_assets.costs.budget import current_limit
    from llm_assets.rollback import rollback_plan

    recipe = plan.recipe
    stages: dict[str, Any] = {}
    overrides: list[dict[str, Any]] = []
    checked: dict[str, Any] = {}
    for name in ancestors(plan.nodes, "release"):
        above = plan.stages[name]
        if above.artifact is None:
            continue
        stages[name] = _manifest_entry(above)
        overrides.extend(overrides_of(store, above.artifact).values())
        found = checked_metrics(plan, name, store)
        if found:
            checked[name] = without_tables(found)
    return {
        "recipe": recipe.model_dump(mode="json", by_alias=True),
        "limit_usd": current_limit(
            store, recipe.campaign, recipe.budget.limit_usd, pipeline=recipe.pipeline
        ),
        # A pin cuts off what stands above it: that is no part of this model any more.
        "gates": {
            stage: gates
            for stage in STAGES
            if (stage in stages or stage not in plan.nodes)
            and (gates := gates_of(recipe, stage))
            and stage != "release"
        },
        "stages": stages,
        "checked": checked,
        "overrides": overrides,
        "rollback_plan": {
            name: step.as_json() for name, step in rollback_plan(plan, store).items()
        },
    }


def _manifest_entry(plan: StagePlan) -> dict[str, Any]:
    entry: dict[str, Any] = {"artifact": plan.artifact, "status": plan.status}
    record = plan.record
    if record is not None and plan.status == "pinned":
        entry.update(metrics=_plain(record), inputs=dict(record.inputs))
    if record is not None and plan.status == "hit":
        entry.update(
            identity=record.identity,
            source_hash=record.source_hash,
            seed=record.seed,
            recipe=dict(record.recipe),
            modules=dict(record.modules),
            metrics=_plain(record),
            inputs=dict(record.inputs),
            libraries=dict(record.libraries),
            cost_usd=record.cost_usd,
            wall_s=record.wall_s,
            run_id=record.run_id,
        )
    return entry


def _plain(record: Record) -> dict[str, Any]:
    return {name: dict(metric) for name, metric in record.metrics.items()}


def build_job(
    plan: Plan,
    name: str,
    store: Store,
    *,
    run_id: str,
    reservation: str = "",
    estimate: StageEstimate | None = None,
) -> StageJob:
    """What the worker of a stage is told. The plan must know the stage's identity.

    `reservation`: what the attempt draws on. `estimate`: what the stage is expected to take.
    """
    recipe = plan.recipe
    node = plan.nodes[name]
    mine = plan.stages[name]
    if mine.identity is None:
        raise GuardError(f"{recipe.pipeline}/{name}: its inputs are not known yet")
    if node.stage.data:
        config: Mapping[str, Any] = recipe.data_block(node.stage.data)
    else:
        config = getattr(recipe.stages, name).model_dump(mode="json", by_alias=True)
    lineage: dict[str, Any] = {"recipe_folder": str(recipe.folder)}
    if name == "release":
        lineage.update(release_lineage(plan, store))
    inputs = {}
    for entry, giver in node.sources.items():
        above = plan.stages[giver]
        inputs[entry] = {"artifact": str(above.artifact), "type": str(above.type)}
    return StageJob(
        stage=name,
        pipeline=recipe.pipeline,
        identity=mine.identity,
        source_hash=plan.sources[name].hash,
        recipe_part=recipe_part(recipe, node),
        config=config,
        seed=recipe.seed,
        inputs=inputs,
        identity_inputs=mine.inputs,
        store_url=store.url,
        imported=node.imported,
        num_processes=processes_of(recipe, name),
        run_id=run_id,
        campaign=recipe.campaign,
        device=recipe.rates.device,
        devices=recipe.rates.devices,
        usd_per_hour=recipe.rates.usd_per_hour,
        stage_limit_usd=recipe.budget.stage_limits_usd.get(name),
        estimate_usd=estimate.cost_usd if estimate else None,
        work_flops=estimate.flops if estimate else 0.0,
        work_tokens=estimate.tokens if estimate else 0,
        reservation=reservation,
        skip_records=mine.useless_records,
        replay=plan.replay,
        lineage=lineage,
    )
