"""What Dagster loads: keys, dependencies, checks, jobs, schedules; and what it must not import."""

import json
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
from dagster import DefaultScheduleStatus

from llm_assets import definitions
from llm_assets.errors import RecipeError
from llm_assets.graph import STAGES
from llm_assets.recipe import load_recipe

HEAVY = [
    *("torch", "transformers", "trl", "great_expectations", "datasets", "peft", "accelerate"),
    "numpy",
]


def build(*paths: Path | str) -> definitions.Definitions:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return definitions.build_definitions(definitions.load_recipes([str(p) for p in paths]))


def test_assets_of_tiny() -> None:
    graph = build("tiny").resolve_asset_graph()
    keys = {key.to_user_string() for key in graph.get_all_asset_keys()}
    data = {"corpus", "instructions", "preferences", "evals"}
    assert keys == {f"tiny/{name}" for name in STAGES} | {f"tiny/sources/{name}" for name in data}
    parents = {
        key.path[-1]: sorted(parent.path[-1] for parent in graph.get(key).parent_keys)
        for key in graph.materializable_asset_keys
    }
    assert parents["corpus"] == ["corpus"]
    assert parents["base_checkpoint"] == ["shards", "tokenizer"]
    assert parents["reward_model"] == ["preferences", "sft_checkpoint"]
    assert parents["release"] == ["eval_report", "inference_server", "quantized_weights"]


def test_assets_say_what_people_look_for() -> None:
    graph = build("tiny").resolve_asset_graph()
    for key in graph.materializable_asset_keys:
        node = graph.get(key)
        stage = STAGES[key.path[-1]]
        assert node.description == stage.description
        assert node.code_version
        assert node.tags["cost_class"] == stage.cost_class
        assert node.kinds == set(stage.kinds)
        assert node.pools == ({"gpu"} if stage.trains else set())


def test_gates_are_blocking_checks() -> None:
    recipe = load_recipe("tiny")
    graph = build("tiny").resolve_asset_graph()
    found = {(key.asset_key.path[-1], key.name) for key in graph.asset_check_keys}
    expected = {(stage, metric) for stage, gates in recipe.gates.items() for metric in gates}
    assert found == expected | {("release", "ship")}
    # Below these two stands the release alone: it has to run, to say HOLD, and its check blocks.
    going_on = {key for key in graph.asset_check_keys if not graph.get_check_spec(key).blocking}
    assert {key.asset_key.path[-1] for key in going_on} == {"eval_report", "inference_server"}


def test_jobs_and_the_schedules_that_are_off() -> None:
    repository = build("tiny").get_repository_def()
    names = {job.name for job in repository.get_all_jobs() if not job.name.startswith("__")}
    upkeep = {"nightly_verification", "monthly_drills"}
    assert names == {"tiny_pipeline", "tiny_alignment", "tiny_evaluate_and_release"} | upkeep
    schedules = repository.schedule_defs
    assert {schedule.name for schedule in schedules} == {"tiny_weekly_alignment"} | upkeep
    assert {entry.default_status for entry in schedules} == {DefaultScheduleStatus.STOPPED}
    alignment = build("tiny").resolve_job_def("tiny_alignment")
    stages = {key.path[-1] for key in alignment.asset_layer.selected_asset_keys}
    assert "sft_checkpoint" in stages
    assert "release" in stages
    assert "base_checkpoint" not in stages


def test_two_recipes_share_one_location(tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    other.write_text(
        Path(load_recipe("tiny").path).read_text().replace("pipeline: tiny", "pipeline: other")
    )
    keys = build("tiny", other).resolve_asset_graph().materializable_asset_keys
    assert len(keys) == 2 * len(STAGES)


def test_two_recipes_of_one_name_are_refused(tmp_path: Path) -> None:
    copy = tmp_path / "copy.yaml"
    copy.write_text(Path(load_recipe("tiny").path).read_text())
    with pytest.raises(RecipeError, match="rename one of them"):
        definitions.load_recipes(["tiny", str(copy)])


def test_recipes_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.yaml").write_text("x")
    (tmp_path / "b.yaml").write_text("x")
    monkeypatch.setenv("LLM_ASSETS_RECIPES", f"tiny:{tmp_path}/*.yaml")
    assert definitions.recipe_paths() == ["tiny", f"{tmp_path}/a.yaml", f"{tmp_path}/b.yaml"]
    monkeypatch.setenv("LLM_ASSETS_RECIPES", f"{tmp_path}/nothing*.yaml")
    with pytest.raises(RecipeError, match="matches nothing"):
        definitions.recipe_paths()


def test_loading_imports_nothing_heavy() -> None:
    script = (
        "import json, sys, llm_assets.definitions; "
        f"print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == []
