"""The one way from a stage to a Dagster asset."""

import threading
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dagster import (
    AssetCheckSpec,
    AssetExecutionContext,
    AssetKey,
    AssetObservation,
    AssetsDefinition,
    BetaWarning,
    DagsterError,
    DataVersion,
    Failure,
    MaterializeResult,
    MetadataValue,
    asset,
    observable_source_asset,
)

from llm_assets.aftermath import clear_dead
from llm_assets.checks import blocks, build_checks, own_gates, show_overrides
from llm_assets.compat import SlotFree, cancelled, forget_input_version
from llm_assets.costs.learning import StageEstimate
from llm_assets.damage import note_damage
from llm_assets.engine import (
    build_job,
    check_upstream,
    gate_results,
    gates_s,
)
from llm_assets.errors import DamagedError, LlmAssetsError, LostWorkerError, WorkerError
from llm_assets.graph import STAGES, Node, processes_of, wire
from llm_assets.guards import stage_money
from llm_assets.identity import digest_of
from llm_assets.measured import measure_missing
from llm_assets.overriding import overrides_of
from llm_assets.planning import Plan, make_plan, node_source, outside_inputs, recipe_part
from llm_assets.presenting import (
    check_result,
    page_metadata,
    progress_metadata,
    record_metadata,
    threshold_text,
)
from llm_assets.recipe import Recipe
from llm_assets.reporting import progress_line
from llm_assets.resources.launcher import (
    LocalLauncher,
    WorkerExit,
    listening,
    listening_event,
    log_tail,
)
from llm_assets.resources.retries import build_retry_policy
from llm_assets.resources.store import StoreResource
from llm_assets.retrying import is_transient, was_lost
from llm_assets.run_tags import REPLAY_TAG, RESERVATION_TAG
from llm_assets.store.protocol import Store
from llm_assets.worker_codes import BUSY

GPU_POOL = "gpu"
OBSERVE_EVERY_S = 60.0
_WAIT_S = 0.5


def asset_key(recipe: Recipe, name: str) -> AssetKey:
    """The key of a stage's asset: pipeline, stage."""
    return AssetKey([recipe.pipeline, name])


def source_key(recipe: Recipe, name: str) -> AssetKey:
    """The key of the observable source of a data set or an import."""
    return AssetKey([recipe.pipeline, "sources", name])


def code_version(recipe: Recipe, node: Node) -> str:
    """Source hash and recipe part: a change of either makes the asset stale in the UI."""
    part = digest_of({"recipe": recipe_part(recipe, node), "seed": recipe.seed})
    return f"{node_source(node).hash[:16]}.{part[:16]}"


def build_assets(recipe: Recipe) -> list[AssetsDefinition]:
    """All of one recipe: observable sources, stages, checks that wait for a second stage."""
    found: list[AssetsDefinition] = []
    nodes = wire(recipe)
    keys = {name: asset_key(recipe, name) for name in nodes}
    for name, node in nodes.items():
        if _has_source(node):
            found.append(_build_source(recipe, node))
        found.append(_build_asset(recipe, name, node))
        found.extend(build_checks(recipe, name, keys))
    return found


def hit_finder(recipes: Sequence[Recipe]) -> SlotFree:
    """Tells the executor which steps only report a hit, and so need no slot of the pool."""
    stages = {asset_key(recipe, name): (recipe, name) for recipe in recipes for name in STAGES}

    def is_hit(key: AssetKey, resources: Any, tags: Mapping[str, str]) -> bool:
        if key not in stages:
            return False
        recipe, name = stages[key]
        try:
            plan = make_plan(recipe, resources.store.open(), replay=tags.get(REPLAY_TAG, ""))
        except LlmAssetsError:
            return False  # The step says it, where people look.
        return plan.stages[name].status in ("hit", "pinned")

    return is_hit


def _has_source(node: Node) -> bool:
    return node.pin is None and (node.stage.data is not None or node.imported)


def _build_source(recipe: Recipe, node: Node) -> AssetsDefinition:
    name = node.stage.name

    def observe() -> DataVersion:
        return DataVersion(_source_version(recipe, node))

    with warnings.catch_warnings():
        # In beta for years, and the way that the design names; the version is pinned.
        warnings.simplefilter("ignore", BetaWarning)
        decorate = observable_source_asset(
            key=source_key(recipe, name),
            group_name=f"{recipe.pipeline}_data",
            description=f"Where {name} comes from; its data version is the hash of its content.",
        )
        return decorate(observe)  # type: ignore[return-value]


def _source_version(recipe: Recipe, node: Node) -> str:
    return digest_of(outside_inputs(recipe, node))


def _build_asset(recipe: Recipe, name: str, node: Node) -> AssetsDefinition:
    stage = node.stage
    key = asset_key(recipe, name)
    deps = [asset_key(recipe, giver) for giver in dict.fromkeys(node.sources.values())]
    if _has_source(node):
        deps.append(source_key(recipe, name))
    blocking = blocks(wire(recipe), name)
    checks = [
        AssetCheckSpec(
            name=metric,
            asset=key,
            blocking=blocking,
            description=threshold_text(metric, gate, blocks=blocking),
        )
        for metric, gate in own_gates(recipe, name).items()
    ]

    @asset(
        key=key,
        deps=deps,
        group_name=f"{recipe.pipeline}_{_group(stage.number)}",
        description=stage.description,
        kinds=set(stage.kinds),
        owners=recipe.owners or None,
        tags={"cost_class": stage.cost_class, "artifact_type": stage.gives},
        code_version=code_version(recipe, node),
        pool=GPU_POOL if stage.trains else None,
        check_specs=checks,
        retry_policy=build_retry_policy(recipe.launcher.retries),
        metadata={
            "recipe": MetadataValue.path(str(recipe.path)),
            "settings": MetadataValue.json(recipe_part(recipe, node)),
        },
    )
    def compute(
        context: AssetExecutionContext, store: StoreResource, launcher: LocalLauncher
    ) -> MaterializeResult:
        try:
            return materialize_stage(context, recipe, name, store.open(), launcher)
        except DagsterError:
            raise
        except Exception as error:
            raise Failure(description=_said(error), allow_retries=is_transient(error)) from error

    return compute


def _said(error: Exception) -> str:
    """What people read of an error: our own say all, of another its type too."""
    return str(error) if isinstance(error, LlmAssetsError) else f"{type(error).__name__}: {error}"


def _group(number: int) -> str:
    if number == 0:
        return "data"
    if number <= 5:
        return "base"
    return "alignment" if number <= 9 else "release"


def materialize_stage(
    context: AssetExecutionContext,
    recipe: Recipe,
    name: str,
    store: Store,
    launcher: LocalLauncher,
) -> MaterializeResult:
    """Resolve, hit or run, report. LlmAssetsError when a guard refuses or the worker fails."""
    replay = context.run.tags.get(REPLAY_TAG, "")
    plan = make_plan(recipe, store, replay=replay)
    node = plan.nodes[name]
    key = asset_key(recipe, name)
    if _has_source(node):
        observed = source_key(recipe, name)
        version = _source_version(recipe, node)
        context.log_event(
            AssetObservation(asset_key=observed, tags={"dagster/data_version": version})
        )
        forget_input_version(context, observed)
    check_upstream(plan, name, store)
    plan = _verified(context, plan, name, store)
    hit = plan.stages[name].status in ("hit", "pinned")
    if not hit:
        _run(context, plan, name, store, launcher)
        plan = make_plan(recipe, store, replay=replay)
    return _report(context, plan, name, key, store, hit=hit)


def _verified(context: AssetExecutionContext, plan: Plan, name: str, store: Store) -> Plan:
    """The plan, made again when the artifact of a hit does not have its bytes any more."""
    mine = plan.stages[name]
    if mine.artifact is None:
        return plan
    damage = store.verify(mine.artifact)
    if not damage:
        return plan
    note_damage(store, damage, run_id=context.run.run_id)
    what = "; ".join(f"{entry.path or 'its tree'}: {entry.what}" for entry in damage)
    if mine.status == "pinned":
        raise DamagedError(
            f"{plan.recipe.path}: stages.{name}.pin: {mine.artifact} is damaged: {what}\n"
            "  next: put that artifact again from its source, or pin another one"
        )
    context.log.warning(f"{name}: {mine.artifact} is damaged, and runs again: {what}")
    return make_plan(plan.recipe, store, replay=plan.replay)


def _run(
    context: AssetExecutionContext,
    plan: Plan,
    name: str,
    store: Store,
    launcher: LocalLauncher,
) -> None:
    """Launch the worker; while another process is at the same identity, wait for its record."""
    lease = f"stage/{plan.stages[name].identity}"
    context.log.info(f"{name}: {'; '.join(plan.stages[name].reasons)}")
    while True:
        for owner in _busy(store, lease):
            context.log.info(f"{name}: {owner} is at it; waiting for its record")
            while store.lease_owner(lease) == owner:
                if cancelled(context.run.run_id):
                    raise WorkerError(f"{name}: the run was cancelled")
                time.sleep(_WAIT_S)
        plan = make_plan(plan.recipe, store, replay=plan.replay)
        if plan.stages[name].status == "hit":
            return
        end = _launch(context, plan, name, store, launcher)
        if end.code == BUSY:
            continue
        if end.code != 0:
            clear_dead(store, plan, name, run_id=context.run.run_id)
        _check_end(plan, name, store, end)
        return


def _launch(
    context: AssetExecutionContext,
    plan: Plan,
    name: str,
    store: Store,
    launcher: LocalLauncher,
) -> WorkerExit:
    """One worker, with the money that it may spend, followed while it runs."""
    run_id = context.run.run_id
    reservation = context.run.tags.get(RESERVATION_TAG, "")
    owner = f"run {run_id}, {name}"
    with stage_money(plan, name, store, owner=owner, reservation=reservation) as money:
        job = build_job(
            plan,
            name,
            store,
            run_id=run_id,
            reservation=money.reservation,
            estimate=money.estimate,
        )
        with listening(_Observer(context, asset_key(plan.recipe, name), money.estimate)):
            return launcher.launch(context, job, side_by_side=plan.nodes[name].stage.side_by_side)


class _Observer:
    """Puts the progress of a worker into the asset's events, at most once a minute."""

    def __init__(
        self, context: AssetExecutionContext, key: AssetKey, estimate: StageEstimate | None
    ) -> None:
        self._context = context
        self._key = key
        self._estimate = estimate
        self._thread = threading.get_ident()
        self._last = time.monotonic()

    def __call__(self, event: Mapping[str, Any]) -> None:
        # Each step follows its worker on a thread of its own, and every listener hears them all.
        if threading.get_ident() != self._thread or "error" in event:
            return
        now = time.monotonic()
        if now - self._last < OBSERVE_EVERY_S:
            return
        self._last = now
        self._context.log_event(
            AssetObservation(
                asset_key=self._key,
                description=progress_line(dict(event)),
                metadata=progress_metadata(event, self._estimate),
            )
        )


def _busy(store: Store, lease: str) -> Iterator[str]:
    owner = store.lease_owner(lease)
    if owner is not None:
        yield owner


def _check_end(plan: Plan, name: str, store: Store, end: WorkerExit) -> None:
    """WorkerError unless the record stands, whatever the exit code."""
    if end.code == 0:
        after = make_plan(plan.recipe, store, replay=plan.replay)
        if after.stages[name].status == "hit":
            return
    where = f"{plan.recipe.pipeline}/{name}"
    processes = processes_of(plan.recipe, name)
    lost = was_lost(code=end.code, kind=end.kind, num_processes=processes)
    kind = LostWorkerError if lost else WorkerError
    if end.error:
        said = end.error if end.error.startswith(where) else f"{where}: {end.error}"
        raise kind(f"{said}\n  log: {end.log}")
    how = f"exit code {end.code}" if end.code >= 0 else f"signal {-end.code}"
    raise kind(
        f"{where}: the worker ended with {how} and without a record\n"
        f"  next: read the log; the next run goes on from the newest checkpoint\n"
        f"  log: {end.log}\n{log_tail(end.log)}"
    )


def _report(
    context: AssetExecutionContext,
    plan: Plan,
    name: str,
    key: AssetKey,
    store: Store,
    *,
    hit: bool,
) -> MaterializeResult:
    """The materialization of a stage whose record stands, and the verdicts of its gates."""
    mine = plan.stages[name]
    if mine.artifact is None:
        raise WorkerError(f"{plan.recipe.pipeline}/{name}: no record under {mine.identity}")
    listening_event({"stage": name, "outcome": "hit" if hit else "run"})
    size_bytes = store.tree(mine.artifact).size_bytes
    measure_missing(plan, [name], store, alone=True)
    if name == "release":
        show_overrides(context.instance, plan, store, lambda stage: asset_key(plan.recipe, stage))
    overrides = overrides_of(store, mine.artifact)
    own = own_gates(plan.recipe, name)
    results = [result for result in gate_results(plan, name, store) if result.name in own]
    outcome = "pinned" if mine.status == "pinned" else "hit" if hit else "run"
    metadata: dict[str, Any] = {"outcome": outcome}
    if mine.type == "eval_report":
        metadata.update(page_metadata(store.fetch(mine.artifact) / "report.html"))
    metadata |= {
        "artifact": MetadataValue.text(mine.artifact),
        "size_bytes": MetadataValue.int(size_bytes),
        "gates_s": MetadataValue.float(gates_s(plan, name, store)),
    }
    if mine.record is not None:
        metadata.update(record_metadata(mine.record))
    return MaterializeResult(
        asset_key=key,
        data_version=DataVersion(mine.artifact),
        metadata=metadata,
        check_results=[check_result(key, r, overrides.get(r.name)) for r in results],
    )
