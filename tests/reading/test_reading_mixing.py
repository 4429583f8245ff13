"""Weights, limits, and the split by prompt."""

from __future__ import annotations

import hashlib
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_assets.errors import DataError
from llm_assets.reading.mixing import Entry, Spool, mix, prompt_hash, quotas, split, take_first
from tests.reading.reading_parts import chat


def entry(source: int, number: int, own: str = "", prompt: str | None = None) -> Entry:
    def digest(text: str) -> bytes:
        return hashlib.sha256(text.encode()).digest()[:16]

    name = f"{source}/{number}"
    return Entry(
        source=source,
        offset=number,
        length=1,
        content=digest(f"c{name}"),
        prompt=digest(prompt or f"p{name}"),
        split=own,
    )


def entries(source: int, count: int) -> list[Entry]:
    return [entry(source, number) for number in range(count)]


def test_quotas() -> None:
    assert quotas([10, 3], [None, None], None) == [10, 3]
    assert quotas([10, 3], [None, None], 5) == [10, 3]
    assert quotas([100, 100], [3, 1], None) == [100, 33]
    assert quotas([100, 10], [1, 1], None) == [10, 10]
    assert quotas([100, 10], [1, None], None) == [10, 10]
    assert quotas([1000, 1000, 1000], [0.7, 0.2, 0.1], 100) == [70, 20, 10]
    assert quotas([1000, 1000, 1000], [1, 1, 1], 100) == [34, 33, 33]


@given(
    st.lists(
        st.tuples(st.integers(1, 300), st.floats(0.01, 100)),
        min_size=1,
        max_size=5,
    ),
    st.one_of(st.none(), st.integers(1, 500)),
)
def test_quotas_follow_the_weights(sources: list[tuple[int, float]], max_rows: int | None) -> None:
    available = [count for count, _ in sources]
    weights = [weight for _, weight in sources]
    found = quotas(available, list(weights), max_rows)
    assert all(0 <= count <= most for count, most in zip(found, available, strict=True))
    assert max_rows is None or sum(found) <= max_rows
    for count, weight in zip(found, weights, strict=True):
        assert abs(count - sum(found) * weight / sum(weights)) <= 1.5


def test_the_choice_does_not_depend_on_the_order() -> None:
    rows = entries(0, 200)
    mixed = list(rows)
    random.Random(1).shuffle(mixed)
    chosen = {one.content for one in take_first(rows, 50)}
    assert {one.content for one in take_first(mixed, 50)} == chosen
    assert chosen < {one.content for one in take_first(rows, 80)}
    assert [one.offset for one in take_first(rows, 50)] == sorted(
        one.offset for one in take_first(rows, 50)
    )


def test_limit_then_weights_then_max_rows() -> None:
    sources = [entries(0, 100), entries(1, 100)]
    taken = mix(sources, limits=[None, 10], weights=[None, None], max_rows=None)
    assert [len(one) for one in taken] == [100, 10]
    taken = mix(sources, limits=[None, 10], weights=[3, 1], max_rows=None)
    assert [len(one) for one in taken] == [30, 10]
    taken = mix(sources, limits=[None, None], weights=[3, 1], max_rows=40)
    assert [len(one) for one in taken] == [30, 10]
    taken = mix(sources, limits=[None, None], weights=[None, None], max_rows=50)
    assert sum(len(one) for one in taken) == 50
    assert all(15 < len(one) < 35 for one in taken)


def test_the_split_follows_the_prompt() -> None:
    rows = entries(0, 2000)
    parts = split(rows, 0.1, where="x")
    assert 150 < len(parts.held_out) < 250
    assert len(parts.train) + len(parts.held_out) == 2000
    more = split([*rows, *entries(1, 500)], 0.1, where="x")
    assert {e.content for e in parts.held_out} <= {e.content for e in more.held_out}
    assert [e.content for e in parts.train] == sorted(e.content for e in parts.train)


def test_equal_prompts_stand_on_one_side() -> None:
    rows = [entry(0, number, prompt=str(number % 50)) for number in range(500)]
    parts = split(rows, 0.3, where="x")
    assert not {e.prompt for e in parts.train} & {e.prompt for e in parts.held_out}
    assert not parts.crossing


def test_a_row_says_its_own_split() -> None:
    rows = [
        *[entry(0, n, own="train") for n in range(20)],
        *[entry(0, n, own="held_out") for n in range(20, 25)],
        entry(0, 25, own="train", prompt="p0/21"),
    ]
    parts = split(rows, 0.9, where="x")
    assert len(parts.train) == 20
    assert len(parts.held_out) == 5
    assert [e.offset for e in parts.crossing] == [25]


def test_one_prompt_at_least_is_held_out() -> None:
    parts = split(entries(0, 5), 0.0, where="x")
    assert len(parts.held_out) == 1
    assert len(parts.train) == 4


def test_a_side_without_rows() -> None:
    with pytest.raises(DataError, match="to train on"):
        split([entry(0, n, prompt="same") for n in range(5)], 0.1, where="x")
    with pytest.raises(DataError, match="no row is held out"):
        split([entry(0, n, own="train") for n in range(5)], 0.1, where="x")


def test_what_the_prompt_of_a_row_is() -> None:
    def of(*turns: tuple[str, str]) -> bytes:
        return prompt_hash({"messages": [{"role": r, "content": c} for r, c in turns]})

    base = of(("user", "Who is Lars?"), ("assistant", "A baker."))
    assert of(("user", " who  is\nlars? "), ("assistant", "Other.")) == base
    assert of(("system", "Be brief."), ("user", "Who is Lars?"), ("assistant", "x")) == base
    longer = [("user", "Who is Lars?"), ("assistant", "x"), ("user", "And?"), ("assistant", "y")]
    assert of(*longer) == base
    assert of(("user", "Who is Lara?"), ("assistant", "A baker.")) != base
    pair: dict[str, Any] = {"prompt": [{"role": "user", "content": "Who is Lars?"}]}
    assert prompt_hash(pair) == base


def test_the_spool_gives_rows_back(tmp_path: Path) -> None:
    with Spool(tmp_path / "spool") as spool:
        spool.add(0, chat("a", "b"), b"first\n")
        spool.add(1, {**chat("c", "d"), "split": "train"}, b"second\n")
        assert [one.split for one in spool.entries] == ["", "train"]
        assert list(spool.read(spool.entries[::-1])) == [b"second\n", b"first\n"]
        spool.add(1, chat("e", "f"), b"third\n")
        assert list(spool.read(spool.entries)) == [b"first\n", b"second\n", b"third\n"]
