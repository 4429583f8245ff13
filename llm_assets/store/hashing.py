"""Blob hashes: SHA-256 over fixed parts of 64 MiB, as S3 computes it for a multipart upload."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

from llm_assets.store.digest import BlobHash

PART_BYTES = 64 * 2**20


def num_parts(size_bytes: int) -> int:
    """Number of parts of a blob; an empty blob has one."""
    return max(1, -(-size_bytes // PART_BYTES))


def join_parts(digests: Sequence[bytes]) -> BlobHash:
    """The blob's hash from its parts' digests: one part, its digest; several, the digest of the
    digests with `-N`."""
    if len(digests) == 1:
        return BlobHash(digests[0].hex())
    return BlobHash(f"{hashlib.sha256(b''.join(digests)).hexdigest()}-{len(digests)}")


def hash_bytes(content: bytes) -> BlobHash:
    """The blob hash of `content`."""
    parts = [
        hashlib.sha256(memoryview(content)[start : start + PART_BYTES]).digest()
        for start in range(0, max(1, len(content)), PART_BYTES)
    ]
    return join_parts(parts)


def part_range(part: int, size_bytes: int) -> tuple[int, int]:
    """First byte and length of a part (counted from 0)."""
    start = part * PART_BYTES
    return start, min(PART_BYTES, size_bytes - start)


def hash_part(source: int, start: int, length: int, buffer: memoryview) -> bytes:
    """The digest of `length` bytes of the open file `source`; EOFError when it is shorter."""
    digest = hashlib.sha256()
    position, end = start, start + length
    while position < end:
        count = os.preadv(source, [buffer[: end - position]], position)
        if count == 0:
            raise EOFError(f"ends after {position} bytes, expected {end}")
        digest.update(buffer[:count])
        position += count
    return digest.digest()


def hash_file(path: Path) -> BlobHash:
    """The blob hash of a file, in this thread."""
    with path.open("rb") as file:
        return hash_open_file(file)


def hash_open_file(file: BinaryIO) -> BlobHash:
    """The blob hash of an open file, in this thread."""
    buffer = memoryview(bytearray(2**20))
    size = os.fstat(file.fileno()).st_size
    parts = [
        hash_part(file.fileno(), *part_range(part, size), buffer) for part in range(num_parts(size))
    ]
    return join_parts(parts)


def num_workers() -> int:
    """Threads that hash or move data at the same time: one a core, eight at most."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(2, min(8, cores or 2))
