"""The one encoding of every document in a store: canonical JSON, and sealed small documents.

Canonical: UTF-8, sorted keys, no spaces, no NaN or infinity, text keys only. What is read must be
the canonical encoding of what it says, byte for byte; so one document has one hash.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

from llm_assets.errors import DamagedError, RefusedError, message

FORMAT = 1
"""Version of the store's layout and documents. A reader refuses any other."""

_MAX_DEPTH = 64
_MAX_INT = 2**63


def encode(value: Any, where: str) -> bytes:
    """The canonical bytes of `value`; RefusedError when it has no canonical form."""
    return _dump(plain(value, where), where)


def plain(value: Any, where: str) -> Any:
    """`value` with mappings as dict and sequences as list; RefusedError when it is not JSON."""
    return _plain(value, where, 0)


def _plain(value: Any, where: str, depth: int) -> Any:
    if depth > _MAX_DEPTH:
        raise _refused(where, f"nested deeper than {_MAX_DEPTH}", "flatten the value")
    # A subclass of str, int or float (a digest, an IntEnum, a numpy float) becomes the plain type.
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        if not -_MAX_INT <= value < _MAX_INT:
            raise _refused(where, "a whole number beyond 64 bits", "store it as text")
        return int(value)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise _refused(where, f"{float(value)!r}", "leave the value out, or store it as text")
        return float(value)
    if isinstance(value, Mapping):
        return {
            _key(key, where): _plain(v, f"{where}.{key}", depth + 1) for key, v in value.items()
        }
    if isinstance(value, list | tuple):
        return [_plain(v, f"{where}[{i}]", depth + 1) for i, v in enumerate(value)]
    raise _refused(
        where, f"a {type(value).__name__}", "turn it into numbers, texts, lists, mappings"
    )


def _key(key: object, where: str) -> str:
    if not isinstance(key, str):
        raise _refused(where, f"the key {key!r}", "use text keys")
    return str(key)


def _refused(where: str, found: str, remedy: str) -> RefusedError:
    return RefusedError(
        message(
            where=where,
            found=found,
            rule="a document is JSON with text keys and finite numbers",
            remedy=remedy,
        )
    )


def _dump(value: Any, where: str) -> bytes:
    try:
        text = json.dumps(
            value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
        )
        return text.encode("utf-8", "strict")
    except UnicodeEncodeError as error:
        raise _refused(
            where, "text that is not Unicode (a lone surrogate)", "fix the text"
        ) from error


def decode(content: bytes, where: str) -> dict[str, Any]:
    """The document in `content`; DamagedError unless it is a canonical JSON object."""
    try:
        value = json.loads(content.decode("utf-8", "strict"))
        # Whatever JSON allows beside the canonical form (doubled keys, NaN, other spacing, other
        # spellings of a number) does not survive encoding it again.
        if isinstance(value, dict) and _within_limits(value) and _dump(value, where) == content:
            return value
    except (ValueError, RecursionError) as error:
        raise _damaged(where, f"no canonical JSON ({type(error).__name__})") from error
    raise _damaged(where, "no canonical JSON object")


def _within_limits(value: dict[str, Any]) -> bool:
    """What `plain` would refuse of a value that JSON gave: its depth, and whole numbers."""
    waiting: list[tuple[Any, int]] = [(value, 0)]
    while waiting:
        current, depth = waiting.pop()
        if depth >= _MAX_DEPTH and current:
            return False
        for entry in current.values() if isinstance(current, dict) else current:
            kind = type(entry)
            if kind is dict or kind is list:
                waiting.append((entry, depth + 1))
            elif kind is int and not -_MAX_INT <= entry < _MAX_INT:
                return False
    return True


def _damaged(where: str, found: str) -> DamagedError:
    return DamagedError(
        message(
            where=where,
            found=found,
            rule="a stored document is canonical JSON",
            remedy="run `llm-assets store verify`, and put the artifact or record again",
        )
    )


def check_format(value: Mapping[str, Any], where: str) -> None:
    """RefusedError for a document of another format version, DamagedError for none."""
    found = value.get("format")
    if isinstance(found, bool) or not isinstance(found, int):
        raise _damaged(where, f"format {found!r}")
    if found != FORMAT:
        raise RefusedError(
            message(
                where=where,
                found=f"format {found}",
                rule=f"this version of llm-assets reads store format {FORMAT}",
                remedy="install the version of llm-assets that wrote it",
            )
        )


def seal(body: Mapping[str, Any], where: str) -> bytes:
    """A small document: its body, the format version and the SHA-256 of the canonical body."""
    content = encode(body, where)
    digest = hashlib.sha256(content).hexdigest()
    return b'{"body":' + content + f',"format":{FORMAT},"sha256":"{digest}"}}'.encode()


def unseal(content: bytes, where: str) -> dict[str, Any]:
    """The body of a small document; DamagedError when it has not its digest."""
    value = decode(content, where)
    check_format(value, where)
    body = value.get("body")
    if set(value) != {"body", "format", "sha256"} or not isinstance(body, dict):
        raise _damaged(where, f"the fields {sorted(value)}")
    # The document is canonical, so the body's own bytes stand in it as `seal` put them.
    tail = f',"format":{FORMAT},"sha256":{json.dumps(value["sha256"])}}}'.encode()
    sealed = content[len(b'{"body":') : len(content) - len(tail)]
    if hashlib.sha256(sealed).hexdigest() != value["sha256"]:
        raise _damaged(where, "a body that has not its digest")
    return body
