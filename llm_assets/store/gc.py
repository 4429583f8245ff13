"""Garbage collection: the only thing that deletes from a store.

First a plan, which can be looked at; then a sweep, which announces itself (sweep.py), plans again,
and deletes what both plans name and nobody claims: records that expired, then trees, then blobs. A
sweep that dies leaves garbage for the next one and nothing else.
"""

from __future__ import annotations

import dataclasses
import os
import socket
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from llm_assets.errors import ConflictError, DamagedError, RefusedError, message
from llm_assets.store.backend import Item
from llm_assets.store.digest import ArtifactHash, BlobHash, Identity
from llm_assets.store.directory import DirectoryStore
from llm_assets.store.leases import HeldLease
from llm_assets.store.local_space import CHECKPOINT_DAYS, LocalGarbage, LocalSpace
from llm_assets.store.remote_saves import FOLDER as SAVES
from llm_assets.store.remote_saves import saved_identities
from llm_assets.store.retention import Catalog, Retention, keep, live_identities, named_metrics
from llm_assets.store.s3 import S3Store
from llm_assets.store.sweep import FOLDER, LEASE, TTL_S, WAITED, announce

GRACE_S = 24 * 3600.0
"""Artifacts and blobs younger than this stay: between put and record nothing reaches them."""

LOCAL_GRACE_S = 3600.0
"""Linked folders and cached files that were used within this time stay: a reader has no claim."""

_RENEW_S = TTL_S / 6
_TRIES = 50

AnyStore = DirectoryStore | S3Store


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a collection keeps. `also`: artifacts named by the caller. `grace_s` is for objects,
    `local_grace_s`, if it is longer, for what is on this machine only."""

    retention: Retention = field(default_factory=Retention)
    grace_s: float = GRACE_S
    local_grace_s: float = LOCAL_GRACE_S
    also: tuple[ArtifactHash, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Garbage:
    """One artifact that would go."""

    artifact: ArtifactHash
    type: str
    stages: tuple[str, ...]
    size_bytes: int
    created_at: str


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What a collection would delete, and what it keeps with the reason."""

    kept: dict[ArtifactHash, str]
    artifacts: tuple[Garbage, ...]
    records: tuple[str, ...]
    trees: tuple[Item, ...]
    blobs: tuple[Item, ...]
    uploads: tuple[tuple[str, str], ...]
    saves: tuple[Item, ...]
    local: LocalGarbage

    @property
    def size_bytes(self) -> int:
        """Bytes of the objects, which deleting frees in the store."""
        return sum(item.size_bytes for item in (*self.trees, *self.blobs, *self.saves))

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "kept": {str(artifact): why for artifact, why in sorted(self.kept.items())},
            "artifacts": [dataclasses.asdict(entry) for entry in self.artifacts],
            "records": list(self.records),
            "objects": [item.key for item in (*self.trees, *self.blobs)],
            "uploads": [key for key, _ in self.uploads],
            "checkpoints": [
                *(str(path) for path, _ in self.local.checkpoints),
                *saved_identities(list(self.saves)),
            ],
            "size_bytes": self.size_bytes,
            "local_bytes": self.local.size_bytes,
        }

    @property
    def is_empty(self) -> bool:
        """Nothing to delete."""
        stored = self.records or self.trees or self.blobs or self.uploads or self.saves
        return not stored and self.local.is_empty


def make_plan(store: AnyStore, settings: Settings) -> Plan:
    """What a collection would delete now. DamagedError when what must be kept can't be known."""
    uploads = tuple(store.open_uploads())
    # Blobs are listed before anything that may reach them is read: a blob that is listed and then
    # reached is kept, one that comes later is not listed.
    stored_blobs = [*store.backend.items("objects/blobs"), *store.backend.items("objects/parts")]
    catalog = Catalog.read(store)
    _check_metrics(settings.retention, catalog)
    kept = keep(store, catalog, settings.retention, grace_s=settings.grace_s, extra=settings.also)
    needed: set[str] = set(_needed_blobs(catalog, kept))
    now = store.backend.now()
    trees = [
        item
        for item in store.backend.items("objects/trees")
        if _name(item) in catalog.trees and _name(item) not in kept
    ]
    blobs = [
        item
        for item in stored_blobs
        if _name(item) not in needed
        and (settings.grace_s <= 0 or now - item.modified >= settings.grace_s)
    ]
    records = [
        key
        for key, record in catalog.records
        if settings.retention.expires_records and record.output not in kept
    ]
    claimed = set(store.backend.claimed())
    live = live_identities(store)
    committed = {record.identity for _, record in catalog.records}
    local = LocalSpace(store.local_root, store.sessions, is_cache=isinstance(store, S3Store))
    return Plan(
        kept=kept,
        artifacts=tuple(_describe(catalog, ArtifactHash(_name(item)), item) for item in trees),
        records=tuple(records),
        trees=tuple(trees),
        blobs=tuple(blobs),
        uploads=tuple(
            (key, upload)
            for key, upload in uploads
            if key not in claimed and _identity_of(key) not in live
        ),
        saves=tuple(_remote_saves(store, live, committed, settings.grace_s)),
        local=local.garbage(
            kept=set(kept),
            blobs=needed,
            live=live,
            committed=committed,
            grace_s=max(settings.grace_s, settings.local_grace_s),
        ),
    )


def _remote_saves(
    store: AnyStore, live: set[Identity], committed: set[Identity], grace_s: float
) -> Iterator[Item]:
    """Copies of saves of identities that nobody trains and that are committed, or were not written
    to for 30 days: documents before files."""
    if not isinstance(store, S3Store):
        return
    groups: dict[str, list[Item]] = {}
    for item in store.backend.items(SAVES):
        groups.setdefault(_identity_of(item.key), []).append(item)
    now = store.backend.now()
    for identity, items in groups.items():
        if identity in live:
            continue
        wait_s = max(grace_s, 0.0 if identity in committed else CHECKPOINT_DAYS * 86_400.0)
        if wait_s <= 0 or now - max(item.modified for item in items) >= wait_s:
            yield from sorted(items, key=lambda item: item.key.count("/"))


def _identity_of(key: str) -> str:
    """Of a key below `checkpoints/`; "" for another."""
    folder, _, rest = key.partition("/")
    return rest.partition("/")[0] if folder == SAVES else ""


def collect(store: AnyStore, settings: Settings, planned: Plan | None = None) -> Plan:
    """Delete what `planned` names (all that is garbage, without it); what was deleted.

    Safe beside running writers, readers and other collectors: ConflictError when another one runs.
    """
    lease = _acquire(store)
    mark = ""
    try:
        first = planned or make_plan(store, settings)
        # Marks of collectors that died: this one holds their lease.
        for item in store.backend.items(FOLDER):
            store.backend.delete(item.key)
        mark = announce(store.backend, lease, _keys(first))
        claimed = set(store.backend.claimed())
        final = _still(first, make_plan(store, settings), claimed)
        _Sweep(store, lease).run(final)
        return final
    finally:
        if mark:
            store.backend.delete(mark)
        lease.release()


def _acquire(store: AnyStore) -> HeldLease:
    owner = f"gc on {socket.gethostname()}, process {os.getpid()}"
    for _ in range(_TRIES):
        lease = store.leases.acquire(LEASE, owner=owner, ttl_s=TTL_S)
        if lease is not None:
            return lease
        holder = store.lease_owner(LEASE)
        if holder not in (None, WAITED):
            break
        # A writer holds it for a moment, to end a collection that died.
        time.sleep(0.1)
    raise ConflictError(
        message(
            where=store.url,
            found=f"garbage collection runs already: {holder}",
            rule="one collection at a time",
            remedy=f"wait for it; one that died is over after {TTL_S:g} s",
        )
    )


class _Sweep:
    """The deleting, with the lease kept alive and looked at before each step."""

    def __init__(self, store: AnyStore, lease: HeldLease) -> None:
        self._store = store
        self._lease = lease
        self._renewed = time.monotonic()

    def run(self, plan: Plan) -> None:
        store = self._store
        for key in plan.records:
            self._step()
            store.backend.delete(key)
        for item in (*plan.trees, *plan.blobs):
            self._step()
            store.delete_object(item)
        for key, upload in plan.uploads:
            self._step()
            store.abort_upload(key, upload)
        for item in plan.saves:
            self._step()
            store.backend.delete(item.key)
        plan.local.delete(self._step)

    def _step(self) -> None:
        """Stop when the lease may be lost: a writer that waited may rely on the objects by now."""
        if time.monotonic() - self._renewed > _RENEW_S:
            self._lease.renew()
            self._renewed = time.monotonic()


def _still(first: Plan, second: Plan, claimed: set[str]) -> Plan:
    """What both plans name and nobody claims."""

    def both(one: Sequence[Item], other: Sequence[Item]) -> tuple[Item, ...]:
        keys = {item.key for item in other}
        return tuple(i for i in one if i.key in keys and claim_key(i.key) not in claimed)

    trees = both(first.trees, second.trees)
    left = {_name(item) for item in trees}
    return Plan(
        kept=second.kept,
        artifacts=tuple(entry for entry in first.artifacts if entry.artifact in left),
        records=tuple(key for key in first.records if key in set(second.records)),
        trees=trees,
        blobs=both(first.blobs, second.blobs),
        uploads=tuple(pair for pair in first.uploads if pair in set(second.uploads)),
        saves=both(first.saves, second.saves),
        local=second.local,
    )


def _keys(plan: Plan) -> Iterator[str]:
    for item in (*plan.trees, *plan.blobs):
        yield claim_key(item.key)


def claim_key(key: str) -> str:
    """The key that writers claim for an object: a part list goes with its blob."""
    return key.replace("objects/parts/", "objects/blobs/", 1)


def _name(item: Item) -> ArtifactHash:
    return ArtifactHash(item.key.rpartition("/")[2])


def _needed_blobs(catalog: Catalog, kept: Iterable[ArtifactHash]) -> Iterator[BlobHash]:
    for artifact in kept:
        tree = catalog.trees[artifact]
        if tree is None:
            raise DamagedError(
                message(
                    where=f"artifact {artifact}",
                    found="a damaged tree",
                    rule="nothing is deleted while it is unknown which blobs a kept artifact needs",
                    remedy="put the artifact again from its source, then collect",
                )
            )
        yield from (entry.blob for entry in tree.files)


def _describe(catalog: Catalog, artifact: ArtifactHash, item: Item) -> Garbage:
    tree = catalog.trees[artifact]
    records = catalog.by_output.get(artifact, [])
    return Garbage(
        artifact=artifact,
        type=tree.type if tree else "damaged",
        stages=tuple(sorted({record.stage for record in records})),
        size_bytes=tree.size_bytes if tree else item.size_bytes,
        created_at=max((record.created_at for record in records), default=""),
    )


def _check_metrics(retention: Retention, catalog: Catalog) -> None:
    known = named_metrics(catalog)
    for rule in retention.best:
        if rule.metric not in known:
            raise RefusedError(
                message(
                    where=f"retention by metric {rule.metric!r}",
                    found="no record with this metric",
                    rule="the best by a metric is looked for among the records that have it",
                    remedy=f"use one of: {', '.join(sorted(known)) or 'none is recorded yet'}",
                )
            )
