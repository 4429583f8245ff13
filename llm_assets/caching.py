"""Small results that depend on file contents or versions only, kept between processes.

The key says everything that the result depends on, so an entry is never stale. A cache that can't
be read or written is no error: the result is computed again.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def cache_folder() -> Path:
    """`$LLM_ASSETS_CACHE`, or llm-assets under the user's cache folder."""
    if folder := os.environ.get("LLM_ASSETS_CACHE"):
        return Path(folder)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "llm-assets"


def cached_json(key: str, compute: Callable[[], Any]) -> Any:
    """`compute()`, or what it gave earlier for the same key. The value must be JSON."""
    name = hashlib.sha256(key.encode()).hexdigest()
    path = cache_folder() / name[:2] / f"{name[2:]}.json"
    try:
        entry = json.loads(path.read_bytes())
        if entry["key"] == key:
            return entry["value"]
    except (OSError, ValueError, KeyError, TypeError):
        entry = None
    value = compute()
    with contextlib.suppress(OSError):
        write_atomically(path, json.dumps({"key": key, "value": value}).encode())
    return value


def write_atomically(path: Path, content: bytes) -> None:
    """Readers see the old content or the new one, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
