"""Records, refs, entries and leases of a store, the same for every backend."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from llm_assets.errors import ConflictError, DamagedError, NotFoundError, RefusedError, message
from llm_assets.store.backend import Backend
from llm_assets.store.canonical import encode, seal, unseal
from llm_assets.store.clock import utc_now
from llm_assets.store.digest import ArtifactHash, Identity
from llm_assets.store.documents import record_body, unseal_record
from llm_assets.store.leases import HeldLease, LeaseBook
from llm_assets.store.names import decode_name, encode_name
from llm_assets.store.protocol import Lease, Record, RefMove, RemoteSaves, Tree
from llm_assets.store.sweep import relying_on

RESERVED = frozenset(
    ("objects", "records", "refs", "leases", "checkpoints", "checkouts", "cache", "tmp", "gc")
)


class DocumentStore:
    """The part of a store that is small documents; a subclass adds the artifacts."""

    url: str

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.leases = LeaseBook(backend, self._publish_record)

    def has(self, artifact: ArtifactHash) -> bool:
        """See the Protocol; each implementation looks its own objects up."""
        raise NotImplementedError

    def tree(self, artifact: ArtifactHash) -> Tree:
        """See the Protocol."""
        raise NotImplementedError

    def artifacts(self) -> Iterator[ArtifactHash]:
        """All artifacts, in hash order."""
        for item in self.backend.items("objects/trees"):
            with contextlib.suppress(ValueError):
                yield ArtifactHash.parse(item.key.rpartition("/")[2])

    # Records

    def add_record(self, record: Record, *, lease: Lease | None = None) -> None:
        """Commit: append to the records of an identity. See the Protocol."""
        body = record_body(record)
        with relying_on(self.backend, self._object_keys(record.output)):
            if not self.has(record.output):
                raise NotFoundError(
                    message(
                        where=f"record of {record.stage}",
                        found=f"its output {record.output.short} is not in {self.backend.where}",
                        rule="a record is the commit of an artifact that is stored already",
                        remedy="put the artifact before its record",
                    )
                )
            if isinstance(lease, HeldLease):
                lease.commit(body)
            elif lease is not None:
                lease.check()
            self._publish_record(body)

    def _object_keys(self, artifact: ArtifactHash) -> list[str]:
        """Keys of an artifact's tree and blobs, for a claim."""
        try:
            return artifact_keys(artifact, self.tree(artifact))
        except NotFoundError:
            return [tree_key(artifact)]

    def _publish_record(self, body: Mapping[str, Any]) -> None:
        folder = _record_folder(Identity.parse(body["identity"]))
        content = seal(body, "record")
        while True:
            keys = [item.key for item in self.backend.items(folder)]
            # A commit that is published again (by its owner, or by who took the lease over) finds
            # itself: the same bytes are the same commit.
            if any(self._read_if_there(key) == content for key in keys):
                return
            if self.backend.create(_numbered(folder, _highest(folder, keys) + 1), content):
                return

    def records(self, identity: Identity) -> list[Record]:
        """The records of an identity, oldest first."""
        found = []
        for item in self.backend.items(_record_folder(identity)):
            if (content := self._read_if_there(item.key)) is None:
                continue
            record = unseal_record(content, self._where(item.key))
            if record.identity != identity:
                raise DamagedError(f"{self._where(item.key)} is a record of {record.identity}")
            found.append(record)
        return found

    def all_records(self) -> Iterator[Record]:
        """Every record of the store."""
        for _, record in self.record_items():
            yield record

    def record_stamps(self) -> dict[str, str]:
        """Keys of all records, each with what tells another document under the same key."""
        items = self.backend.items("records")
        return {item.key: f"{item.size_bytes}:{item.modified}" for item in items}

    def record_at(self, key: str) -> Record:
        """The record under a key; NotFoundError when it is gone."""
        return unseal_record(self.backend.read(key), self._where(key))

    def record_items(self) -> Iterator[tuple[str, Record]]:
        """Every record with its key, in key order."""
        for item in self.backend.items("records"):
            if (content := self._read_if_there(item.key)) is not None:
                yield item.key, unseal_record(content, self._where(item.key))

    def _read_if_there(self, key: str) -> bytes | None:
        """A listed document; None when it expired since it was listed."""
        try:
            return self.backend.read(key)
        except NotFoundError:
            return None

    # Refs

    def ref(self, name: str) -> ArtifactHash | None:
        """Where a ref stands; None when it was never set."""
        _, move = self._last_move(name)
        return move.artifact if move else None

    def move_ref(
        self,
        name: str,
        artifact: ArtifactHash,
        *,
        expected: ArtifactHash | None,
        who: str,
        why: str,
    ) -> None:
        """Compare and swap, logged: the move is the next number of the ref's log, write-once."""
        with relying_on(self.backend, self._object_keys(artifact)):
            if not self.has(artifact):
                raise NotFoundError(
                    message(
                        where=f"ref {name}",
                        found=f"{artifact[:12]} is not in {self.backend.where}",
                        rule="a ref stands on an artifact of its store",
                        remedy="`llm-assets store ls` lists the artifacts",
                    )
                )
            number, last = self._last_move(name)
            current = last.artifact if last else None
            if current != expected:
                raise _ref_moved(name, current, expected)
            body = {
                "name": name,
                "number": number + 1,
                "artifact": str(artifact),
                "previous": str(current) if current else None,
                "at": utc_now(),
                "who": who,
                "why": why,
            }
            key = _numbered(_ref_folder(name), number + 1)
            content = seal(body, f"ref {name}")
            if not self.backend.create(key, content) and self.backend.read(key) != content:
                raise _ref_moved(name, self.ref(name), expected)

    def refs(self) -> dict[str, ArtifactHash]:
        """All refs, in name order."""
        newest: dict[str, str] = {}
        for item in self.backend.items("refs"):
            folder = item.key.rpartition("/")[0]
            newest[folder] = max(newest.get(folder, ""), item.key)
        names = {decode_name(folder.removeprefix("refs/")): key for folder, key in newest.items()}
        return {name: self._move(name, names[name]).artifact for name in sorted(names)}

    def ref_log(self, name: str) -> list[RefMove]:
        """The moves of a ref, oldest first."""
        return [self._move(name, key) for key in self._move_keys(name)]

    def _move_keys(self, name: str) -> list[str]:
        folder = _ref_folder(name)
        keys = [item.key for item in self.backend.items(folder)]
        # Deeper keys are those of the refs below this name.
        return [key for key in keys if "/" not in key[len(folder) + 1 :]]

    def _last_move(self, name: str) -> tuple[int, RefMove | None]:
        keys = self._move_keys(name)
        if not keys:
            return 0, None
        return _highest(_ref_folder(name), keys), self._move(name, max(keys))

    def _move(self, name: str, key: str) -> RefMove:
        body = unseal(self.backend.read(key), self._where(key))
        try:
            if body["name"] != name or _numbered(_ref_folder(name), body["number"]) != key:
                raise ValueError(f"it says {body['name']} {body['number']}")
            previous = body["previous"]
            return RefMove(
                name=name,
                artifact=ArtifactHash.parse(body["artifact"]),
                previous=None if previous is None else ArtifactHash.parse(previous),
                at=str(body["at"]),
                who=str(body["who"]),
                why=str(body["why"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedError(
                f"{self._where(key)} is no move of the ref {name}: {error}"
            ) from None

    # Entries

    def add_entry(self, kind: str, key: str, body: Mapping[str, Any]) -> None:
        """A small write-once JSON document. See the Protocol."""
        stored = f"{_kind_folder(kind)}/{encode_name(key, kind)}.json"
        document = {"kind": kind, "key": key, "value": dict(body)}
        content = seal(document, f"{kind} {key}")
        claimed = list(hashes_in(document)) if kind == "pins" else []
        keys = [found for artifact in claimed for found in self._object_keys(artifact)]
        with relying_on(self.backend, keys):
            if self.backend.create(stored, content):
                return
        found = unseal(self.backend.read(stored), self._where(stored))
        if encode(found, stored) != encode(document, stored):
            raise ConflictError(
                message(
                    where=f"{kind} {key}",
                    found="another document under this key",
                    rule="an entry is written once",
                    remedy="use a new key",
                )
            )

    def entries(self, kind: str, prefix: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
        """The documents of one kind whose key starts with `prefix`, in key order."""
        folder = _kind_folder(kind)
        above = prefix.rpartition("/")[0]
        inside = f"{folder}/{encode_name(above, kind)}" if above else folder
        found: dict[str, str] = {}
        for item in self.backend.items(inside):
            name = decode_name(item.key[len(folder) + 1 :].removesuffix(".json"))
            if name.startswith(prefix):
                found[name] = item.key
        for name in sorted(found):
            body = unseal(self.backend.read(found[name]), self._where(found[name]))
            if body.get("key") != name or body.get("kind") != kind:
                raise DamagedError(f"{self._where(found[name])} is not the {kind} entry {name}")
            if not isinstance(body.get("value"), dict):
                raise DamagedError(f"{self._where(found[name])} has no value")
            yield name, body["value"]

    # Leases

    def acquire(
        self, name: str, *, owner: str, ttl_s: float, reaches: Iterable[str] = ()
    ) -> Lease | None:
        """Take a lease, or take it over when its heartbeat is too old. `reaches`: artifacts that
        garbage collection keeps while the lease is alive."""
        return self.leases.acquire(name, owner=owner, ttl_s=ttl_s, reaches=reaches)

    def lease_owner(self, name: str) -> str | None:
        """Who holds the lease now and is alive; None when nobody does."""
        top = self.leases.top(name)
        return top.owner if top and top.alive else None

    def end_lease(self, name: str, owner: str) -> None:
        """See the Protocol."""
        self.leases.end(name, owner)

    def checkpoints(self, identity: Identity) -> Path:
        """See the Protocol."""
        raise NotImplementedError

    def checkpoint_folders(self) -> dict[Identity, Path]:
        """See the Protocol."""
        raise NotImplementedError

    def remote_saves(self, identity: Identity) -> RemoteSaves | None:
        """None: saves are in the store's own folder."""
        return None

    def remote_identities(self) -> list[Identity]:
        """None, for the same reason."""
        return []

    def _where(self, key: str) -> str:
        return f"{self.backend.where}: {key}"


def identity_folders(root: Path) -> dict[Identity, Path]:
    """The folders directly in `root` that are named by an identity."""
    found = {}
    for path in sorted(root.iterdir()) if root.is_dir() else ():
        with contextlib.suppress(ValueError):
            found[Identity.parse(path.name)] = path
    return found


def tree_key(artifact: ArtifactHash) -> str:
    """Key of an artifact's tree."""
    return f"objects/trees/{artifact[:2]}/{artifact}"


def blob_key(blob: str) -> str:
    """Key of a blob."""
    return f"objects/blobs/{blob[:2]}/{blob}"


def artifact_keys(artifact: ArtifactHash, tree: Tree) -> list[str]:
    """Keys of all objects of an artifact."""
    return [tree_key(artifact), *sorted({blob_key(entry.blob) for entry in tree.files})]


def hashes_in(value: Any) -> Iterator[ArtifactHash]:
    """Every text inside a JSON value that has the form of an artifact hash, keys included."""
    if isinstance(value, str):
        for part in value.replace("/", " ").replace(":", " ").split():
            try:
                yield ArtifactHash.parse(part)
            except ValueError:
                continue
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            yield from hashes_in(key)
            yield from hashes_in(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from hashes_in(entry)


def _record_folder(identity: Identity) -> str:
    return f"records/{identity[:2]}/{identity}"


def _ref_folder(name: str) -> str:
    return f"refs/{encode_name(name, 'ref')}"


def _numbered(folder: str, number: int) -> str:
    return f"{folder}/{number:012d}.json"


def _highest(folder: str, keys: Iterable[str]) -> int:
    numbers = [key[len(folder) + 1 :].removesuffix(".json") for key in keys]
    return max((int(text) for text in numbers if text.isdigit()), default=0)


def _kind_folder(kind: str) -> str:
    if not kind.isidentifier() or not kind.isascii() or kind in RESERVED or kind != kind.lower():
        raise RefusedError(
            message(
                where=f"entry kind {kind!r}",
                found="a name that the store does not give to entries",
                rule="a kind is lower-case letters, digits and _, and none of "
                + ", ".join(sorted(RESERVED)),
                remedy="use another kind",
            )
        )
    return kind


def _ref_moved(
    name: str, current: ArtifactHash | None, expected: ArtifactHash | None
) -> ConflictError:
    return ConflictError(
        message(
            where=f"ref {name}",
            found=f"it stands on {current.short if current else 'nothing'}",
            rule=f"it moves only from {expected.short if expected else 'nothing'}, as expected",
            remedy="read the ref again and decide again",
        )
    )
