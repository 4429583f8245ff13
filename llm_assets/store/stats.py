"""Numbers about a store."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from llm_assets.store.directory import DirectoryStore
from llm_assets.store.retention import Catalog
from llm_assets.store.s3 import S3Store


@dataclass(frozen=True, kw_only=True)
class Stats:
    """`objects` and `size_bytes` are what is stored; `logical_bytes` what the artifacts would take
    without deduplication. `saves_bytes`: in-training saves, beside them."""

    root: str
    artifacts: int
    objects: int
    size_bytes: int
    logical_bytes: int
    records: int
    refs: int
    saves_bytes: int

    @property
    def saved_share(self) -> float:
        """Share of the logical bytes that deduplication saves."""
        return max(0.0, 1 - self.size_bytes / self.logical_bytes) if self.logical_bytes else 0.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {**dataclasses.asdict(self), "saved_share": self.saved_share}


def read_stats(store: DirectoryStore | S3Store) -> Stats:
    """Read every tree and list every object."""
    catalog = Catalog.read(store)
    objects = store.backend.items("objects")
    return Stats(
        root=store.url,
        artifacts=len(catalog.trees),
        objects=len(objects),
        size_bytes=sum(item.size_bytes for item in objects),
        logical_bytes=sum(tree.size_bytes for tree in catalog.trees.values() if tree),
        records=len(catalog.records),
        refs=len(store.refs()),
        saves_bytes=sum(item.size_bytes for item in store.backend.items("checkpoints")),
    )
