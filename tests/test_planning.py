"""The plan: what is a hit, what runs, and why."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llm_assets import planning
from llm_assets.errors import NotFoundError
from llm_assets.graph import Node
from llm_assets.identity import Source, digest_of
from llm_assets.planning import make_plan
from llm_assets.recipe import Recipe, load_recipe
from llm_assets.store import open_store
from llm_assets.store.protocol import Store
from tests.simulation import simulate
from tests.test_recipe import changed, write

SFT_AND_BELOW = [
    "sft_checkpoint",
    "reward_model",
    "dpo_policy",
    "refined_policy",
    "eval_report",
    "quantized_weights",
    "inference_server",
    "release",
]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "store"))


@pytest.fixture
def code(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Stage to the version of its code, as the plan sees it; trl under "trl"."""
    versions: dict[str, str] = {}

    def source(node: Node) -> Source:
        name = node.stage.name
        modules = {node.stage.module: versions.get(name, "1")}
        libraries = {entry: versions.get(entry, "1") for entry in node.stage.libraries}
        return Source(modules=modules, libraries=libraries, hash=digest_of([modules, libraries]))

    monkeypatch.setattr(planning, "node_source", source)
    return versions


Loader = Callable[..., Recipe]


@pytest.fixture
def recipe(tmp_path: Path) -> Loader:
    def load(**change: Any) -> Recipe:
        dotted = {key.replace("__", "."): value for key, value in change.items()}
        return load_recipe(write(tmp_path, changed(dotted)))

    return load


def test_at_first_everything_runs(store: Store, code: dict[str, str], recipe: Loader) -> None:
    plan = make_plan(recipe(), store)
    assert plan.rerun == list(plan.nodes)
    assert plan.stages["corpus"].status == "run"
    assert plan.stages["corpus"].reasons == ("no record",)
    assert not plan.complete


def test_after_a_run_everything_is_a_hit(
    store: Store, code: dict[str, str], recipe: Loader
) -> None:
    ran = simulate(recipe(), store)
    plan = make_plan(recipe(), store)
    assert sorted(ran) == sorted(plan.nodes)
    assert plan.complete
    assert {entry.status for entry in plan.stages.values()} == {"hit"}


def test_a_changed_learning_rate_reruns_sft_and_below(
    store: Store, code: dict[str, str], recipe: Loader
) -> None:
    simulate(recipe(), store)
    plan = make_plan(recipe(stages__sft_checkpoint__learning_rate=0.01), store)
    assert plan.rerun == SFT_AND_BELOW
    assert plan.stages["sft_checkpoint"].status == "run"
    assert plan.stages["sft_checkpoint"].reasons == (
        "recipe changed: learning_rate from 0.0005 to 0.01",
    )
    assert plan.stages["reward_model"].status == "maybe"


@pytest.mark.parametrize(
    "change",
    [
        {"gates.sft_checkpoint": {"held_out_loss": {"max": 9.0}}},
        {"budget": {"limit_usd": 99.0}},
        {"rates": {"usd_per_hour": 3.0}},
        {"launcher": {"kind": "accelerate", "num_processes": 2}},
        {"stages.sft_checkpoint.logging_steps": 7},
        {"stages.sft_checkpoint.checkpoint": {"keep": 5}},
        {"description": "another text"},
        {"owners": ["team:ml"]},
    ],
)
def test_what_cannot_change_a_result_reruns_nothing_that_trains(
    store: Store, code: dict[str, str], recipe: Loader, change: dict[str, Any]
) -> None:
    simulate(recipe(), store)
    plan = make_plan(recipe(**{k.replace(".", "__"): v for k, v in change.items()}), store)
    # The ship decision depends on the gates; nothing else does.
    assert plan.rerun == (["release"] if "gates.sft_checkpoint" in change else [])


def test_going_back_hits_without_a_run(store: Store, code: dict[str, str], recipe: Loader) -> None:
    simulate(recipe(), store)
    simulate(recipe(stages__sft_checkpoint__learning_rate=0.01), store)
    assert make_plan(recipe(), store).complete


def test_the_same_output_ends_the_wave(store: Store, code: dict[str, str], recipe: Loader) -> None:
    simulate(recipe(), store, same_output=["vocabulary"])
    code["vocabulary"] = "2"
    plan = make_plan(recipe(), store)
    assert plan.stages["vocabulary"].reasons == ("code changed: llm_assets.stages.vocabulary",)
    assert plan.stages["tokenizer"].status == "maybe"
    assert simulate(recipe(), store, same_output=["vocabulary"]) == ["vocabulary"]


def test_another_trl_reruns_what_trains_with_it(
    store: Store, code: dict[str, str], recipe: Loader
) -> None:
    simulate(recipe(), store)
    code["trl"] = "2"
    plan = make_plan(recipe(), store)
    assert plan.rerun == SFT_AND_BELOW
    assert plan.stages["sft_checkpoint"].reasons == ("library changed: trl 1 → 2",)


def test_a_changed_input_is_named(store: Store, code: dict[str, str], recipe: Loader) -> None:
    simulate(recipe(), store)
    simulate(recipe(data__village__eval_items=50), store, stop_before="eval_report")
    plan = make_plan(recipe(data__village__eval_items=50), store)
    assert plan.rerun == ["eval_report", "release"]
    assert plan.stages["eval_report"].reasons == ("input changed: evals",)


def test_a_changed_data_file_reruns_its_snapshot(
    store: Store, code: dict[str, str], recipe: Loader, tmp_path: Path
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "one"}\n')
    loaded = recipe(data__corpus__sources=[{"from": "files", "files": "rows.jsonl"}])
    simulate(loaded, store)
    file.write_text('{"text": "two"}\n')
    plan = make_plan(loaded, store)
    assert plan.stages["corpus"].reasons == ("input changed: source",)
    assert "evals" not in plan.rerun


def test_the_place_of_a_data_file_is_no_part_of_the_identity(
    store: Store, code: dict[str, str], recipe: Loader, tmp_path: Path
) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "rows.jsonl").write_text('{"text": "one"}\n')
    simulate(recipe(data__corpus__sources=[{"from": "files", "files": "a/rows.jsonl"}]), store)
    moved = recipe(data__corpus__sources=[{"from": "files", "files": "b/rows.jsonl"}])
    assert make_plan(moved, store).complete


def test_a_lost_artifact_runs_again(store: Store, code: dict[str, str], recipe: Loader) -> None:
    simulate(recipe(), store)
    lost = make_plan(recipe(), store).stages["shards"].artifact
    assert lost is not None
    blob = store.tree(lost).files[0].blob
    path = next(
        p
        for p in Path(store.url, "objects").rglob("*")
        if p.name.endswith(blob[4:]) and p.is_file()
    )
    path.unlink()
    plan = make_plan(recipe(), store)
    assert plan.stages["shards"].status == "run"
    assert "gone or damaged" in plan.stages["shards"].reasons[0]


def test_a_pin_takes_its_artifact_and_cuts_the_edge(
    store: Store, code: dict[str, str], recipe: Loader
) -> None:
    simulate(recipe(), store)
    kept = make_plan(recipe(), store).stages["base_checkpoint"].artifact
    code["base_checkpoint"] = "2"
    plan = make_plan(recipe(stages__base_checkpoint__pin=str(kept)), store)
    assert plan.stages["base_checkpoint"].status == "pinned"
    assert plan.rerun == []


def test_a_pin_to_nothing_is_an_error(store: Store, code: dict[str, str], recipe: Loader) -> None:
    with pytest.raises(NotFoundError, match=r"stages\.sft_checkpoint\.pin"):
        make_plan(recipe(stages__sft_checkpoint__pin="a" * 64), store)


def test_another_seed_reruns_what_it_can_change(
    store: Store, code: dict[str, str], recipe: Loader
) -> None:
    simulate(recipe(), store)
    plan = make_plan(recipe(seed=8), store)
    assert plan.stages["base_checkpoint"].status == "run"
    assert plan.stages["base_checkpoint"].reasons == ("recipe changed: seed from 0 to 8",)
