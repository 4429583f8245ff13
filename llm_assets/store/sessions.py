"""What a running process holds in a directory: temporary files and claims, known to be alive.

Each process has one session: the folder `tmp/<id>` and beside it `tmp/<id>.lock`, which it keeps
locked with flock. The kernel drops the lock when the process ends, however it ends; so a session
whose lock can be taken is dead, and whatever it left may be deleted.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import secrets
import shutil
import threading
import weakref
from collections.abc import Iterable, Iterator
from pathlib import Path

from llm_assets.errors import DamagedError, StoreError, message


class Session:
    """The session of this process in the store at `root`."""

    def __init__(self, root: Path) -> None:
        self._parent = root / "tmp"
        self._pid = os.getpid()
        self._lock_file = -1
        self._counter = itertools.count()
        self._parent.mkdir(parents=True, exist_ok=True)
        reap(root)
        while self._lock_file < 0:
            self.name = secrets.token_hex(8)
            self._lock_file = self._locked(self._parent / f"{self.name}.lock")
        self.folder = self._parent / self.name
        self.folder.mkdir()

    @staticmethod
    def _locked(path: Path) -> int:
        """The open, locked file; -1 when somebody reaped it between the two steps."""
        file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            os.close(file)
            raise StoreError(
                message(
                    where=str(path),
                    found=f"flock is refused ({error.strerror})",
                    rule="a directory store needs a file system with advisory locks",
                    remedy="keep the store on a local disk or NFS 4, or in S3",
                )
            ) from error
        if _same_file(path, file):
            return file
        os.close(file)
        return -1

    def temporary(self, label: str) -> Path:
        """A path in the session's folder that nobody uses."""
        return self.folder / f"{next(self._counter)}-{label}"

    def close(self) -> None:
        """Delete what is left of the session; nothing happens in a forked child."""
        if self._lock_file >= 0 and self._pid == os.getpid():
            shutil.rmtree(self.folder, ignore_errors=True)
            with contextlib.suppress(OSError):
                os.unlink(self._parent / f"{self.name}.lock")
            os.close(self._lock_file)
            self._lock_file = -1


class Sessions:
    """Gives every process its own session, also after a fork."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._pid = 0
        self._session: Session | None = None
        self._guard = threading.Lock()

    def current(self) -> Session:
        """This process's session, begun on the first call."""
        with self._guard:
            if self._session is None or self._pid != os.getpid():
                # After a fork the parent's session stays the parent's: it is not closed here.
                self._session, self._pid = Session(self._root), os.getpid()
                weakref.finalize(self, self._session.close)
            return self._session

    def close(self) -> None:
        """End the session of this process, if it began one."""
        with self._guard:
            if self._session is not None and self._pid == os.getpid():
                self._session.close()
            self._session = None


class DirectoryClaim:
    """A claim as a file `claim-N` of the session, one JSON list a line."""

    def __init__(self, session: Session) -> None:
        self._path = session.temporary("claim")

    def add(self, keys: Iterable[str]) -> None:
        """Append the keys. One write call: a reader sees whole lines only."""
        line = json.dumps(list(keys)).encode() + b"\n"
        with self._path.open("ab", buffering=0) as file:
            file.write(line)

    def close(self) -> None:
        """Delete the file."""
        self._path.unlink(missing_ok=True)


def live_claims(root: Path) -> list[str]:
    """Every key that a live session claims. Dead sessions are reaped."""
    reap(root)
    keys: list[str] = []
    for path in (root / "tmp").glob("*/*-claim"):
        try:
            # A line without its end is a claim that its writer does not rely on yet.
            for line in path.read_bytes().split(b"\n")[:-1]:
                keys.extend(json.loads(line))
        except FileNotFoundError:
            continue
        except ValueError as error:
            raise DamagedError(
                message(
                    where=str(path),
                    found="a claim that is no list of keys",
                    rule="garbage collection must know what running writers need",
                    remedy="wait for the running writers to end, then try again",
                )
            ) from error
    return keys


def is_live(root: Path, name: str) -> bool:
    """Whether the process of a session runs still."""
    try:
        file = os.open(root / "tmp" / f"{name}.lock", os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(file)
    return False


def dead_sessions(root: Path) -> Iterator[tuple[str, int]]:
    """Name and bytes of each session whose process has ended; they stay locked while yielded."""
    for lock in sorted((root / "tmp").glob("*.lock")):
        try:
            file = os.open(lock, os.O_RDWR)
        except OSError:
            continue
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _same_file(lock, file):
                yield lock.stem, _folder_bytes(root / "tmp" / lock.stem)
        except OSError:
            continue
        finally:
            os.close(file)


def reap(root: Path) -> int:
    """Delete what dead sessions left; the number of bytes."""
    freed = 0
    for name, size in dead_sessions(root):
        shutil.rmtree(root / "tmp" / name, ignore_errors=True)
        (root / "tmp" / f"{name}.lock").unlink(missing_ok=True)
        freed += size
    return freed


def _same_file(path: Path, file: int) -> bool:
    try:
        found, held = os.stat(path), os.fstat(file)
    except FileNotFoundError:
        return False
    return (found.st_dev, found.st_ino) == (held.st_dev, held.st_ino)


def _folder_bytes(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(parent, name)).st_size
    return total
