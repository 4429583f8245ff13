"""Artifacts that were found damaged: a record whose artifact is one of them is no hit.

Reading every byte of every artifact is too slow for a plan, so a plan looks at names and sizes. An
asset reads the bytes before it reports a hit; what it finds stands in the store (kind `damaged`),
and from then on every plan reads that artifact's bytes again: a stage that ran again may have
mended it.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from functools import cached_property

from llm_assets.errors import ConflictError, DamagedError
from llm_assets.store.digest import ArtifactHash
from llm_assets.store.protocol import Damage, Store

KIND = "damaged"


def note_damage(store: Store, damage: Iterable[Damage], *, run_id: str) -> None:
    """Put what `Store.verify` found into the store."""
    now = datetime.datetime.now(datetime.UTC)
    for number, entry in enumerate(damage):
        body = {
            "artifact": entry.artifact,
            "path": entry.path,
            "what": entry.what,
            "at": now.isoformat(timespec="seconds"),
            "run_id": run_id,
        }
        key = f"{entry.artifact}/{now:%Y%m%dT%H%M%S%f}-{number}"
        try:
            store.add_entry(KIND, key, body)
        except ConflictError:
            continue  # another process found it in the same microsecond


class Wholeness:
    """Which artifacts can be taken: those that are there, and are not damaged by what is known."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._verified: dict[ArtifactHash, str] = {}

    @cached_property
    def _suspects(self) -> set[str]:
        return {str(body["artifact"]) for _, body in self._store.entries(KIND)}

    def problem(self, artifact: ArtifactHash) -> str:
        """What keeps an artifact from being taken, "" when nothing does."""
        try:
            if not self._store.has(artifact):
                return "is gone or damaged"
        except DamagedError:
            return "is damaged: its tree has not its hash"
        if artifact not in self._suspects:
            return ""
        if artifact not in self._verified:
            found = self._store.verify(artifact)
            self._verified[artifact] = (
                f"is damaged: {found[0].path or 'its tree'}: {found[0].what}" if found else ""
            )
        return self._verified[artifact]
