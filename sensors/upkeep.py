"""Jobs that nobody starts: stored checkpoints proved again each night, all drills each month.

What they find goes into the run's log, into observations of the assets, and to the webhook; a run
that found something fails. Both schedules are off until somebody switches them on in the UI.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dagster import (
    AssetKey,
    AssetObservation,
    DagsterInstance,
    DefaultScheduleStatus,
    Failure,
    JobDefinition,
    MetadataValue,
    OpExecutionContext,
    ScheduleDefinition,
    job,
    op,
)

from llm_assets.places import store_url
from llm_assets.recipe import Recipe
from llm_assets.store import open_store
from llm_assets.webhook import post

if TYPE_CHECKING:
    from llm_assets.reverifying import Reverified

NIGHTLY_SAMPLE = 4


def build_upkeep(recipes: Sequence[Recipe]) -> tuple[list[JobDefinition], list[ScheduleDefinition]]:
    """The jobs of a code location and their schedules."""
    pipelines = [recipe.pipeline for recipe in recipes]

    @op(description="A sample of stored checkpoints: bytes, and their number on the fixed batch.")
    def verify_sample(context: OpExecutionContext) -> None:
        # Imported here: it brings numpy, which loading the definitions need not wait for.
        from llm_assets.reverifying import reverify

        store = open_store(store_url())
        found = reverify(
            store,
            pipelines=pipelines,
            count=NIGHTLY_SAMPLE,
            say=lambda text: context.log.info(text),
        )
        alarm(context.instance, found, run_id=context.run_id, log=context.log.error)

    @op(description="Every drill on a scratch pipeline: detected, recovered, steps lost, time.")
    def run_drills(context: OpExecutionContext) -> None:
        done = subprocess.run(
            [sys.executable, "-m", "llm_assets.cli", "drill", "--all", "--json"],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
        )
        report_drills(done.returncode, done.stdout, done.stderr, context.log)

    @job(name="nightly_verification", description="Prove a sample of stored checkpoints again.")
    def nightly() -> None:
        verify_sample()

    @job(name="monthly_drills", description="Disrupt a scratch pipeline in every known way.")
    def monthly() -> None:
        run_drills()

    schedules = [
        _schedule(nightly, "0 2 * * *", "Every night, 02:00."),
        _schedule(monthly, "0 4 1 * *", "The first of every month, 04:00."),
    ]
    return [nightly, monthly], schedules


def _schedule(target: JobDefinition, cron: str, description: str) -> ScheduleDefinition:
    return ScheduleDefinition(
        name=target.name,
        job=target,
        cron_schedule=cron,
        default_status=DefaultScheduleStatus.STOPPED,
        description=description,
    )


def alarm(
    instance: DagsterInstance, found: "Sequence[Reverified]", *, run_id: str, log: Any
) -> None:
    """Tell what drifted or is damaged, and fail; nothing when all is as it was."""
    alarming = [entry for entry in found if entry.alarming]
    if not alarming:
        return
    text = "stored checkpoints are not what they were:\n" + "\n".join(e.text() for e in alarming)
    for entry in alarming:
        instance.report_runless_asset_event(
            AssetObservation(
                asset_key=AssetKey([entry.pipeline, entry.stage]),
                description=entry.text(),
                metadata={
                    "verdict": entry.verdict,
                    "artifact": entry.artifact,
                    "found_in_run": MetadataValue.dagster_run(run_id),
                },
            )
        )
    _tell(text, log)
    raise Failure(description=text, allow_retries=False)


def report_drills(code: int, stdout: str, stderr: str, log: Any) -> None:
    """Log every drill; tell and fail when one failed or none could be run."""
    try:
        drills = json.loads(stdout)["drills"]
    except (ValueError, KeyError):
        drills = []
    for entry in drills:
        log.info(json.dumps(entry))
    if code == 0 and drills:
        return
    failed = [e["name"] for e in drills if not (e["detected"] and e["recovered"])]
    text = f"drills failed: {', '.join(failed) or stderr[-500:]}"
    _tell(text, log.error)
    raise Failure(description=text, allow_retries=False)


def _tell(text: str, log: Any) -> None:
    log(text)
    problem = post(text)
    if problem:
        log(f"webhook: {problem}")
