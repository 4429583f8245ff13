"""Two runs of the same stale stage, started together, train once."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from dagster import AssetExecutionContext, DagsterInstance, materialize

from llm_assets import worker
from llm_assets.artifacts import ARTIFACT_TYPES
from llm_assets.assets import asset_key, build_assets
from llm_assets.costs.ledger import ledger_entries
from llm_assets.jobs import StageJob
from llm_assets.recipe import load_recipe
from llm_assets.reporting import Reporter
from llm_assets.resources.launcher import LocalLauncher, WorkerExit
from llm_assets.resources.store import StoreResource
from llm_assets.stages.context import StageContext, StageResult
from llm_assets.store import open_store
from tests.road import outcomes

_together = threading.Barrier(2)


class ThreadLauncher(LocalLauncher):
    """The real worker, on the thread of its step. The first launches of both runs wait for each
    other, so that both come for the lease at the same moment."""

    def launch(
        self, context: AssetExecutionContext, job: StageJob, *, side_by_side: int
    ) -> WorkerExit:
        """See Launcher.launch."""
        if _together.n_waiting or not open_store(job.store_url).records(job.identity):  # type: ignore[arg-type]
            _together.wait(timeout=60)
        reporter = Reporter(stage=job.stage, path=None, log=lambda line: None)
        code = worker.run_job(job, open_store(job.store_url), reporter)
        return WorkerExit(code=code, error="", kind="", log=Path("thread.log"))


def test_two_runs_train_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[str] = []

    def stage(context: StageContext) -> StageResult:
        trained.append(context.stage)
        time.sleep(1.0)
        for name in ARTIFACT_TYPES["corpus"].required:
            (context.out / name).write_text("x")
        return StageResult(metrics={}, metadata={"num_rows": 1})

    monkeypatch.setattr(worker, "stage_entry_point", lambda job: stage)
    monkeypatch.setenv("LLM_ASSETS_STORE", str(tmp_path / "store"))
    open_store(str(tmp_path / "store"))
    recipe = load_recipe("tiny")
    # What the pretended stage gives is no corpus that could be measured.
    gates = {name: gate for name, gate in recipe.gates.items() if name != "corpus"}
    recipe = recipe.model_copy(update={"gates": gates})
    results: list[Any] = []

    def run() -> None:
        with DagsterInstance.ephemeral() as instance:
            results.append(
                materialize(
                    build_assets(recipe),
                    selection=[asset_key(recipe, "corpus")],
                    instance=instance,
                    resources={
                        "store": StoreResource(url=""),
                        "launcher": ThreadLauncher(threads=1, grace_s=1.0),
                    },
                    raise_on_error=False,
                    run_config={"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}},
                )
            )

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert [result.success for result in results] == [True, True]
    assert trained == ["corpus"]
    store = open_store(str(tmp_path / "store"))
    (record,) = store.all_records()
    (attempt,) = ledger_entries(store)
    assert attempt.status == "done"
    for result in results:
        assert set(outcomes(result)) == {"corpus"}
        (event,) = result.get_asset_materialization_events()
        made = event.step_materialization_data.materialization
        assert made.tags["dagster/data_version"] == record.output
