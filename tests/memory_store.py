"""A store in memory, as much of it as a plan asks for: thousands of plans in a second."""

import hashlib
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

from llm_assets.store.digest import ArtifactHash, Identity
from llm_assets.store.protocol import Damage, Record


class MemoryStore:
    """Artifacts are the hashes of texts; `lose` takes one out."""

    def __init__(self) -> None:
        self.url = f"memory:{uuid.uuid4()}"
        self._records: dict[str, Record] = {}
        self._artifacts: set[ArtifactHash] = set()
        self._entries: dict[tuple[str, str], dict[str, Any]] = {}

    def put_text(self, text: str) -> ArtifactHash:
        """An artifact that stands for `text`."""
        artifact = ArtifactHash.parse(hashlib.sha256(text.encode()).hexdigest())
        self._artifacts.add(artifact)
        return artifact

    def lose(self, artifact: ArtifactHash) -> None:
        """The artifact is gone."""
        self._artifacts.discard(artifact)

    def has(self, artifact: ArtifactHash) -> bool:
        """See Store."""
        return artifact in self._artifacts

    def verify(self, artifact: ArtifactHash, *, deep: bool = False) -> list[Damage]:
        """See Store."""
        return []

    def add_record(self, record: Record, *, lease: object = None) -> None:
        """See Store."""
        self._records[f"{record.identity}/{len(self._records):06d}"] = record

    def records(self, identity: Identity) -> list[Record]:
        """See Store."""
        return [r for key, r in sorted(self._records.items()) if r.identity == identity]

    def all_records(self) -> Iterator[Record]:
        """See Store."""
        yield from self._records.values()

    def record_stamps(self) -> dict[str, str]:
        """See Store."""
        return dict.fromkeys(self._records, "same")

    def record_at(self, key: str) -> Record:
        """See Store."""
        return self._records[key]

    def add_entry(self, kind: str, key: str, body: Mapping[str, Any]) -> None:
        """See Store."""
        self._entries[kind, key] = dict(body)

    def entries(self, kind: str, prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
        """See Store."""
        for (found, key), body in sorted(self._entries.items()):
            if found == kind and key.startswith(prefix):
                yield key, body
