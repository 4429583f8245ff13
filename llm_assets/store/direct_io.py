"""Writing and reading large files past the page cache.

Copying gigabytes through the page cache costs a second copy of every byte, and the process waits
when too much of the cache is unwritten. Direct writes go from the buffer to the disk while other
threads hash. What is read once, to be proved, need not drive out what is read often. Where a file
system has no direct access, and for what does not fill whole blocks, they fall back to the ordinary
one.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
from collections.abc import Iterator
from pathlib import Path

CHUNK_BYTES = 4 * 2**20
"""Bytes of one write. A worker thread of the store holds one such buffer."""

DIRECT_FROM = 16 * 2**20
"""Smaller files stay in the page cache: they are read again soon, and cost little."""

BLOCK = 4096
"""Memory, offset and length of a direct write are multiples of this."""

_O_DIRECT = getattr(os, "O_DIRECT", 0)
_local = threading.local()


def buffer() -> memoryview:
    """This thread's chunk buffer, aligned to a page."""
    if not hasattr(_local, "buffer"):
        _local.buffer = memoryview(mmap.mmap(-1, CHUNK_BYTES))
    found: memoryview = _local.buffer
    return found


def pieces(path: Path) -> Iterator[memoryview]:
    """The content in pieces of CHUNK_BYTES, the last one shorter. Each is valid until the next."""
    chunk = memoryview(mmap.mmap(-1, CHUNK_BYTES))
    with contextlib.ExitStack() as stack:

        def opened(flags: int) -> int:
            handle = os.open(path, os.O_RDONLY | flags)
            stack.callback(os.close, handle)
            return handle

        handle = opened(0)
        size, position = os.fstat(handle).st_size, 0
        direct = -1
        if _O_DIRECT and size >= DIRECT_FROM:
            with contextlib.suppress(OSError):
                direct = opened(_O_DIRECT)
        while True:
            try:
                count = os.preadv(handle if direct < 0 else direct, [chunk], position)
            except OSError as error:
                if direct < 0 or error.errno != errno.EINVAL:
                    raise
                direct = -1
                continue
            if count == 0:
                return
            yield chunk[:count]
            position += count
            if position % BLOCK:
                direct = -1  # The end, or what is left of a short read.


class Writer:
    """A file that several threads write at different places."""

    def __init__(self, path: Path, size_bytes: int, flags: int, mode: int) -> None:
        """`flags`: as of os.open, beside O_RDWR | O_CREAT. The file has its size at once."""
        self.handle = os.open(path, os.O_RDWR | os.O_CREAT | flags, mode)
        self._direct = -1
        try:
            if size_bytes >= DIRECT_FROM:
                self._prepare(path, size_bytes)
        except BaseException:
            self.close()
            raise

    def _prepare(self, path: Path, size_bytes: int) -> None:
        # The space is taken now: a full disk shows before the work, and direct writes then change
        # no metadata.
        if hasattr(os, "posix_fallocate"):
            try:
                os.posix_fallocate(self.handle, 0, size_bytes)
            except OSError as error:
                if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                    raise
        if _O_DIRECT:
            with contextlib.suppress(OSError):
                self._direct = os.open(path, os.O_WRONLY | _O_DIRECT)

    def write(self, data: memoryview, position: int) -> None:
        """Write all of `data`. Past the page cache goes only memory that begins at a block, as that
        of `buffer()` does."""
        whole = len(data) // BLOCK * BLOCK if self._direct >= 0 and position % BLOCK == 0 else 0
        done = 0
        while done < whole:
            try:
                done += os.pwrite(self._direct, data[done:whole], position + done)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                whole = done  # This file system wants larger blocks, or none of this at all.
        while done < len(data):
            done += os.pwrite(self.handle, data[done:], position + done)

    def close(self) -> None:
        """Close; may be called again."""
        for handle in (self.handle, self._direct):
            if handle >= 0:
                os.close(handle)
        self.handle = self._direct = -1
