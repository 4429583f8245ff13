"""What the reward model is watched by: agreement in training, gaming, length and formatting."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
import torch
from alignment_parts import small_model, small_tokenizer

from llm_assets.errors import DataError, DisagreementError, RecipeError
from llm_assets.gates.thresholds import evaluate
from llm_assets.stage_settings import RefineSettings
from llm_assets.stages import rewards
from llm_assets.stages.encoding import Pair
from llm_assets.stages.judging import Question
from llm_assets.stages.refined_policy import _check_judge, _reward_metrics
from llm_assets.stages.reward_bias import bias_metrics, ceiling_metrics
from llm_assets.stages.rewards import RewardFunction
from llm_assets.stages.sft_checkpoint import forgetting

CHECK = {"kind": "fact", "accept": ["red"], "reject": ["blue"]}
GROUP = 8


def step(function: RewardFunction, monkeypatch: pytest.MonkeyPatch, *, right: bool) -> list[float]:
    """One step of training: half of a group's answers are right; the model scores them so or
    the other way round."""
    texts = ["It is red.", "It is blue."] * (GROUP // 2)
    scores = [float(("red" in text) == right) for text in texts]
    monkeypatch.setattr(rewards, "conversation_rewards", lambda *_: scores)
    logged: list[float] = []
    function(
        [[{"role": "user", "content": "?"}]] * GROUP,
        [[{"role": "assistant", "content": text}] for text in texts],
        check=[json.dumps(CHECK)] * GROUP,
        log_metric=lambda name, value: logged.append(value) if "agreement" in name else None,
    )
    return logged


def test_training_goes_on_while_the_reward_model_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    function = RewardFunction(None, None, group=GROUP, min_agreement=0.6)
    for _ in range(40):
        assert step(function, monkeypatch, right=True) == [1.0]


def test_training_stops_when_it_agrees_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 pairs a step tell right from wrong: nothing is said before there are 60."""
    function = RewardFunction(None, None, group=GROUP, min_agreement=0.6)
    for _ in range(3):
        step(function, monkeypatch, right=False)
    with pytest.raises(DisagreementError, match=r"0% of 64 pairs(.|\n)*min_reward_agreement 0.6"):
        step(function, monkeypatch, right=False)


def test_it_forgets_what_is_long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reward model that was right for long is stopped soon after it turned wrong."""
    function = RewardFunction(None, None, group=GROUP, min_agreement=0.6)
    for _ in range(200):
        step(function, monkeypatch, right=True)
    for _ in range(5):
        step(function, monkeypatch, right=False)
    with pytest.raises(DisagreementError):
        for _ in range(20):
            step(function, monkeypatch, right=False)


def test_without_a_limit_it_is_only_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    function = RewardFunction(None, None, group=GROUP)
    for _ in range(10):
        assert step(function, monkeypatch, right=False) == [0.0]


def test_a_limit_without_a_judge_is_refused() -> None:
    settings = RefineSettings(min_reward_agreement=0.6)
    bare = Question(prompt=[], expected="", kind="", check=None)
    with pytest.raises(DataError, match="no prompt of the preferences has a `check`"):
        _check_judge(settings, [bare])
    _check_judge(RefineSettings(), [bare])


def gaming(monkeypatch: pytest.MonkeyPatch, better: float, after: str) -> Any:
    """Metrics when the reward model scores all answers of the policy `better`."""
    from llm_assets.stages import refined_policy

    questions = [Question(prompt=[], expected="", kind="", check=CHECK)] * 50
    said = [
        [rewards_answer(text) for _ in questions] for text in ("It is red.", after, "It is red.")
    ]
    scores = [value for _ in questions for value in (0.0, better, 0.0)]
    monkeypatch.setattr(refined_policy, "conversation_rewards", lambda *_: scores)
    return _reward_metrics(None, None, questions, (said[0], said[1], said[2]))


def rewards_answer(text: str) -> Any:
    from llm_assets.stages.generation import Answer

    return Answer(prompt_ids=[1], ids=[2], text=text, stopped=True)


def test_reward_up_and_the_judge_down_is_a_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gaming(monkeypatch, 1.0, "It is blue.")["reward_judge_gap"].value == 1.0
    assert gaming(monkeypatch, 1.0, "It is red.")["reward_judge_gap"].value == 0.5
    assert gaming(monkeypatch, 1.0, "Gladly. It is red.")["reward_judge_gap"].value == 0.0
    assert gaming(monkeypatch, 0.0, "It is red.")["reward_judge_gap"].value == 0.0


def pair(chosen: str, rejected: str, votes: list[bool] | None = None) -> Pair:
    row: dict[str, Any] = {
        "chosen": [{"role": "assistant", "content": chosen}],
        "rejected": [{"role": "assistant", "content": rejected}],
    }
    if votes:
        row["votes"] = [{"choice": "chosen" if vote else "rejected"} for vote in votes]
    return Pair(
        row=row, prompt_ids=[1], chosen_ids=[2] * len(chosen), rejected_ids=[2] * len(rejected)
    )


def test_the_partial_correlation_is_what_regression_leaves() -> None:
    """Against residuals of two least-squares fits on the label, both ways round."""
    rng = random.Random(4)
    texts = [("a" * rng.randint(5, 30), "a" * rng.randint(5, 30)) for _ in range(300)]
    pairs = [pair(*both) for both in texts]
    lengths = [float(len(a) - len(b)) for a, b in texts]
    margins = [1.0 + 0.1 * length + rng.gauss(0, 1) for length in lengths]
    found = bias_metrics(pairs, margins)["length_partial"].value
    middle = sum(lengths) / 300, sum(margins) / 300
    rest = [(x - middle[0], y - middle[1]) for x, y in zip(lengths, margins, strict=True)]
    wanted = sum(x * y for x, y in rest)
    wanted /= (sum(x * x for x, _ in rest) * sum(y * y for _, y in rest)) ** 0.5
    assert found == pytest.approx(wanted)


def test_formatting_counts_marks_and_is_absent_without_any() -> None:
    plain = [pair("one two", "three")] * 10
    assert "format_partial" not in bias_metrics(plain, [1.0] * 10)
    listed = [pair("- one\n- two", "three"), pair("one", "**two**"), pair("a", "b")] * 20
    margins = [2.0, -1.0, 0.5] * 20
    assert bias_metrics(listed, margins)["format_partial"].value > 0.9


def test_a_model_of_length_alone_is_half_right_at_best() -> None:
    pairs = [pair("long answer", "short")] * 30 + [pair("short", "long answer")] * 10
    margins = [1.0] * 30 + [-1.0] * 10
    metrics = bias_metrics(pairs, margins)
    assert metrics["accuracy_balanced"].value == 0.5
    assert metrics["length_bias"].value == 0.25
    assert metrics["length_bias_low"].value > 0
    # Nothing tells a length bias from good labels here: no data, so no gate passes on it.
    assert "accuracy_balanced" not in bias_metrics(pairs[:30], margins[:30])


def test_the_ceiling_is_how_often_a_majority_is_right() -> None:
    rng = random.Random(1)
    pairs = [pair("a", "b", [rng.random() < 0.8 for _ in range(3)]) for _ in range(4000)]
    metrics = ceiling_metrics(pairs, 0.8)
    # Three annotators of 0.8: 0.8^3 + 3 * 0.8^2 * 0.2.
    assert metrics["accuracy_ceiling"].value == pytest.approx(0.896, abs=0.01)
    assert metrics["accuracy_gap"].value == pytest.approx(0.096, abs=0.01)
    assert ceiling_metrics([pair("a", "b")], 0.8) == {}


def test_a_limit_is_for_online_methods(make_context: Any) -> None:
    from llm_assets.stages.refined_policy import check_settings

    settings = RefineSettings(
        method="constitutional", constitution=["Be brief."], min_reward_agreement=0.6
    )
    with pytest.raises(RecipeError, match="take method grpo or rloo"):
        check_settings(make_context("refined_policy", settings))


def test_forgetting_is_what_the_incoming_model_says_and_the_other_does_not() -> None:
    """None against itself; much when the weights that made its texts likely are gone."""
    tokenizer = small_tokenizer(["the cat is in the barn", "the miller sleeps"] * 20)
    sharp, blank = small_model(tokenizer), small_model(tokenizer)
    with torch.no_grad():
        for parameter in sharp.parameters():
            parameter.mul_(4.0)
    same = forgetting(sharp, sharp, tokenizer, seed=1)
    lost = forgetting(sharp, blank, tokenizer, seed=1)
    gates = {"forgetting_per_token": {"max": 0.5, "confident": True}}
    assert same["forgetting_per_token"].value == pytest.approx(0.0, abs=1e-5)
    assert evaluate(same, gates)[0].verdict == "pass"
    assert evaluate(lost, gates)[0].verdict == "fail"
    assert lost["forgetting_per_token_low"].value < lost["forgetting_per_token"].value
