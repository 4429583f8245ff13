"""Gates compare, and pass only on data."""

import math

import pytest

from llm_assets.gates.statistics import Interval
from llm_assets.gates.thresholds import evaluate
from llm_assets.stages.context import Metric


def one(metrics, gate, name="rate"):
    (result,) = evaluate(metrics, {name: gate})
    return result


@pytest.mark.parametrize(
    ("value", "gate", "verdict"),
    [
        (0.9, {"min": 0.85}, "pass"),
        (0.85, {"min": 0.85}, "pass"),
        (0.84, {"min": 0.85}, "fail"),
        (0.1, {"max": 0.1}, "pass"),
        (0.11, {"max": 0.1}, "fail"),
        (0.5, {"min": 0.4, "max": 0.6}, "pass"),
        (0.7, {"min": 0.4, "max": 0.6}, "fail"),
        (-3.0, {"min": None, "max": 0.0, "confident": False}, "pass"),
    ],
)
def test_point_comparison(value, gate, verdict):
    result = one({"rate": {"value": value, "n": None}}, gate)
    assert result.verdict == verdict
    assert result.passed == (verdict == "pass")
    assert f"{value:.4g}" in result.why


@pytest.mark.parametrize(
    "metrics",
    [
        {},
        {"rate": {"value": None, "n": 3}},
        {"rate": {"value": math.nan, "n": 3}},
        {"rate": {"value": math.inf, "n": 3}},
        {"rate": {"value": 1.0, "n": 0}},
        {"rate": {"value": True, "n": 1}},
        {"rate": {"value": "0.9", "n": 1}},
        {"rate": {"n": 9}},
    ],
)
@pytest.mark.parametrize("confident", [False, True])
def test_no_gate_passes_by_having_no_data(metrics, confident):
    result = one(metrics, {"min": -1e9, "max": 1e9, "confident": confident})
    assert result.verdict == "no data"
    assert not result.passed
    assert "no data" in result.why


def test_a_gate_without_a_threshold_fails():
    assert one({"rate": {"value": 1.0}}, {"min": None, "max": None}).verdict == "fail"
    assert one({"rate": {"value": 1.0}}, {}).verdict == "fail"


@pytest.mark.parametrize(
    ("successes", "n", "gate", "verdict"),
    [
        (200, 200, {"min": 0.95}, "pass"),
        (20, 20, {"min": 0.95}, "undecided"),
        (10, 20, {"min": 0.95}, "fail"),
        (0, 200, {"max": 0.1}, "pass"),
        (0, 10, {"max": 0.1}, "undecided"),
        (9, 10, {"max": 0.1}, "fail"),
    ],
)
def test_a_confident_gate_compares_the_bound_of_wilsons_interval(successes, n, gate, verdict):
    result = one({"rate": Metric(value=successes / n, n=n)}, {**gate, "confident": True})
    assert result.verdict == verdict
    assert result.interval is not None
    assert ("too few items" in result.why) == (verdict == "undecided")


def test_a_confident_gate_takes_the_stages_own_interval_when_there_is_one():
    metrics = {
        "delta": Metric(value=-0.01, n=100),
        "delta_low": Metric(value=-0.05, n=100),
        "delta_high": Metric(value=0.03, n=100),
    }
    assert one(metrics, {"min": -0.02, "confident": True}, "delta").verdict == "undecided"
    result = one(metrics, {"min": -0.06, "confident": True}, "delta")
    assert result.passed
    assert result.interval == Interval(-0.05, 0.03)
    assert one(metrics, {"min": 0.04, "confident": True}, "delta").verdict == "fail"


def test_a_confident_gate_on_a_metric_without_an_interval_does_not_pass():
    result = one({"loss": {"value": 2.5, "n": 100}}, {"max": 9.0, "confident": True}, "loss")
    assert result.verdict == "no data"
    assert "no interval" in result.why


def test_results_come_in_name_order_and_as_plain_json():
    results = evaluate({"a": {"value": 1.0, "n": 4}}, {"b": {"min": 1}, "a": {"min": 1}})
    assert [result.name for result in results] == ["a", "b"]
    assert results[0].as_dict() == {
        "name": "a",
        "passed": True,
        "blocks": False,
        "verdict": "pass",
        "value": 1.0,
        "n": 4,
        "interval": [pytest.approx(0.5101, abs=1e-4), 1.0],
        "threshold": {"min": 1},
        "why": "1 (n = 4) is within min 1",
    }


def test_pydantic_thresholds_do_as_well():
    from llm_assets.recipe import GateSettings

    result = one({"rate": Metric(value=0.5, n=10)}, GateSettings(min=0.9))
    assert result.verdict == "fail"
    assert result.threshold["min"] == 0.9


def test_nothing_to_compare_with_lets_through_and_is_no_pass():
    absent = {"rate": {"absent": "no reference", "why": "nothing is in production"}}
    result = one(absent, {"max": 0.1, "confident": True})
    assert result.verdict == "no reference"
    assert (result.passed, result.blocks) == (False, False)
    assert result.why == "nothing is in production"


def test_a_number_that_was_not_measured_yet_blocks():
    result = one({"rate": {"absent": "not measured", "why": "later"}}, {"max": 0.1})
    assert (result.verdict, result.passed, result.blocks) == ("not measured", False, True)


def test_the_rows_behind_a_number_come_along():
    rows = [{"row": 3, "text": "planted"}]
    assert one({"rate": {"value": 1.0, "n": 2, "table": rows}}, {"max": 0.1}).table == rows
