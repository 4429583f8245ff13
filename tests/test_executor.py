"""The thread executor, against real Dagster instances."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
from dagster import (
    AssetCheckResult,
    AssetCheckSpec,
    AssetExecutionContext,
    DagsterInstance,
    Definitions,
    JobDefinition,
    MaterializeResult,
    RetryPolicy,
    asset,
    build_reconstructable_job,
    define_asset_job,
    execute_job,
)

from llm_assets import dagster_run
from llm_assets.executor import build_executor
from llm_assets.process_names import process_name

_barrier = threading.Barrier(2)
_tries: dict[str, int] = {}


@asset
def left() -> None:
    _barrier.wait(timeout=20)


@asset
def right() -> None:
    _barrier.wait(timeout=20)


@asset(deps=[left, right])
def below() -> None:
    return None


@asset(check_specs=[AssetCheckSpec("gate", asset="gated", blocking=True)])
def gated() -> MaterializeResult:
    return MaterializeResult(check_results=[AssetCheckResult(passed=False, check_name="gate")])


@asset(deps=[gated])
def below_gate() -> None:
    return None


@asset(retry_policy=RetryPolicy(max_retries=2))
def flaky(context: AssetExecutionContext) -> None:
    _tries[context.run.run_id] = _tries.get(context.run.run_id, 0) + 1
    if _tries[context.run.run_id] < 3:
        raise RuntimeError("not yet")


@asset(deps=[flaky])
def after_flaky() -> None:
    return None


def job(*names: str) -> JobDefinition:
    defs = Definitions(
        assets=[left, right, below, gated, below_gate, flaky, after_flaky],
        jobs=[define_asset_job("chosen", selection=list(names))],
        executor=build_executor(),
    )
    return defs.resolve_job_def("chosen")


def run(instance: DagsterInstance, *names: str) -> tuple[bool, list[str], list[str]]:
    """Success, names of assets that were materialized, names of steps that failed."""
    reconstructable = build_reconstructable_job("tests.test_executor", "job", names, {})
    result = execute_job(reconstructable, instance=instance, raise_on_error=False)
    events = result.get_asset_materialization_events()
    made = [str(event.asset_key.to_user_string()) for event in events if event.asset_key]
    return result.success, made, [str(e.step_key) for e in result.get_step_failure_events()]


@pytest.fixture
def instance(own_places: Path) -> DagsterInstance:
    folder = own_places / "dagster"
    folder.mkdir()
    return DagsterInstance.get()


def test_independent_steps_run_at_the_same_time(instance: DagsterInstance) -> None:
    # Each of the two waits for the other: one at a time would break the barrier.
    success, made, failed = run(instance, "left", "right", "below")
    assert success, failed
    assert sorted(made) == ["below", "left", "right"]
    assert made[-1] == "below"


def test_a_failed_blocking_check_stops_what_is_below(instance: DagsterInstance) -> None:
    success, made, failed = run(instance, "gated", "below_gate")
    assert not success
    assert made == ["gated"]
    assert failed == ["gated"]


def test_a_step_is_retried(instance: DagsterInstance) -> None:
    success, made, _ = run(instance, "flaky", "after_flaky")
    assert success
    assert sorted(made) == ["after_flaky", "flaky"]
    assert list(_tries.values()) == [3]


def test_an_interrupt_ends_the_run(own_places: Path) -> None:
    (own_places / "dagster").mkdir()
    script = textwrap.dedent("""
        import sys, time
        from dagster import (AssetExecutionContext,
            DagsterInstance, Definitions, asset, build_reconstructable_job, define_asset_job,
            execute_job)
        from llm_assets.compat import cancelled, capture_interrupts
        from llm_assets.executor import build_executor

        @asset
        def waits(context: AssetExecutionContext) -> None:
            print("waiting", flush=True)
            while not cancelled(context.run.run_id):
                time.sleep(0.05)
            print("told to stop", flush=True)

        def job():
            return Definitions(assets=[waits], jobs=[define_asset_job("all_of_it")],
                executor=build_executor()).resolve_job_def("all_of_it")

        if __name__ == "__main__":
            with capture_interrupts():
                instance = DagsterInstance.get()
                result = execute_job(build_reconstructable_job("interrupted", "job"),
                    instance=instance)
                run = instance.get_run_by_id(result.run_id)
                print(run.status.value, flush=True)
    """)
    (own_places / "interrupted.py").write_text(script)
    path = os.pathsep.join(filter(None, [str(own_places), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path}
    process = subprocess.Popen(
        [sys.executable, "interrupted.py"],
        cwd=own_places,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "waiting\n"
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=30)
    assert rest.split("\n")[:2] == ["told to stop", "CANCELED"]


def test_a_killed_run_is_ended_by_the_next(own_places: Path) -> None:
    (own_places / "dagster").mkdir()
    with DagsterInstance.get() as instance:
        dead = subprocess.Popen([sys.executable, "-c", ""])
        dead.wait()
        gone = f"{socket.gethostname()}:{dead.pid}:1"
        for process in (gone, f"elsewhere:{dead.pid}:1", process_name()):
            run = instance.create_run_for_job(
                job("below"), tags={dagster_run._PROCESS_TAG: process}
            )
            instance.report_run_canceling(run)
        assert len(dagster_run.end_dead_runs(instance)) == 1
        statuses = sorted(run.status.value for run in instance.get_runs())
    assert statuses == ["CANCELING", "CANCELING", "FAILURE"]
