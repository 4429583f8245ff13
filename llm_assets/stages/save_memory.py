"""Memory that two processes share, without a name in any file system."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref


class SharedMemory:
    """`size_bytes` of zeros. Not in /dev/shm, which a container may limit to a few megabytes."""

    def __init__(self, size_bytes: int) -> None:
        """OSError when there is not so much."""
        self.descriptor = _nameless()
        weakref.finalize(self, os.close, self.descriptor)
        os.ftruncate(self.descriptor, size_bytes)
        self.content = mapped(self.descriptor, size_bytes, touch=True)


def mapped(descriptor: int, size_bytes: int, *, touch: bool = False) -> memoryview:
    """The memory behind a descriptor; `touch`: all its pages are there at once."""
    if not size_bytes:
        return memoryview(bytearray())
    flags = mmap.MAP_SHARED | (getattr(mmap, "MAP_POPULATE", 0) if touch else 0)
    return memoryview(mmap.mmap(descriptor, size_bytes, flags=flags))


def _nameless() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("llm-assets-save")
    # macOS: a file that is deleted at once.
    descriptor, path = tempfile.mkstemp(prefix="llm-assets-save-")
    os.unlink(path)
    return descriptor
