"""The pool of what trains, against a real Dagster instance: a hit stands in no line."""

import threading
from pathlib import Path
from typing import Any

import pytest
from dagster import (
    AssetKey,
    DagsterInstance,
    Definitions,
    JobDefinition,
    build_reconstructable_job,
    define_asset_job,
    execute_job,
)

from llm_assets.assets import GPU_POOL, build_assets, hit_finder
from llm_assets.executor import build_executor
from llm_assets.recipe import load_recipe
from llm_assets.resources.store import StoreResource
from tests.road import PretendLauncher
from tests.test_recipe import changed, write


def job(path: str) -> JobDefinition:
    """All stages of the recipe at `path`, with workers that only pretend."""
    recipe = load_recipe(path)
    defs = Definitions(
        assets=build_assets(recipe),
        jobs=[define_asset_job("everything")],
        executor=build_executor(hit_finder([recipe])),
        resources={
            "store": StoreResource(url=""),
            "launcher": PretendLauncher(threads=1, grace_s=1.0, metrics={"ship": 1.0}),
        },
    )
    return defs.resolve_job_def("everything")


@pytest.fixture
def instance(own_places: Path) -> DagsterInstance:
    (own_places / "dagster").mkdir()
    instance = DagsterInstance.get()
    instance.event_log_storage.set_concurrency_slots(GPU_POOL, 1)
    return instance


def write_recipe(folder: Path, **settings: Any) -> str:
    """A recipe, with settings of its reward model."""
    document = changed({f"stages.reward_model.{name}": value for name, value in settings.items()})
    return str(write(folder, document))


def materialize(instance: DagsterInstance, path: str) -> Any:
    reconstructable = build_reconstructable_job("tests.test_pool", "job", (path,), {})
    return execute_job(reconstructable, instance=instance, raise_on_error=False)


def freed_after(instance: DagsterInstance, seconds: float) -> tuple[threading.Timer, list[bool]]:
    """Another run gives its slot back after a while, unless it is cancelled."""
    freed: list[bool] = []

    def free() -> None:
        freed.append(True)
        instance.event_log_storage.free_concurrency_slots_for_run("another")

    timer = threading.Timer(seconds, free)
    timer.start()
    return timer, freed


def test_a_hit_waits_for_no_slot_and_what_trains_does(
    instance: DagsterInstance, tmp_path: Path
) -> None:
    path = write_recipe(tmp_path)
    assert materialize(instance, path).success
    claim = instance.event_log_storage.claim_concurrency_slot(GPU_POOL, "another", "step")
    assert claim.is_claimed

    timer, freed = freed_after(instance, 60)
    again = materialize(instance, path)
    timer.cancel()
    assert again.success
    assert not freed
    keys = {event.asset_key for event in again.get_asset_materialization_events()}
    assert AssetKey(["small", "base_checkpoint"]) in keys

    timer, freed = freed_after(instance, 3)
    trained = materialize(instance, write_recipe(tmp_path, learning_rate=1e-5))
    timer.join()
    assert trained.success
    assert freed
