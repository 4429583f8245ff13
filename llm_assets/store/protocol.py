"""What a store promises. Every implementation runs tests/store/conformance.py."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from llm_assets.store.digest import ArtifactHash, BlobHash, Identity


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One file of a tree: its POSIX path inside the tree, its size and its blob."""

    path: str
    size_bytes: int
    blob: BlobHash


@dataclass(frozen=True, kw_only=True)
class Tree:
    """An artifact's document: type, files in path order, metadata. Its SHA-256 is its name."""

    type: str
    files: tuple[FileEntry, ...]
    metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """Sum of the file sizes."""
        return sum(entry.size_bytes for entry in self.files)


@dataclass(frozen=True, kw_only=True)
class Record:
    """What is kept under an identity. Write-once; the record is a stage's commit.

    `inputs` maps input names to artifact hashes. `metrics` maps a name to {"value": float, "n": int
    or null}. `measure_s`: of `wall_s`, on measuring what was made. `created_at` is UTC, ISO 8601.
    `recipe` is the stage's part of the recipe as hashed.
    `series`, `samples` and `tables` are what people look at (see StageResult).
    """

    identity: Identity
    stage: str
    pipeline: str
    output: ArtifactHash
    type: str
    source_hash: str
    recipe: Mapping[str, Any]
    seed: int
    inputs: Mapping[str, str]
    metrics: Mapping[str, Mapping[str, Any]]
    cost_usd: float
    wall_s: float
    created_at: str
    measure_s: float = 0.0
    run_id: str = ""
    tokens: int = 0
    flops: float = 0.0
    device: str = ""
    modules: Mapping[str, str] = field(default_factory=dict)
    libraries: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    series: Mapping[str, Any] = field(default_factory=dict)
    samples: tuple[Mapping[str, Any], ...] = ()
    tables: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Damage:
    """One thing wrong with a stored artifact: which, which file ("" for the tree), what."""

    artifact: str
    path: str
    what: str


@dataclass(frozen=True, kw_only=True)
class RefMove:
    """One entry of a ref's log."""

    name: str
    artifact: ArtifactHash
    previous: ArtifactHash | None
    at: str
    who: str
    why: str


class Lease(Protocol):
    """A lease that this process holds. Lost when its heartbeat is older than its time to live."""

    name: str
    owner: str

    def renew(self) -> None:
        """Move the heartbeat. ConflictError when somebody else took the lease over."""

    def check(self) -> None:
        """ConflictError when this process does not hold the lease any more."""

    def release(self) -> None:
        """Give the lease up. Does nothing when it is lost already."""


class RemoteSaves(Protocol):
    """Copies of one identity's in-training saves that outlive the machine that trains. Written by
    the one process that holds the identity's lease."""

    where: str
    """How messages name the place."""

    def put(self, folder: Path, about: Mapping[str, Any]) -> int:
        """Keep the plain files of `folder` under its name, with a JSON document about them; the
        bytes. A save of that name is replaced, whole. Seen by nobody before it is whole."""

    def restate(self, name: str, about: Mapping[str, Any]) -> None:
        """Say something else about a save."""

    def names(self) -> list[str]:
        """The saves that are there, in order."""

    def about(self, name: str) -> dict[str, Any]:
        """What was said about a save. DamagedError when that cannot be read."""

    def fetch(self, name: str, target: Path) -> None:
        """Bring the files into `target`, each byte checked by its hash and durable. A fetch that
        was cut off goes on where it stopped. DamagedError when something is wrong or missing."""

    def damage(self, name: str) -> dict[str, str]:
        """File name to what is wrong with it, without a download where the server keeps checksums;
        empty for a whole save."""

    def drop(self, name: str) -> None:
        """Delete a save."""

    def tidy(self) -> None:
        """Delete what no save names: the rest of uploads that were cut off."""

    def clear(self) -> None:
        """Delete everything."""


class Store(Protocol):
    """Content-addressed, write-once, crash-safe. Safe for concurrent processes and threads.

    A method that takes an artifact raises NotFoundError when it is not there and DamagedError when
    its bytes are wrong. Nothing half-written is ever visible. There is no delete: see gc.
    """

    url: str
    """How to open this store again in another process: `open_store(url)`."""

    def put(self, folder: Path, *, type: str, metadata: Mapping[str, Any]) -> ArtifactHash:
        """Store a folder as an artifact, durably; equal files once. RefusedError on bad entries."""

    def has(self, artifact: ArtifactHash) -> bool:
        """The tree and all its blobs are there (by name and size; `verify` reads them)."""

    def tree(self, artifact: ArtifactHash) -> Tree:
        """The artifact's document, its hash checked."""

    def fetch(self, artifact: ArtifactHash) -> Path:
        """A local, read-only folder with the artifact's files, verified. Linked, not copied,
        where the store is local. Do not write into it."""

    def verify(self, artifact: ArtifactHash, *, deep: bool = False) -> list[Damage]:
        """What is wrong with the artifact; empty when it is whole."""

    def artifacts(self) -> Iterator[ArtifactHash]:
        """All artifacts of the store, in hash order."""

    def add_record(self, record: Record, *, lease: Lease | None = None) -> None:
        """Commit: append to the records of an identity. With a lease, only while it is held
        (ConflictError otherwise). The output artifact must be in the store."""

    def records(self, identity: Identity) -> list[Record]:
        """The records of an identity, oldest first; empty when it has none."""

    def all_records(self) -> Iterator[Record]:
        """Every record of the store, in no particular order."""

    def record_stamps(self) -> dict[str, str]:
        """Keys of all records, each with a stamp: the same key and stamp are the same document.
        For caches; reads no record."""

    def record_at(self, key: str) -> Record:
        """The record under a key of `record_stamps`. NotFoundError when it is gone."""

    def ref(self, name: str) -> ArtifactHash | None:
        """Where a ref stands; None when it was never set."""

    def move_ref(
        self,
        name: str,
        artifact: ArtifactHash,
        *,
        expected: ArtifactHash | None,
        who: str,
        why: str,
    ) -> None:
        """Compare and swap, logged. ConflictError when the ref is not at `expected`."""

    def refs(self) -> dict[str, ArtifactHash]:
        """All refs."""

    def ref_log(self, name: str) -> list[RefMove]:
        """The moves of a ref, oldest first."""

    def add_entry(self, kind: str, key: str, body: Mapping[str, Any]) -> None:
        """A small write-once JSON document (`ledger`, `approvals`, `overrides`, `pins`, ...).
        ConflictError when the key is taken by another body; the same body again is fine."""

    def entries(self, kind: str, prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
        """The documents of one kind whose key starts with `prefix`, in key order."""

    def acquire(
        self, name: str, *, owner: str, ttl_s: float, reaches: Iterable[str] = ()
    ) -> Lease | None:
        """Take a lease, or take it over when its heartbeat is older than its own time to live.
        None when it is held by a live owner. `reaches`: artifacts that garbage collection keeps
        while the lease is alive, beside those of an identity in its name."""

    def lease_owner(self, name: str) -> str | None:
        """Who holds the lease now and is alive; None when nobody does."""

    def end_lease(self, name: str, owner: str) -> None:
        """Give up the lease of an owner whose process is known to be dead, before its time to live
        is over. Does nothing when somebody else holds it by now."""

    def checkpoints(self, identity: Identity) -> Path:
        """A local folder for the in-training saves of an identity: the same one every time."""

    def checkpoint_folders(self) -> dict[Identity, Path]:
        """The folders of in-training saves that are on this machine, by identity."""

    def remote_saves(self, identity: Identity) -> RemoteSaves | None:
        """Where copies of an identity's saves go; None when the folder of `checkpoints` is in the
        store itself."""

    def remote_identities(self) -> list[Identity]:
        """The identities that have such copies."""
