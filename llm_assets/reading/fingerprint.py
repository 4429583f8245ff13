"""What a source is: the files that it names, and the fingerprint of their content.

A fingerprint holds names relative to the glob and content hashes, never an absolute path or a time:
the same data has the same fingerprint wherever it lies. Unchanged files are not read again: a cache
file remembers their hashes by size, times and inode.
"""

from __future__ import annotations

import glob
import hashlib
import itertools
import json
import os
import re
import tempfile
import time
import unicodedata
from pathlib import Path
from typing import Any

from llm_assets.data_settings import DataSettings, FileSource, HubSource, VillageSource
from llm_assets.errors import DataError
from llm_assets.reading.files import check_readable
from llm_assets.reading.problems import FileRef, shown

_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
_WILDCARD = re.compile(r"[*?\[]")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_BLOCK = 2**20
# A file changed this shortly before it was hashed could change again without a new time stamp.
_SETTLED_NS = 2_000_000_000
_CACHE_VERSION = 1


def expand(text: str, *, where: str) -> str:
    """`${NAME}` and `${NAME:-default}` from the environment; DataError when one is not set."""

    def value(match: re.Match[str]) -> str:
        found = os.environ.get(match[1], "")
        if found:
            return found
        if match[2] is None:
            raise DataError(
                where=where,
                found=f"${{{match[1]}}}, which is not set or empty",
                rule="each variable of a path is set in the environment or has a default",
                remedy=f"export {match[1]}=FOLDER, or write ${{{match[1]}:-FOLDER}}",
            )
        return match[2]

    return _VARIABLE.sub(value, text)


def resolve_files(source: FileSource, recipe_folder: Path) -> list[FileRef]:
    """The files of a source, sorted by label. DataError when a path or glob gives none.

    Relative paths start at `recipe_folder`. A file that two globs match is taken once.
    """
    patterns = [source.files] if isinstance(source.files, str) else list(source.files)
    if not patterns:
        raise DataError(
            where="files: []",
            found="no path",
            rule="a source names at least one path or glob",
            remedy="add one",
        )
    found: dict[Path, FileRef] = {}
    for pattern in patterns:
        for file in _matches(pattern, recipe_folder):
            check_readable(file.path)
            found.setdefault(file.path.resolve(), file)
    # A stable sort: files of equal labels stay in the order of their patterns.
    return sorted(found.values(), key=lambda file: file.label)


def _matches(pattern: str, folder: Path) -> list[FileRef]:
    expanded = Path(os.path.expanduser(expand(pattern, where=pattern)))
    path = Path(os.path.normpath(folder / expanded))
    if path.exists() or not _WILDCARD.search(str(expanded)):
        return [FileRef(path=path, label=_label(path.name))]
    matched = [
        Path(os.path.normpath(folder / name))
        for name in glob.glob(str(expanded), root_dir=folder, recursive=True)
    ]
    files = [entry for entry in matched if not entry.is_dir()]
    if not files:
        raise DataError(
            where=shown(path),
            found="only directories match" if matched else "nothing matches",
            rule="a glob matches at least one file",
            remedy=f"end it with a file's pattern, such as {shown(path)}/*.jsonl"
            if matched
            else f"check the path; {_nearest(path)}",
        )
    fixed = itertools.takewhile(lambda part: not _WILDCARD.search(part), expanded.parts)
    base = Path(os.path.normpath(folder / Path(*fixed)))
    refs = [FileRef(path=entry, label=_label(str(entry.relative_to(base)))) for entry in files]
    return sorted(refs, key=lambda file: file.label)


def _label(name: str) -> str:
    text = os.fsencode(name.replace(os.sep, "/")).decode("utf-8", "replace")
    return unicodedata.normalize("NFC", text)


def _nearest(path: Path) -> str:
    for parent in path.parents:
        if parent.exists():
            names = sorted(entry.name for entry in parent.iterdir())[:5]
            return f"{shown(parent)} holds {', '.join(shown(Path(n)) for n in names) or 'nothing'}"
    return "its root does not exist"


def check_commit(source: HubSource) -> None:
    """DataError unless the revision is a full commit hash."""
    if not _COMMIT.fullmatch(source.revision):
        raise DataError(
            where=f"hub data set {source.name}: revision",
            found=source.revision,
            rule="a revision is a commit hash of 40 hex digits: a branch or tag can move",
            remedy="copy the commit from the data set's page, Files and versions, History",
        )


class HashCache:
    """SHA-256 of files by size, mtime, ctime and inode, kept in a JSON file.

    A damaged or missing cache file is an empty one: the hashes are computed again.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._entries: dict[str, list[Any]] = self._load()
        self._changed = False

    def _load(self) -> dict[str, list[Any]]:
        if self._path is None:
            return {}
        try:
            document = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        if not isinstance(document, dict) or document.get("version") != _CACHE_VERSION:
            return {}
        entries = document.get("files")
        return entries if isinstance(entries, dict) else {}

    def sha256(self, path: Path) -> str:
        """The file's SHA-256; read only when its size, times or inode differ from last time."""
        stat = path.stat()
        key = os.fsencode(path.resolve()).hex()
        state = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
        known = self._entries.get(key)
        if isinstance(known, list) and len(known) == 5 and known[:4] == state:
            return str(known[4])
        begun = time.time_ns()
        digest = hashlib.sha256()
        with path.open("rb") as stream:
            while block := stream.read(_BLOCK):
                digest.update(block)
        if max(stat.st_mtime_ns, stat.st_ctime_ns) < begun - _SETTLED_NS:
            self._entries[key] = [*state, digest.hexdigest()]
            self._changed = True
        return digest.hexdigest()

    def save(self) -> None:
        """Write the cache file, if anything is new. A folder that takes no files is no error."""
        if self._path is None or not self._changed:
            return
        document = {"version": _CACHE_VERSION, "files": self._entries}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self._path.parent, prefix=self._path.name)
            with os.fdopen(handle, "w", encoding="utf-8") as stream:
                json.dump(document, stream)
            os.replace(name, self._path)
        except OSError:
            # Only time is lost: the next call hashes again.
            return
        self._changed = False


def source_hash_of(
    config: DataSettings, recipe_folder: Path, cache_path: Path | None = None
) -> str:
    """Fingerprint of a data set's sources, as 64 hex digits.

    Files: their labels and content. Hub: name, configuration, split and commit. The village: its
    settings. DataError when a file cannot be found or read.
    """
    cache = HashCache(cache_path)
    parts: list[dict[str, Any]] = []
    for source in config.sources:
        if isinstance(source, VillageSource):
            village = config.village.model_dump(mode="json") if config.village else None
            parts.append({"from": "village", "village": village})
        elif isinstance(source, HubSource):
            check_commit(source)
            keys = {"name", "config", "split", "revision"}
            parts.append({"from": "hub", **source.model_dump(mode="json", include=keys)})
        else:
            files = resolve_files(source, recipe_folder)
            hashes = [[file.label, cache.sha256(file.path)] for file in files]
            parts.append({"from": "files", "files": hashes})
    cache.save()
    document = json.dumps(parts, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(document.encode()).hexdigest()
