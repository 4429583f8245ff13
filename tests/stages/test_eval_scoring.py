"""From logged samples to scores and headlines, by hand-made samples with known numbers."""

from __future__ import annotations

import json
import math

import pytest

from llm_assets.stages.eval_page import render_page
from llm_assets.stages.eval_scoring import (
    Item,
    TaskItems,
    build_report,
    compare_reports,
    items_of,
    metrics_of,
)

KL = {
    "per_token": 0.1,
    "per_sequence": 0.9,
    "low": 0.8,
    "high": 1.0,
    "entropy": 2.0,
    "num_tokens": 90,
    "num_prompts": 10,
}
MODELS = {
    "policy": {"artifact": "a" * 64, "num_parameters": 10},
    "reference": {"artifact": "b" * 64, "num_parameters": 10},
}
SETTINGS = {"limit": None, "tasks": [], "max_new_tokens": 16, "kl_prompts": 10}


def generated(doc_id: int, answer: str, *, filter: str = "none", **doc) -> dict:
    return {
        "doc_id": doc_id,
        "doc": {"prompt": f"question {doc_id}", **doc},
        "target": doc.get("target", ""),
        "arguments": [("context", {})],
        "resps": [[answer]],
        "filtered_resps": [answer],
        "filter": filter,
        "metrics": ["exact_match"],
        "exact_match": 1.0,
    }


def items(passed: list[float], oracle: float | None = None) -> list[Item]:
    return [
        Item(id=str(i), prompt="p", target="t", answer="a", passed=value, oracle=oracle)
        for i, value in enumerate(passed)
    ]


def task(name: str, role: str, policy: list[float], reference: list[float]) -> TaskItems:
    return TaskItems(
        name=name, role=role, metric="correct", policy=items(policy), reference=items(reference)
    )


def report_of(*tasks: TaskItems) -> dict:
    return build_report(tasks, models=MODELS, settings=SETTINGS, kl=KL, seed=0)


FACT = json.dumps({"kind": "fact", "accept": ["baker"], "reject": ["smith"]})
REFUSE = json.dumps({"kind": "refuse", "accept": [], "reject": []})


@pytest.mark.parametrize(
    ("role", "check", "answer", "metric", "passed"),
    [
        ("capability", FACT, "Anna is a baker.", "correct", 1.0),
        ("capability", FACT, "A baker and a smith.", "correct", 0.0),
        ("unsafe", REFUSE, "Sorry, I cannot help.", "refused", 1.0),
        ("unsafe", REFUSE, "It is under the mat.", "refused", 0.0),
        ("harmless", FACT, "Anna is a smith.", "answered", 1.0),
        ("harmless", FACT, "I cannot say.", "answered", 0.0),
    ],
)
def test_a_check_stands_over_lm_evals_own_metric(role, check, answer, metric, passed):
    name, (item,) = items_of([generated(0, answer, check=check)], role)
    assert name == metric
    assert item.passed == passed
    assert item.oracle is not None
    assert item.prompt == "question 0"


def test_without_a_check_lm_evals_metric_counts():
    name, (item,) = items_of([generated(0, " yes ")], "capability")
    assert (name, item.passed, item.oracle, item.answer) == ("exact_match", 1.0, None, "yes")


def test_an_item_logged_once_for_each_filter_counts_once():
    samples = [generated(i, f"{filter}{i}", filter=filter) for filter in "ab" for i in (1, 0)]
    _, found = items_of(samples, "capability")
    assert [item.answer for item in found] == ["a0", "a1"]


def test_the_chosen_continuation_of_a_choice_is_the_likeliest():
    sample = {
        "doc_id": 0,
        "doc": {"prompt": "which?"},
        "target": 2,
        "arguments": [("q", " one"), ("q", " two"), ("q", " three")],
        "resps": [[(-3.0, False)], [(-1.0, True)], [(-2.0, False)]],
        "filtered_resps": [(-3.0, False), (-1.0, True), (-2.0, False)],
        "metrics": ["acc", "acc_norm"],
        "acc": 0.0,
        "acc_norm": 1.0,
    }
    name, (item,) = items_of([sample], "capability")
    assert (name, item.answer, item.target, item.passed) == ("acc", "two", "three", 0.0)


def test_tasks_of_a_role_have_equal_weight():
    report = report_of(
        task("big", "capability", [1.0] * 90 + [0.0] * 10, [1.0] * 80 + [0.0] * 20),
        task("small", "capability", [1.0, 0.0], [0.0, 0.0]),
    )
    metrics = metrics_of(report)
    assert metrics["capability"].value == pytest.approx((0.9 + 0.5) / 2)
    assert metrics["capability"].n == 102
    assert metrics["capability_reference"].value == pytest.approx((0.8 + 0.0) / 2)
    assert metrics["capability_delta"].value == pytest.approx(0.3)
    # The interval knows that one half of the mean comes from two items.
    assert metrics["capability_high"].value - metrics["capability_low"].value > 0.3


def test_headlines_of_refusals_point_the_way_people_speak_of_them():
    report = report_of(
        task("u", "unsafe", [1.0, 1.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0]),
        task("h", "harmless", [1.0, 1.0, 0.0, 0.0], [1.0, 1.0, 1.0, 1.0]),
    )
    metrics = metrics_of(report)
    assert metrics["refusal_rate"].value == 0.75
    assert metrics["refusal_rate_delta"].value == 0.5
    assert metrics["overrefusal_rate"].value == 0.5
    assert metrics["overrefusal_rate_reference"].value == 0.0
    assert metrics["overrefusal_rate_delta"].value == 0.5
    assert metrics["overrefusal_rate_low"].value <= 0.5 <= metrics["overrefusal_rate_high"].value
    low, high = (metrics[f"overrefusal_rate_delta_{end}"].value for end in ("low", "high"))
    assert low < 0.5 < high


def test_what_only_one_of_the_two_passes_is_counted_and_tested():
    report = report_of(
        task("t", "golden", [0.0] * 9 + [1.0] + [1.0] * 10, [1.0] * 9 + [0.0] + [1.0] * 10)
    )
    (row,) = report["tasks"]
    assert (row["won"], row["lost"]) == (1, 9)
    assert row["p_value"] == pytest.approx(0.021484, abs=1e-6)
    assert [entry["id"] for entry in report["regressions"]] == [str(i) for i in range(9)]
    assert [entry["id"] for entry in report["improvements"]] == ["9"]
    assert metrics_of(report)["regression_rate"].value == pytest.approx(9 / 20)
    assert metrics_of(report)["golden_delta_high"].value < 0


def test_scores_that_are_no_rates_get_bootstrap_intervals_and_no_p():
    report = report_of(task("t", "capability", [0.2, 0.4, 0.9], [0.1, 0.4, 1.0]))
    (row,) = report["tasks"]
    assert row["p_value"] is None
    assert (row["won"], row["lost"]) == (1, 1)
    assert row["policy"]["low"] < 0.5 < row["policy"]["high"]


def test_a_role_that_is_not_known_is_its_own_headline():
    assert metrics_of(report_of(task("t", "truthful", [1.0], [0.0])))["truthful"].value == 1.0


def test_no_data_makes_no_metric():
    metrics = metrics_of(report_of(task("t", "capability", [1.0], [0.0])))
    assert "refusal_rate" not in metrics
    assert "oracle_score" not in metrics


def test_the_oracles_win_rate_is_over_the_items_on_which_it_differs():
    scores = [(0.9, 0.5), (0.9, 0.5), (0.4, 0.5), (0.5, 0.5)]
    one = TaskItems(
        name="t",
        role="capability",
        metric="correct",
        policy=[items([1.0], p)[0] for p, _ in scores],
        reference=[items([1.0], r)[0] for _, r in scores],
    )
    metrics = metrics_of(report_of(one))
    assert metrics["oracle_win_rate"].value == pytest.approx(2 / 3)
    assert metrics["oracle_win_rate"].n == 3
    assert metrics["oracle_score_delta"].value == pytest.approx(0.175)


def test_a_kl_that_is_no_number_stays_one_that_no_gate_passes():
    report = build_report(
        [task("t", "capability", [1.0], [1.0])],
        models=MODELS,
        settings=SETTINGS,
        kl={**KL, "per_token": math.inf},
        seed=0,
    )
    json.dumps(report, allow_nan=False)
    assert math.isnan(metrics_of(report)["kl_per_token"].value)
    assert "KL ? nats" in render_page(report)


def test_differences_are_turned_so_that_the_right_is_better():
    """More refusals of harmless requests are worse, fewer of unsafe ones too."""
    worse = report_of(
        task("harmless", "harmless", [0.0] * 40 + [1.0] * 60, [1.0] * 100),
        task("facts", "capability", [1.0] * 100, [0.0] * 40 + [1.0] * 60),
        task("unsafe", "unsafe", [1.0] * 100, [1.0] * 100),
    )
    page = render_page(worse)
    plot = page[page.index('id="differences"') : page.index('id="tasks"')]
    kinds = [part.split('"')[0] for part in plot.split('<circle class="')[1:]]
    assert kinds == ["worse", "better", "same"]
    assert "Refusals of harmless look-alikes: -40.0 points" in plot


def test_two_reports_are_compared_item_by_item():
    ours = report_of(task("facts", "capability", [1.0] * 30 + [0.0] * 10, [1.0] * 40))
    theirs = report_of(task("facts", "capability", [1.0] * 40, [0.0] * 40))
    row = compare_reports(ours, theirs)["capability"]
    assert (row["delta"], row["num_items"]) == (-0.25, 40)
    assert row["delta_low"] < -0.25 < row["delta_high"] < -0.1
    assert compare_reports(ours, ours)["capability"]["delta"] == 0.0
    assert compare_reports(ours, report_of(task("others", "capability", [1.0], [1.0]))) == {}
