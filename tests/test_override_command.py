"""Overrides: one gate of one artifact, recorded, and the release decides again."""

from collections.abc import Callable
from pathlib import Path

import pytest

from llm_assets.cli import main
from llm_assets.engine import failed_gates, gate_results, release_lineage
from llm_assets.overriding import overrides_of
from llm_assets.planning import Plan, make_plan
from llm_assets.recipe import Recipe, load_recipe
from llm_assets.store.protocol import Store
from tests.simulation import simulate
from tests.test_recipe import changed, write

WHO = ("--reviewer", "Ada", "--reason", "known, and fine")
GATES = {"gates.reward_model": {"accuracy": {"min": 0.9}, "ece": {"max": 0.5}}}


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    return load_recipe(write(tmp_path, changed(GATES)))


@pytest.fixture
def plan(recipe: Recipe, store: Store) -> Callable[[], Plan]:
    """The plan after everything ran: the reward model's accuracy is too low."""
    simulate(recipe, store, metrics={"accuracy": {"value": 0.5, "n": 9}, "ece": {"value": 0.1}})
    return lambda: make_plan(recipe, store)


def call(plan: Plan, gate: str, artifact: str = "", *more: str) -> int:
    chosen = artifact or str(plan.stages["reward_model"].artifact)
    return int(
        main(["override", gate, "--artifact", chosen, "-r", str(plan.recipe.path), *(more or WHO)])
    )


def test_an_override_is_recorded_and_lets_that_artifact_through(
    plan: Callable[[], Plan], store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    before = plan()
    assert [r.name for r in failed_gates(before, "reward_model", store)] == ["accuracy"]
    artifact = before.stages["reward_model"].artifact
    assert artifact is not None
    assert call(before, "reward_model.accuracy", artifact[:8]) == 0
    assert f"overridden for {artifact} by Ada: known, and fine" in capsys.readouterr().out
    body = overrides_of(store, artifact)["accuracy"]
    assert (body["stage"], body["reviewer"], body["reason"]) == (
        "reward_model",
        "Ada",
        "known, and fine",
    )
    assert body["verdict"]["verdict"] == "fail"
    after = plan()
    assert failed_gates(after, "reward_model", store) == []
    # It is still no pass.
    assert not gate_results(after, "reward_model", store)[0].passed
    assert release_lineage(after, store)["overrides"] == [body]


def test_the_release_decides_again(plan: Callable[[], Plan], recipe: Recipe, store: Store) -> None:
    before = plan()
    assert before.stages["release"].status == "hit"
    call(before, "accuracy")
    after = plan()
    assert [name for name in after.rerun] == ["release"]
    assert "input changed: override." in after.stages["release"].reasons[0]
    simulate(recipe, store)
    assert plan().complete


def test_another_artifact_has_to_pass(
    tmp_path: Path, plan: Callable[[], Plan], store: Store
) -> None:
    call(plan(), "accuracy")
    other = load_recipe(write(tmp_path, changed({**GATES, "stages.reward_model.max_steps": 99})))
    simulate(other, store, metrics={"accuracy": {"value": 0.5, "n": 9}, "ece": {"value": 0.1}})
    assert [r.name for r in failed_gates(make_plan(other, store), "reward_model", store)] == [
        "accuracy"
    ]


@pytest.mark.parametrize(
    ("gate", "artifact", "more", "said", "code"),
    [
        ("acuracy", "", (), "did you mean reward_model.accuracy?", 2),
        ("dpo_policy.accuracy", "", (), "no such gate of reward_model", 2),
        ("ece", "", (), "its verdict is pass", 2),
        ("accuracy", "0" * 64, (), "no artifact begins with", 1),
        ("accuracy", "", ("--reviewer", " ", "--reason", "x"), "give --reviewer", 2),
        ("accuracy", "", ("--reviewer", "Ada", "--reason", ""), "give --reason", 2),
    ],
)
def test_what_is_refused(
    plan: Callable[[], Plan],
    store: Store,
    capsys: pytest.CaptureFixture[str],
    gate: str,
    artifact: str,
    more: tuple[str, ...],
    said: str,
    code: int,
) -> None:
    now = plan()
    assert call(now, gate, artifact, *more) == code
    assert said in capsys.readouterr().err
    assert list(store.entries("overrides")) == []


def test_a_release_is_not_overridden(
    plan: Callable[[], Plan], capsys: pytest.CaptureFixture[str]
) -> None:
    now = plan()
    assert call(now, "ship", str(now.stages["release"].artifact)) == 2
    assert "override the gate that its reasons name" in capsys.readouterr().err
