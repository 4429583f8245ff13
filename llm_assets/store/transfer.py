"""Blobs in S3: what stands there, and how it is uploaded in checked parts.

A blob of several parts has a part list beside it, `objects/parts/..`: its parts' digests one after
the other. The list's own SHA-256 is the first half of the blob's name, so that it can be trusted
when it fits; with it a single damaged or missing part is found and fetched again (download.py).
"""

from __future__ import annotations

import base64
import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from llm_assets.errors import NotFoundError, RefusedError, StoreError, message
from llm_assets.store.digest import BlobHash
from llm_assets.store.direct_io import buffer
from llm_assets.store.document_store import blob_key
from llm_assets.store.hashing import hash_part, num_workers, part_range
from llm_assets.store.parallel import in_parallel
from llm_assets.store.s3_backend import WORKERS
from llm_assets.store.s3_client import PreconditionFailed, S3Client

UPLOADS = max(4, min(WORKERS, 2 * num_workers()))
"""Parts on their way at the same time. Each keeps a core of the receiver busy with its checksums:
where that is this machine, more of them only get into each other's way."""
_MIN_READ = 8192
_READ_BYTES = 256 * 1024


def parts_key(blob: BlobHash) -> str:
    """Key of a blob's part list."""
    return f"objects/parts/{blob[:2]}/{blob}"


class FilePart:
    """A range of an open file, as the seekable body of a request."""

    def __init__(self, handle: int, start: int, length: int) -> None:
        self._handle, self._start, self._length, self._at = handle, start, length, 0

    def __len__(self) -> int:
        return self._length

    def read(self, count: int = -1) -> bytes:
        """The next bytes. More than `count` when it is small: http.client asks for pieces of
        16 KiB and sends whatever it gets, and larger ones cost less."""
        left = self._length - self._at
        if _MIN_READ <= count < _READ_BYTES:
            count = _READ_BYTES
        data = os.pread(
            self._handle, left if count < 0 else min(left, count), self._start + self._at
        )
        self._at += len(data)
        return data

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """As of a file."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        """As of a file."""
        return self._at


def stored_state(s3: S3Client, blob: BlobHash, key: str = "") -> tuple[int, str] | None:
    """Size of a stored blob, and the blob hash that the server computed ("" when it has none);
    None when the blob is not there. `key`: where it stands, if not among the objects."""
    try:
        head = s3.call("head_object", Key=s3.key(key or blob_key(blob)), ChecksumMode="ENABLED")
    except NotFoundError:
        return None
    text = str(head.get("ChecksumSHA256") or "")
    digest, dash, parts = text.partition("-")
    try:
        computed = base64.b64decode(digest, validate=True).hex() + dash + parts
    except ValueError:
        computed = text
    return int(head["ContentLength"]), computed


def is_stored(s3: S3Client, blob: BlobHash, size_bytes: int, key: str = "") -> bool:
    """The blob is there with its size, and the server's checksum, if it has one, is its hash."""
    state = stored_state(s3, blob, key)
    return state is not None and state[0] == size_bytes and state[1] in ("", str(blob))


class Upload:
    """One blob on its way to S3 from an open file whose parts were hashed."""

    def __init__(
        self,
        s3: S3Client,
        source: Path,
        blob: BlobHash,
        digests: Sequence[bytes],
        *,
        replace: bool,
        key: str = "",
    ) -> None:
        """`replace`: a damaged object stands there, and is overwritten. `key`: where it goes, if
        not among the objects; it has no part list there."""
        self.s3, self.source, self.blob, self.digests = s3, source, blob, digests
        self.condition: dict[str, str] = {} if replace else {"IfNoneMatch": "*"}
        self.place, self.key = key, s3.key(key or blob_key(blob))

    def run(self, size_bytes: int) -> None:
        """Upload; done already when another writer was first."""
        handle = os.open(self.source, os.O_RDONLY | os.O_NOFOLLOW)
        try:
            if os.fstat(handle).st_size != size_bytes:
                raise self._changed()
            if len(self.digests) == 1:
                self._whole(handle, size_bytes)
            else:
                self._multipart(handle, size_bytes)
        finally:
            os.close(handle)

    def _whole(self, handle: int, size_bytes: int) -> None:
        with contextlib.suppress(PreconditionFailed):
            self._send("put_object", handle, 0, size_bytes, self.condition)

    def _multipart(self, handle: int, size_bytes: int) -> None:
        upload = self.s3.call(
            "create_multipart_upload",
            Key=self.key,
            ChecksumAlgorithm="SHA256",
            ChecksumType="COMPOSITE",
        )["UploadId"]

        def send(part: int) -> dict[str, Any]:
            target = {"UploadId": upload, "PartNumber": part + 1}
            answer = self._send("upload_part", handle, part, size_bytes, target)
            digest = _base64(self.digests[part])
            return {"PartNumber": part + 1, "ETag": answer["ETag"], "ChecksumSHA256": digest}

        try:
            parts = in_parallel(send, range(len(self.digests)), UPLOADS)
            if not self.place:
                list_key = self.s3.key(parts_key(self.blob))
                self.s3.call("put_object", Key=list_key, Body=b"".join(self.digests))
            self._complete(upload, parts, size_bytes)
        except BaseException:
            with contextlib.suppress(StoreError):
                self.s3.call("abort_multipart_upload", Key=self.key, UploadId=upload)
            raise

    def _send(
        self, operation: str, handle: int, part: int, size_bytes: int, target: dict[str, Any]
    ) -> dict[str, Any]:
        """Send one part; the server refuses it unless its bytes have the digest."""
        start, length = part_range(part, size_bytes)
        arguments = {
            **target,
            "Key": self.key,
            "Body": FilePart(handle, start, length),
            "ChecksumSHA256": _base64(self.digests[part]),
        }
        failed = False

        def request() -> dict[str, Any]:
            nonlocal failed
            # A part that failed may have been refused for its bytes: on the wire, or at the source.
            if failed and not self._unchanged(handle, part, start, length):
                raise self._changed()
            failed = True
            arguments["Body"].seek(0)
            return self.s3.request(operation, arguments)

        return self.s3.attempt(f"{operation} {self.blob.short}", request)

    def _unchanged(self, handle: int, part: int, start: int, length: int) -> bool:
        try:
            return hash_part(handle, start, length, buffer()) == self.digests[part]
        except EOFError:
            return False

    def _changed(self) -> RefusedError:
        return RefusedError(
            message(
                where=str(self.source),
                found="the file changed while it was stored",
                rule="an artifact is one state of its folder",
                remedy="put the folder again when nothing writes into it any more",
            )
        )

    def _complete(self, upload: str, parts: list[dict[str, Any]], size_bytes: int) -> None:
        try:
            self.s3.call(
                "complete_multipart_upload",
                Key=self.key,
                UploadId=upload,
                MultipartUpload={"Parts": parts},
                ChecksumType="COMPOSITE",
                **self.condition,
            )
        except PreconditionFailed:
            with contextlib.suppress(NotFoundError):
                self.s3.call("abort_multipart_upload", Key=self.key, UploadId=upload)
        except StoreError:
            # The answer of a completion that worked may have been lost; the upload is gone then.
            if not is_stored(self.s3, self.blob, size_bytes, self.place):
                raise


def _base64(digest: bytes) -> str:
    return base64.b64encode(digest).decode()
