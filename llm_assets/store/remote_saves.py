"""In-training saves in S3, beside the objects: `checkpoints/<identity>/`.

    <name>.json        sealed: files with their part digests, and what the writer says about them
    <name>/<blob>      the bytes of a file, under their hash

The document is written last and removed first, so a save that is listed has been whole. It is
replaced in one request; two writers of one name leave one of their saves and never a mixture.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llm_assets.errors import DamagedError, message
from llm_assets.store.backend import Item
from llm_assets.store.canonical import seal, unseal
from llm_assets.store.digest import BlobHash, Identity
from llm_assets.store.direct_io import buffer
from llm_assets.store.directory_backend import disk_errors, sync_folder
from llm_assets.store.download import PartFile, read_through
from llm_assets.store.hashing import hash_part, join_parts, num_parts, part_range
from llm_assets.store.names import check_path
from llm_assets.store.parallel import in_parallel
from llm_assets.store.s3_backend import WORKERS, S3Backend
from llm_assets.store.transfer import Upload, is_stored, stored_state

FOLDER = "checkpoints"


@dataclass(frozen=True, kw_only=True)
class SavedFile:
    """One file of a save: `digests` of its parts of 64 MiB."""

    name: str
    size_bytes: int
    digests: tuple[bytes, ...]

    @property
    def blob(self) -> BlobHash:
        """The hash of its bytes."""
        return join_parts(self.digests)


class S3Saves:
    """The saves of one identity in S3. For the one process that holds the identity's lease, and
    for readers."""

    def __init__(self, backend: S3Backend, identity: Identity) -> None:
        self.s3, self.backend, self.identity = backend.s3, backend, identity
        self.folder = f"{FOLDER}/{identity}"
        self.where = f"{backend.where}/{self.folder}"

    def put(self, folder: Path, about: Mapping[str, Any]) -> int:
        """See the Protocol. What is there of an earlier try is not sent again."""
        name = check_path(folder.name, self.where)
        files = [_described(path) for path in sorted(folder.iterdir()) if path.is_file()]
        for file in files:
            self._upload(folder / file.name, file, self._key(name, file))
        self._write(name, files, about)
        return sum(file.size_bytes for file in files)

    def _upload(self, path: Path, file: SavedFile, key: str) -> None:
        if is_stored(self.s3, file.blob, file.size_bytes, key):
            return
        upload = Upload(self.s3, path, file.blob, file.digests, replace=True, key=key)
        upload.run(file.size_bytes)

    def restate(self, name: str, about: Mapping[str, Any]) -> None:
        """See the Protocol."""
        self._write(name, self._read(name)[0], about)

    def _write(self, name: str, files: list[SavedFile], about: Mapping[str, Any]) -> None:
        body = {
            "identity": str(self.identity),
            "name": name,
            "files": [
                {
                    "name": file.name,
                    "size_bytes": file.size_bytes,
                    "parts": [digest.hex() for digest in file.digests],
                }
                for file in files
            ],
            "about": dict(about),
        }
        key = self._document(name)
        self.backend.replace(key, seal(body, key))

    def _read(self, name: str) -> tuple[list[SavedFile], dict[str, Any]]:
        key = self._document(name)
        where = f"{self.backend.where}/{key}"
        body = unseal(self.backend.read(key), where)
        try:
            if (body["identity"], body["name"]) != (str(self.identity), name):
                raise ValueError(f"it is of {body['identity']}/{body['name']}")
            files = [
                SavedFile(
                    name=_plain_name(entry["name"], where),
                    size_bytes=int(entry["size_bytes"]),
                    digests=tuple(bytes.fromhex(part) for part in entry["parts"]),
                )
                for entry in body["files"]
            ]
            if any(len(file.digests) != num_parts(file.size_bytes) for file in files):
                raise ValueError("a file with too few or too many parts")
            return files, dict(body["about"])
        except (KeyError, TypeError, ValueError) as error:
            raise DamagedError(f"{where}: {type(error).__name__}: {error}") from error

    def names(self) -> list[str]:
        """See the Protocol."""
        return sorted(
            name.removesuffix(".json")
            for name in map(self._below, self._items())
            if "/" not in name
        )

    def about(self, name: str) -> dict[str, Any]:
        """See the Protocol."""
        return self._read(name)[1]

    def fetch(self, name: str, target: Path) -> None:
        """See the Protocol."""
        files, _ = self._read(name)
        with disk_errors(target, sum(file.size_bytes for file in files)):
            target.mkdir(parents=True, exist_ok=True)
            for left in set(os.listdir(target)) - {file.name for file in files}:
                (target / left).unlink()
        for file in files:
            what = f"{self.folder}/{name}, {file.name}"
            key = self._key(name, file)
            with PartFile(self.s3, key, target / file.name, file.size_bytes, what) as filled:
                filled.fill(file.digests)
                with disk_errors(target, 0):
                    os.fsync(filled.handle)
        with disk_errors(target, 0):
            sync_folder(target)

    def damage(self, name: str) -> dict[str, str]:
        """See the Protocol."""

        def look(file: SavedFile) -> tuple[str, str]:
            key = self._key(name, file)
            state = stored_state(self.s3, file.blob, key)
            if state is None:
                return file.name, "missing"
            if state[0] != file.size_bytes:
                return file.name, f"{state[0]} bytes, expected {file.size_bytes}"
            if not state[1]:
                return file.name, read_through(self.s3, file.blob, file.size_bytes, key)
            wrong = f"the server's checksum is {state[1]}"
            return file.name, wrong if state[1] != file.blob else ""

        found = in_parallel(look, self._read(name)[0], WORKERS)
        return {file: what for file, what in found if what}

    def drop(self, name: str) -> None:
        """See the Protocol."""
        self.backend.delete(self._document(name))
        self._delete([item for item in self._items() if self._below(item).startswith(f"{name}/")])

    def tidy(self) -> None:
        """See the Protocol."""
        items = self._items()
        needed: set[str] = set()
        for name in [self._below(item) for item in items]:
            if "/" in name:
                continue
            try:
                files, _ = self._read(name.removesuffix(".json"))
            except DamagedError:
                # What it needs is not known; it goes with the whole identity.
                needed |= {i.key for i in items if self._below(i).startswith(name[:-5] + "/")}
            else:
                needed |= {self._key(name.removesuffix(".json"), file) for file in files}
        blobs = [item for item in items if "/" in self._below(item)]
        self._delete([item for item in blobs if item.key not in needed])

    def clear(self) -> None:
        """See the Protocol."""
        items = sorted(self._items(), key=lambda item: "/" in self._below(item))
        documents = [item for item in items if "/" not in self._below(item)]
        self._delete(documents)
        self._delete(items[len(documents) :])

    def _delete(self, items: list[Item]) -> None:
        in_parallel(lambda item: self.backend.delete(item.key), items, WORKERS)

    def _items(self) -> list[Item]:
        return self.backend.items(self.folder)

    def _below(self, item: Item) -> str:
        return item.key[len(self.folder) + 1 :]

    def _document(self, name: str) -> str:
        return f"{self.folder}/{check_path(name, self.where)}.json"

    def _key(self, name: str, file: SavedFile) -> str:
        return f"{self.folder}/{name}/{file.blob}"


def saved_identities(items: list[Item]) -> list[Identity]:
    """The identities of a listing of `checkpoints/`."""
    found: dict[Identity, None] = {}
    for item in items:
        try:
            found[Identity.parse(item.key.split("/")[1])] = None
        except (ValueError, IndexError):
            continue
    return sorted(found)


def _described(path: Path) -> SavedFile:
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        size = os.fstat(handle).st_size
        parts = range(num_parts(size))
        digests = [hash_part(handle, *part_range(part, size), buffer()) for part in parts]
    finally:
        os.close(handle)
    return SavedFile(name=path.name, size_bytes=size, digests=tuple(digests))


def _plain_name(name: Any, where: str) -> str:
    if not isinstance(name, str) or "/" in check_path(name, where):
        raise DamagedError(
            message(
                where=where,
                found=f"a file {name!r}",
                rule="a save is one folder of plain files",
                remedy="take another save",
            )
        )
    return name
