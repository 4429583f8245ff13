"""The real assets under Dagster: hits, damage, held stages, failures and what is told of them."""

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from dagster import AssetKey, DagsterInstance, Definitions, build_run_status_sensor_context

from llm_assets import planning
from llm_assets.assets import build_assets
from llm_assets.cli import app
from llm_assets.compat import stale_statuses
from llm_assets.executor import build_executor
from llm_assets.planning import make_plan, recipe_argument
from llm_assets.recipe import Recipe, load_recipe
from llm_assets.resources import LocalLauncher, StoreResource
from llm_assets.run_tags import FAILED_TAG, ROLLED_BACK_TAG
from llm_assets.sensors import build_failure_sensor
from llm_assets.sensors.failures import report_failure
from llm_assets.store.digest import ArtifactHash
from llm_assets.store.protocol import Store
from tests.road import outcomes, take_road
from tests.test_planning import SFT_AND_BELOW
from tests.test_recipe import changed, write
from tests.test_telemetry import Receiver

Loader = Callable[..., Recipe]


@pytest.fixture
def recipe(tmp_path: Path) -> Loader:
    def load(**change: Any) -> Recipe:
        dotted = {key.replace("__", "."): value for key, value in change.items()}
        return load_recipe(write(tmp_path, changed(dotted)))

    return load


def blob_of(store: Store, artifact: ArtifactHash) -> Path:
    """The stored file of an artifact's only file."""
    blob = str(store.tree(artifact).files[0].blob)
    return next(path for path in Path(store.url, "objects").rglob(blob) if path.is_file())


def spoil(path: Path) -> None:
    """Other bytes, the same size, name and times: rot on the disk."""
    stat = path.stat()
    path.chmod(0o644)
    path.write_bytes(b"x" * stat.st_size)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


SMALL = ("corpus", "vocabulary", "tokenizer")


def test_damage_is_found_before_a_hit_is_reported_and_mended(
    store: Store, instance: DagsterInstance, recipe: Loader
) -> None:
    assert take_road(recipe(), instance, *SMALL).success
    artifact = make_plan(recipe(), store).stages["vocabulary"].artifact
    assert artifact is not None
    store.fetch(artifact)
    spoil(blob_of(store, artifact))
    assert store.has(artifact)
    again = take_road(recipe(), instance, *SMALL)
    assert again.success
    # The same output comes out again, so what stands below is a hit.
    assert outcomes(again) == {"corpus": "hit", "vocabulary": "run", "tokenizer": "hit"}
    assert store.verify(artifact) == []
    assert (store.fetch(artifact) / "documents.jsonl").read_text().startswith("vocabulary ")
    assert set(outcomes(take_road(recipe(), instance, *SMALL)).values()) == {"hit"}


def test_a_damaged_output_that_comes_out_otherwise_is_replaced(
    store: Store, instance: DagsterInstance, recipe: Loader
) -> None:
    chain = (*SMALL, "shards", "base_checkpoint")
    assert take_road(recipe(), instance, *chain).success
    before = make_plan(recipe(), store).stages["base_checkpoint"].artifact
    assert before is not None
    spoil(blob_of(store, before))
    again = take_road(recipe(), instance, *chain, noise="!")
    assert outcomes(again)["base_checkpoint"] == "run"
    mine = make_plan(recipe(), store).stages["base_checkpoint"]
    assert mine.status == "hit"
    assert mine.artifact not in (None, before)


def test_a_plan_says_what_is_damaged(
    store: Store, instance: DagsterInstance, recipe: Loader
) -> None:
    assert take_road(recipe(), instance, *SMALL).success
    artifact = make_plan(recipe(), store).stages["vocabulary"].artifact
    assert artifact is not None
    spoil(blob_of(store, artifact))
    assert not take_road(recipe(), instance, *SMALL, fail=["vocabulary"]).success
    plan = make_plan(recipe(), store)
    assert plan.stages["vocabulary"].status == "run"
    assert "is damaged: documents.jsonl" in plan.stages["vocabulary"].reasons[0]


def test_a_damaged_pin_is_an_error(store: Store, instance: DagsterInstance, recipe: Loader) -> None:
    assert take_road(recipe(), instance, *SMALL).success
    artifact = make_plan(recipe(), store).stages["vocabulary"].artifact
    assert artifact is not None
    spoil(blob_of(store, artifact))
    pinned = recipe(stages__vocabulary__pin=str(artifact))
    result = take_road(pinned, instance, "vocabulary")
    assert not result.success
    (failure,) = result.get_step_failure_events()
    assert "pin another one" in failure.step_failure_data.user_failure_data.description


def test_a_failed_run_is_told(
    store: Store, instance: DagsterInstance, recipe: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver = Receiver()
    monkeypatch.setenv("LLM_ASSETS_WEBHOOK", f"{receiver.url}/hook")
    loaded = recipe(owners=["team:ml"])
    result = take_road(loaded, instance, fail=["sft_checkpoint"])
    assert not result.success
    run = instance.get_run_by_id(result.run_id)
    assert run is not None
    said: list[str] = []
    (rollback,) = report_failure(instance, run, [loaded], log=said.append)
    receiver.close()
    assert list(rollback.failed) == ["sft_checkpoint"]
    assert list(rollback.invalidated) == SFT_AND_BELOW
    assert "midtrained_checkpoint" in rollback.cached
    assert rollback.owner == "team:ml"
    assert "  sft_checkpoint starts over\n" in rollback.text()
    assert rollback.text().endswith(f"next: llm-assets run -r {recipe_argument(loaded)}")
    for kept, said_of_it in (
        ("checkpoint save-00000009", "goes on from checkpoint save-00000009"),
        (f"artifact {'a' * 64} of 2026-03-01", "starts over; last good: artifact aaaaaaaaaaaa of"),
    ):
        changed = dataclasses.replace(rollback, checkpoints={"sft_checkpoint": kept})
        assert f"  sft_checkpoint {said_of_it}" in changed.text()

    tagged = instance.get_run_by_id(result.run_id)
    assert tagged is not None
    assert tagged.tags[FAILED_TAG] == "sft_checkpoint"
    assert tagged.tags[ROLLED_BACK_TAG] == ", ".join(SFT_AND_BELOW)
    (seen,) = instance.fetch_observations(AssetKey(["small", "sft_checkpoint"]), limit=5).records
    observation = seen.asset_observation
    assert observation is not None
    assert observation.metadata["rolled_back"].value == SFT_AND_BELOW
    assert any("rolled back: sft_checkpoint" in text for text in said)
    logged = [entry.user_message or entry.message for entry in instance.all_logs(result.run_id)]
    assert any("rolled back: sft_checkpoint" in text for text in logged)
    ((path, _, sent),) = receiver.got
    assert path == "/hook"
    assert "told to fail" in sent["text"]
    # Telling once is enough.
    assert report_failure(instance, run, [loaded], log=said.append) == []


def test_the_sensor_tells_of_a_failed_run(
    store: Store, instance: DagsterInstance, recipe: Loader
) -> None:
    loaded = recipe()
    result = take_road(loaded, instance, fail=["quantized_weights"])
    run = instance.get_run_by_id(result.run_id)
    assert run is not None
    event = next(
        entry.dagster_event
        for entry in instance.all_logs(result.run_id)
        if entry.dagster_event is not None and entry.dagster_event.is_failure
        if entry.dagster_event.event_type_value == "PIPELINE_FAILURE"
    )
    sensor = build_failure_sensor([loaded])
    context = build_run_status_sensor_context(
        sensor_name=sensor.name, dagster_instance=instance, dagster_run=run, dagster_event=event
    ).for_run_failure()
    sensor(context)
    tagged = instance.get_run_by_id(result.run_id)
    assert tagged is not None
    assert tagged.tags[ROLLED_BACK_TAG] == "quantized_weights, inference_server, release"


def test_a_gate_that_fails_spoils_all_below(
    store: Store, instance: DagsterInstance, recipe: Loader
) -> None:
    take_road(recipe(), instance, metrics={"ship": 1.0, "accuracy": 0.5})
    assert make_plan(recipe(), store).complete
    gated = recipe(gates__reward_model={"accuracy": {"min": 0.9}})
    result = take_road(gated, instance)
    assert not result.success
    run = instance.get_run_by_id(result.run_id)
    assert run is not None
    (rollback,) = report_failure(instance, run, [gated], log=print)
    assert list(rollback.failed) == ["reward_model"]
    assert "0.5 is below min 0.9" in rollback.failed["reward_model"]
    assert "refined_policy" in rollback.invalidated
    assert "dpo_policy" in rollback.cached
    assert rollback.command.startswith("llm-assets report")


def test_what_is_told_of_a_failure_makes_nothing_stale(
    store: Store, instance: DagsterInstance, recipe: Loader
) -> None:
    loaded = recipe()
    assert take_road(loaded, instance, metrics={"ship": 1.0}).success
    gated = recipe(gates__reward_model={"accuracy": {"min": 0.9}})
    result = take_road(gated, instance, "reward_model")
    run = instance.get_run_by_id(result.run_id)
    assert run is not None
    assert report_failure(instance, run, [gated], log=print)
    defs = Definitions(
        assets=build_assets(loaded),
        executor=build_executor(),
        resources={
            "store": StoreResource(url=""),
            "launcher": LocalLauncher(threads=1, grace_s=1.0),
        },
    )
    assert set(stale_statuses(instance, defs).values()) == {"FRESH"}


def test_a_held_stage_does_not_start(
    store: Store,
    instance: DagsterInstance,
    recipe: Loader,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded = recipe(budget__hold_over_usd=0.0, owners=["team:ml"])
    assert take_road(loaded, instance, metrics={"ship": 1.0}).success
    real = planning.node_source

    def other_code(node: Any) -> Any:
        source = real(node)
        if node.stage.name != "base_checkpoint":
            return source
        modules = {**source.modules, node.stage.module: "another"}
        return dataclasses.replace(source, modules=modules, hash="b" * 64)

    monkeypatch.setattr(planning, "node_source", other_code)
    monkeypatch.setattr("llm_assets.assets.node_source", other_code)
    result = take_road(loaded, instance, "base_checkpoint")
    assert not result.success
    (failure,) = result.get_step_failure_events()
    said = failure.step_failure_data.user_failure_data.description
    for way in ("llm-assets approve base_checkpoint --identity", "pin: ", "or revert: "):
        assert way in said

    path = str(tmp_path / "recipe.yaml")
    call = CliRunner().invoke
    planned = call(app, ["plan", "-r", path, "--json"], standalone_mode=False)
    assert planned.return_value == 3
    held = next(
        entry for entry in json.loads(planned.output)["stages"] if entry["status"] == "held"
    )
    assert held["name"] == "base_checkpoint"
    wrong = call(
        app, ["approve", "base_checkpoint", "-r", path, "--identity", "f" * 64, "--why", "x"]
    )
    assert wrong.exit_code != 0
    approved = call(
        app,
        f"approve base_checkpoint -r {path} --identity {held['identity'][:8]} --who ada --why fixed",
        standalone_mode=False,
    )
    assert "approved by ada: fixed" in approved.output
    assert outcomes(take_road(loaded, instance, "base_checkpoint")) == {"base_checkpoint": "run"}
