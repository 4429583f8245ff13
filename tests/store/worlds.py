"""The places that the conformance suite runs in: a directory, and a prefix in a real S3 server.

A world opens its store as often as asked, each time as another process would, and can look at and
spoil what is stored behind the store's back.
"""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any, Protocol

from llm_assets.store import open_store
from llm_assets.store.directory import DirectoryStore
from llm_assets.store.document_store import blob_key
from llm_assets.store.opening_s3 import open_s3
from llm_assets.store.s3 import S3Store
from llm_assets.store.s3_client import RetryPolicy
from tests.store.weed import SeaweedServer

FAST = RetryPolicy(attempts=8, base_s=0.01, cap_s=0.1)


class World(Protocol):
    """One empty store."""

    ttl_s: float
    """A short time to live that the store's clock can tell."""
    dead_s: float
    """After so long a lease with that time to live is surely dead."""

    def open(self) -> Any:
        """The store, as a process on another machine would open it."""

    def keys(self, prefix: str = "") -> list[str]:
        """All keys below a prefix."""

    def read(self, key: str) -> bytes:
        """What stands under a key."""

    def write(self, key: str, content: bytes) -> None:
        """Write without the store's knowledge."""

    def remove(self, key: str) -> None:
        """Delete without the store's knowledge."""


class DirectoryWorld:
    """A store in a directory."""

    ttl_s = 0.1
    dead_s = 0.3

    def __init__(self, root: Path) -> None:
        self.root = root
        open_store(str(root))

    def open(self) -> DirectoryStore:
        store = open_store(str(self.root), create=False)
        assert isinstance(store, DirectoryStore)
        return store

    def keys(self, prefix: str = "") -> list[str]:
        found = (
            str(path.relative_to(self.root)) for path in self.root.rglob("*") if path.is_file()
        )
        return sorted(key for key in found if key.startswith(prefix))

    def read(self, key: str) -> bytes:
        return (self.root / key).read_bytes()

    def write(self, key: str, content: bytes) -> None:
        path = self.root / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_bytes(content)

    def remove(self, key: str) -> None:
        (self.root / key).unlink()


class S3World:
    """A store below a prefix of a bucket; each opening has a cache of its own."""

    ttl_s = 0.5
    dead_s = 2.6

    _numbers = itertools.count()

    def __init__(self, server: SeaweedServer, bucket: str, folder: Path) -> None:
        self.server, self.bucket, self.folder = server, bucket, folder
        self.cache: str | None = None
        self.prefix = f"tests/{os.getpid()}-{next(self._numbers)}"
        self.client = server.shared_client
        self.open()

    def url(self, cache: str | None = None) -> str:
        name = cache or f"cache-{next(self._numbers)}"
        return (
            f"s3://{self.bucket}/{self.prefix}?endpoint={self.server.endpoint}"
            f"&region=us-east-1&cache={self.folder / name}"
        )

    def open(self, cache: str | None = None) -> S3Store:
        return open_s3(
            self.url(cache or self.cache), client_factory=lambda: self.client, retry=FAST
        )

    def _key(self, key: str) -> str:
        return f"{self.prefix}/{key}"

    def keys(self, prefix: str = "") -> list[str]:
        found: list[str] = []
        for page in self.client.get_paginator("list_objects_v2").paginate(
            Bucket=self.bucket, Prefix=self._key(prefix)
        ):
            found += [entry["Key"] for entry in page.get("Contents", ())]
        return sorted(key[len(self.prefix) + 1 :] for key in found)

    def read(self, key: str) -> bytes:
        body = self.client.get_object(Bucket=self.bucket, Key=self._key(key))["Body"]
        content: bytes = body.read()
        return content

    def write(self, key: str, content: bytes) -> None:
        self.client.put_object(
            Bucket=self.bucket, Key=self._key(key), Body=content, ChecksumAlgorithm="SHA256"
        )

    def remove(self, key: str) -> None:
        self.client.delete_object(Bucket=self.bucket, Key=self._key(key))


def flip(world: World, key: str) -> None:
    """Change one byte in the middle."""
    content = bytearray(world.read(key))
    content[len(content) // 2] ^= 1
    world.write(key, bytes(content))


def blob_of(store: Any, artifact: Any, path: str) -> str:
    """Key of a file's blob."""
    return next(blob_key(e.blob) for e in store.tree(artifact).files if e.path == path)
