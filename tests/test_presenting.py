"""What a person reads in the UI."""

from pathlib import Path

import pytest
from dagster import AssetCheckSeverity, AssetKey

from llm_assets.gates.thresholds import evaluate
from llm_assets.presenting import check_result, page_metadata

METRICS = {"accuracy": {"value": 0.5, "n": 9}, "gap": {"absent": "no reference", "why": "none"}}
OVERRIDE = {"gate": "accuracy", "reviewer": "Ada", "reason": "known"}


@pytest.mark.parametrize(
    ("gate", "override", "passed", "severity"),
    [
        ("accuracy", None, False, AssetCheckSeverity.ERROR),
        ("accuracy", OVERRIDE, False, AssetCheckSeverity.WARN),
        ("gap", None, False, AssetCheckSeverity.WARN),
    ],
)
def test_a_gate_that_does_not_pass_is_an_error_or_a_warning(
    gate: str, override: dict[str, str] | None, passed: bool, severity: AssetCheckSeverity
) -> None:
    """Neither an override nor a missing reference makes a pass of it."""
    (result,) = evaluate(METRICS, {gate: {"min": 0.9}})
    check = check_result(AssetKey(["tiny", "reward_model"]), result, override)
    assert (check.passed, check.severity) == (passed, severity)
    assert ("override" in check.metadata) == (override is not None)
    assert check.metadata["why"].value == result.why


def test_the_report_is_linked(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    metadata = page_metadata(page)
    assert metadata["report"].value == page.as_uri()
    assert metadata["report_path"].value == str(page)
