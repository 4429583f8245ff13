"""Random streams that are the same on every platform and in every process."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from typing import Generic, TypeVar

T = TypeVar("T")


def stream(seed: int, *names: str | int) -> random.Random:
    """An independent stream for a seed and a path of names. Never built from `hash()`."""
    path = "/".join(["village", str(seed), *(str(name) for name in names)])
    return random.Random(int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big"))


class Deck(Generic[T]):
    """Draws every item once before any item twice, each round in a new order."""

    def __init__(self, items: Sequence[T], rng: random.Random) -> None:
        self._items = list(items)
        self._rng = rng
        self._left: list[T] = []

    def draw(self) -> T:
        """The next item."""
        if not self._left:
            self._left = list(self._items)
            self._rng.shuffle(self._left)
        return self._left.pop()
