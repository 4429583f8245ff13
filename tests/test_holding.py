"""Which stages are held, and the three ways on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llm_assets import planning
from llm_assets.errors import UserError
from llm_assets.graph import Node
from llm_assets.guards import forecast_plan, refusals
from llm_assets.holding import approve
from llm_assets.identity import Source, digest_of
from llm_assets.planning import Plan, make_plan
from llm_assets.recipe import Recipe, load_recipe
from llm_assets.store import open_store
from llm_assets.store.digest import Identity
from llm_assets.store.protocol import Store
from tests.simulation import simulate
from tests.test_recipe import changed, write

Loader = Callable[..., Recipe]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "store"))


@pytest.fixture
def recipe(tmp_path: Path) -> Loader:
    """The small recipe whose expensive stages are all over the threshold."""

    def load(**change: Any) -> Recipe:
        dotted = {key.replace("__", "."): value for key, value in change.items()}
        base = {"budget.hold_over_usd": 0.0, "owners": ["team:ml"]}
        return load_recipe(write(tmp_path, changed({**base, **dotted})))

    return load


@pytest.fixture
def code(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Stage or library to its version, as the plan sees it."""
    versions: dict[str, str] = {}

    def source(node: Node) -> Source:
        modules = {node.stage.module: versions.get(node.stage.name, "1")}
        libraries = {entry: versions.get(entry, "1") for entry in node.stage.libraries}
        return Source(modules=modules, libraries=libraries, hash=digest_of([modules, libraries]))

    monkeypatch.setattr(planning, "node_source", source)
    return versions


def held(plan: Plan) -> list[str]:
    return [name for name, entry in plan.stages.items() if entry.status == "held"]


def test_code_alone_holds_an_expensive_stage(
    store: Store, recipe: Loader, code: dict[str, str]
) -> None:
    simulate(recipe(), store)
    kept = make_plan(recipe(), store).stages["base_checkpoint"].artifact
    code["base_checkpoint"] = "2"
    plan = make_plan(recipe(), store)
    assert held(plan) == ["base_checkpoint"]
    assert "base_checkpoint" not in plan.rerun
    assert not plan.complete
    assert plan.stages["midtrained_checkpoint"].status == "maybe"
    (text,) = refusals(plan, store, forecast_plan(plan, store))
    assert "llm-assets approve base_checkpoint --identity" in text
    assert f"stages.base_checkpoint.pin: {kept}" in text
    assert "revert: llm_assets.stages.base_checkpoint" in text


def test_libraries_hold_and_name_themselves(
    store: Store, recipe: Loader, code: dict[str, str]
) -> None:
    simulate(recipe(), store)
    code["accelerate"] = "2"
    plan = make_plan(recipe(), store)
    assert held(plan) == ["base_checkpoint"]
    assert plan.stages["base_checkpoint"].reasons == ("library changed: accelerate 1 → 2",)


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"stages__base_checkpoint__learning_rate": 0.5}, "run"),
        ({"seed": 9}, "run"),
        ({"stages__shards__held_out": 0.3}, "run"),
        ({"budget__hold_over_usd": 1e6}, "run"),
    ],
)
def test_anything_else_that_changed_is_wanted(
    store: Store, recipe: Loader, code: dict[str, str], change: dict[str, Any], status: str
) -> None:
    simulate(recipe(), store)
    code["base_checkpoint"] = "2"
    plan = make_plan(recipe(**change), store)
    assert held(plan) == []
    assert plan.stages["base_checkpoint"].status == status


def test_only_expensive_stages_are_held(store: Store, recipe: Loader, code: dict[str, str]) -> None:
    simulate(recipe(), store)
    code.update(sft_checkpoint="2", eval_report="2", vocabulary="2")
    assert held(make_plan(recipe(), store)) == []


def test_a_lost_artifact_is_not_worth_holding_for(
    store: Store, recipe: Loader, code: dict[str, str]
) -> None:
    simulate(recipe(), store)
    lost = make_plan(recipe(), store).stages["base_checkpoint"].artifact
    assert lost is not None
    blob = str(store.tree(lost).files[0].blob)
    next(p for p in Path(store.url, "objects").rglob(blob) if p.is_file()).unlink()
    code["base_checkpoint"] = "2"
    assert make_plan(recipe(), store).stages["base_checkpoint"].status == "run"


def test_an_approval_counts_for_its_identity_only(
    store: Store, recipe: Loader, code: dict[str, str]
) -> None:
    simulate(recipe(), store)
    code["base_checkpoint"] = "2"
    hold = make_plan(recipe(), store).stages["base_checkpoint"].hold
    assert hold is not None
    first = approve(
        store,
        stage="base_checkpoint",
        identity=hold.identity,
        pipeline="small",
        who="ada",
        why="the mask was wrong",
    )
    plan = make_plan(recipe(), store)
    assert plan.stages["base_checkpoint"].status == "run"
    again = approve(
        store,
        stage="base_checkpoint",
        identity=hold.identity,
        pipeline="small",
        who="bob",
        why="me too",
    )
    assert again == first
    code["base_checkpoint"] = "3"
    assert held(make_plan(recipe(), store)) == ["base_checkpoint"]


def test_pin_and_revert_are_ways_on(store: Store, recipe: Loader, code: dict[str, str]) -> None:
    simulate(recipe(), store)
    code["base_checkpoint"] = "2"
    hold = make_plan(recipe(), store).stages["base_checkpoint"].hold
    assert hold is not None
    pinned = recipe(stages__base_checkpoint__pin=str(hold.last_good.output))
    assert make_plan(pinned, store).complete
    code["base_checkpoint"] = "1"
    assert make_plan(recipe(), store).complete


def test_a_stage_below_is_held_when_its_input_comes_out_as_before(
    store: Store, recipe: Loader, code: dict[str, str]
) -> None:
    simulate(recipe(), store, same_output=["shards"])
    code.update(shards="2", base_checkpoint="2")
    plan = make_plan(recipe(), store)
    assert held(plan) == []
    assert plan.stages["base_checkpoint"].status == "run"
    simulate(recipe(), store, same_output=["shards"], stop_before="base_checkpoint")
    assert held(make_plan(recipe(), store)) == ["base_checkpoint"]


@pytest.mark.parametrize("empty", ["who", "why"])
def test_an_approval_says_who_and_why(store: Store, empty: str) -> None:
    words = {"who": "ada", "why": "because", empty: " "}
    with pytest.raises(UserError, match=f"--{empty}"):
        approve(store, stage="s", identity=Identity.parse("a" * 64), pipeline="p", **words)


def test_an_expensive_stage_without_an_owner_does_not_start(store: Store, recipe: Loader) -> None:
    plan = make_plan(recipe(owners=[]), store)
    texts = refusals(plan, store, forecast_plan(plan, store))
    assert len(texts) == 2  # base_checkpoint and midtrained_checkpoint
    assert all("no owner in its plan" in text and "add `owners:`" in text for text in texts)
