"""Reading a folder into blobs: hashing and copying at once, in parts, on several threads.

What is hashed is what is written: each chunk goes from one buffer into the digest and into the
temporary file. A source that changes meanwhile is refused. Files whose state is known from the last
put, and large files that look equal to a stored one, are not copied.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from llm_assets.errors import RefusedError, message
from llm_assets.store.digest import BlobHash
from llm_assets.store.directory_backend import FULL, full
from llm_assets.store.hashing import (
    CHUNK_BYTES,
    hash_part,
    join_parts,
    num_parts,
    part_range,
)
from llm_assets.store.parallel import in_parallel
from llm_assets.store.scanning import SourceFile, Stat

_local = threading.local()
_SYNC_FILE_RANGE_WRITE = 2


def _find_sync_file_range() -> Callable[..., int] | None:
    if not sys.platform.startswith("linux"):
        return None
    function: Callable[..., int] | None = getattr(ctypes.CDLL(None), "sync_file_range", None)
    return function


_sync_file_range = _find_sync_file_range()


def buffer() -> memoryview:
    """This thread's chunk buffer."""
    if not hasattr(_local, "buffer"):
        _local.buffer = memoryview(bytearray(CHUNK_BYTES))
    found: memoryview = _local.buffer
    return found


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
        self._target = -1

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
                    mode = os.O_RDWR | os.O_CREAT | os.O_EXCL
                    self._target = os.open(self.copy, mode, 0o444)
                except BaseException:
                    os.close(source)
                    raise
            self._source = source

    def read(self, part: int) -> None:
        """Hash one part, and copy it when the file is copied."""
        try:
            self._open()
            start, length = part_range(part, self.size)
            if self.copy is None:
                digest = hash_part(self._source, start, length, buffer())
            else:
                digest = self._copy_part(start, length)
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

    def _copy_part(self, start: int, length: int) -> bytes:
        digest = hashlib.sha256()
        position, end, chunk = start, start + length, buffer()
        while position < end:
            count = os.preadv(self._source, [chunk[: end - position]], position)
            if count == 0:
                raise EOFError
            data = chunk[:count]
            digest.update(data)
            written = 0
            while written < count:
                written += os.pwrite(self._target, data[written:], position + written)
            self._remaining.take(count)
            position += count
        _start_writeback(self._target, start, length)
        return digest.digest()

    def _finished(self) -> None:
        with self._guard:
            self._left -= 1
            if self._left:
                return
        try:
            if self.copy is not None:
                os.fsync(self._target)
            if Stat.of(os.fstat(self._source)) != self.file.stat:
                raise _changed(self.file)
        finally:
            self.close()

    def close(self) -> None:
        """Close what is open."""
        with self._guard:
            for handle in (self._source, self._target):
                if handle >= 0:
                    os.close(handle)
            self._source = self._target = -1

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
        in_parallel(lambda task: task[0].read(task[1]), parts)
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


def _start_writeback(handle: int, start: int, length: int) -> None:
    """Ask the kernel to write a range out now, so that the fsync at the end finds little left."""
    if _sync_file_range is not None and length > CHUNK_BYTES:
        _sync_file_range(
            handle, ctypes.c_int64(start), ctypes.c_int64(length), _SYNC_FILE_RANGE_WRITE
        )
