"""Blobs from S3 into the local cache: in parts, in parallel, resumed, verified, shared.

Who downloads a blob holds a lock on it; others wait and find it done. The bytes go into
`partial/<blob>`, which gets its final name only when all have their digests. A partial file that a
dead process left is read again first: parts that are right are not fetched again.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from llm_assets.errors import DamagedError, NotFoundError, message
from llm_assets.store.digest import BlobHash
from llm_assets.store.direct_io import Writer, buffer
from llm_assets.store.directory_backend import FULL, disk_errors, full
from llm_assets.store.document_store import blob_key
from llm_assets.store.hashing import hash_part, join_parts, num_parts, part_range
from llm_assets.store.local_objects import LocalObjects
from llm_assets.store.parallel import in_parallel
from llm_assets.store.protocol import FileEntry
from llm_assets.store.s3_backend import WORKERS
from llm_assets.store.s3_client import S3Client, TransferDamagedError
from llm_assets.store.transfer import parts_key

_WHOLE_TRIES = 3
_READ_BYTES = 512 * 1024


def download(s3: S3Client, local: LocalObjects, entries: Sequence[FileEntry]) -> None:
    """Bring the blobs into the cache that are not there, verified."""
    todo = {e.blob: e.size_bytes for e in entries if not local.is_whole(e.blob, e.size_bytes)}
    small = [blob for blob, size in todo.items() if num_parts(size) == 1]
    large = [blob for blob, size in todo.items() if num_parts(size) > 1]
    in_parallel(lambda blob: Download(s3, local, blob, todo[blob]).run(), small, WORKERS)
    for blob in large:
        Download(s3, local, blob, todo[blob]).run()


class Download:
    """One blob on its way into the cache."""

    def __init__(self, s3: S3Client, local: LocalObjects, blob: BlobHash, size_bytes: int) -> None:
        self.s3, self.local, self.blob, self.size = s3, local, blob, size_bytes
        self.partial = local.root / "partial" / blob

    def run(self) -> None:
        """Download, unless somebody else did while this waited."""
        with self._alone():
            if self.local.is_whole(self.blob, self.size):
                return
            with disk_errors(self.partial, self.size):
                self.partial.parent.mkdir(parents=True, exist_ok=True)
            self._fill()
            self.local.publish_blob(self.partial, self.blob, self.size, durable=False)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        lock = self.local.root / "partial" / f"{self.blob}.lock"
        with disk_errors(lock, 0):
            lock.parent.mkdir(parents=True, exist_ok=True)
            handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            # The file stays: deleting it would let two processes lock two files of one name.
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def _fill(self) -> None:
        """Make the partial file whole and right."""
        where = f"blob {self.blob}"
        with PartFile(self.s3, blob_key(self.blob), self.partial, self.size, where) as target:
            digests = self._part_list()
            if digests is not None:
                target.fill(digests)
            elif not any(target.fetch() == self.blob for _ in range(_WHOLE_TRIES)):
                raise target.damaged("its bytes do not have its hash")
            os.fchmod(target.handle, 0o444)

    def _part_list(self) -> list[bytes] | None:
        """The parts' digests; None when the server has no list that fits the blob's name."""
        if num_parts(self.size) == 1:
            return [bytes.fromhex(self.blob)]

        def request() -> bytes:
            content = self.s3.read_object(parts_key(self.blob))
            if hashlib.sha256(content).hexdigest() != self.blob[:64]:
                raise TransferDamagedError(f"part list of {self.blob}: wrong digest")
            return content

        try:
            content = self.s3.attempt(f"part list of {self.blob.short}", request)
        except (NotFoundError, DamagedError):
            return None
        return [content[start : start + 32] for start in range(0, len(content), 32)]


class PartFile:
    """A local file that is filled with an object's bytes, part by part, while the context lasts.

    Parts that are right in the file already are kept. DamagedError names `what`.
    """

    def __init__(self, s3: S3Client, key: str, path: Path, size_bytes: int, what: str) -> None:
        self.s3, self.key, self.path, self.size, self.what = s3, key, path, size_bytes, what

    def __enter__(self) -> PartFile:
        with disk_errors(self.path, self.size):
            self._resumed = self.path.exists() and self.path.stat().st_size > 0
            self._target = Writer(self.path, self.size, os.O_NOFOLLOW, 0o600)
        try:
            with disk_errors(self.path, self.size):
                os.ftruncate(self._target.handle, self.size)
        except BaseException:
            self._target.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._target.close()

    @property
    def handle(self) -> int:
        """The open file."""
        return self._target.handle

    def fill(self, digests: Sequence[bytes]) -> None:
        """Fetch every part that has not its digest."""
        in_parallel(lambda part: self._part(part, digests[part]), range(len(digests)), WORKERS)

    def fetch(self) -> BlobHash:
        """Fetch all parts; the hash of what came."""
        return join_parts(
            in_parallel(
                lambda part: self.s3.attempt(
                    self._name(part), lambda: self._get(*part_range(part, self.size))
                ),
                range(num_parts(self.size)),
            )
        )

    def _part(self, part: int, digest: bytes) -> None:
        start, length = part_range(part, self.size)
        if self._resumed and hash_part(self.handle, start, length, buffer()) == digest:
            return

        def request() -> None:
            if self._get(start, length) != digest:
                raise TransferDamagedError(f"{self._name(part)}: wrong digest")

        try:
            self.s3.attempt(self._name(part), request)
        except NotFoundError:
            raise self.damaged("missing") from None
        except TransferDamagedError:
            raise self.damaged(f"the bytes of part {part + 1} do not have their hash") from None

    def _name(self, part: int) -> str:
        return f"{self.what}, part {part + 1}"

    def _get(self, start: int, length: int) -> bytes:
        def take(data: memoryview, position: int) -> None:
            try:
                self._target.write(data, position)
            except OSError as error:
                if error.errno in FULL:
                    used = os.fstat(self.handle).st_blocks * 512
                    raise full(self.path, max(1, self.size - used)) from error
                raise

        return get_range(self.s3, self.key, start, length, take)

    def damaged(self, found: str) -> DamagedError:
        """The error for bytes that are not what they must be."""
        return DamagedError(
            message(
                where=f"{self.s3.where}, {self.what}",
                found=found,
                rule="a file is handed out only when its bytes have their hash",
                remedy="put the artifact again from its source, or rerun its stage",
            )
        )


def get_range(
    s3: S3Client,
    key: str,
    start: int,
    length: int,
    take: Callable[[memoryview, int], None] | None = None,
) -> bytes:
    """Fetch a range of an object once, giving each piece and its position to `take`; the digest.

    TransferDamagedError when the body is cut short.
    """
    arguments = {"Key": s3.key(key)}
    if length:
        arguments["Range"] = f"bytes={start}-{start + length - 1}"
    digest, position, end, chunk = hashlib.sha256(), start, start + length, buffer()
    with contextlib.closing(s3.request("get_object", arguments)["Body"]) as body:
        while position < end:
            piece = chunk[: min(len(chunk), end - position)]
            filled = 0
            while filled < len(piece):
                count = body.readinto(piece[filled : filled + _READ_BYTES])
                if not count:
                    raise TransferDamagedError(f"{key}: cut short at {position + filled}")
                filled += count
            digest.update(piece)
            if take is not None:
                take(piece, position)
            position += len(piece)
    return digest.digest()


def read_through(s3: S3Client, blob: BlobHash, size_bytes: int, key: str = "") -> str:
    """Download a blob without keeping it; what is wrong with it, empty for a whole one. `key`:
    where it stands, if not among the objects."""
    place = key or blob_key(blob)

    def digest_of(part: int) -> bytes:
        start, length = part_range(part, size_bytes)
        what = f"blob {blob.short}, part {part + 1}"
        return s3.attempt(what, lambda: get_range(s3, place, start, length))

    for _ in range(_WHOLE_TRIES):
        if join_parts([digest_of(part) for part in range(num_parts(size_bytes))]) == blob:
            return ""
    return "its bytes do not have its hash"
