"""The order of rows: everything as often as anything else, little padding, the same every time."""

from __future__ import annotations

import random
from collections import Counter

from llm_assets.stages.batching import like_lengths

_DRAW = random.Random(1)
LENGTHS = [_DRAW.randint(20, 120) for _ in range(500)]


def padded(order: list[int], batch: int) -> int:
    groups = [order[i : i + batch] for i in range(0, len(order), batch)]
    return sum(max(LENGTHS[i] for i in group) * len(group) for group in groups)


def test_every_row_comes_as_often_as_any_other() -> None:
    counts = Counter(like_lengths(LENGTHS, batch=16, rows=1250, seed=3))
    assert sum(counts.values()) == 1250
    assert set(counts.values()) <= {2, 3}


def test_batches_hold_little_padding_and_stand_in_random_order() -> None:
    order = like_lengths(LENGTHS, batch=16, rows=1600, seed=3)
    real = sum(LENGTHS[i] for i in order)
    mixed = random.Random(2).sample(order, len(order))
    assert padded(order, 16) < 1.1 * real < padded(mixed, 16)
    longest = [max(LENGTHS[i] for i in order[s : s + 16]) for s in range(0, 512, 16)]
    assert longest != sorted(longest)
    assert longest != sorted(longest, reverse=True)


def test_the_order_depends_on_the_seed_alone() -> None:
    first = like_lengths(LENGTHS, batch=16, rows=600, seed=3)
    assert first == like_lengths(LENGTHS, batch=16, rows=600, seed=3)
    assert first != like_lengths(LENGTHS, batch=16, rows=600, seed=4)


def test_a_batch_that_is_not_full_is_the_last() -> None:
    order = like_lengths(LENGTHS[:10], batch=4, rows=10, seed=3)
    assert sorted(order) == list(range(10))
    groups = [order[i : i + 4] for i in range(0, 10, 4)]
    spans = [max(LENGTHS[i] for i in g) - min(LENGTHS[i] for i in g) for g in groups]
    whole = max(LENGTHS[:10]) - min(LENGTHS[:10])
    assert max(spans) < whole
