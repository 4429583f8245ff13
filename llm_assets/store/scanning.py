"""What a folder holds, as the files of an artifact. Refuses what an artifact can't hold."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from llm_assets.errors import RefusedError, message
from llm_assets.store.names import check_clashes, check_path


@dataclass(frozen=True, kw_only=True)
class Stat:
    """What tells a changed file from an unchanged one."""

    device: int
    inode: int
    size_bytes: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, found: os.stat_result) -> Stat:
        """From os.stat."""
        return cls(
            device=found.st_dev,
            inode=found.st_ino,
            size_bytes=found.st_size,
            mtime_ns=found.st_mtime_ns,
            ctime_ns=found.st_ctime_ns,
        )


@dataclass(frozen=True, kw_only=True)
class SourceFile:
    """A file to store: its path in the artifact, where its bytes are, and its state when found."""

    path: str
    source: Path
    stat: Stat


def scan(folder: Path) -> list[SourceFile]:
    """The files below `folder`, in path order.

    A symbolic link to a file of the same folder counts as that file. Empty folders are no part of
    an artifact. RefusedError for links that leave the folder or lead to a folder, for devices,
    sockets and pipes, and for names that check_path or check_clashes refuses.
    """
    if not folder.is_dir():
        raise RefusedError(
            message(
                where=str(folder),
                found="no folder" if folder.exists() else "nothing",
                rule="an artifact is made from a folder",
                remedy="give the folder that holds the files",
            )
        )
    root = os.path.realpath(folder)
    files = sorted(_walk(root, root, str(folder)), key=lambda file: file.path)
    check_clashes((file.path for file in files), str(folder))
    if not files:
        raise RefusedError(
            message(
                where=str(folder),
                found="no file",
                rule="an artifact holds at least one file",
                remedy="write the files before putting the folder",
            )
        )
    return files


def _walk(root: str, folder: str, shown: str) -> list[SourceFile]:
    files: list[SourceFile] = []
    try:
        entries = list(os.scandir(folder))
    except OSError as error:
        raise _refused(
            folder, f"unreadable ({error.strerror})", "every file is readable"
        ) from error
    for entry in entries:
        path = os.path.relpath(entry.path, root)
        check_path(path, shown)
        if entry.is_symlink():
            files.append(_linked(root, entry.path, path))
        elif entry.is_dir(follow_symlinks=False):
            files.extend(_walk(root, entry.path, shown))
        else:
            files.append(_file(entry.path, path))
    return files


def _linked(root: str, link: str, path: str) -> SourceFile:
    target = os.path.realpath(link)
    if not target.startswith(root + os.sep) or not os.path.isfile(target):
        raise _refused(
            link,
            f"a symbolic link to {os.readlink(link)}",
            "a link in an artifact leads to a file of the same folder",
        )
    return _file(target, path)


def _file(source: str, path: str) -> SourceFile:
    try:
        found = os.stat(source, follow_symlinks=False)
    except OSError as error:
        raise _refused(
            source, f"unreadable ({error.strerror})", "every file is readable"
        ) from error
    if not stat.S_ISREG(found.st_mode):
        raise _refused(source, "a device, socket or pipe", "an artifact holds regular files only")
    return SourceFile(path=path, source=Path(source), stat=Stat.of(found))


def _refused(where: str, found: str, rule: str) -> RefusedError:
    remedy = "replace it by a regular file (`cp -rL` copies what links lead to), or take it out"
    return RefusedError(message(where=where, found=found, rule=rule, remedy=remedy))
