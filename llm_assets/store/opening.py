"""From a URL to a store."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path
from urllib.parse import unquote, urlsplit

from llm_assets.errors import DamagedError, NotFoundError, RefusedError, message
from llm_assets.store.canonical import check_format, decode, encode
from llm_assets.store.directory import DirectoryStore
from llm_assets.store.directory_backend import disk_errors, make_folders, sync_folder

FORMAT_KEY = "format.json"
FORMAT_DOCUMENT = encode({"format": 1, "what": "llm-assets store"}, FORMAT_KEY)


def open_directory(root: Path, *, create: bool = True) -> DirectoryStore:
    """The store at `root`. With `create` an absent or empty directory becomes one; otherwise
    NotFoundError. RefusedError for a directory that holds something else, or another format."""
    with disk_errors(root, len(FORMAT_DOCUMENT)):
        document = root / FORMAT_KEY
        if not document.exists():
            if root.exists() and not root.is_dir():
                raise _no_store(root, "no directory")
            if root.is_dir() and any(not name.startswith(".format-") for name in os.listdir(root)):
                # Looked at again: another process may have made the store between the two looks.
                if not document.exists():
                    raise _no_store(root, "a directory with other things in it")
            elif not create:
                raise NotFoundError(
                    message(
                        where=str(root),
                        found="no store",
                        rule="a store is made before it is read",
                        remedy="`llm-assets store init`, or give the right path",
                    )
                )
            else:
                _make(root)
        check_store_format(document.read_bytes(), str(document))
    return DirectoryStore(root)


def _make(root: Path) -> None:
    make_folders(root)
    temporary = root / f".format-{secrets.token_hex(4)}"
    with temporary.open("wb") as file:
        file.write(FORMAT_DOCUMENT)
        file.flush()
        os.fsync(file.fileno())
    with contextlib.suppress(FileExistsError):
        os.link(temporary, root / FORMAT_KEY)
    temporary.unlink()
    sync_folder(root)


def check_store_format(content: bytes, where: str) -> None:
    """RefusedError for another format, DamagedError for no format document."""
    value = decode(content, where)
    check_format(value, where)
    if content != FORMAT_DOCUMENT:
        raise DamagedError(f"{where}: no format document of an llm-assets store")


def directory_of(url: str) -> Path:
    """The path that a plain path or a file:// URL names."""
    parts = urlsplit(url)
    if parts.scheme != "file":
        return Path(url).expanduser()
    if parts.netloc not in ("", "localhost") or not parts.path:
        raise RefusedError(f"{url}: a file URL is file:///absolute/path")
    return Path(unquote(parts.path))


def _no_store(root: Path, found: str) -> RefusedError:
    return RefusedError(
        message(
            where=str(root),
            found=found,
            rule="a store stands alone in its directory",
            remedy="give an empty or absent directory",
        )
    )
