"""Krippendorff's alpha against his own examples; planted faults of preference labels."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from llm_assets.gates import labels
from llm_assets.gates.agreement import alpha_interval, krippendorff_alpha
from tests.gates.data_parts import data, failed, of_village, settings

GATES = {
    "provenance_rate": {"min": 1.0},
    "votes_per_pair": {"min": 3},
    "against_votes_rate": {"max": 0.0},
    "agreement": {"min": 0.5, "confident": True},
    "agreement_worst": {"min": 0.4},
    "longer_chosen_rate": {"min": 0.3, "max": 0.7, "confident": True},
    "vendor_length_gap": {"max": 0.15},
}


def units(*raters: str) -> list[list[str]]:
    """One text a rater, a letter a unit; `.` for none."""
    return [[value for value in unit if value != "."] for unit in zip(*raters, strict=True)]


@pytest.mark.parametrize(
    ("raters", "alpha"),
    [
        (("0100000010", "1110010000"), 0.095),
        (("aabbdcccedda", "babbbcccedd" + "d"), 0.692),
        (("123321412...", "1233224125.3", ".3332342251.", "12332441251."), 0.743),
    ],
)
def test_krippendorffs_own_examples(raters: tuple[str, ...], alpha: float) -> None:
    assert krippendorff_alpha(units(*raters)) == pytest.approx(alpha, abs=6e-4)


def test_alpha_at_its_ends() -> None:
    assert krippendorff_alpha([["a", "a"], ["b", "b"]]) == 1.0
    assert krippendorff_alpha([["a", "a"], ["a", "a"]]) is None
    assert krippendorff_alpha([["a"], []]) is None
    assert alpha_interval([["a"]]) is None
    rng = random.Random(1)
    noise = [[rng.choice("ab") for _ in range(5)] for _ in range(400)]
    interval = alpha_interval(noise)
    assert interval is not None
    assert interval.low < 0.0 < interval.high or abs(interval.low) < 0.05


def gates_failed(folder: Path, rows: list[Any]) -> set[str]:
    made = data(folder, "preferences", rows)
    return failed(labels.measure({"data": made}).metrics, GATES)


def pairs(**more: Any) -> list[Any]:
    train, held_out = of_village(Path(), "preferences", settings(preferences=600, **more))
    return train + held_out


def longer_side(row: Any) -> str:
    sizes = {side: len(row[side][0]["content"].split()) for side in ("chosen", "rejected")}
    return max(sizes, key=sizes.__getitem__)


def relabelled(row: Any, side: str) -> Any:
    """The pair with `side` as the chosen one, and all votes for it."""
    other = "rejected" if side == "chosen" else "chosen"
    votes = [{**vote, "choice": "chosen"} for vote in row["votes"]]
    return {**row, "chosen": row[side], "rejected": row[other], "votes": votes}


def test_a_clean_panel_passes(tmp_path: Path) -> None:
    assert gates_failed(tmp_path / "a", pairs()) == set()


def test_noisy_annotators(tmp_path: Path) -> None:
    noisy = pairs(annotator_error=0.35)
    assert gates_failed(tmp_path / "a", noisy) >= {"agreement", "agreement_worst"}


def test_missing_provenance(tmp_path: Path) -> None:
    rows = pairs()
    rows[5] = {**rows[5], "rubric": ""}
    rows[7] = {key: value for key, value in rows[7].items() if key != "vendor"}
    rows[9] = {**rows[9], "votes": []}
    assert "provenance_rate" in gates_failed(tmp_path / "a", rows)
    shown = labels.measure({"data": data(tmp_path / "b", "preferences", rows)}).tables
    assert [entry["missing"] for entry in shown["provenance_rate"]] == ["rubric", "vendor", "votes"]


def test_labels_that_are_length_alone(tmp_path: Path) -> None:
    biased = [relabelled(row, longer_side(row)) for row in pairs()]
    assert "longer_chosen_rate" in gates_failed(tmp_path / "a", biased)


def test_one_vendor_that_likes_long_answers(tmp_path: Path) -> None:
    biased = [
        relabelled(row, longer_side(row)) if row["vendor"] == "meadow" else row for row in pairs()
    ]
    assert "vendor_length_gap" in gates_failed(tmp_path / "a", biased)


def test_a_vendor_whose_annotators_guess(tmp_path: Path) -> None:
    rng = random.Random(3)
    rows = [
        {
            **row,
            "votes": [{**v, "choice": rng.choice(("chosen", "rejected"))} for v in row["votes"]],
        }
        if row["vendor"] == "hearth"
        else row
        for row in pairs()
    ]
    assert "agreement_worst" in gates_failed(tmp_path / "a", rows)


def test_labels_against_the_votes_and_too_few_votes(tmp_path: Path) -> None:
    rows = pairs()
    against = [{**v, "choice": "rejected"} for v in rows[0]["votes"]]
    assert gates_failed(tmp_path / "a", [{**rows[0], "votes": against}, *rows[1:]]) == {
        "against_votes_rate"
    }
    few = [{**row, "votes": row["votes"][:2]} for row in rows]
    assert "votes_per_pair" in gates_failed(tmp_path / "b", few)


def test_pairs_without_votes_are_no_data(tmp_path: Path) -> None:
    rows = [{**row, "votes": []} for row in pairs()]
    assert gates_failed(tmp_path / "a", rows) >= {
        "agreement",
        "against_votes_rate",
        "vendor_length_gap",
    }
