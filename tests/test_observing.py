"""What the UI sees of a stage's money: observations while it runs, metadata when it is done."""

from pathlib import Path

import pytest
from dagster import AssetExecutionContext, AssetKey, DagsterInstance, materialize

from llm_assets import assets
from llm_assets.assets import asset_key, build_assets
from llm_assets.jobs import StageJob
from llm_assets.recipe import Recipe, load_recipe
from llm_assets.resources.launcher import WorkerExit, listening_event
from llm_assets.resources.store import StoreResource
from llm_assets.store.protocol import Store
from tests.road import PretendLauncher
from tests.simulation import simulate
from tests.test_recipe import MINIMAL, write


class TellingLauncher(PretendLauncher):
    """Its worker reports three steps before it ends."""

    def launch(
        self, context: AssetExecutionContext, job: StageJob, *, side_by_side: int
    ) -> WorkerExit:
        """See Launcher.launch."""
        for step in (1, 2, 3):
            listening_event(
                {
                    "stage": job.stage,
                    "step": step,
                    "total": 3,
                    "loss": 1.0 / step,
                    "tokens_per_s": 100.0,
                    "spent_usd": 0.01 * step,
                }
            )
        return super().launch(context, job, side_by_side=side_by_side)


@pytest.fixture
def recipe(tmp_path: Path, store: Store) -> Recipe:
    """All above the fine-tuning is done."""
    loaded = load_recipe(write(tmp_path, MINIMAL))
    simulate(loaded, store, stop_before="sft_checkpoint")
    return loaded


def run(recipe: Recipe, instance: DagsterInstance) -> AssetKey:
    key = asset_key(recipe, "sft_checkpoint")
    result = materialize(
        list(build_assets(recipe)),
        instance=instance,
        resources={
            "store": StoreResource(url=""),
            "launcher": TellingLauncher(threads=1, grace_s=1.0),
        },
        selection=[key],
    )
    assert result.success
    return key


def test_a_running_stage_is_observed(
    recipe: Recipe, instance: DagsterInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assets, "OBSERVE_EVERY_S", 0.0)
    key = run(recipe, instance)
    newest, *_ = records = instance.fetch_observations(key, limit=9).records
    assert len(records) == 3
    seen = newest.asset_observation
    assert seen is not None
    found = {name: value.value for name, value in seen.metadata.items()}
    assert (found["step"], found["loss"], found["tokens_per_s"]) == (3, 1.0 / 3, 100.0)
    assert found["spent_usd"] == pytest.approx(0.03)
    assert found["estimate_usd"] > 0
    made = instance.get_latest_materialization_event(key)
    assert made is not None and made.asset_materialization is not None
    assert {"cost_usd", "wall_s", "device"} <= made.asset_materialization.metadata.keys()


def test_once_a_minute_is_enough(recipe: Recipe, instance: DagsterInstance) -> None:
    key = run(recipe, instance)
    assert instance.fetch_observations(key, limit=9).records == []
