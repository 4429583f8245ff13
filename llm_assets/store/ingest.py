"""Reading a folder into blobs: hashing and copying at once, in parts, on several threads.

What is hashed is what is written: each chunk goes from one buffer into the digest and into the
temporary file. A source that changes meanwhile is refused. Files whose state is known from the last
put, and large files that look equal to a stored one, are not copied.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from llm_assets.errors import RefusedError, message
from llm_assets.store.digest import BlobHash
from llm_assets.store.direct_io import Writer, buffer
from llm_assets.store.directory_backend import FULL, full
from llm_assets.store.hashing import (
    hash_part,
    join_parts,
    num_parts,
    num_workers,
    part_range,
)
from llm_assets.store.parallel import in_parallel
from llm_assets.store.scanning import SourceFile, Stat


@dataclass(frozen=True, kw_only=True)
class Ingested:
    """A file that was read: its blob, the parts' digests, and the copy if one was made."""

    file: SourceFile
    blob: BlobHash
    parts: tuple[bytes, ...]
    copy: Path | None


class _Reading:
    """One file on its way; the thread that finishes the last part closes it."""

    def __init__(self, file: SourceFile, copy: Path | None, remaining: Remaining) -> None:
        self.file = file
        self.copy = copy
        self.size = file.stat.size_bytes
        self.digests: list[bytes] = [b""] * num_parts(self.size)
        self._left = len(self.digests)
        self._guard = threading.Lock()
        self._remaining = remaining
        self._source = -1
        self._target: Writer | None = None

    def _open(self) -> None:
        with self._guard:
            if self._source >= 0:
                return
            flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
            source = os.open(self.file.source, flags)
            if Stat.of(os.fstat(source)) != self.file.stat:
                os.close(source)
                raise _changed(self.file)
            if self.copy is not None:
                try:
                    self._target = Writer(self.copy, self.size, os.O_EXCL, 0o444)
                except BaseException:
                    os.close(source)
                    raise
            self._source = source

    def read(self, part: int) -> None:
        """Hash one part, and copy it when the file is copied."""
        try:
            self._open()
            start, length = part_range(part, self.size)
            target = self._target
            if target is None:
                digest = hash_part(self._source, start, length, buffer())
            else:
                digest = self._copy_part(target, start, length)
            self.digests[part] = digest
            self._finished()
        except EOFError:
            raise _changed(self.file) from None
        except OSError as error:
            if error.errno in FULL and self.copy is not None:
                raise full(self.copy, self._remaining.bytes) from error
            raise RefusedError(
                message(
                    where=str(self.file.source),
                    found=f"unreadable ({error.strerror or error})",
                    rule="every file of an artifact is read whole",
                    remedy="look at the file's permissions and its disk",
                )
            ) from error

    def _copy_part(self, target: Writer, start: int, length: int) -> bytes:
        digest = hashlib.sha256()
        position, end, chunk = start, start + length, buffer()
        while position < end:
            count = os.preadv(self._source, [chunk[: end - position]], position)
            if count == 0:
                raise EOFError
            digest.update(chunk[:count])
            target.write(chunk[:count], position)
            self._remaining.take(count)
            position += count
        return digest.digest()

    def _finished(self) -> None:
        with self._guard:
            self._left -= 1
            if self._left:
                return
        try:
            if self._target is not None:
                os.fsync(self._target.handle)
            if Stat.of(os.fstat(self._source)) != self.file.stat:
                raise _changed(self.file)
        finally:
            self.close()

    def close(self) -> None:
        """Close what is open."""
        with self._guard:
            if self._source >= 0:
                os.close(self._source)
                self._source = -1
            if self._target is not None:
                self._target.close()
                self._target = None

    def result(self) -> Ingested:
        """After all parts are read."""
        return Ingested(
            file=self.file,
            blob=join_parts(self.digests),
            parts=tuple(self.digests),
            copy=self.copy,
        )


class Remaining:
    """Bytes that are still to be written, for the error of a full disk."""

    def __init__(self, total: int) -> None:
        self.bytes = total
        self._guard = threading.Lock()

    def take(self, count: int) -> None:
        """`count` bytes are written."""
        with self._guard:
            self.bytes -= count


def ingest(
    files: Sequence[SourceFile], copy_to: Callable[[SourceFile], Path | None]
) -> list[Ingested]:
    """Read the files, each part by one thread; `copy_to` says where a copy goes, None for none.

    RefusedError for a file that changes or can't be read, StoreFullError for a full disk. After an
    error nothing runs any more and the copies may be half: they are the caller's to delete.
    """
    targets = [copy_to(file) for file in files]
    total = sum(f.stat.size_bytes for f, t in zip(files, targets, strict=True) if t is not None)
    remaining = Remaining(total)
    readings = [_Reading(f, t, remaining) for f, t in zip(files, targets, strict=True)]
    parts = [(reading, part) for reading in readings for part in range(len(reading.digests))]
    try:
        # Threads that copy wait for the disk half of the time.
        workers = num_workers() * (2 if any(targets) else 1)
        in_parallel(lambda task: task[0].read(task[1]), parts, workers)
    finally:
        for reading in readings:
            reading.close()
    return [reading.result() for reading in readings]


def _changed(file: SourceFile) -> RefusedError:
    return RefusedError(
        message(
            where=str(file.source),
            found="the file changed while it was stored",
            rule="an artifact is one state of its folder",
            remedy="put the folder again when nothing writes into it any more",
        )
    )
