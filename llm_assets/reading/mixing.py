"""Which rows of several sources are taken, and which of them are held out.

Every choice follows a stable hash of the row's content, so that it depends neither on the machine
nor on the order of the files, and more data moves as few rows as can be.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

from llm_assets.errors import DataError


@dataclass(slots=True)
class Entry:
    """One row in the spool: where it lies, its content hash and its prompt's hash."""

    source: int
    offset: int
    length: int
    content: bytes
    prompt: bytes
    split: str


class Spool:
    """Rows on disk with a small index in memory: data sets may be larger than the memory.

    A context manager: the file is closed at the end of the block.
    """

    def __init__(self, path: Path) -> None:
        # Append mode: a row goes to the end also after rows were read.
        self._file: IO[bytes] = path.open("a+b")
        self._end = path.stat().st_size
        self.entries: list[Entry] = []

    def add(self, source: int, row: Mapping[str, Any], encoded: bytes) -> None:
        """Append one encoded row."""
        self._file.write(encoded)
        self.entries.append(
            Entry(
                source=source,
                offset=self._end,
                length=len(encoded),
                content=hashlib.sha256(encoded).digest()[:16],
                prompt=prompt_hash(row),
                split=str(row.get("split", "")),
            )
        )
        self._end += len(encoded)

    def read(self, entries: Sequence[Entry]) -> Iterator[bytes]:
        """The encoded rows of `entries`, in their order."""
        self._file.flush()
        for entry in entries:
            self._file.seek(entry.offset)
            yield self._file.read(entry.length)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def prompt_hash(row: Mapping[str, Any]) -> bytes:
    """SHA-256 (first 16 bytes) of the normalized prompt.

    The prompt is what stands before the first assistant turn, system turns excepted, so that a
    dialogue and its own beginning never stand on both sides. White space and the case of ASCII
    letters do not count. Rows of a corpus have none: their whole text counts.
    """
    if "text" in row:
        texts = [row["text"]]
    else:
        turns = row.get("prompt", row.get("messages", ()))
        texts = []
        for turn in turns:
            if turn["role"] == "assistant":
                break
            if turn["role"] == "user":
                texts.append(turn["content"])
    normalized = "\0".join(" ".join(text.split()) for text in texts).encode("utf-8").lower()
    return hashlib.sha256(b"prompt\0" + normalized).digest()[:16]


def take_first(entries: Sequence[Entry], count: int | None) -> list[Entry]:
    """At most `count` entries, the lowest content hashes; the order stays."""
    if count is None or len(entries) <= count:
        return list(entries)
    ranked = sorted(range(len(entries)), key=lambda index: (entries[index].content, index))
    return [entries[index] for index in sorted(ranked[:count])]


def quotas(
    available: Sequence[int], weights: Sequence[float | None], max_rows: int | None
) -> list[int]:
    """How many rows each source gives.

    Without any weight all rows are taken, or `max_rows` of them wherever they come from (then the
    quotas are the sizes). With weights (a source without one counts 1) the shares are those of the
    weights, and the mix is as large as the scarcest source allows, or `max_rows`; no row is
    repeated.
    Rounded by largest remainder, earlier sources first.
    """
    if all(weight is None for weight in weights):
        return list(available)
    shares = [1.0 if weight is None else weight for weight in weights]
    whole = sum(shares)
    exact = [share / whole for share in shares]
    total = min(int(count / part + 1e-9) for count, part in zip(available, exact, strict=True))
    total = min(total, max_rows) if max_rows is not None else total
    given = [min(int(total * part), count) for part, count in zip(exact, available, strict=True)]
    order = sorted(range(len(exact)), key=lambda i: (-(total * exact[i] - given[i]), i))
    for index in order[: total - sum(given)]:
        given[index] = min(given[index] + 1, available[index])
    return given


def mix(
    sources: Sequence[Sequence[Entry]],
    *,
    limits: Sequence[int | None],
    weights: Sequence[float | None],
    max_rows: int | None,
) -> list[list[Entry]]:
    """The entries that are taken of each source: limit, then weights, then `max_rows`."""
    limited = [take_first(entries, limit) for entries, limit in zip(sources, limits, strict=True)]
    counts = quotas([len(entries) for entries in limited], weights, max_rows)
    taken = [take_first(entries, count) for entries, count in zip(limited, counts, strict=True)]
    if max_rows is None:
        return taken
    chosen = {id(e) for e in take_first([e for entries in taken for e in entries], max_rows)}
    return [[entry for entry in entries if id(entry) in chosen] for entries in taken]


@dataclass(frozen=True, kw_only=True)
class Split:
    """Rows to train on, rows held out, and training rows left out for a held-out prompt."""

    train: list[Entry]
    held_out: list[Entry]
    crossing: list[Entry]


def split(entries: Sequence[Entry], held_out: float, *, where: str) -> Split:
    """Divide by the prompt's hash, unless a row says its own split; each side in hash order.

    At least one prompt is held out, however small the share: gates measure on it. A training row
    whose prompt is held out is left out. DataError when a side stays empty.
    """
    ordered = sorted(entries, key=lambda entry: (entry.content, entry.source, entry.offset))
    bound = int(held_out * 2**64)
    outside = [
        entry
        for entry in ordered
        if entry.split == "held_out"
        or (not entry.split and int.from_bytes(entry.prompt[:8], "big") < bound)
    ]
    free = [entry.prompt for entry in ordered if not entry.split]
    if not outside and free:
        least = min(free)
        outside = [entry for entry in ordered if not entry.split and entry.prompt == least]
    prompts = {entry.prompt for entry in outside}
    chosen = {id(entry) for entry in outside}
    rest = [entry for entry in ordered if id(entry) not in chosen]
    result = Split(
        train=[entry for entry in rest if entry.prompt not in prompts],
        held_out=outside,
        crossing=[entry for entry in rest if entry.prompt in prompts],
    )
    if not result.train or not result.held_out:
        side = "to train on" if not result.train else "held out"
        raise DataError(
            where=where,
            found=f"no row is {side} ({len(ordered)} rows, {len({e.prompt for e in ordered})} "
            f"prompts, {len(result.crossing)} with a held-out prompt)",
            rule="there are rows to train on and rows held out, and no prompt is on both sides",
            remedy="give more rows with different prompts, or correct the rows' own `split`",
        )
    return result
