"""Small documents in S3: conditional puts make them write-once."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import itertools
import os
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path

from llm_assets.errors import NotFoundError
from llm_assets.store.backend import Claim, Item
from llm_assets.store.canonical import seal, unseal
from llm_assets.store.parallel import in_parallel
from llm_assets.store.s3_client import PreconditionFailed, S3Client
from llm_assets.store.sessions import Sessions, is_live

CLAIMS = "tmp/claims"
CLAIM_DAYS = 7
"""A claim whose writer can't be asked whether it lives is void after these days; a lifecycle rule
deletes it then."""
WORKERS = 8
"""Requests at the same time. Below boto3's pool of ten connections."""


def checksum(content: bytes) -> str:
    """The SHA-256 of `content` as S3 writes it."""
    return base64.b64encode(hashlib.sha256(content).digest()).decode()


class S3Backend:
    """The documents of a store in S3. `cache` is this machine's cache of the store."""

    def __init__(self, s3: S3Client, cache: Path, sessions: Sessions) -> None:
        self.s3 = s3
        self.where = s3.where
        self.cache = cache
        self.sessions = sessions

    def create(self, key: str, content: bytes, *, durable: bool = True) -> bool:
        """If-None-Match: only one writer gets the key."""
        try:
            self.s3.call_counted(
                "put_object",
                Key=self.s3.key(key),
                Body=content,
                IfNoneMatch="*",
                ChecksumSHA256=checksum(content),
            )
            return True
        except PreconditionFailed as error:
            # When an answer was lost on the way, the document in the way may be this one.
            return bool(error.args and error.args[0] > 1 and self.read(key) == content)

    def read(self, key: str) -> bytes:
        """The object's bytes."""

        try:
            return self.s3.attempt(f"read {key}", lambda: self.s3.read_object(key))
        except NotFoundError:
            raise NotFoundError(f"{self.where}: there is no {key}") from None

    def replace(self, key: str, content: bytes) -> None:
        """A put without a condition."""
        self.s3.call(
            "put_object", Key=self.s3.key(key), Body=content, ChecksumSHA256=checksum(content)
        )

    def delete(self, key: str) -> None:
        """Delete; on a versioned bucket the old version stays until its lifecycle rule."""
        with contextlib.suppress(NotFoundError):
            self.s3.call("delete_object", Key=self.s3.key(key))

    def items(self, prefix: str) -> list[Item]:
        """A listing, page by page."""
        start = self.s3.key(prefix) + "/"
        cut = len(self.s3.key(""))
        found: list[Item] = []
        arguments: dict[str, str] = {"Prefix": start}
        while True:
            page = self.s3.call("list_objects_v2", **arguments)
            found += [
                Item(
                    key=entry["Key"][cut:],
                    size_bytes=entry["Size"],
                    modified=entry["LastModified"].timestamp(),
                )
                for entry in page.get("Contents", ())
            ]
            if not page.get("IsTruncated"):
                return sorted(found, key=lambda item: item.key)
            arguments["ContinuationToken"] = page["NextContinuationToken"]

    def now(self) -> float:
        """The server's clock."""
        return self.s3.now()

    def claim(self) -> Claim:
        """Objects below `tmp/claims`."""
        return S3Claim(self)

    def claimed(self) -> Sequence[str]:
        """From every claim whose writer lives, or may."""

        def keys_of(item: Item) -> list[str]:
            try:
                body = unseal(self.read(item.key), item.key)
            except NotFoundError:
                return []
            too_old = self.now() - item.modified > CLAIM_DAYS * 86_400
            if too_old or (body["machine"] == machine(self.cache) and self._is_dead(body)):
                self.delete(item.key)
                return []
            return [str(key) for key in body["keys"]]

        found = in_parallel(keys_of, self.items(CLAIMS), WORKERS)
        return [key for keys in found for key in keys]

    def _is_dead(self, body: dict[str, object]) -> bool:
        return not is_live(self.cache, str(body["session"]))


class S3Claim:
    """A claim as objects, one for each `add`."""

    def __init__(self, backend: S3Backend) -> None:
        self._backend = backend
        self._keys: list[str] = []
        self._name = os.urandom(8).hex()
        self._counter = itertools.count()

    def add(self, keys: Iterable[str]) -> None:
        """Write one more object."""
        session = self._backend.sessions.current().name
        key = f"{CLAIMS}/{self._name}-{next(self._counter)}.json"
        body = {"keys": list(keys), "machine": machine(self._backend.cache), "session": session}
        self._keys.append(key)
        self._backend.create(key, seal(body, key))

    def close(self) -> None:
        """Delete the objects."""
        while self._keys:
            self._backend.delete(self._keys.pop())


def machine(cache: Path) -> str:
    """What processes share that can see each other's locks in `cache`."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = ""
    found = os.stat(cache)
    name = f"{socket.gethostname()}:{boot}:{found.st_dev}:{found.st_ino}"
    return hashlib.sha256(name.encode()).hexdigest()[:16]
