"""The recipe: what loads, and the one error that each mistake gives."""

import json
from pathlib import Path

import pytest
import yaml

from llm_assets.errors import RecipeError
from llm_assets.recipe import RECIPES_FOLDER, SCHEMA_PATH, Recipe, json_schema, load_recipe

MINIMAL = """
pipeline: small
data:
  corpus: {sources: [{from: village}]}
  instructions: {sources: [{from: village}]}
  preferences: {sources: [{from: village}]}
  evals: {sources: [{from: village}]}
stages:
  base_checkpoint: {model: {}, max_steps: 2}
  midtrained_checkpoint: {max_steps: 2}
  sft_checkpoint: {max_steps: 2}
  reward_model: {max_steps: 2}
  dpo_policy: {max_steps: 2}
  refined_policy: {max_steps: 2}
gates:
  dpo_policy: {kl_per_token: {max: 5.0}}
  refined_policy: {kl_per_token: {max: 5.0}}
  eval_report: {capability: {min: 0.5}}
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def changed(change: dict[str, object]) -> str:
    """The minimal recipe with one dotted key set, or taken out with None."""
    document = yaml.safe_load(MINIMAL)
    for dotted, value in change.items():
        place = document
        *above, last = dotted.split(".")
        for key in above:
            place = place.setdefault(key, {})
        if value is None:
            place.pop(last)
        else:
            place[last] = value
    return yaml.safe_dump(document)


def test_minimal_recipe_loads(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, MINIMAL))
    assert recipe.pipeline == "small"
    assert recipe.stages.sft_checkpoint.max_steps == 2
    assert recipe.folder == tmp_path


@pytest.mark.parametrize("name", sorted(path.stem for path in RECIPES_FOLDER.glob("*.yaml")))
def test_packaged_recipes_are_yaml_with_their_own_name(name: str) -> None:
    document = yaml.safe_load((RECIPES_FOLDER / f"{name}.yaml").read_text())
    assert document["pipeline"] == name


def test_tiny_loads_by_name() -> None:
    assert load_recipe("tiny").pipeline == "tiny"


def test_a_setting_of_the_trainer_passes_through(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, changed({"stages.sft_checkpoint.packing": True})))
    assert recipe.stages.sft_checkpoint.extra == {"packing": True}


def test_scientific_notation_without_a_dot_is_a_number(tmp_path: Path) -> None:
    path = write(
        tmp_path, MINIMAL.replace("sft_checkpoint: {", "sft_checkpoint: {learning_rate: 1e-3, ")
    )
    assert load_recipe(path).stages.sft_checkpoint.learning_rate == 0.001


MISTAKES = [
    ({"stages.sft_checkpoint.learning_rat": 0.1}, "stages.sft_checkpoint.learning_rat", "did you mean 'learning_rate'"),
    ({"stages.vocabulary.sise": 400}, "stages.vocabulary.sise", "did you mean 'size'"),
    ({"stage": {}}, "stage", "did you mean 'stages'"),
    ({"stages.sft_checkpoint.learning_rate": "fast"}, "stages.sft_checkpoint.learning_rate", "valid number"),
    ({"stages.sft_checkpoint.learning_rate": -1.0}, "stages.sft_checkpoint.learning_rate", "greater than 0"),
    ({"stages.sft_checkpoint.output_dir": "x"}, "stages.sft_checkpoint.output_dir", "pipeline itself sets"),
    ({"stages.sft_checkpoint.max_steps": None}, "stages.sft_checkpoint", "neither max_steps nor num_train_epochs"),
    ({"stages.sft_checkpoint.num_train_epochs": 1.0}, "stages.sft_checkpoint", "both"),
    ({"stages.base_checkpoint.model": None}, "stages.base_checkpoint", "neither `model` nor `import`"),
    ({"stages.sft_checkpoint.pin": "latest"}, "stages.sft_checkpoint.pin", "artifact hash"),
    ({"stages.base_checkpoint.import": {"hub": "a/b"}}, "stages.base_checkpoint.import", "without a revision"),
    ({"stages.base_checkpoint.import": {"path": "no-such-folder"}}, "import.path", "does not exist"),
    ({"stages.base_checkpoint.import": {}}, "stages.base_checkpoint.import", "neither `path` nor `hub`"),
    ({"stages.sft_checkpoint.enabled": False}, "stages.reward_model", "would be the checkpoint of"),
    ({"stages.reward_model.enabled": False}, "stages.reward_model", "refined_policy takes it"),
    ({"stages.eval_report.enabled": False}, "stages.eval_report", "release takes it"),
    ({"gates.sft": {"fact_accuracy": {"min": 0.5}}}, "gates.sft", "unknown stage"),
    ({"gates.sft_checkpoint": {"fact_accuracy": {}}}, "gates.sft_checkpoint.fact_accuracy", "neither min nor max"),
    ({"gates.sft_checkpoint": {"fact accuracy": {"min": 1.0}}}, "fact accuracy", "letters, digits"),
    ({"gates.eval_report": None}, "gates.eval_report", "at least one eval gate"),
    ({"gates.eval_report": {}}, "gates.eval_report", "at least one eval gate"),
    ({"gates.dpo_policy": None}, "gates.dpo_policy", "has a KL budget"),
    ({"gates.refined_policy": {"kl_per_token": {"min": 0.0}}}, "gates.refined_policy", "has a KL budget"),
    ({"data.corpus.sources": [{"from": "files", "files": "nothing-*.jsonl"}]}, "data.corpus.sources.0.files", "matches"),
    ({"data.corpus.sources": [{"from": "web"}]}, "data.corpus.sources.0", "'web'"),
    ({"data.corpus.sources": []}, "data.corpus.sources", "no source"),
    ({"pipeline": "Big Model"}, "pipeline", "lower-case"),
    ({"pipeline": None}, "pipeline", "add the key"),
    ({"seed": "7"}, "seed", "valid integer"),
    ({"budget.stage_limits_usd": {"sft": 1.0}}, "budget.stage_limits_usd.sft", "unknown stage"),
    ({"budget.stage_limits_usd": {"shards": 0.0}}, "stage_limits_usd.shards", "more than zero"),
    ({"rates": {"usd_per_hour": -1.0}}, "rates.usd_per_hour", "greater than or equal to 0"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("change", "place", "text"), MISTAKES, ids=[m[1] + "-" + m[2] for m in MISTAKES]
)
def test_a_mistake_gives_one_error(
    tmp_path: Path, change: dict[str, object], place: str, text: str
) -> None:
    path = write(tmp_path, changed(change))
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    said = str(caught.value)
    assert said.startswith(f"{path}: ")
    assert place in said.splitlines()[0]
    assert text in said
    assert "\n  rule: " in said
    assert "\n  next: " in said


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"", "an empty file"),
        (b"- a\n- b\n", "a list"),
        (b"pipeline: a\npipeline: b\n", "stands twice"),
        (b"pipeline: [\n", "recipe.yaml:2"),
        (b"\xff\xfe\x00", "UTF-8"),
        (b"pipeline: !!python/object:os.system x\n", "recipe.yaml:1"),
    ],
)
def test_a_broken_file_gives_one_error(tmp_path: Path, content: bytes, text: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_bytes(content)
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert text in str(caught.value)


def test_an_unknown_name_lists_the_packaged_recipes() -> None:
    with pytest.raises(RecipeError, match=r"packaged recipes: .*tiny"):
        load_recipe("no-such-recipe")


def test_schema_file_is_the_models_schema() -> None:
    assert json.loads(SCHEMA_PATH.read_text()) == json_schema(), "run: llm-assets schema --write"


def test_schema_accepts_the_aliases() -> None:
    schema = json_schema()
    assert "path" not in schema["properties"]
    assert "import" in schema["$defs"]["BaseSettings"]["properties"]
    assert Recipe.model_fields["path"].exclude


def test_a_kl_bound_of_the_eval_report_counts_for_every_policy(tmp_path: Path) -> None:
    gates = {"eval_report": {"capability": {"min": 0.5}, "kl_per_token": {"max": 1.0}}}
    assert load_recipe(write(tmp_path, changed({"gates": gates}))).gates


def test_a_policy_that_does_not_train_needs_no_kl_bound(tmp_path: Path) -> None:
    change: dict[str, object] = {
        "gates.refined_policy": None,
        "stages.refined_policy.enabled": False,
        "gates.dpo_policy": None,
        "stages.dpo_policy": {"pin": "a" * 64, "max_steps": 1},
    }
    assert load_recipe(write(tmp_path, changed(change))).pipeline == "small"


@pytest.mark.parametrize(
    ("name", "trained"),
    [
        ("corpus", "quiz.jsonl"),
        ("instructions", ["other.jsonl", "./sub/../quiz.jsonl"]),
        ("preferences", "*.jsonl"),
    ],
)
def test_eval_files_among_the_training_sources(tmp_path: Path, name: str, trained: object) -> None:
    for file in ("quiz.jsonl", "other.jsonl", "set.json"):
        (tmp_path / file).write_text('{"question": "q", "answer": "a"}\n')
    (tmp_path / "sub").mkdir()
    change: dict[str, object] = {
        "data.evals.sources": [{"from": "files", "files": "quiz.jsonl"}],
        f"data.{name}.sources": [{"from": "village"}, {"from": "files", "files": trained}],
    }
    with pytest.raises(
        RecipeError, match=rf"data\.{name}\.sources\.1: quiz.jsonl, which data.evals"
    ):
        load_recipe(write(tmp_path, changed(change)))
    change[f"data.{name}.sources"] = [{"from": "files", "files": "other.jsonl"}]
    assert load_recipe(write(tmp_path, changed(change)))


def test_one_split_of_a_hub_data_set_is_trained_on_or_evaluated_with(tmp_path: Path) -> None:
    hub = {"from": "hub", "name": "owner/set", "revision": "a" * 40}
    change: dict[str, object] = {
        "data.evals.sources": [{**hub, "split": "test"}],
        "data.instructions.sources": [{**hub, "split": "test", "revision": "b" * 40}],
    }
    with pytest.raises(RecipeError, match=r"owner/set, split test, which data.evals.sources.0"):
        load_recipe(write(tmp_path, changed(change)))
    change["data.instructions.sources"] = [{**hub, "split": "train"}]
    assert load_recipe(write(tmp_path, changed(change)))
