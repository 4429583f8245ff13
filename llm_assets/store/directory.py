"""The store in a directory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from llm_assets.errors import DamagedError, NotFoundError, StoreError
from llm_assets.store.backend import Item
from llm_assets.store.canonical import encode
from llm_assets.store.digest import ArtifactHash, BlobHash, Identity
from llm_assets.store.directory_backend import DirectoryBackend, disk_errors
from llm_assets.store.document_store import DocumentStore, artifact_keys, identity_folders
from llm_assets.store.documents import encode_tree, make_tree, parse_tree
from llm_assets.store.ingest import Ingested, ingest
from llm_assets.store.local_objects import LocalObjects, not_found, sync_folders
from llm_assets.store.protocol import Damage, FileEntry, Tree
from llm_assets.store.scanning import SourceFile, scan
from llm_assets.store.sessions import Sessions
from llm_assets.store.stat_cache import StatCache
from llm_assets.store.sweep import rely
from llm_assets.store.types import check_type


class DirectoryStore(DocumentStore):
    """A store below one directory; see docs/store.md for its layout and promises."""

    def __init__(self, root: Path) -> None:
        """`root` must be a store already: opening.py makes one."""
        self.root = Path(os.path.abspath(root))
        self.url = str(self.root)
        self.sessions = Sessions(self.root)
        self.objects = LocalObjects(self.root, self.sessions)
        super().__init__(DirectoryBackend(self.root, self.sessions))

    def close(self) -> None:
        """Delete this process's temporary files. The store may be used again after."""
        self.sessions.close()

    @property
    def local_root(self) -> Path:
        """Where checkouts, notes and temporary files are."""
        return self.root

    # For garbage collection only

    def delete_object(self, item: Item) -> None:
        """Delete a blob or a tree, and what is noted about it."""
        with contextlib.suppress(ValueError):
            blob = BlobHash.parse(item.key.rpartition("/")[2])
            self.objects.forget(blob)
            self.objects.forget_size(blob, item.size_bytes)
        self.backend.delete(item.key)

    def open_uploads(self) -> Iterator[tuple[str, str]]:
        """None: what a dead writer leaves is in its session."""
        return iter(())

    def abort_upload(self, key: str, upload: str) -> None:
        """Never called: see open_uploads."""
        raise StoreError(f"{self.url}: a directory has no uploads ({key}, {upload})")

    # Putting

    def put(self, folder: Path, *, type: str, metadata: Mapping[str, Any]) -> ArtifactHash:
        """Store a folder. Blobs first, synced; then the tree, synced. See the Protocol."""
        encode(metadata, f"metadata of {folder}")
        files = scan(folder)
        check_type(folder, type, metadata)
        cache = StatCache(self.root / "cache", folder)
        claim = self.backend.claim()
        try:
            unchanged, read = self._read(files, cache)
            tree = make_tree(
                type,
                [
                    *(_entry(file, blob) for file, blob in unchanged),
                    *(_entry(found.file, found.blob) for found in read),
                ],
                metadata,
            )
            artifact, content = encode_tree(tree)
            rely(self.backend, claim, artifact_keys(artifact, tree))
            self._publish_blobs(tree, files, read)
            self._publish_tree(artifact, content)
            cache.keep(unchanged, read)
            return artifact
        finally:
            claim.close()

    def _read(
        self, files: Sequence[SourceFile], cache: StatCache
    ) -> tuple[list[tuple[SourceFile, BlobHash]], list[Ingested]]:
        """Files whose blob is known and stored, and the others, hashed and copied as needed."""
        unchanged, rest = [], []
        for file in files:
            blob = cache.known(file)
            if blob is not None and self.objects.has_blob(blob, file.stat.size_bytes):
                unchanged.append((file, blob))
            else:
                rest.append(file)
        looks_stored = {
            file.path
            for file in rest
            if self.objects.looks_stored(file.source, file.stat.size_bytes)
        }
        read = self._ingest(rest, skip=looks_stored)
        missing = {
            found.file.path: found
            for found in read
            if found.copy is None
            and not self.objects.has_blob(found.blob, found.file.stat.size_bytes)
        }
        if missing:
            again = self._ingest([found.file for found in missing.values()])
            read = [found for found in read if found.file.path not in missing] + again
        return unchanged, read

    def _ingest(
        self, files: Sequence[SourceFile], skip: set[str] | frozenset[str] = frozenset()
    ) -> list[Ingested]:
        session = self.sessions.current()
        copies: list[Path] = []

        def copy_to(file: SourceFile) -> Path | None:
            if file.path in skip:
                return None
            copies.append(session.temporary("blob"))
            return copies[-1]

        try:
            return ingest(files, copy_to)
        except BaseException:
            for copy in copies:
                copy.unlink(missing_ok=True)
            raise

    def _publish_blobs(
        self, tree: Tree, files: Sequence[SourceFile], read: Sequence[Ingested]
    ) -> None:
        """Link the copies under their names; copy what was counted on and is not whole."""
        folders = []
        for found in read:
            if found.copy is not None:
                folder = self.objects.publish_blob(
                    found.copy, found.blob, found.file.stat.size_bytes, durable=True
                )
                folders += [folder] if folder else []
        broken = {e.path for e in tree.files if not self.objects.is_whole(e.blob, e.size_bytes)}
        if broken:
            for again in self._ingest([file for file in files if file.path in broken]):
                wanted = next(entry for entry in tree.files if entry.path == again.file.path)
                if again.blob != wanted.blob or again.copy is None:
                    raise StoreError(f"{again.file.source}: the file changed while it was stored")
                folder = self.objects.publish_blob(
                    again.copy, again.blob, wanted.size_bytes, durable=True
                )
                folders += [folder] if folder else []
        sync_folders(folders)

    def _publish_tree(self, artifact: ArtifactHash, content: bytes) -> None:
        path = self.objects.tree_path(artifact)
        key = str(path.relative_to(self.root))
        if self.backend.create(key, content):
            return
        # The age of an artifact counts from its last put.
        with disk_errors(path, len(content)):
            if path.read_bytes() == content:
                os.utime(path)
            else:
                self.backend.replace(key, content)

    # Reading

    def has(self, artifact: ArtifactHash) -> bool:
        """The tree and all its blobs are there, by name and size; a damaged tree is not there."""
        try:
            tree = self.tree(artifact)
        except (NotFoundError, DamagedError):
            return False
        return all(self.objects.has_blob(e.blob, e.size_bytes) for e in tree.files)

    def tree(self, artifact: ArtifactHash) -> Tree:
        """The artifact's document, its hash checked."""
        try:
            content = self.objects.tree_path(artifact).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise not_found(self.url, artifact) from None
        return parse_tree(content, artifact)

    def fetch(self, artifact: ArtifactHash) -> Path:
        """A folder of hard links to the artifact's verified blobs."""
        if self.objects.checkout_stands(artifact):
            return self.objects.checkout_path(artifact)
        return self.objects.checkout(artifact, self.tree(artifact))

    def verify(self, artifact: ArtifactHash, *, deep: bool = False) -> list[Damage]:
        """Read and hash everything; `deep` changes nothing on a directory."""
        return self.verify_many([artifact])[artifact]

    def verify_many(
        self, artifacts: Sequence[ArtifactHash], *, deep: bool = False
    ) -> dict[ArtifactHash, list[Damage]]:
        """`verify` of several artifacts; a blob that they share is read once."""
        trees: dict[ArtifactHash, Tree] = {}
        damage: dict[ArtifactHash, list[Damage]] = {artifact: [] for artifact in artifacts}
        for artifact in artifacts:
            try:
                trees[artifact] = self.tree(artifact)
            except DamagedError as error:
                damage[artifact].append(Damage(artifact=artifact, path="", what=str(error)))
        wrong = self.objects.check_blobs([e for tree in trees.values() for e in tree.files])
        for artifact, tree in trees.items():
            damage[artifact] += [
                Damage(artifact=artifact, path=entry.path, what=wrong[entry.blob])
                for entry in tree.files
                if entry.blob in wrong
            ]
            if damage[artifact]:
                # Its files are the damaged blobs' own, also after these were put again.
                self.objects.drop_checkout(artifact)
        return damage

    def checkpoints(self, identity: Identity) -> Path:
        """`checkpoints/<identity>`, made when it is not there."""
        folder = self.root / "checkpoints" / identity
        with disk_errors(folder, 0):
            folder.mkdir(parents=True, exist_ok=True)
        return folder

    def checkpoint_folders(self) -> dict[Identity, Path]:
        """See the Protocol."""
        return identity_folders(self.root / "checkpoints")


def _entry(file: SourceFile, blob: BlobHash) -> FileEntry:
    return FileEntry(path=file.path, size_bytes=file.stat.size_bytes, blob=blob)
