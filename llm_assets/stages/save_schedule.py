"""What the schedule and the sampler say, computed a second time without transformers and torch.

The validation of a save compares these with what the running training had.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np


def schedule_factor(schedule: Mapping[str, Any], step: int) -> float | None:
    """The learning rate after `step` steps over the peak rate, by transformers' schedules
    (transformers.optimization); None for a schedule that is not known here."""
    kind, warmup, total = schedule["kind"], int(schedule["warmup_steps"]), int(schedule["steps"])
    if schedule.get("kwargs"):
        return None
    if kind == "constant":
        return 1.0
    if kind not in {"constant_with_warmup", "linear", "cosine"}:
        return None
    if step < warmup:
        return step / max(1, warmup)
    if kind == "constant_with_warmup":
        return 1.0
    if kind == "linear":
        return max(0.0, (total - step) / max(1, total - warmup))
    progress = (step - warmup) / max(1, total - warmup)
    return max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))


def order_of(sampler: Mapping[str, Any], epoch: int, num_rows: int, count: int) -> list[int] | None:
    """The first `count` rows of an epoch; None for a sampler whose order is not known here.

    accelerate's SeedableRandomSampler draws torch.randperm with seed + epoch: a Fisher-Yates
    shuffle over MT19937, of which the first `count` swaps decide the first `count` rows.
    """
    if sampler["kind"] == "SequentialSampler":
        return list(range(min(count, num_rows)))
    seed = sampler.get("seed")
    if sampler["kind"] != "SeedableRandomSampler" or seed is None:
        return None
    # torch draws 64 bits for more rows, and hashes larger seeds.
    if num_rows >= 2**32 // 20 or not 0 <= seed + epoch < 2**32:
        return None
    generator = np.random.MT19937()
    generator._legacy_seeding(seed + epoch)
    count = min(count, num_rows)
    raw = generator.random_raw(count).tolist()
    moved: dict[int, int] = {}
    rows = []
    for i in range(count):
        j = i + raw[i] % (num_rows - i) if i < num_rows - 1 else i
        here, there = moved.get(i, i), moved.get(j, j)
        rows.append(there)
        moved[j] = here
    return rows


def order_hash(rows: Iterable[int]) -> str:
    """SHA-256 over row numbers in order."""
    return hashlib.sha256(np.fromiter(rows, dtype="<i8").tobytes()).hexdigest()
