"""What a store leaves on the machine: checkouts, notes, partial downloads, in-training saves."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass
from pathlib import Path

from llm_assets.store.digest import ArtifactHash, Identity
from llm_assets.store.local_objects import LocalObjects
from llm_assets.store.sessions import Sessions, dead_sessions, reap

CHECKPOINT_DAYS = 30
"""In-training saves of an identity that nobody trains and that has no record."""


@dataclass(frozen=True, kw_only=True)
class LocalGarbage:
    """What may go from this machine. Checkouts are links: they free nothing by themselves."""

    root: Path
    sessions: Sessions
    checkouts: tuple[ArtifactHash, ...]
    files: tuple[tuple[Path, int], ...]
    checkpoints: tuple[tuple[Path, int], ...]
    dead: tuple[tuple[str, int], ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of the files, saves and dead writers' temporary files."""
        return sum(size for found in (self.files, self.checkpoints, self.dead) for _, size in found)

    @property
    def is_empty(self) -> bool:
        """Nothing to delete."""
        return not (self.checkouts or self.files or self.checkpoints or self.dead)

    def delete(self, step: Callable[[], None]) -> None:
        """Delete it all; `step` is called before each, and may stop it by raising."""
        objects = LocalObjects(self.root, self.sessions)
        for artifact in self.checkouts:
            step()
            objects.drop_checkout(artifact)
        for path, _ in self.files:
            step()
            with unlocked(path) as free:
                if free:
                    path.unlink(missing_ok=True)
        for folder, _ in self.checkpoints:
            step()
            shutil.rmtree(folder, ignore_errors=True)
        step()
        reap(self.root)


class LocalSpace:
    """The local side of a store: its directory, or the cache of a store in S3."""

    def __init__(self, root: Path, sessions: Sessions, *, is_cache: bool) -> None:
        self.root = root
        self.sessions = sessions
        self.is_cache = is_cache

    def garbage(
        self,
        *,
        kept: Set[ArtifactHash],
        blobs: Set[str],
        live: Set[Identity],
        committed: Set[Identity],
        grace_s: float,
    ) -> LocalGarbage:
        """What may go: checkouts and cached objects of artifacts that are not kept, saves of
        identities that are committed or given up, temporary files of dead writers."""
        old = time.time() - grace_s
        files = [*self._partial(old)]
        if self.is_cache:
            files += self._objects("objects/blobs", blobs, old)
            files += self._objects("objects/trees", kept, old)
        return LocalGarbage(
            root=self.root,
            sessions=self.sessions,
            checkouts=tuple(self._checkouts(kept, old)),
            files=tuple(files),
            checkpoints=tuple(self._checkpoints(live, committed, old)),
            dead=tuple(dead_sessions(self.root)),
        )

    def _checkouts(self, kept: Set[ArtifactHash], old: float) -> Iterator[ArtifactHash]:
        for folder in _entries(self.root / "checkouts"):
            note = self.root / "cache" / "checkouts" / folder.name
            if folder.name not in kept and max(_modified(note), _modified(folder)) <= old:
                yield ArtifactHash(folder.name)

    def _objects(self, kind: str, needed: Set[str], old: float) -> Iterator[tuple[Path, int]]:
        for folder in _entries(self.root / kind):
            for path in _entries(folder):
                if path.name not in needed and _modified(path) <= old:
                    yield path, _size(path)

    def _partial(self, old: float) -> Iterator[tuple[Path, int]]:
        for path in _entries(self.root / "partial"):
            if path.suffix == ".lock" or _modified(path) > old:
                continue
            with unlocked(path) as free:
                if free:
                    yield path, os.stat(path).st_blocks * 512

    def _checkpoints(
        self, live: Set[Identity], committed: Set[Identity], old: float
    ) -> Iterator[tuple[Path, int]]:
        given_up = time.time() - CHECKPOINT_DAYS * 86_400
        for folder in _entries(self.root / "checkpoints"):
            if folder.name in live:
                continue
            newest = max([_modified(folder), *(_modified(path) for path in folder.rglob("*"))])
            if newest <= (old if folder.name in committed else min(old, given_up)):
                yield folder, sum(_size(path) for path in folder.rglob("*") if path.is_file())


@contextlib.contextmanager
def unlocked(path: Path) -> Iterator[bool]:
    """Whether nobody downloads into this partial file; nobody can while the context lasts."""
    lock = path.with_name(f"{path.name}.lock")
    try:
        handle = os.open(lock, os.O_RDWR)
    except OSError:
        yield True
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        free = True
    except OSError:
        free = False
    try:
        yield free
    finally:
        os.close(handle)


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _modified(path: Path) -> float:
    try:
        return os.stat(path, follow_symlinks=False).st_mtime
    except OSError:
        return 0.0


def _size(path: Path) -> int:
    try:
        return os.stat(path, follow_symlinks=False).st_size
    except OSError:
        return 0
