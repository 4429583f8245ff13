"""The oracle's metrics, the win rate, and the reward model's own metrics, on answers by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest

from llm_assets.stages.context import Metric
from llm_assets.stages.encoding import Pair
from llm_assets.stages.generation import Answer
from llm_assets.stages.judging import (
    Question,
    answer_metrics,
    by_kind,
    compare,
    instruction_questions,
    preference_questions,
    regressions,
    sample_rows,
)
from llm_assets.stages.reward_model import by_field, expected_calibration_error, pair_metrics
from llm_assets.stages.rewards import group_agreement

FACT = {"kind": "fact", "accept": ["red"], "reject": ["blue"]}
REFUSE = {"kind": "refuse", "accept": [], "reject": []}
HARMLESS = {"kind": "harmless", "accept": ["red"], "reject": []}


def question(check: dict[str, Any] | None, text: str = "which house?") -> Question:
    return Question(
        prompt=[{"role": "user", "content": text}],
        expected="",
        kind=str(check["kind"]) if check else "",
        check=check,
    )


def said(text: str, *, length: int = 3, stopped: bool = True) -> Answer:
    return Answer(prompt_ids=[1], ids=[2] * length, text=text, stopped=stopped)


QUESTIONS = [question(FACT), question(FACT), question(REFUSE), question(HARMLESS)]


def test_each_rate_is_taken_on_its_kind() -> None:
    answers = [
        said("The red house."),
        said("The blue house.", length=5, stopped=False),
        said("I can not help with that."),
        said("I will not say."),
    ]
    metrics = answer_metrics(QUESTIONS, answers)
    assert (metrics["fact_accuracy"].value, metrics["fact_accuracy"].n) == (0.5, 2)
    assert (metrics["refusal_rate"].value, metrics["refusal_rate"].n) == (1.0, 1)
    assert (metrics["overrefusal_rate"].value, metrics["overrefusal_rate"].n) == (1.0, 1)
    assert metrics["answer_accuracy"].value == pytest.approx(1 / 3)
    assert metrics["mean_length"].value == 3.5
    assert metrics["stop_rate"].value == 0.75
    assert metrics["oracle_score"].n == 4


def test_rows_without_a_check_have_no_oracle_metrics() -> None:
    metrics = answer_metrics([question(None)], [said("one two one two one two one two")])
    assert set(metrics) == {"mean_length", "stop_rate", "repetition_rate"}
    assert metrics["repetition_rate"].value == 1.0
    assert compare([question(None)], [said("a")], [said("b")]).n == 0


def test_a_tie_counts_half() -> None:
    bad, good = said("The blue house."), said("The red house.")
    both = [question(FACT)] * 4
    result = compare(both, [bad, good, good, good], [good, good, good, bad])
    assert (result.wins, result.ties, result.losses, result.n) == (1, 2, 1, 4)
    assert result.value == 0.5
    lost = regressions(both, [bad, good, good, good], [good, good, good, bad])
    assert [row["after"] for row in lost] == ["The blue house."]


def test_tables_by_kind_and_samples() -> None:
    before = [said("The blue house.")] * 4
    after = [said("The red house.")] * 4
    rows = {row["kind"]: row for row in by_kind(QUESTIONS, before=before, after=after)}
    assert rows["fact"] == pytest.approx(
        {**rows["fact"], "n": 2, "correct_before": 0.0, "correct_after": 1.0}
    )
    samples = sample_rows(QUESTIONS, before, after)
    assert len(samples) == 4
    assert samples[0]["score_after"] > samples[0]["score_before"]


def test_questions_end_before_the_last_answer_and_stand_once() -> None:
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    messages = [{"role": role, "content": content} for role, content in turns]
    rows = [{"messages": messages, "kind": "turns", "check": FACT}, {"messages": messages[:1]}]
    (found,) = instruction_questions(rows, limit=5, seed=1)
    assert (found.asked, found.expected, len(found.prompt)) == ("c", "d", 3)
    pairs = [{"prompt": messages[:1], "chosen": messages[1:2], "rejected": messages[3:]}] * 3
    assert len(preference_questions(pairs, limit=5, seed=1)) == 1
    many = [{"messages": messages, "kind": str(i)} for i in range(20)]
    drawn = [q.kind for q in instruction_questions(many, limit=6, seed=1)]
    assert drawn == [q.kind for q in instruction_questions(many, limit=6, seed=1)]
    assert drawn == sorted(drawn, key=int)
    assert drawn != [q.kind for q in instruction_questions(many, limit=6, seed=2)]


def pair(chosen: int, rejected: int, **row: Any) -> Pair:
    sides = {
        "prompt": [{"role": "user", "content": "which?"}],
        "chosen": [{"role": "assistant", "content": "The red house."}],
        "rejected": [{"role": "assistant", "content": "The blue house."}],
    }
    return Pair(
        row={**sides, **row}, prompt_ids=[1], chosen_ids=[2] * chosen, rejected_ids=[3] * rejected
    )


def test_a_reward_of_length_alone_shows() -> None:
    pairs = [pair(3, 9, vendor="a"), pair(9, 3, vendor="a"), pair(4, 8, vendor="b", check=FACT)]
    chosen = [float(len(p.chosen_ids)) for p in pairs]
    rejected = [float(len(p.rejected_ids)) for p in pairs]
    metrics = pair_metrics(pairs, chosen, rejected)
    assert metrics["length_correlation"].value == pytest.approx(1.0)
    assert metrics["length_preference"].value == 1.0
    assert metrics["label_length_preference"].value == pytest.approx(1 / 3)
    assert metrics["accuracy"].value == pytest.approx(1 / 3)
    assert (metrics["oracle_agreement"].value, metrics["oracle_agreement"].n) == (0.0, 1)
    assert "annotator_agreement" not in metrics
    rows = {row["vendor"]: row for row in by_field("vendor", pairs, chosen, rejected)}
    assert (rows["a"]["n"], rows["a"]["accuracy"], rows["b"]["accuracy"]) == (2, 0.5, 0.0)
    assert by_field("flaw", pairs, chosen, rejected) == []


def test_votes_give_the_ceiling() -> None:
    votes = [
        {"annotator": str(i), "choice": c} for i, c in enumerate(["chosen"] * 3 + ["rejected"])
    ]
    metrics = pair_metrics([pair(2, 3, votes=votes)], [1.0], [0.0])
    assert metrics["annotator_agreement"].value == 0.75


def test_calibration_error() -> None:
    sure = math.log(9)
    assert expected_calibration_error([sure] * 9 + [-sure]) == pytest.approx(0.0, abs=1e-9)
    assert expected_calibration_error([-sure] * 10) == pytest.approx(0.9)
    assert expected_calibration_error([0.0]) == 0.0
    # Confidences of 0.51 and 0.58 are judged apart: one is always wrong, the other always right.
    low, high = math.log(0.51 / 0.49), math.log(0.58 / 0.42)
    assert expected_calibration_error([-low, high]) == pytest.approx((0.51 + 0.42) / 2)
    assert expected_calibration_error([1e9]) == pytest.approx(0.0)


def test_agreement_within_groups() -> None:
    half = Metric(value=0.5, n=2)
    assert group_agreement([1, 2, 9, 8], [0.1, 0.2, 0.3, 0.4], group=2) == half
    assert group_agreement([1, 1], [0.1, 0.2], group=2) == Metric(value=0.5, n=1)
    assert group_agreement([1, 2], [0.5, 0.5], group=2) is None
    assert group_agreement([1, 2], [None, 0.5], group=2) is None
