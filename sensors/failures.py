"""When a run fails: what is rolled back, computed and put where people look.

Run tags, an observation of each failed stage's asset, the run's log, and a webhook. The sensor does
it for runs that Dagster's daemon sees; `llm-assets run` does it for its own.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dagster import (
    AssetKey,
    AssetObservation,
    DagsterEventType,
    DagsterInstance,
    DagsterRun,
    DefaultSensorStatus,
    MetadataValue,
    RunFailureSensorContext,
    SensorDefinition,
    run_failure_sensor,
)

from llm_assets.engine import failed_gates
from llm_assets.errors import LlmAssetsError
from llm_assets.graph import stage_of
from llm_assets.places import store_url
from llm_assets.planning import make_plan
from llm_assets.recipe import Recipe
from llm_assets.rollback import Rollback, actual_rollback
from llm_assets.run_tags import FAILED_TAG, LOST_TAG, REPLAY_TAG, ROLLED_BACK_TAG
from llm_assets.store import open_store
from llm_assets.store.protocol import Store
from llm_assets.webhook import post

Log = Callable[[str], Any]


def build_failure_sensor(recipes: Sequence[Recipe]) -> SensorDefinition:
    """The run-failure sensor of a code location; on by default."""

    @run_failure_sensor(
        name="rollback_set",
        description="What a failed run rolls back: run tags, observations, log, webhook.",
        default_status=DefaultSensorStatus.RUNNING,
        minimum_interval_seconds=30,
    )
    def rollback_set(context: RunFailureSensorContext) -> None:
        report_failure(context.instance, context.dagster_run, recipes, log=context.log.info)

    return rollback_set


def report_failure(
    instance: DagsterInstance, run: DagsterRun, recipes: Sequence[Recipe], *, log: Log
) -> list[Rollback]:
    """Compute the rollback set of a failed run and tell it, once: a run that has the tags was told
    already. Empty when no stage of these recipes was in the run."""
    fresh = instance.get_run_by_id(run.run_id) or run
    if ROLLED_BACK_TAG in fresh.tags:
        return []
    steps = _failed_steps(instance, run.run_id)
    store = open_store(store_url())
    found = []
    for recipe in recipes:
        failed = {
            key.removeprefix(f"{recipe.pipeline}__"): why
            for key, why in steps.items()
            if key.startswith(f"{recipe.pipeline}__")
        }
        rollback = _rollback(recipe, store, failed, fresh)
        if rollback is not None:
            found.append(rollback)
    for rollback in found:
        _tell(instance, fresh, rollback, log)
    if found:
        instance.add_run_tags(run.run_id, _tags(found))
    return found


def _rollback(
    recipe: Recipe, store: Store, failed: Mapping[str, str], run: DagsterRun
) -> Rollback | None:
    plan = make_plan(recipe, store, replay=run.tags.get(REPLAY_TAG, ""))
    own = {stage: why for step, why in failed.items() if (stage := stage_of(step)) in plan.nodes}
    if not own:
        return None
    gates = [name for name in own if failed_gates(plan, name, store)]
    for name in gates:
        results = failed_gates(plan, name, store)
        own[name] = "; ".join(f"gate {result.name}: {result.why}" for result in results)
    return actual_rollback(plan, store, own, run_id=run.run_id, gates=gates)


def _failed_steps(instance: DagsterInstance, run_id: str) -> dict[str, str]:
    """Step to why it failed; of a run that was killed, the steps that never ended."""
    failed: dict[str, str] = {}
    open_steps: dict[str, None] = {}
    for entry in instance.all_logs(run_id):
        event = entry.dagster_event
        if event is None or event.step_key is None:
            continue
        if event.event_type is DagsterEventType.STEP_START:
            open_steps[event.step_key] = None
        elif event.event_type is DagsterEventType.STEP_SUCCESS:
            open_steps.pop(event.step_key, None)
        elif event.event_type is DagsterEventType.STEP_FAILURE:
            open_steps.pop(event.step_key, None)
            failed[event.step_key] = _why(event)
    return failed or {key: "the run ended without a word" for key in open_steps}


def _why(event: Any) -> str:
    data = event.step_failure_data
    user = data.user_failure_data
    if user is not None and user.description:
        return str(user.description)
    cause = data.error
    while cause is not None and cause.cause is not None:
        cause = cause.cause
    return "" if cause is None else str(cause.message).strip()


def _tags(found: Sequence[Rollback]) -> dict[str, str]:
    several = len(found) > 1

    def names(rollback: Rollback, stages: Sequence[str]) -> list[str]:
        return [f"{rollback.pipeline}/{name}" if several else name for name in stages]

    failed = [name for entry in found for name in names(entry, list(entry.failed))]
    gone = [name for entry in found for name in names(entry, entry.invalidated)]
    return {
        FAILED_TAG: ", ".join(failed),
        ROLLED_BACK_TAG: ", ".join(gone),
        LOST_TAG: f"{sum(entry.lost_usd for entry in found):.6f}",
    }


def _tell(instance: DagsterInstance, run: DagsterRun, rollback: Rollback, log: Log) -> None:
    text = rollback.text()
    log(text)
    instance.report_engine_event(text, run)
    for name, why in rollback.failed.items():
        instance.report_runless_asset_event(
            AssetObservation(
                asset_key=AssetKey([rollback.pipeline, name]),
                description=text,
                metadata={
                    "failed_in_run": MetadataValue.dagster_run(run.run_id),
                    "why": why,
                    "rolled_back": MetadataValue.json(list(rollback.invalidated)),
                    "cached": MetadataValue.json(list(rollback.cached)),
                    "lost_usd": MetadataValue.float(rollback.lost_usd),
                    "owner": rollback.owner,
                    "next": rollback.command,
                },
            )
        )
    problem = post(text)
    if problem:
        log(f"webhook: {problem}")


def tell_failure(instance: DagsterInstance, run_id: str, recipe: Recipe, *, log: Log) -> None:
    """`report_failure` for a run of this process; a problem with it is logged, not raised."""
    run = instance.get_run_by_id(run_id)
    if run is None:
        return
    try:
        report_failure(instance, run, [recipe], log=log)
    except LlmAssetsError as error:
        log(f"the rollback set could not be computed: {error}")
