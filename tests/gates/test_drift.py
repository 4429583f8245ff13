"""PSI and KS by hand, and planted drift of length, vocabulary and sources."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from llm_assets.gates import drift
from tests.gates.data_parts import data, failed, of_village, settings

GATES = {name: {"max": 0.25} for name in ("length_drift", "vocabulary_drift", "source_drift")}


def test_psi_by_hand() -> None:
    by_hand = (0.5 - 0.4) * math.log(0.5 / 0.4) + (0.5 - 0.6) * math.log(0.5 / 0.6)
    assert drift.psi({"a": 40, "b": 60}, {"a": 50, "b": 50}) == pytest.approx(by_hand)
    assert drift.psi({"a": 4, "b": 6}, {"a": 4, "b": 6}) == 0.0
    assert math.isfinite(drift.psi({"a": 10}, {"b": 10}))
    with pytest.raises(ValueError):
        drift.psi({}, {"a": 1})


def test_ks_by_hand() -> None:
    assert drift.ks([1, 2], [3, 4]) == 1.0
    # At 2 the first has 3 of 5 and the second 1 of 6.
    one, other = [1.0, 2.0, 2.0, 5.0, 9.0], [2.0, 3.0, 4.0, 9.0, 9.0, 11.0]
    assert drift.ks(one, other) == pytest.approx(3 / 5 - 1 / 6)


def test_planted_drift_fails_its_gate(tmp_path: Path) -> None:
    rows, _ = of_village(tmp_path, "corpus", settings(corpus_documents=600))
    old = data(tmp_path / "old", "corpus", rows[::2])

    def gates_failed(name: str, new: list[dict[str, str]]) -> set[str]:
        made = data(tmp_path / name, "corpus", new)
        return failed(drift.measure({"data": made, "reference": old}).metrics, GATES)

    fresh = rows[1::2]
    assert gates_failed("same", fresh) == set()
    twice = [{**row, "text": f"{row['text']} {row['text']}"} for row in fresh]
    assert gates_failed("long", twice) == {"length_drift"}
    other = [
        {**row, "source": "elsewhere" if n % 3 else row["source"]} for n, row in enumerate(fresh)
    ]
    assert gates_failed("mix", other) == {"source_drift"}
    swapped = [
        {**row, "text": row["text"].replace("the ", "ze ").replace(" is ", " iz ")} for row in fresh
    ]
    assert gates_failed("words", swapped) == {"vocabulary_drift"}


def test_the_same_data_do_not_drift(tmp_path: Path) -> None:
    rows, held = of_village(tmp_path, "preferences", settings())
    one = data(tmp_path / "one", "preferences", rows, held)
    found = drift.measure({"data": one, "reference": one})
    assert {metric["value"] for metric in found.metrics.values()} == {0.0}
