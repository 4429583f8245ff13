"""A fault on the real road: the release is decided and says HOLD, production stays, an override."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dagster import AssetCheckKey, AssetCheckSeverity, AssetKey, DagsterInstance

from llm_assets.cli import main
from llm_assets.planning import make_plan
from llm_assets.recipe import Recipe, load_recipe
from llm_assets.store.digest import ArtifactHash
from llm_assets.store.protocol import Store
from tests.road import outcomes, take_road
from tests.test_recipe import changed, write

GATES = {
    "gates.eval_report": {"capability": {"min": 0.9}, "golden": {"min": 0.5}},
    "gates.inference_server": {"answers_agree": {"min": 1.0}},
    "gates.sft_checkpoint": {"fact_accuracy": {"min": 0.1}},
}
GOOD = {"capability": 0.95, "golden": 1.0, "answers_agree": 1.0, "fact_accuracy": 0.9}
SEVEN_BELOW = ("reward_model", "dpo_policy", "refined_policy", "eval_report", "quantized_weights")
REASON = "gate eval_report.capability: 0.5 is below min 0.9"

Road = Callable[..., Any]


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return load_recipe(write(tmp_path, changed(GATES)))


@pytest.fixture
def road(store: Store, instance: DagsterInstance) -> Road:
    """Run a recipe, or stages of it, with a real release; `metrics` change those of good stages."""

    def run(recipe: Recipe, *stages: str, **metrics: float) -> Any:
        made = {**GOOD, **metrics}
        return take_road(recipe, instance, *stages, metrics=made, real=["release"])

    return run


def manifest(recipe: Recipe, store: Store) -> dict[str, Any]:
    release = make_plan(recipe, store).stages["release"].artifact
    assert release is not None
    body: dict[str, Any] = json.loads((store.fetch(release) / "manifest.json").read_bytes())
    return body


def checks(result: Any) -> dict[str, Any]:
    return {check.check_name: check for check in result.get_asset_check_evaluations()}


def command(*words: str) -> int:
    return int(main([*words]))


def test_a_fault_is_a_hold_with_each_reason(recipe: Recipe, store: Store, road: Road) -> None:
    assert road(recipe).success
    assert manifest(recipe, store)["decision"] == "SHIP"
    shipped = make_plan(recipe, store).stages["release"].artifact
    assert shipped is not None
    store.move_ref("small/production", shipped, expected=None, who="ada", why="it ships")

    worse = load_recipe(write(recipe.folder, changed({**GATES, "stages.dpo_policy.max_steps": 9})))
    result = road(worse, capability=0.5, answers_agree=0.0)
    assert not result.success
    body = manifest(worse, store)
    assert body["decision"] == "HOLD"
    assert body["reasons"] == [REASON, "gate inference_server.answers_agree: 0 is below min 1"]
    assert body["overrides"] == []
    found = checks(result)
    assert not found["ship"].passed
    assert not found["capability"].passed
    assert found["capability"].severity is AssetCheckSeverity.ERROR
    assert store.ref("small/production") == shipped


def test_above_the_release_a_failed_gate_stops_the_run(
    recipe: Recipe, store: Store, road: Road, capsys: pytest.CaptureFixture[str]
) -> None:
    result = road(recipe, fact_accuracy=0.0)
    assert not result.success
    assert "sft_checkpoint" in outcomes(result)
    assert not {*SEVEN_BELOW, "release"} & set(outcomes(result))
    assert command("report", "-r", str(recipe.path)) == 1
    said = capsys.readouterr().out
    assert "HOLD  no release" in said
    assert "gate sft_checkpoint.fact_accuracy: 0 is below min 0.1" in said


def test_an_override_lets_that_artifact_through_and_no_other(
    recipe: Recipe,
    store: Store,
    instance: DagsterInstance,
    road: Road,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert not road(recipe, capability=0.5).success
    assert command("report", "-r", str(recipe.path)) == 1
    assert REASON in capsys.readouterr().out
    report = str(make_plan(recipe, store).stages["eval_report"].artifact)
    signed = ("--reviewer", "Ada", "--reason", "measured on the wrong day")
    where = ("--artifact", report[:8], "-r", str(recipe.path))
    assert command("override", "eval_report.capability", *where, *signed) == 0

    assert outcomes(road(recipe, "release")) == {"release": "run"}
    body = manifest(recipe, store)
    assert body["decision"] == "SHIP"
    (override,) = body["overrides"]
    assert (override["gate"], override["artifact"]) == ("capability", report)
    warning = f"{REASON}; overridden by Ada: measured on the wrong day"
    assert body["warnings"] == [warning]
    # In the UI a warning, and still no pass: at once, and when the asset is materialized again.
    key = AssetCheckKey(AssetKey(["small", "eval_report"]), "capability")
    (newest,) = instance.event_log_storage.get_asset_check_execution_history(key, limit=1)
    evaluation = newest.event.dagster_event.asset_check_evaluation_data
    for check in (evaluation, checks(road(recipe))["capability"]):
        assert (check.passed, check.severity) == (False, AssetCheckSeverity.WARN)
        assert "Ada" in str(check.metadata)
    capsys.readouterr()
    assert command("report", "-r", str(recipe.path)) == 0
    assert warning in " ".join(capsys.readouterr().out.split())

    other = load_recipe(write(recipe.folder, changed({**GATES, "stages.dpo_policy.max_steps": 9})))
    assert not road(other, capability=0.5).success
    assert manifest(other, store)["reasons"] == [REASON]
    assert ArtifactHash.parse(report) != make_plan(other, store).stages["eval_report"].artifact
