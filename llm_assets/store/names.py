"""Paths inside an artifact, and the keys under which refs, leases and entries are stored."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from urllib.parse import quote, unquote

from llm_assets.errors import RefusedError, message

_MAX_SEGMENT = 255
_MAX_PATH = 1024
_MAX_KEY = 900


def _refuse(where: str, found: str, rule: str, remedy: str) -> RefusedError:
    return RefusedError(message(where=where, found=found, rule=rule, remedy=remedy))


def check_path(path: str, where: str) -> str:
    """`path` when it may name a file of an artifact; RefusedError otherwise.

    It is relative, POSIX, Unicode, without `.`, `..`, empty segments, backslashes or control
    characters; a segment has at most 255 bytes, a path 1024.
    """
    rule = "a path in an artifact is relative and stays inside it"
    remedy = "rename the file"
    try:
        size = len(path.encode("utf-8", "strict"))
    except UnicodeEncodeError:
        raise _refuse(where, f"the name {path!r}", "file names are UTF-8", remedy) from None
    if not path or path.startswith("/") or size > _MAX_PATH:
        raise _refuse(where, f"the path {path[:80]!r} of {size} bytes", rule, remedy)
    if any(ch == "\\" or unicodedata.category(ch) == "Cc" for ch in path):
        raise _refuse(where, f"the path {path!r}", "no backslash or control character", remedy)
    for segment in path.split("/"):
        if segment in ("", ".", "..") or len(segment.encode()) > _MAX_SEGMENT:
            raise _refuse(where, f"the path {path!r}", rule, remedy)
    return path


def _fold(text: str) -> str:
    # Folding can leave a text that is not normalized, so it is normalized on both sides.
    return unicodedata.normalize("NFC", unicodedata.normalize("NFD", text).casefold())


def check_clashes(paths: Iterable[str], where: str) -> None:
    """RefusedError when two names differ by case or normalization only, or a file is a folder."""
    seen: dict[str, tuple[str, bool]] = {}
    for path in paths:
        segments = path.split("/")
        for depth in range(1, len(segments) + 1):
            name, is_file = "/".join(segments[:depth]), depth == len(segments)
            folded = _fold(name)
            if folded not in seen:
                seen[folded] = (name, is_file)
            elif is_file or seen[folded] != (name, False):
                raise _refuse(
                    where,
                    f"{name!r} beside {seen[folded][0]!r}",
                    "names in an artifact differ by more than case or Unicode normalization, and "
                    "none is both file and folder",
                    "rename one of them",
                )


def encode_name(name: str, what: str) -> str:
    """The key of a ref, lease or entry called `name`: each segment percent-encoded.

    Segments are kept apart by `/`. A folder's name never ends in `.json`, so that the entry `a` and
    the entry `a.json/b` do not meet. RefusedError for an empty segment or a name that is too long.
    """
    where = f"{what} {name!r}"
    segments = name.split("/")
    try:
        encoded = [_encode_segment(segment) for segment in segments]
    except UnicodeEncodeError:
        raise _refuse(where, "text that is not Unicode", "names are UTF-8", "rename it") from None
    key = "/".join(encoded)
    if "" in segments or len(key) > _MAX_KEY or any(len(s) > _MAX_SEGMENT - 8 for s in encoded):
        raise _refuse(
            where,
            f"{len(segments)} segments, {len(key)} bytes as a key",
            f"a name has no empty segment and at most {_MAX_KEY} bytes, a segment "
            f"{_MAX_SEGMENT - 8}",
            "use a shorter name without doubled slashes",
        )
    return key


def _encode_segment(segment: str) -> str:
    text = quote(segment, safe="@+=,:")
    if text.startswith("."):
        text = "%2E" + text[1:]
    if text.endswith((".json", ".beat")):
        text = text[:-5] + "%2E" + text[-4:]
    return text


def decode_name(key: str) -> str:
    """The inverse of `encode_name`."""
    return "/".join(unquote(segment, errors="strict") for segment in key.split("/"))
