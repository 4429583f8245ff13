"""Where a store keeps its small documents: five calls that a directory and S3 both answer.

Records, refs, entries, leases and the garbage collector's marks are all built on these in
documents kept under keys like `refs/tiny/production/000000000001.json`; see documents_store.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class Item:
    """A stored key, its size and when it was written last, in seconds of the store's own clock."""

    key: str
    size_bytes: int
    modified: float


class Claim(Protocol):
    """Objects that a writer relies on while it commits; the garbage collector leaves them."""

    def add(self, keys: Iterable[str]) -> None:
        """Claim more objects. Visible to every process when it returns."""

    def close(self) -> None:
        """Give the claim up."""


class Backend(Protocol):
    """Whole documents under keys. Every call is atomic and sees what finished before it."""

    where: str
    """How messages name this store."""

    def create(self, key: str, content: bytes, *, durable: bool = True) -> bool:
        """Write once: False when the key is taken. `durable`: survives a power failure."""

    def read(self, key: str) -> bytes:
        """The document; NotFoundError when there is none."""

    def replace(self, key: str, content: bytes) -> None:
        """Write, whether or not the key is taken. Only heartbeats and marks are replaced."""

    def delete(self, key: str) -> None:
        """Delete; nothing happens when there is none. For garbage collection only."""

    def items(self, prefix: str) -> list[Item]:
        """Every key below the folder `prefix`, in key order."""

    def now(self) -> float:
        """The store's own clock, the one that `Item.modified` is told in."""

    def claim(self) -> Claim:
        """Begin a claim, empty."""

    def claimed(self) -> Sequence[str]:
        """All objects that live writers claim now. Claims of dead writers are removed."""
