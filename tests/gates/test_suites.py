"""Great Expectations suites: each planted fault is counted by its expectation, and shown."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llm_assets.gates import suites
from llm_assets.gates.text_checks import language_of, personal_data
from tests.gates.data_parts import data, evals, failed, of_village, settings

GATES = {
    "schema_error_rate": {"max": 0.0},
    "empty_rate": {"max": 0.0},
    "length_median": {"min": 20, "max": 2000},
    "length_max": {"max": 20_000},
    "duplicate_rate": {"max": 0.30},
    "charset_error_rate": {"max": 0.0},
    "other_language_rate": {"max": 0.02},
    "pii_rate": {"max": 0.001},
}
TURN_GATES = {**GATES, "role_error_rate": {"max": 0.0}, "split_overlap_rate": {"max": 0.0}}
GERMAN = "Der alte Mann ist nicht mit dem Hund in die Stadt gegangen, und das ist auch gut für ihn."


def gates_failed(folder: Path, kind: str, train: list[Any], held_out: list[Any]) -> set[str]:
    found = suites.measure({"data": data(folder, kind, train, held_out)})
    return failed(found.metrics, GATES if kind == "corpus" else TURN_GATES)


@pytest.mark.parametrize("kind", ["corpus", "instructions", "preferences"])
def test_a_clean_village_passes(tmp_path: Path, kind: str) -> None:
    assert gates_failed(tmp_path / "a", kind, *of_village(tmp_path, kind, settings())) == set()


def test_clean_evals_pass(tmp_path: Path) -> None:
    found = suites.measure({"data": evals(tmp_path / "e", settings())})
    assert failed(found.metrics, {**GATES, "length_median": {"min": 5}}) == set()


def document(text: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda row: {**row, "text": text}


CORPUS: list[tuple[str, Callable[[dict[str, Any]], Any], set[str]]] = [
    ("schema", document(7), {"schema_error_rate"}),
    ("empty", document(" \n "), {"empty_rate"}),
    ("long", document("word " * 5000), {"length_max"}),
    ("broken", document("The caf\u00c3\u00a9 is old."), {"charset_error_rate"}),
    ("control", document("The bell\x07 rings."), {"charset_error_rate"}),
    ("mail", document("Write to jane.doe@gmail.com, please."), {"pii_rate"}),
]


@pytest.mark.parametrize(("name", "plant", "caught"), CORPUS, ids=[c[0] for c in CORPUS])
def test_one_bad_document(tmp_path: Path, name: str, plant: Any, caught: set[str]) -> None:
    rows, _ = of_village(tmp_path, "corpus", settings())
    rows[17] = plant(rows[17])
    assert gates_failed(tmp_path / name, "corpus", rows, []) == caught


def test_copies_and_another_language(tmp_path: Path) -> None:
    rows, _ = of_village(tmp_path, "corpus", settings())
    assert gates_failed(tmp_path / "copies", "corpus", rows + rows, []) == {"duplicate_rate"}
    mixed = [{**row, "text": GERMAN} if n < 8 else row for n, row in enumerate(rows)]
    assert gates_failed(tmp_path / "german", "corpus", mixed, []) == {"other_language_rate"}


def test_what_is_shown_beside_the_number(tmp_path: Path) -> None:
    rows, _ = of_village(tmp_path, "corpus", settings())
    rows[17] = {"text": "My card is 4111 1111 1111 1111.", "source": "shop.csv"}
    found = suites.measure({"data": data(tmp_path / "a", "corpus", rows)})
    (shown,) = found.tables["pii_rate"]
    assert (shown["row"], shown["source"], shown["file"]) == (17, "shop.csv", "documents.jsonl")
    assert "card number" in shown["found"]
    assert "4111 1111" not in str(shown)
    assert found.tables["empty_rate"][0]["expectation"] == "expect_column_values_to_be_in_set"


def broken_roles(row: Any) -> Any:
    user = {"role": "user", "content": "Hello there, my friend."}
    return {**row, "messages": [user, user, *row["messages"][1:]]}


def test_broken_roles_and_crossing_prompts(tmp_path: Path) -> None:
    train, held_out = of_village(tmp_path, "instructions", settings())
    bad = [broken_roles(train[0]), *train[1:]]
    assert gates_failed(tmp_path / "roles", "instructions", bad, held_out) == {"role_error_rate"}
    crossing = [*train, held_out[0]]
    assert gates_failed(tmp_path / "cross", "instructions", crossing, held_out) == {
        "split_overlap_rate"
    }


def test_a_pair_that_answers_in_the_users_name(tmp_path: Path) -> None:
    train, held_out = of_village(tmp_path, "preferences", settings())
    row = train[3]
    bad = {**row, "rejected": [{"role": "user", "content": row["rejected"][0]["content"]}]}
    train[3] = bad
    assert gates_failed(tmp_path / "a", "preferences", train, held_out) == {"role_error_rate"}


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("mail me: a.b+c@mail.co.uk", {"e-mail address"}),
        ("call +49 30 1234 5678 or (212) 555-0134", {"phone number"}),
        ("ssn 536-22-1234", {"social security number"}),
        ("card 5500-0000-0000-0004", {"card number"}),
        ("iban DE89 3704 0044 0532 0130 00", {"IBAN"}),
        ("host 8.8.8.8 is up", {"IP address"}),
        ("key AKIAABCDEFGHIJKLMNOP", {"access key"}),
        ("order 1234 5678 9012 3456, version 10.0.0.1, 3 + 4 = 7", set()),
        ("year 1999-2004, page 12, 127.0.0.1, user@example.com, 1,234,567.89", set()),
        ("DE00 1234 is no IBAN, 000-12-3456 no ssn, a@b no mail", set()),
    ],
)
def test_personal_data(text: str, kinds: set[str]) -> None:
    assert {kind for kind, _ in personal_data(text)} == kinds


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("The house of the miller is not far from the river.", "en"),
        (GERMAN, "de"),
        ("Le chat est dans la maison et il ne veut pas sortir avec nous.", "fr"),
        ("Der Hund", ""),
        ("8 plus 8 is 16. 9 plus 1 makes 10. 1 plus 9 makes 10.", ""),
        ("Привет, друзья, где ваш дом?", "CYRILLIC"),
        ("12 + 4", ""),
    ],
)
def test_language(text: str, language: str) -> None:
    assert language_of(text) == language
