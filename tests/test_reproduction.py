"""Manifests compared: reproduced, weights differ, or not and why; replays through the real assets."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from dagster import DagsterInstance

from llm_assets.cli import app
from llm_assets.engine import release_lineage
from llm_assets.errors import NotFoundError, UserError
from llm_assets.manifests import Manifest, differences, find_manifest, recipe_of
from llm_assets.planning import make_plan
from llm_assets.recipe import Recipe, load_recipe
from llm_assets.replaying import begin_replay, end_replay, other_code, replays_of
from llm_assets.reproduction import Reproduction, compare
from llm_assets.run_tags import REPLAY_TAG
from llm_assets.store.digest import ArtifactHash
from llm_assets.store.protocol import Store
from tests.road import outcomes, take_road
from tests.simulation import simulate

METRICS = {
    "accuracy": {"value": 0.8, "n": 100},
    "drift": {"value": 0.0, "n": None},
    "latency_s": {"value": 1.0, "n": None},
}


@pytest.fixture
def recipe() -> Recipe:
    return load_recipe("tiny")


@pytest.fixture
def manifest(store: Store, recipe: Recipe) -> Manifest:
    """What the release stage would write after a run of tiny."""
    simulate(recipe, store, metrics=METRICS)
    lineage = release_lineage(make_plan(recipe, store), store)
    body = {"pipeline": "tiny", "decision": "SHIP", "seed": recipe.seed, **lineage, "gates": []}
    return Manifest(name="a" * 64, body=json.loads(json.dumps(body)))


def edited(manifest: Manifest, stage: str, **change: Any) -> Manifest:
    body = copy.deepcopy(dict(manifest.body))
    body["stages"][stage].update(change)
    return Manifest(name="b" * 64, body=body)


def metrics(**values: float) -> dict[str, Any]:
    return {**METRICS, **{name: {"value": value, "n": None} for name, value in values.items()}}


def why(result: Reproduction, stage: str) -> str:
    (found,) = (entry for entry in result.stages if entry.stage == stage)
    return "; ".join(found.why)


def test_the_same_manifest_is_reproduced(manifest: Manifest) -> None:
    result = compare(manifest, manifest)
    assert result.reproduced
    assert result.text == "reproduced"
    assert [entry.stage for entry in result.stages][:2] == ["corpus", "instructions"]


def test_weights_may_differ(manifest: Manifest) -> None:
    other = edited(manifest, "sft_checkpoint", artifact="c" * 64)
    result = compare(manifest, other)
    assert result.reproduced
    assert result.text == "reproduced, weights differ"


def test_a_bit_identical_stage_must_not(manifest: Manifest) -> None:
    result = compare(manifest, edited(manifest, "shards", artifact="c" * 64))
    assert not result.reproduced
    assert result.text.startswith("not reproduced: shards, output ")


def test_a_bit_identical_stage_may_when_its_inputs_do(manifest: Manifest) -> None:
    other = edited(manifest, "eval_report", artifact="c" * 64, inputs={"refined_policy": "d" * 64})
    assert compare(manifest, other).reproduced


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (metrics(accuracy=0.83), ""),
        (metrics(accuracy=0.7), "accuracy: 0.8 and 0.7, 12.5% apart, 5.0% allowed"),
        (metrics(drift=0.04), ""),
        (metrics(drift=0.06), "drift: 0 and 0.06, 6.0% apart"),
        (metrics(accuracy=float("nan")), "accuracy: 0.8 and nan"),
        (metrics(latency_s=9.0), ""),
        ({"accuracy": METRICS["accuracy"], "drift": METRICS["drift"]}, ""),
        ({"accuracy": METRICS["accuracy"]}, "drift: 0.0 and None"),
    ],
)
def test_metrics_within_the_tolerance(
    manifest: Manifest, change: dict[str, Any], text: str
) -> None:
    result = compare(manifest, edited(manifest, "reward_model", metrics=change))
    assert result.reproduced == (not text)
    assert text in why(result, "reward_model")


def test_the_recipe_can_choose_a_tolerance(manifest: Manifest) -> None:
    body = copy.deepcopy(dict(manifest.body))
    body["recipe"]["tolerance"] = {"default": 0.5, "metrics": {"latency_s": 0.1}}
    strict = Manifest(name="a" * 64, body=body)
    result = compare(strict, edited(strict, "reward_model", metrics=metrics(latency_s=1.2)))
    assert "latency_s: 1 and 1.2" in why(result, "reward_model")
    assert compare(strict, edited(strict, "reward_model", metrics=metrics(accuracy=0.5))).reproduced


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"source_hash": "x", "libraries": {"trl": "9"}}, "source hash: "),
        ({"recipe": {"learning_rate": 1.0}}, "recipe: learning_rate"),
        ({"seed": 99}, "seed: 7 and 99"),
        ({"inputs": {"source": "e" * 64}}, "source data: source"),
    ],
)
def test_other_work_is_no_reproduction(
    manifest: Manifest, change: dict[str, Any], text: str
) -> None:
    result = compare(manifest, edited(manifest, "corpus", **change))
    assert not result.reproduced
    assert text in why(result, "corpus")


def test_a_missing_stage_is_no_reproduction(manifest: Manifest) -> None:
    body = copy.deepcopy(dict(manifest.body))
    del body["stages"]["dpo_policy"]
    result = compare(manifest, Manifest(name="b" * 64, body=body))
    assert result.text == "not reproduced: dpo_policy, the replay has no such"


def test_differences_name_what_changed(manifest: Manifest) -> None:
    assert list(differences(manifest, manifest)) == []
    other = edited(
        manifest,
        "shards",
        artifact="c" * 64,
        libraries={**manifest.stages["shards"]["libraries"], "tokenizers": "9"},
        metrics=metrics(accuracy=0.9),
    )
    other.body["recipe"]["seed"] = 8  # type: ignore[index]
    found = {
        (stage, what): (before, after)
        for stage, what, before, after in differences(manifest, other)
    }
    assert found["", "recipe seed"] == (7, 8)
    assert found["shards", "artifact"][1] == "c" * 64
    assert found["shards", "library tokenizers"][1] == "9"
    assert found["shards", "metric accuracy"] == (0.8, 0.9)
    assert len(found) == 4


def test_a_manifest_holds_its_recipe(manifest: Manifest, recipe: Recipe, store: Store) -> None:
    again = recipe_of(manifest, Path("/"))
    assert again.model_dump() == recipe.model_dump()
    # The same identities, wherever it is read: everything is a hit.
    assert make_plan(again, store).complete
    assert other_code(again, manifest, store) == {}
    stale = edited(manifest, "sft_checkpoint", source_hash="f" * 64, modules={}, libraries={})
    assert "trl" in other_code(again, stale, store)["sft_checkpoint"]


def test_manifests_are_found_by_file_and_refused_otherwise(
    manifest: Manifest, store: Store, tmp_path: Path
) -> None:
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps(manifest.body))
    assert find_manifest(store, str(path)).body == manifest.body
    assert find_manifest(store, str(tmp_path)).body == manifest.body
    path.write_text("{}")
    with pytest.raises(UserError, match="no manifest"):
        find_manifest(store, str(path))
    with pytest.raises(NotFoundError, match="no such manifest"):
        find_manifest(store, "nothing")
    policy = make_plan(load_recipe("tiny"), store).stages["corpus"].artifact
    with pytest.raises(UserError, match="of type corpus"):
        find_manifest(store, str(policy))


def test_replays_are_numbered_and_go_on(manifest: Manifest, store: Store) -> None:
    first = begin_replay(store, manifest)
    assert begin_replay(store, manifest) == first
    release = ArtifactHash.parse("e" * 64)
    end_replay(store, manifest, first, release)
    second = begin_replay(store, manifest)
    assert second != first
    assert replays_of(store, manifest) == {first: release, second: None}


def test_a_replay_takes_nothing_from_the_first_run(
    store: Store, instance: DagsterInstance, recipe: Recipe
) -> None:
    # What pretended stages give can be measured no more than it can be trained on.
    recipe = recipe.model_copy(update={"gates": {}})
    chain = ("corpus", "vocabulary", "tokenizer", "shards", "base_checkpoint")
    assert take_road(recipe, instance, *chain).success
    before = make_plan(recipe, store)
    tags = {REPLAY_TAG: "again"}
    failed = take_road(recipe, instance, *chain, tags=tags, fail=["shards"])
    assert outcomes(failed) == dict.fromkeys(chain[:3], "run")
    # It goes on where it was, and its own weights may differ.
    rest = take_road(recipe, instance, *chain, tags=tags, noise="!")
    assert outcomes(rest) == {
        **dict.fromkeys(chain[:3], "hit"),
        **dict.fromkeys(chain[3:], "run"),
    }
    replayed = make_plan(recipe, store, replay="again")
    assert replayed.stages["shards"].artifact == before.stages["shards"].artifact
    assert replayed.stages["base_checkpoint"].artifact != before.stages["base_checkpoint"].artifact
    # The first record stays the answer.
    after = make_plan(recipe, store)
    assert after.stages["base_checkpoint"].artifact == before.stages["base_checkpoint"].artifact


def test_reproduce_and_show_on_the_command_line(
    manifest: Manifest, store: Store, tmp_path: Path
) -> None:
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    one.write_text(json.dumps(manifest.body))
    other.write_text(json.dumps(edited(manifest, "shards", seed=1).body))
    call = CliRunner().invoke
    same = call(app, ["reproduce", str(one), str(one)], standalone_mode=False)
    assert (same.return_value, same.output.splitlines()[-1].endswith("reproduced")) == (0, True)
    differs = call(app, ["reproduce", str(one), str(other), "--json"], standalone_mode=False)
    assert differs.return_value == 1
    assert json.loads(differs.output)["verdict"] == "not reproduced: shards, seed: 7 and 1"
    shown = call(app, ["manifest", "show", str(one)], standalone_mode=False)
    assert "sft_checkpoint" in shown.output
    assert "rollback plan for 17 stages" in shown.output
    alone = call(app, ["reproduce", str(one)])
    assert isinstance(alone.exception, NotFoundError)
