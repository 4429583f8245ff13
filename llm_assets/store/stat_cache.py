"""What the last put of a folder found, so that an unchanged file is not read again.

Trusted by put only. A file counts as unchanged while device, inode, size, modification and change
time are the same. A file that changed shortly before it was read is not noted: a second change
within the clock's grain would not show.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import platform
import time
from collections.abc import Iterable
from pathlib import Path

from llm_assets.store.digest import BlobHash
from llm_assets.store.ingest import Ingested
from llm_assets.store.local_objects import read_note, write_note
from llm_assets.store.scanning import SourceFile

_GRAIN_NS = 2_000_000_000


class StatCache:
    """Blobs by file state, for one source folder on this machine."""

    def __init__(self, cache: Path, folder: Path) -> None:
        self.began_ns = time.time_ns()
        name = f"{platform.node()}:{os.path.realpath(folder)}"
        self._path = (
            cache / "stat" / hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()
        )
        note = read_note(self._path)
        self._known: dict[str, list[object]] = note if isinstance(note, dict) else {}

    def known(self, file: SourceFile) -> BlobHash | None:
        """The file's blob, when it is unchanged since it was read."""
        entry = self._known.get(file.path)
        if not isinstance(entry, list) or entry[:-1] != list(dataclasses.astuple(file.stat)):
            return None
        try:
            return BlobHash.parse(str(entry[-1]))
        except ValueError:
            return None

    def keep(
        self, unchanged: Iterable[tuple[SourceFile, BlobHash]], read: Iterable[Ingested]
    ) -> None:
        """Note what this put found."""
        states = {f.path: [*dataclasses.astuple(f.stat), str(blob)] for f, blob in unchanged}
        for found in read:
            stat = found.file.stat
            if max(stat.mtime_ns, stat.ctime_ns) + _GRAIN_NS < self.began_ns:
                states[found.file.path] = [*dataclasses.astuple(stat), str(found.blob)]
        if states != self._known:
            write_note(self._path, states)
