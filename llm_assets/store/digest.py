"""Digests as small parsed types: what names an object, an artifact or an identity."""

from __future__ import annotations

import re
from typing import Self

_HEX = re.compile(r"[0-9a-f]{64}")
_BLOB = re.compile(r"[0-9a-f]{64}(-[1-9][0-9]*)?")


class _Digest(str):
    """A lower-case hex SHA-256. Built by `parse` only; a malformed text is a ValueError."""

    __slots__ = ()
    _pattern = _HEX

    @classmethod
    def parse(cls, text: str) -> Self:
        """The digest that `text` spells; ValueError when it is not one."""
        if not isinstance(text, str) or not cls._pattern.fullmatch(text):
            raise ValueError(f"{text!r} is not a {cls.__name__}: expected 64 lower-case hex digits")
        return cls(text)

    @property
    def short(self) -> str:
        """The first 12 digits, for people."""
        return self[:12]


class ArtifactHash(_Digest):
    """SHA-256 of an artifact's canonical tree document."""

    __slots__ = ()


class Identity(_Digest):
    """SHA-256 over source hash, recipe part, seed and input artifact hashes."""

    __slots__ = ()


class BlobHash(_Digest):
    """SHA-256 over 64 MiB parts: the plain digest, or digest-of-digests with `-N`."""

    __slots__ = ()
    _pattern = _BLOB
