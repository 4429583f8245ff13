"""Blobs and trees as files of a directory, and read-only folders linked from them.

The whole of a directory store's objects, and the cache in front of S3. A blob counts as verified
while its file has the inode, size and modification time that it had when its bytes were hashed.
That note is trusted by put and fetch, never by verify.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from llm_assets.errors import DamagedError, NotFoundError, message
from llm_assets.store.digest import ArtifactHash, BlobHash
from llm_assets.store.direct_io import buffer
from llm_assets.store.directory_backend import disk_errors, make_folders, publish, sync_folder
from llm_assets.store.document_store import blob_key, tree_key
from llm_assets.store.hashing import hash_part, join_parts, num_parts, num_workers, part_range
from llm_assets.store.parallel import in_parallel
from llm_assets.store.protocol import FileEntry, Tree
from llm_assets.store.sessions import Sessions

_SIZE_HINT_FROM = 8 * 2**20
_SAMPLES = 32
_SAMPLE_BYTES = 4096


class LocalObjects:
    """The objects below `root`, and the notes about them in `root/cache`."""

    def __init__(self, root: Path, sessions: Sessions) -> None:
        self.root = root
        self.sessions = sessions

    def blob_path(self, blob: BlobHash) -> Path:
        """Where a blob is or would be."""
        return self.root / blob_key(blob)

    def tree_path(self, artifact: ArtifactHash) -> Path:
        """Where a tree is or would be."""
        return self.root / tree_key(artifact)

    def checkout_path(self, artifact: ArtifactHash) -> Path:
        """Where an artifact's linked folder is or would be."""
        return self.root / "checkouts" / artifact

    def has_blob(self, blob: BlobHash, size_bytes: int) -> bool:
        """The blob's file is there and has its size."""
        try:
            return os.stat(self.blob_path(blob)).st_size == size_bytes
        except (FileNotFoundError, NotADirectoryError):
            return False

    # What is known about a blob's file

    def _note_path(self, blob: BlobHash) -> Path:
        return self.root / "cache" / "verified" / blob[:2] / blob

    def note_verified(self, blob: BlobHash) -> None:
        """The file's bytes were hashed just now, and are right."""
        found = os.stat(self.blob_path(blob))
        write_note(self._note_path(blob), _state(found))
        if found.st_size >= _SIZE_HINT_FROM:
            hint = self.root / "cache" / "sizes" / str(found.st_size) / blob
            hint.parent.mkdir(parents=True, exist_ok=True)
            hint.touch()

    def is_verified(self, blob: BlobHash) -> bool:
        """The file is as it was when its bytes were hashed."""
        try:
            return bool(read_note(self._note_path(blob)) == _state(os.stat(self.blob_path(blob))))
        except OSError:
            return False

    def forget(self, blob: BlobHash) -> None:
        """The file is damaged or gone: nothing is known about it."""
        self._note_path(blob).unlink(missing_ok=True)

    def forget_size(self, blob: BlobHash, size_bytes: int) -> None:
        """Drop the hint that a blob of this size is stored."""
        (self.root / "cache" / "sizes" / str(size_bytes) / blob).unlink(missing_ok=True)

    def looks_stored(self, source: Path, size_bytes: int) -> bool:
        """Whether a stored blob has this size and the same bytes in some places: then the file is
        hashed without copying it. A guess that costs a second reading when it is wrong."""
        if size_bytes < _SIZE_HINT_FROM:
            return False
        try:
            hints = os.listdir(self.root / "cache" / "sizes" / str(size_bytes))
        except OSError:
            return False
        return any(_look_equal(source, self.root / blob_key(hint), size_bytes) for hint in hints)

    # Publishing

    def publish_blob(
        self, temporary: Path, blob: BlobHash, size_bytes: int, *, durable: bool
    ) -> Path | None:
        """Put a finished, synced file under its blob's name; the folder that must be synced then,
        None when the blob stood there already. A copy that is damaged is replaced."""
        path = self.blob_path(blob)
        with disk_errors(path, size_bytes):
            make_folders(path.parent, durable=durable)
            fresh = publish(temporary, path, durable=False)
            if not fresh and not self.is_whole(blob, size_bytes):
                os.replace(temporary, path)
                fresh = True
            temporary.unlink(missing_ok=True)
            if fresh:
                self.note_verified(blob)
        return path.parent if fresh else None

    def is_whole(self, blob: BlobHash, size_bytes: int) -> bool:
        """The blob's file is there and has its bytes, by the note or by reading it."""
        if not self.has_blob(blob, size_bytes):
            return False
        if self.is_verified(blob):
            return True
        return self.check_blob(blob, size_bytes) == ""

    def check_blob(self, blob: BlobHash, size_bytes: int) -> str:
        """Read the file; what is wrong with it, empty for a whole one. Keeps the note right."""
        wrong = self.check_blobs([FileEntry(path=blob, size_bytes=size_bytes, blob=blob)])
        return wrong.get(blob, "")

    def check_blobs(self, entries: Iterable[FileEntry]) -> dict[BlobHash, str]:
        """Read the blobs' files, in parts on several threads; what is wrong, by blob."""
        todo = {entry.blob: entry.size_bytes for entry in entries}
        wrong: dict[BlobHash, str] = {}
        digests: dict[BlobHash, list[bytes]] = {}
        tasks: list[tuple[BlobHash, int]] = []
        for blob, size in todo.items():
            if problem := self._file_problem(blob, size):
                wrong[blob] = problem
                continue
            digests[blob] = [b""] * num_parts(size)
            tasks += [(blob, part) for part in range(num_parts(size))]

        def read(task: tuple[BlobHash, int]) -> None:
            blob, part = task
            try:
                digests[blob][part] = _hash_stored(self.blob_path(blob), part, todo[blob])
            except (OSError, EOFError) as error:
                wrong[blob] = f"unreadable ({error})"

        # Twice the cores: half of the threads wait for the disk.
        in_parallel(read, tasks, 2 * num_workers())
        for blob, parts in digests.items():
            if blob not in wrong and join_parts(parts) != blob:
                wrong[blob] = "its bytes do not have its hash"
        for blob in todo:
            if blob in wrong:
                self.forget(blob)
            else:
                self.note_verified(blob)
        return wrong

    def _file_problem(self, blob: BlobHash, size_bytes: int) -> str:
        try:
            found = os.stat(self.blob_path(blob)).st_size
        except (FileNotFoundError, NotADirectoryError):
            return "missing"
        except OSError as error:
            return f"unreadable ({error.strerror})"
        return "" if found == size_bytes else f"{found} bytes instead of {size_bytes}"

    # Checkouts

    def checkout(self, artifact: ArtifactHash, tree: Tree) -> Path:
        """The artifact's folder, made of hard links to verified blobs. All blobs must be here."""
        folder = self.checkout_path(artifact)
        if self.checkout_stands(artifact):
            return folder
        unknown = [entry for entry in tree.files if not self.is_verified(entry.blob)]
        wrong = self.check_blobs(unknown)
        for entry in tree.files:
            if entry.blob in wrong:
                raise blob_damaged(artifact, entry, wrong[entry.blob])
        session = self.sessions.current()
        fresh = session.temporary("checkout")
        with disk_errors(folder, 0):
            self._link(fresh, artifact, tree)
            folder.parent.mkdir(parents=True, exist_ok=True)
            for _ in range(10):
                try:
                    os.rename(fresh, folder)
                    break
                except OSError as error:
                    if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                        raise
                # Another process made it meanwhile, or it is one that does not stand any more.
                if self._same_files(folder, tree):
                    break
                with contextlib.suppress(FileNotFoundError):
                    os.rename(folder, session.temporary("stale"))
            shutil.rmtree(fresh, ignore_errors=True)
            states = {path: state for path, state in _listing(folder)}
            write_note(self._checkout_note(artifact), states)
        return folder

    def checkout_stands(self, artifact: ArtifactHash) -> bool:
        """Whether the folder has exactly the files that it was made with, unchanged."""
        note = read_note(self._checkout_note(artifact))
        if note is None:
            return False
        try:
            stands: bool = dict(_listing(self.checkout_path(artifact))) == note
        except OSError:
            return False
        if stands:
            # The time of last use, for garbage collection.
            with contextlib.suppress(OSError):
                os.utime(self._checkout_note(artifact))
        return stands

    def drop_checkout(self, artifact: ArtifactHash) -> None:
        """Delete the folder. What has a file of it open keeps its bytes."""
        self._checkout_note(artifact).unlink(missing_ok=True)
        shutil.rmtree(self.checkout_path(artifact), ignore_errors=True)

    def _checkout_note(self, artifact: ArtifactHash) -> Path:
        return self.root / "cache" / "checkouts" / artifact

    def _link(self, folder: Path, artifact: ArtifactHash, tree: Tree) -> None:
        folder.mkdir()
        for entry in tree.files:
            target = folder / entry.path
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(self.blob_path(entry.blob), target)
            except FileNotFoundError:
                raise blob_damaged(artifact, entry, "missing") from None
            except OSError as error:
                if error.errno not in (errno.EMLINK, errno.EPERM, errno.EXDEV):
                    raise
                shutil.copyfile(self.blob_path(entry.blob), target)
                target.chmod(0o444)

    def _same_files(self, folder: Path, tree: Tree) -> bool:
        """Whether the folder holds the blobs' own files, which were found verified."""
        try:
            found = {path: state[0] for path, state in _listing(folder)}
            wanted = {
                entry.path: os.stat(self.blob_path(entry.blob)).st_ino for entry in tree.files
            }
        except OSError:
            return False
        return found == wanted


def sync_folders(folders: Iterable[Path]) -> None:
    """Make the names in the folders durable, in parallel."""
    in_parallel(sync_folder, sorted(set(folders)))


def blob_damaged(artifact: ArtifactHash, entry: FileEntry, found: str) -> DamagedError:
    """The error for a file of an artifact whose blob is wrong."""
    return DamagedError(
        message(
            where=f"artifact {artifact[:12]}, file {entry.path}",
            found=f"{found} (blob {entry.blob.short})",
            rule="a file is handed out only when its bytes have their hash",
            remedy="put the artifact again from its source, or rerun its stage",
        )
    )


def not_found(where: str, artifact: ArtifactHash) -> NotFoundError:
    """The error for an artifact that is not in the store."""
    return NotFoundError(
        message(
            where=where,
            found=f"no artifact {artifact}",
            rule="an artifact is named by its whole hash",
            remedy="`llm-assets store ls` lists the artifacts",
        )
    )


def write_note(path: Path, value: Any) -> None:
    """Keep a small JSON value in the cache; a note that can't be kept is no error."""
    keep_file(path, json.dumps(value).encode())


def keep_file(path: Path, content: bytes) -> None:
    """Keep a small file in the cache, whole or not at all; it is no error when it can't be kept."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content)
        os.replace(temporary, path)
    with contextlib.suppress(OSError):
        temporary.unlink(missing_ok=True)


def read_note(path: Path) -> Any:
    """What write_note kept; None when there is nothing or it can't be read."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None


def _state(found: os.stat_result) -> list[int]:
    return [found.st_ino, found.st_size, found.st_mtime_ns]


def _listing(folder: Path) -> list[tuple[str, list[int]]]:
    """Path and state of everything below a folder; a folder that is empty counts as an entry."""
    found: list[tuple[str, list[int]]] = []

    def walk(current: str, prefix: str) -> None:
        entries = list(os.scandir(current))
        if not entries:
            found.append((prefix, [0, 0, 0]))
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                walk(entry.path, f"{prefix}{entry.name}/")
            else:
                found.append((prefix + entry.name, _state(entry.stat(follow_symlinks=False))))

    walk(str(folder), "")
    return found


def _hash_stored(path: Path, part: int, size_bytes: int) -> bytes:
    handle = os.open(path, os.O_RDONLY)
    try:
        return hash_part(handle, *part_range(part, size_bytes), buffer())
    finally:
        os.close(handle)


def _look_equal(left: Path, right: Path, size_bytes: int) -> bool:
    step = max(1, (size_bytes - _SAMPLE_BYTES) // (_SAMPLES - 1))
    try:
        with left.open("rb", buffering=0) as one, right.open("rb", buffering=0) as other:
            if os.fstat(other.fileno()).st_size != size_bytes:
                return False
            return all(
                os.pread(one.fileno(), _SAMPLE_BYTES, start)
                == os.pread(other.fileno(), _SAMPLE_BYTES, start)
                for start in range(0, size_bytes - _SAMPLE_BYTES + 1, step)
            )
    except OSError:
        return False
