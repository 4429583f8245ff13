"""Against production and the last good record: at check time, and in no identity."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from llm_assets.engine import checked_metrics, gate_results
from llm_assets.planning import Plan, make_plan
from llm_assets.recipe import Recipe, load_recipe
from llm_assets.stages.eval_scoring import Item, TaskItems, build_report
from llm_assets.store import open_store
from llm_assets.store.digest import ArtifactHash
from llm_assets.store.protocol import Store
from tests.simulation import add_record, simulate
from tests.test_recipe import changed, write

GATES = {
    "gates": {
        "sft_checkpoint": {"loss": {"max": 9.0}, "loss_delta": {"max": 0.1}},
        "eval_report": {
            "capability_delta_production": {"min": -0.05},
            "refusal_rate_delta_production": {"min": -0.05},
        },
    }
}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "store"))


def load(folder: Path, **change: Any) -> Recipe:
    dotted = {key.replace("__", "."): value for key, value in change.items()}
    return load_recipe(
        write(folder, changed({**{f"gates.{k}": v for k, v in GATES["gates"].items()}, **dotted}))
    )


def report(right: list[bool], refused: list[bool]) -> dict[str, Any]:
    """A report of two tasks; the reference is of no account here."""

    def task(name: str, role: str, passed: list[bool]) -> TaskItems:
        items = [
            Item(id=f"{name}-{i}", prompt="?", target="", answer="", passed=float(value))
            for i, value in enumerate(passed)
        ]
        return TaskItems(name=name, role=role, metric="", policy=items, reference=items)

    kl = dict.fromkeys(("per_token", "per_sequence", "low", "high", "entropy"), 0.0)
    return build_report(
        [task("facts", "capability", right), task("unsafe", "unsafe", refused)],
        models={},
        settings={},
        kl={**kl, "num_tokens": 1, "num_prompts": 1},
        seed=0,
    )


def put_json(store: Store, folder: Path, name: str, document: Any, type: str) -> ArtifactHash:
    target = folder / str(random.random())
    target.mkdir(parents=True)
    (target / name).write_text(json.dumps(document))
    (target / "report.html").write_text("a page")
    metadata = {"eval_report": {"num_tasks": 2, "num_items": 1}, "release": {"decision": "SHIP"}}
    return store.put(target, type=type, metadata=metadata[type])


def evaluated(recipe: Recipe, store: Store, folder: Path, document: Any) -> Plan:
    """Everything ran; the eval report is this one."""
    simulate(recipe, store, stop_before="eval_report", metrics={"loss": {"value": 1.0, "n": 9}})
    output = put_json(store, folder, "report.json", document, "eval_report")
    add_record(make_plan(recipe, store), "eval_report", store, output=output)
    simulate(recipe, store)
    return make_plan(recipe, store)


def promote(plan: Plan, store: Store, folder: Path) -> None:
    mine = plan.stages["eval_report"]
    entry = {
        "artifact": mine.artifact,
        "inputs": dict(mine.record.inputs if mine.record else {}),
        "metrics": {"capability": {"value": 1.0, "n": 1}},
    }
    manifest = {"stages": {"eval_report": entry}}
    release = put_json(store, folder, "manifest.json", manifest, "release")
    name = f"{plan.recipe.pipeline}/production"
    store.move_ref(name, release, expected=store.ref(name), who="me", why="test")


GOOD = report([True] * 190 + [False] * 10, [True] * 200)


def test_without_production_there_is_no_reference(tmp_path: Path, store: Store) -> None:
    plan = evaluated(load(tmp_path), store, tmp_path / "a", GOOD)
    results = gate_results(plan, "eval_report", store)
    assert [result.verdict for result in results] == ["no reference"] * 2
    assert not any(result.blocks or result.passed for result in results)
    assert "no release in production" in results[0].why


def test_a_worse_policy_than_production_is_held(tmp_path: Path, store: Store) -> None:
    """The change is in the items: refusals are lost, capability is as it was."""
    recipe = load(tmp_path)
    promote(evaluated(recipe, store, tmp_path / "a", GOOD), store, tmp_path / "b")
    worse = report([True] * 190 + [False] * 10, [True] * 150 + [False] * 50)
    later = load(tmp_path, stages__dpo_policy__max_steps=77)
    plan = evaluated(later, store, tmp_path / "c", worse)
    capability, refusals = gate_results(plan, "eval_report", store)
    assert (capability.verdict, capability.value) == ("pass", 0.0)
    assert capability.n == 200
    assert (refusals.verdict, refusals.value) == ("fail", -0.25)
    assert refusals.interval is not None
    assert refusals.interval.low < -0.25 < refusals.interval.high < -0.15


def test_a_promotion_makes_nothing_stale(tmp_path: Path, store: Store) -> None:
    recipe = load(tmp_path)
    plan = evaluated(recipe, store, tmp_path / "a", GOOD)
    identities = {name: entry.identity for name, entry in plan.stages.items()}
    promote(plan, store, tmp_path / "b")
    again = make_plan(recipe, store)
    assert again.complete
    assert {name: entry.identity for name, entry in again.stages.items()} == identities
    assert gate_results(again, "eval_report", store)[0].verdict == "pass"


def test_other_eval_data_is_no_reference(tmp_path: Path, store: Store) -> None:
    promote(evaluated(load(tmp_path), store, tmp_path / "a", GOOD), store, tmp_path / "b")
    other = load(tmp_path, data__village__eval_items=17)
    plan = evaluated(other, store, tmp_path / "c", GOOD)
    result = gate_results(plan, "eval_report", store)[0]
    assert result.verdict == "no reference"
    assert "was measured on other evals" in result.why


def _losses(loss: float, low: float, high: float) -> dict[str, Any]:
    values = {"loss": loss, "loss_low": low, "loss_high": high}
    return {name: {"value": value, "n": 100} for name, value in values.items()}


def test_the_last_good_record_is_the_reference_without_production(
    tmp_path: Path, store: Store
) -> None:
    first = load(tmp_path)
    simulate(first, store, metrics=_losses(1.0, 0.99, 1.01))
    assert (
        checked_metrics(make_plan(first, store), "sft_checkpoint", store)["loss_delta"]["absent"]
        == "no reference"
    )
    # One that fails its own gates is not good.
    bad = load(tmp_path, stages__sft_checkpoint__max_steps=50)
    simulate(bad, store, metrics=_losses(20.0, 19.0, 21.0))
    worse = load(tmp_path, stages__sft_checkpoint__max_steps=51)
    simulate(worse, store, metrics=_losses(1.3, 1.29, 1.31))
    plan = make_plan(worse, store)
    found = checked_metrics(plan, "sft_checkpoint", store)
    assert found["loss_delta"]["value"] == pytest.approx(0.3)
    # Two intervals of 0.02: their distances add in squares.
    assert found["loss_delta_low"]["value"] == pytest.approx(0.3 - 0.01 * 2**0.5)
    verdicts = {
        result.name: result.verdict for result in gate_results(plan, "sft_checkpoint", store)
    }
    assert verdicts == {"loss": "pass", "loss_delta": "fail"}
