"""The store in S3, with a cache on this machine."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from llm_assets.errors import DamagedError, NotFoundError, StoreError
from llm_assets.store.backend import Item
from llm_assets.store.canonical import encode
from llm_assets.store.digest import ArtifactHash, BlobHash, Identity
from llm_assets.store.directory_backend import disk_errors
from llm_assets.store.document_store import (
    DocumentStore,
    artifact_keys,
    identity_folders,
    tree_key,
)
from llm_assets.store.documents import encode_tree, make_tree, parse_tree
from llm_assets.store.download import download, read_through
from llm_assets.store.ingest import Ingested, ingest
from llm_assets.store.local_objects import LocalObjects, keep_file, not_found
from llm_assets.store.parallel import in_parallel
from llm_assets.store.protocol import Damage, FileEntry, Tree
from llm_assets.store.remote_saves import FOLDER, S3Saves, saved_identities
from llm_assets.store.s3_backend import WORKERS, S3Backend
from llm_assets.store.s3_client import S3Client, TransferDamagedError
from llm_assets.store.scanning import SourceFile, scan
from llm_assets.store.sessions import Sessions
from llm_assets.store.stat_cache import StatCache
from llm_assets.store.sweep import rely
from llm_assets.store.transfer import Upload, stored_state
from llm_assets.store.types import check_type


class S3Store(DocumentStore):
    """A store below a prefix of a bucket; see docs/store.md for its layout and promises."""

    def __init__(self, s3: S3Client, *, url: str, cache: Path) -> None:
        """`cache`: a directory of this machine that may be deleted whenever nothing uses it."""
        self.s3 = s3
        self.url = url
        self.cache = cache
        with disk_errors(cache, 0):
            cache.mkdir(parents=True, exist_ok=True)
        self.sessions = Sessions(cache)
        self.local = LocalObjects(cache, self.sessions)
        self.backend: S3Backend
        super().__init__(S3Backend(s3, cache, self.sessions))

    def close(self) -> None:
        """Delete this process's temporary files. The store may be used again after."""
        self.sessions.close()

    @property
    def local_root(self) -> Path:
        """Where checkouts, notes and temporary files are: the cache."""
        return self.cache

    # For garbage collection only

    def delete_object(self, item: Item) -> None:
        """Delete a blob, a part list or a tree."""
        self.backend.delete(item.key)

    def open_uploads(self) -> Iterator[tuple[str, str]]:
        """Key and id of every multipart upload that was neither completed nor aborted."""
        for folder in ("objects", FOLDER):
            yield from self._open_uploads(folder)

    def _open_uploads(self, folder: str) -> Iterator[tuple[str, str]]:
        cut = len(self.s3.key(""))
        arguments: dict[str, str] = {"Prefix": self.s3.key(f"{folder}/")}
        while True:
            page = self.s3.call("list_multipart_uploads", **arguments)
            for upload in page.get("Uploads", ()):
                yield upload["Key"][cut:], upload["UploadId"]
            if not page.get("IsTruncated"):
                return
            arguments["KeyMarker"] = page["NextKeyMarker"]
            arguments["UploadIdMarker"] = page["NextUploadIdMarker"]

    def abort_upload(self, key: str, upload: str) -> None:
        """Give an upload up, with its parts."""
        with contextlib.suppress(NotFoundError):
            self.s3.call("abort_multipart_upload", Key=self.s3.key(key), UploadId=upload)

    # Putting

    def put(self, folder: Path, *, type: str, metadata: Mapping[str, Any]) -> ArtifactHash:
        """Hash the folder, upload what is new in checked parts, then the tree. See the Protocol."""
        encode(metadata, f"metadata of {folder}")
        files = scan(folder)
        check_type(folder, type, metadata)
        notes = StatCache(self.cache / "cache", folder)
        known = {file.path: blob for file in files if (blob := notes.known(file)) is not None}
        read = ingest([file for file in files if file.path not in known], lambda file: None)
        blobs = {**known, **{found.file.path: found.blob for found in read}}
        tree = make_tree(type, [_entry(file, blobs[file.path]) for file in files], metadata)
        artifact, content = encode_tree(tree)
        claim = self.backend.claim()
        try:
            rely(self.backend, claim, artifact_keys(artifact, tree))
            self._upload(files, known, read)
            # Written again when it stands already: the age of an artifact counts from its last put.
            self.backend.replace(tree_key(artifact), content)
        finally:
            claim.close()
        notes.keep([(file, known[file.path]) for file in files if file.path in known], read)
        return artifact

    def _upload(
        self, files: Sequence[SourceFile], known: Mapping[str, BlobHash], read: Sequence[Ingested]
    ) -> None:
        """Upload every blob that is not stored whole. A file that is known by its state only is
        read when its blob is missing."""
        sources = {found.blob: found for found in read}
        by_note = {blob: f for f in files if (blob := known.get(f.path)) and blob not in sources}
        sizes = {blob: found.file.stat.size_bytes for blob, found in sources.items()}
        sizes |= {blob: file.stat.size_bytes for blob, file in by_note.items()}
        states = in_parallel(lambda blob: (blob, stored_state(self.s3, blob)), sizes, WORKERS)
        todo: list[tuple[Ingested, bool]] = []
        for blob, state in states:
            if state is not None and state[0] == sizes[blob] and state[1] in ("", str(blob)):
                continue
            found = sources.get(blob) or ingest([by_note[blob]], lambda file: None)[0]
            if found.blob != blob:
                raise StoreError(f"{found.file.source}: the file changed while it was stored")
            todo.append((found, state is not None))

        def upload(task: tuple[Ingested, bool]) -> None:
            found, replace = task
            transfer = Upload(self.s3, found.file.source, found.blob, found.parts, replace=replace)
            transfer.run(found.file.stat.size_bytes)

        in_parallel(upload, [task for task in todo if len(task[0].parts) == 1], WORKERS)
        for task in todo:
            if len(task[0].parts) > 1:
                upload(task)

    # Reading

    def has(self, artifact: ArtifactHash) -> bool:
        """The tree and all its blobs are on the server, by name and size."""
        try:
            tree = self._stored_tree(artifact)
        except (NotFoundError, DamagedError):
            return False

        def stands(entry: FileEntry) -> bool:
            state = stored_state(self.s3, entry.blob)
            return state is not None and state[0] == entry.size_bytes

        return all(in_parallel(stands, tree.files, WORKERS))

    def tree(self, artifact: ArtifactHash) -> Tree:
        """The artifact's document, its hash checked; from the cache when it is there."""
        path = self.local.tree_path(artifact)
        with contextlib.suppress(OSError, DamagedError):
            return parse_tree(path.read_bytes(), artifact)
        return self._stored_tree(artifact)

    def _stored_tree(self, artifact: ArtifactHash) -> Tree:
        def read() -> bytes:
            content = self.s3.read_object(tree_key(artifact))
            if hashlib.sha256(content).hexdigest() != artifact:
                raise TransferDamagedError(f"artifact {artifact[:12]}: a tree without its hash")
            return content

        try:
            content = self.s3.attempt(f"tree {artifact[:12]}", read)
        except NotFoundError:
            raise not_found(self.s3.where, artifact) from None
        tree = parse_tree(content, artifact)
        keep_file(self.local.tree_path(artifact), content)
        return tree

    def fetch(self, artifact: ArtifactHash) -> Path:
        """The artifact's folder in the cache, downloaded as needed."""
        if self.local.checkout_stands(artifact):
            return self.local.checkout_path(artifact)
        tree = self.tree(artifact)
        try:
            download(self.s3, self.local, tree.files)
        except DamagedError as error:
            raise DamagedError(f"artifact {artifact[:12]}: {error}") from error
        try:
            return self.local.checkout(artifact, tree)
        except DamagedError:
            # The cache lost a blob meanwhile: to a collection on this machine, or to a person.
            download(self.s3, self.local, tree.files)
            return self.local.checkout(artifact, tree)

    def verify(self, artifact: ArtifactHash, *, deep: bool = False) -> list[Damage]:
        """Ask the server for the checksums that it keeps; `deep` downloads and hashes."""
        return self.verify_many([artifact], deep=deep)[artifact]

    def verify_many(
        self, artifacts: Sequence[ArtifactHash], *, deep: bool = False
    ) -> dict[ArtifactHash, list[Damage]]:
        """`verify` of several artifacts; a blob that they share is asked for once."""
        trees: dict[ArtifactHash, Tree] = {}
        damage: dict[ArtifactHash, list[Damage]] = {artifact: [] for artifact in artifacts}
        for artifact in artifacts:
            try:
                trees[artifact] = self._stored_tree(artifact)
            except DamagedError as error:
                damage[artifact].append(Damage(artifact=artifact, path="", what=str(error)))
        entries = {entry.blob: entry for tree in trees.values() for entry in tree.files}
        found = in_parallel(
            lambda entry: (entry.blob, self._check(entry, deep)), entries.values(), WORKERS
        )
        wrong = dict(found)
        for artifact, tree in trees.items():
            damage[artifact] += [
                Damage(artifact=artifact, path=entry.path, what=wrong[entry.blob])
                for entry in tree.files
                if wrong[entry.blob]
            ]
        return damage

    def _check(self, entry: FileEntry, deep: bool) -> str:
        state = stored_state(self.s3, entry.blob)
        if state is None:
            return "missing"
        size, computed = state
        if size != entry.size_bytes:
            return f"{size} bytes instead of {entry.size_bytes}"
        if computed and computed != entry.blob:
            return f"the server's checksum is {computed}"
        if deep or not computed:
            return read_through(self.s3, entry.blob, entry.size_bytes)
        return ""

    def checkpoints(self, identity: Identity) -> Path:
        """A folder of the cache; `remote_saves` has the copies that outlive the machine."""
        folder = self.cache / "checkpoints" / identity
        with disk_errors(folder, 0):
            folder.mkdir(parents=True, exist_ok=True)
        return folder

    def checkpoint_folders(self) -> dict[Identity, Path]:
        """See the Protocol."""
        return identity_folders(self.cache / "checkpoints")

    def remote_saves(self, identity: Identity) -> S3Saves:
        """See the Protocol."""
        return S3Saves(self.backend, identity)

    def remote_identities(self) -> list[Identity]:
        """See the Protocol."""
        return saved_identities(self.backend.items(FOLDER))


def _entry(file: SourceFile, blob: BlobHash) -> FileEntry:
    return FileEntry(path=file.path, size_bytes=file.stat.size_bytes, blob=blob)
