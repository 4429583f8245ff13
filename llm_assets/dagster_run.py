"""Runs stages of one recipe as a Dagster run of this process, with the job's own executor."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dagster import (
    AssetKey,
    DagsterInstance,
    DagsterRunStatus,
    JobDefinition,
    RunsFilter,
    build_reconstructable_job,
    execute_job,
)

from llm_assets.compat import capture_interrupts, free_slots, is_failed_check
from llm_assets.graph import stage_of
from llm_assets.process_names import is_gone, process_name
from llm_assets.recipe import Recipe
from llm_assets.sensors.failures import tell_failure

_PROCESS_TAG = "llm_assets/process"


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """How a run ended. `gated`: of the failed stages, those that ran and whose gates failed.
    `errors` are the texts of the others and `rollback` what it takes along, for people."""

    run_id: str
    succeeded: bool
    interrupted: bool = False
    failed: list[str] = field(default_factory=list)
    gated: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    rollback: list[str] = field(default_factory=list)


_RECIPES: dict[str, Recipe] = {}
"""Recipes that this process runs, by pipeline: the job is made again from its name."""


def pipeline_job(name: str) -> JobDefinition:
    """The whole-pipeline job of a recipe that this process runs."""
    from llm_assets.building import build_definitions

    return build_definitions([_RECIPES[name]]).resolve_job_def(f"{name}_pipeline")


def run_stages(
    recipe: Recipe, stages: Sequence[str], *, tags: Mapping[str, str] | None = None
) -> RunResult:
    """Materialize `stages` in the instance of $DAGSTER_HOME, as a run with `tags`."""
    _RECIPES[recipe.pipeline] = recipe
    job = build_reconstructable_job(
        "llm_assets.dagster_run", "pipeline_job", (recipe.pipeline,), {}
    )
    quiet = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
    with DagsterInstance.get() as instance, capture_interrupts():
        end_dead_runs(instance)
        result = execute_job(
            job,
            instance=instance,
            run_config=quiet,
            tags={**(tags or {}), _PROCESS_TAG: process_name()},
            asset_selection=[AssetKey([recipe.pipeline, name]) for name in stages],
            raise_on_error=False,
        )
        failed: list[str] = []
        gated: list[str] = []
        errors = []
        for event in result.get_step_failure_events():
            failed.append(stage_of(str(event.step_key).split("__")[-1]))
            data = event.step_failure_data
            user = data.user_failure_data
            if user is not None and user.description:
                errors.append(user.description)
            elif data.error is not None:
                cause = data.error
                while cause.cause is not None:
                    cause = cause.cause
                if is_failed_check(cause):
                    gated.append(failed[-1])
                    continue  # what fails at it, and why, is told with the rollback
                errors.append(f"{event.step_key}: {cause.message.strip()}")
        interrupted = _was_cancelled(instance, result.run_id)
        rollback: list[str] = []
        if not result.success and not interrupted:
            tell_failure(instance, result.run_id, recipe, log=rollback.append)
        return RunResult(
            run_id=result.run_id,
            succeeded=result.success,
            interrupted=interrupted,
            rollback=rollback,
            failed=failed,
            gated=gated,
            errors=errors,
        )


def _was_cancelled(instance: DagsterInstance, run_id: str) -> bool:
    run = instance.get_run_by_id(run_id)
    return run is not None and run.status == DagsterRunStatus.CANCELED


def end_dead_runs(instance: DagsterInstance) -> list[str]:
    """Runs of this command whose process was killed: mark them failed, free their pool slots."""
    running = [DagsterRunStatus.STARTING, DagsterRunStatus.STARTED, DagsterRunStatus.CANCELING]
    ended = []
    for run in instance.get_runs(filters=RunsFilter(statuses=running)):
        if _PROCESS_TAG in run.tags and is_gone(run.tags[_PROCESS_TAG]):
            instance.report_run_failed(run, "The process of the run was killed.")
            free_slots(instance, run.run_id)
            ended.append(run.run_id)
    return ended
