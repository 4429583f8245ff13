"""What is tried again and when; the asset's part of it through Dagster, with a real dead process."""

import datetime
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from dagster import AssetExecutionContext, DagsterEventType, DagsterInstance, materialize

from llm_assets.assets import asset_key, build_assets
from llm_assets.costs.ledger import Attempt, AttemptInfo, ledger_entries, open_attempt
from llm_assets.errors import (
    BudgetError,
    DamagedError,
    DataError,
    LostWorkerError,
    NonFiniteLossError,
    StoreFullError,
    StoreUnreachableError,
    WorkerError,
)
from llm_assets.jobs import StageJob
from llm_assets.process_names import process_name
from llm_assets.recipe import Recipe, RetrySettings, load_recipe
from llm_assets.resources.launcher import WorkerExit
from llm_assets.resources.retries import build_retry_policy
from llm_assets.resources.store import StoreResource
from llm_assets.retrying import is_transient, wait_s, was_lost
from llm_assets.store import open_store
from llm_assets.store.protocol import Store
from tests.road import PretendLauncher

MICRO = Path(__file__).parent / "recipes" / "micro.yaml"


def test_what_may_pass_by_itself() -> None:
    bad = DataError(where="a", found="b", rule="c", remedy="d")
    for error in (bad, NonFiniteLossError(), BudgetError(), DamagedError(), StoreFullError()):
        assert not is_transient(error), error
    assert not is_transient(WorkerError("the run was cancelled"))
    assert not is_transient(TypeError("a bug"))
    for passing in (LostWorkerError(), StoreUnreachableError(), ConnectionResetError()):
        assert is_transient(passing), passing


@pytest.mark.parametrize(
    ("code", "kind", "num_processes", "lost"),
    [
        (-signal.SIGKILL, "", 1, True),
        (128 + signal.SIGKILL, "", 1, True),
        (143, "Terminated", 1, True),
        (1, "StoreUnreachableError", 1, True),
        (1, "NonFiniteLossError", 1, False),
        (1, "DataError", 2, False),
        (1, "BudgetError", 1, False),
        (1, "", 1, False),
        (1, "", 2, True),
        (-signal.SIGSEGV, "", 1, False),
        (0, "", 1, False),
    ],
)
def test_which_workers_were_lost(code: int, kind: str, num_processes: int, lost: bool) -> None:
    assert was_lost(code=code, kind=kind, num_processes=num_processes) is lost


def test_the_wait_doubles_up_to_the_cap() -> None:
    settings = RetrySettings(delay_s=10.0, max_delay_s=60.0, jitter=0.0)
    assert [wait_s(settings, n) for n in range(1, 6)] == [10, 20, 40, 60, 60]
    policy = build_retry_policy(settings)
    assert [policy.calculate_delay(n) for n in range(1, 5)] == [10, 20, 40, 60]
    assert policy.max_retries == 3


def test_the_jitter_stays_within_its_share() -> None:
    settings = RetrySettings(delay_s=8.0, max_delay_s=8.0, jitter=0.5)
    chance = random.Random(1)
    waits = [wait_s(settings, 1, chance) for _ in range(200)]
    assert min(waits) >= 4.0 and max(waits) <= 12.0
    assert max(waits) - min(waits) > 6.0


class LossyLauncher(PretendLauncher):
    """Its first workers die: each is a real process that took lease and attempt, and was killed."""

    deaths: int = 1
    code: int = -9
    error: str = ""
    kind: str = ""

    def launch(
        self, context: AssetExecutionContext, job: StageJob, *, side_by_side: int
    ) -> WorkerExit:
        """See Launcher.launch."""
        store = open_store(job.store_url)
        if len(ledger_entries(store, job.campaign)) >= self.deaths:
            with open_attempt(store, **_attempt(job), flush_every_s=0):
                return super().launch(context, job, side_by_side=side_by_side)
        script = "import sys, time; print(flush=True); time.sleep(60)"
        process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
        owner = f"{process_name(process.pid)}:ab"
        assert store.acquire(f"stage/{job.identity}", owner=owner, ttl_s=600) is not None
        # Not closed: what a killed worker leaves is an open attempt.
        started = datetime.datetime.now(datetime.UTC) - datetime.timedelta(minutes=9)
        info = AttemptInfo(
            attempt=f"killed-{process.pid}", started_at=started.isoformat(), **_attempt(job)
        )
        Attempt(store, info, flush_every_s=0)
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        return WorkerExit(code=self.code, error=self.error, kind=self.kind, log=Path("none.log"))


def _attempt(job: StageJob) -> dict[str, Any]:
    names = ("run_id", "stage", "pipeline", "campaign", "identity", "device", "devices")
    return {**{n: getattr(job, n) for n in names}, "usd_per_hour": 0.001}


@pytest.fixture
def store(own_places: Path) -> Store:
    return open_store(str(own_places / "llm-assets" / "store"))


def impatient(folder: Path, **retries: float) -> Recipe:
    document = yaml.safe_load(MICRO.read_text())
    document["launcher"] = {"retries": {"delay_s": 0.0, **retries}}
    del document["gates"]["corpus"]  # A pretended corpus has no rows to measure.
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(document))
    return load_recipe(path)


def attempt(recipe: Recipe, instance: DagsterInstance, launcher: LossyLauncher) -> tuple[bool, int]:
    """Whether the corpus came out, and how often it was tried again."""
    result = materialize(
        list(build_assets(recipe)),
        instance=instance,
        resources={"store": StoreResource(url=""), "launcher": launcher},
        selection=[asset_key(recipe, "corpus")],
        raise_on_error=False,
        run_config={"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}},
    )
    retried = [e for e in result.all_events if e.event_type is DagsterEventType.STEP_UP_FOR_RETRY]
    return result.success, len(retried)


def test_a_killed_worker_is_replaced_at_once_and_both_are_paid(
    store: Store, instance: DagsterInstance, tmp_path: Path
) -> None:
    launcher = LossyLauncher(threads=1, grace_s=1.0)
    assert attempt(impatient(tmp_path), instance, launcher) == (True, 1)
    first, second = ledger_entries(store, "micro")
    assert sorted([first.status, second.status]) == ["done", "killed"]
    # Of a worker that died without a word the whole life is paid: nine minutes, here.
    killed = first if first.status == "killed" else second
    assert killed.usage.seconds >= 540 and killed.usage.cost_usd > 0
    assert first.info.identity == second.info.identity
    # The lease of ten minutes did not keep the second waiting.
    assert store.lease_owner(f"stage/{first.info.identity}") is None


def test_retries_have_an_end(store: Store, instance: DagsterInstance, tmp_path: Path) -> None:
    launcher = LossyLauncher(threads=1, grace_s=1.0, deaths=9)
    assert attempt(impatient(tmp_path, max_retries=2), instance, launcher) == (False, 2)
    assert [entry.status for entry in ledger_entries(store, "micro")] == ["killed"] * 3


@pytest.mark.parametrize("kind", ["NonFiniteLossError", "DataError", "BudgetError"])
def test_what_does_not_pass_is_not_tried_again(
    store: Store, instance: DagsterInstance, tmp_path: Path, kind: str
) -> None:
    launcher = LossyLauncher(threads=1, grace_s=1.0, code=1, kind=kind, error="it is so")
    assert attempt(impatient(tmp_path), instance, launcher) == (False, 0)


def test_a_live_owner_keeps_its_lease(store: Store) -> None:
    held = store.acquire("stage/x", owner="ann:1:ab", ttl_s=60)
    assert held is not None
    store.end_lease("stage/x", "bob:1:ab")
    held.check()
    store.end_lease("stage/x", "ann:1:ab")
    assert store.lease_owner("stage/x") is None
