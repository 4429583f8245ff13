"""Small documents in a directory: written to a temporary file, synced, linked under their name."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from llm_assets.errors import NotFoundError, StoreError, StoreFullError, message
from llm_assets.store.backend import Claim, Item
from llm_assets.store.sessions import DirectoryClaim, Sessions, live_claims

FULL = (errno.ENOSPC, errno.EDQUOT)


class DirectoryBackend:
    """The documents of the store at `root`."""

    def __init__(self, root: Path, sessions: Sessions) -> None:
        self.root = root
        self.where = str(root)
        self.sessions = sessions

    def create(self, key: str, content: bytes, *, durable: bool = True) -> bool:
        """Write, sync, link: a name is taken by a whole document or by none."""
        path = self.root / key
        if path.exists():
            return False
        temporary = self.sessions.current().temporary("document")
        with disk_errors(path, len(content)):
            _write(temporary, content, durable)
            try:
                return publish(temporary, path, durable=durable)
            finally:
                temporary.unlink(missing_ok=True)

    def read(self, key: str) -> bytes:
        """The file's bytes."""
        try:
            return (self.root / key).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            raise NotFoundError(f"{self.where}: there is no {key}") from None

    def replace(self, key: str, content: bytes) -> None:
        """Write, then rename over the old one."""
        path = self.root / key
        temporary = self.sessions.current().temporary("document")
        with disk_errors(path, len(content)):
            _write(temporary, content, False)
            path.parent.mkdir(parents=True, exist_ok=True)
            os.replace(temporary, path)

    def delete(self, key: str) -> None:
        """Unlink."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.unlink(self.root / key)

    def items(self, prefix: str) -> list[Item]:
        """All files below the folder."""
        return sorted(self._walk(prefix), key=lambda item: item.key)

    def _walk(self, prefix: str) -> Iterator[Item]:
        try:
            entries = list(os.scandir(self.root / prefix))
        except (FileNotFoundError, NotADirectoryError):
            return
        for entry in entries:
            key = f"{prefix}/{entry.name}"
            if entry.is_dir(follow_symlinks=False):
                yield from self._walk(key)
                continue
            with contextlib.suppress(FileNotFoundError):
                found = entry.stat(follow_symlinks=False)
                yield Item(key=key, size_bytes=found.st_size, modified=found.st_mtime)

    def now(self) -> float:
        """The machine's clock: that of the file system, where it is local."""
        return time.time()

    def claim(self) -> Claim:
        """A file of this process's session."""
        return DirectoryClaim(self.sessions.current())

    def claimed(self) -> Sequence[str]:
        """From the sessions that are alive."""
        return live_claims(self.root)


def _write(path: Path, content: bytes, durable: bool) -> None:
    with path.open("wb") as file:
        file.write(content)
        if durable:
            file.flush()
            os.fsync(file.fileno())


def publish(temporary: Path, path: Path, *, durable: bool = True) -> bool:
    """Link a finished file under its final name. False when the name is taken."""
    make_folders(path.parent, durable=durable)
    try:
        os.link(temporary, path)
    except FileExistsError:
        return False
    except OSError as error:
        if error.errno in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
            raise StoreError(
                message(
                    where=str(path),
                    found=f"hard links are refused ({error.strerror})",
                    rule="a directory store publishes by linking, so that a name is never half",
                    remedy="keep the store on a file system with hard links, or in S3",
                )
            ) from error
        raise
    if durable:
        sync_folder(path.parent)
    return True


def make_folders(folder: Path, *, durable: bool = True) -> None:
    """mkdir -p; a folder that is new is durable when this returns."""
    if folder.is_dir():
        return
    make_folders(folder.parent, durable=durable)
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
    if durable:
        sync_folder(folder.parent)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextlib.contextmanager
def disk_errors(path: Path, needed_bytes: int) -> Iterator[None]:
    """Turn a full disk into a StoreFullError that names the path and the bytes missing, and any
    other OSError into a StoreError."""
    try:
        yield
    except OSError as error:
        if error.errno in FULL:
            raise full(path, needed_bytes) from error
        raise StoreError(f"{error.filename or path}: {error.strerror or error}") from error


def full(path: Path, needed_bytes: int) -> StoreFullError:
    """The error for a disk that can't take `needed_bytes` more."""
    parent = path
    while not parent.exists() and parent != parent.parent:
        parent = parent.parent
    state = os.statvfs(parent)
    free = state.f_bavail * state.f_frsize
    missing = max(1, needed_bytes - free)
    return StoreFullError(
        message(
            where=str(path),
            found=f"no space left: {missing} bytes missing ({needed_bytes} needed, {free} free)",
            rule="an artifact is stored whole or not at all; nothing of this one is visible",
            remedy="free the space (`llm-assets store gc`) and put it again",
        )
    )
