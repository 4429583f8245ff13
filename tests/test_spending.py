"""A worker's money: what the ledger and the record say, and when the stage is told to stop."""

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llm_assets import spending, worker
from llm_assets.artifacts import ARTIFACT_TYPES
from llm_assets.costs.budget import set_limit
from llm_assets.costs.ledger import ledger_entries
from llm_assets.engine import build_job
from llm_assets.errors import BudgetError
from llm_assets.history import History
from llm_assets.jobs import RESUMED, StageJob
from llm_assets.planning import make_plan
from llm_assets.recipe import load_recipe
from llm_assets.reporting import Reporter
from llm_assets.stages.context import StageContext, StageResult
from llm_assets.store import open_store
from llm_assets.store.digest import Identity
from llm_assets.store.protocol import Store
from tests.simulation import simulate

USD_A_SECOND = 10.0


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "store"))


@pytest.fixture
def job(store: Store) -> StageJob:
    """The fine-tuning of the tiny recipe, all above it done, at a rent that tests can spend."""
    recipe = load_recipe("tiny")
    simulate(recipe, store, stop_before="sft_checkpoint")
    made = build_job(make_plan(recipe, store), "sft_checkpoint", store, run_id="r1")
    return dataclasses.replace(
        made,
        device="h100",
        devices=2,
        usd_per_hour=USD_A_SECOND * 1800,
        work_flops=1e12,
        work_tokens=1000,
    )


Run = Callable[[StageJob], int]


@pytest.fixture
def run(store: Store, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a job in this process with a stage of five steps, a tenth of a second each."""

    def stage(context: StageContext) -> StageResult:
        save = context.checkpoints / "step"
        first = int(save.read_text()) if save.exists() else 0
        for step in range(first, 5):
            time.sleep(0.1)
            context.progress.step(step + 1, 5, loss=1.0, tokens=100 * (step + 1))
            if stop := context.should_stop():
                save.write_text(str(step + 1))
                raise BudgetError(stop)
        for name in ARTIFACT_TYPES["sft_checkpoint"].required:
            (context.out / name).write_text("x")
        return StageResult(metrics={}, metadata={"num_parameters": 7}, tokens=500)

    monkeypatch.setattr(worker, "stage_entry_point", lambda job: stage)

    def start(job: StageJob) -> int:
        return worker.run_job(
            job, store, Reporter(stage=job.stage, path=None, log=lambda line: None)
        )

    return start


def attempts(store: Store) -> list[Any]:
    return list(ledger_entries(store))


def test_record_and_ledger_count_operations_and_devices(
    store: Store, job: StageJob, run: Run
) -> None:
    assert run(dataclasses.replace(job, estimate_usd=3.0)) == 0
    (record,) = store.records(Identity.parse(job.identity))
    assert record.device == "2 x h100"
    assert record.flops == pytest.approx(1e12 * 500 / 1000)
    (attempt,) = attempts(store)
    assert attempt.status == "done"
    assert attempt.usage.tokens == 500
    assert attempt.usage.flops == pytest.approx(5e11)
    assert attempt.info.estimate_usd == 3.0
    assert attempt.usage.cost_usd == pytest.approx(attempt.usage.seconds * USD_A_SECOND)


def test_a_stage_stops_at_its_limit_and_a_raised_limit_goes_on(
    store: Store, job: StageJob, run: Run
) -> None:
    with pytest.raises(BudgetError, match=r"(?s)of 2\.50 USD.*stage_limits_usd\.sft_checkpoint"):
        run(dataclasses.replace(job, stage_limit_usd=2.5))
    assert not store.records(Identity.parse(job.identity))
    (stopped,) = attempts(store)
    assert stopped.status == "failed"
    assert "BudgetError" in stopped.reason
    step = int((store.checkpoints(Identity.parse(job.identity)) / "step").read_text())
    assert 2 <= step < 5

    # What the first attempt spent counts, so a little more is not enough for a second one.
    with pytest.raises(BudgetError, match="earlier attempts included"):
        run(dataclasses.replace(job, stage_limit_usd=2.6))
    assert run(dataclasses.replace(job, stage_limit_usd=1000.0)) == 0
    (last,) = [entry for entry in attempts(store) if entry.status == "done"]
    assert last.usage.tokens == 500 - 100 * (step + 1)
    # The record says so, also to the estimates: its time is that of a part of its work.
    (record,) = store.records(Identity.parse(job.identity))
    assert record.environment[RESUMED] == str(100 * (step + 1))
    assert record.tokens == 500
    (remembered,) = History(store, "tiny").estimating(["sft_checkpoint"])
    assert RESUMED in remembered.environment


def test_the_campaigns_last_money_stops_a_stage(store: Store, job: StageJob, run: Run) -> None:
    def limit(usd: float) -> None:
        set_limit(store, job.campaign, usd, who="a", why="b", recipe_usd=None, pipeline=None)

    limit(2.5)
    with pytest.raises(BudgetError, match=r"(?s)campaign tiny is spent, 2\.50 USD.*budget set"):
        run(job)
    limit(1000.0)
    assert run(job) == 0
    assert sorted(entry.status for entry in attempts(store)) == ["done", "failed"]


def test_a_killed_worker_leaves_what_it_spent(
    store: Store, job: StageJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spending, "FLUSH_EVERY_S", 0.05)
    reporter = Reporter(stage=job.stage, path=None, log=lambda line: None)
    with spending.follow_spending(job, store, reporter):
        reporter.step(1, 5, tokens=100)
        time.sleep(0.5)
        # What stands there now is what a reader finds after a SIGKILL at this moment.
        (attempt,) = attempts(store)
        assert attempt.status == "running"
        assert attempt.usage.cost_usd > 0.3 * USD_A_SECOND
        assert attempt.usage.tokens == 100


def test_a_record_of_somebody_else_is_taken(store: Store, job: StageJob, run: Run) -> None:
    assert run(job) == 0
    assert run(job) == 0
    assert len(store.records(Identity.parse(job.identity))) == 1


def test_useless_records_do_not_count(store: Store, job: StageJob, run: Run) -> None:
    assert run(job) == 0
    again = dataclasses.replace(job, skip_records=1)
    assert run(again) == 0
    assert run(again) == 0
    assert len(store.records(Identity.parse(job.identity))) == 2


def test_only_its_own_records_answer_a_replay(store: Store, job: StageJob, run: Run) -> None:
    assert run(job) == 0
    replay = dataclasses.replace(job, replay="again-1")
    assert run(replay) == 0
    assert run(replay) == 0
    records = store.records(Identity.parse(job.identity))
    assert [record.environment.get("replay") for record in records] == [None, "again-1"]
