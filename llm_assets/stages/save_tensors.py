"""Safetensors files without torch: their header, and whether their values are finite.

Format: https://huggingface.co/docs/safetensors, eight bytes little-endian header length, a JSON
header of name to {dtype, shape, data_offsets}, the data.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llm_assets.store.direct_io import CHUNK_BYTES, pieces

WIDTHS: Mapping[str, int] = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "U16": 2,
    "U32": 4,
    "U64": 8,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
}
_FLOATS = {"F64": np.float64, "F32": np.float32, "F16": np.float16}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One tensor of a file: bytes `start` to `end` of the data, which begins at `data_start`."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_header(path: Path) -> tuple[dict[str, Entry], int]:
    """Tensors by name, and where the data begins. ValueError for a file that is not whole."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = _header_length(file.read(8), size)
        return _entries(file.read(length), size)


def _header_length(first: bytes | memoryview, size: int) -> int:
    length = int.from_bytes(first, "little")
    if length > size - 8:
        raise ValueError(f"a header of {length} bytes in a file of {size}")
    return length


def _entries(header: bytes, size: int) -> tuple[dict[str, Entry], int]:
    document, data_start = json.loads(header), 8 + len(header)
    entries, at = {}, 0
    document.pop("__metadata__", None)
    for name, value in sorted(document.items(), key=lambda item: item[1]["data_offsets"]):
        start, end = value["data_offsets"]
        entry = Entry(dtype=value["dtype"], shape=tuple(value["shape"]), start=start, end=end)
        if start != at or end - start != WIDTHS[entry.dtype] * count(entry.shape):
            raise ValueError(f"{name}: bytes {start} to {end} are not its {entry.shape}")
        entries[name] = entry
        at = end
    if data_start + at != size:
        raise ValueError(f"{size - data_start} bytes of data, expected {at}")
    return entries, data_start


def count(shape: Sequence[int]) -> int:
    """Elements of a shape."""
    return int(np.prod(shape, dtype=np.int64)) if shape else 1


def layout_hash(tensors: Mapping[str, tuple[str, Sequence[int]]]) -> str:
    """One hash over names, types and shapes."""
    text = json.dumps(
        sorted([name, dtype, list(shape)] for name, (dtype, shape) in tensors.items())
    )
    return hashlib.sha256(text.encode()).hexdigest()


def all_finite(data: memoryview, dtype: str) -> bool:
    """Whether bytes of this type hold neither NaN nor infinity. Integers always do."""
    if dtype == "BF16":
        return not bool(((np.frombuffer(data, dtype=np.uint16) & 0x7F80) == 0x7F80).any())
    kind = _FLOATS.get(dtype)
    return kind is None or bool(np.isfinite(np.frombuffer(data, dtype=kind)).all())


def not_finite(path: Path) -> str:
    """The first tensor of a file that holds NaN or infinity; "" without one."""
    entries, data_start = read_header(path)
    return _not_finite(entries, data_start, pieces(path))


def not_finite_in(content: memoryview) -> str:
    """The same of a file's content in memory."""
    size = len(content)
    data_start = 8 + _header_length(content[:8], size)
    entries, _ = _entries(bytes(content[8:data_start]), size)
    every = (content[at : at + CHUNK_BYTES] for at in range(0, size, CHUNK_BYTES))
    return _not_finite(entries, data_start, every)


def _not_finite(entries: Mapping[str, Entry], start: int, content: Iterable[memoryview]) -> str:
    """`content`: pieces of the file, whose data begins at `start`; `entries` in its order. Every
    tensor lies at a multiple of its width, as writers of the format see to: no value lies across
    the end of a piece."""
    left = iter([(name, entry) for name, entry in entries.items() if entry.end > entry.start])
    name, entry = next(left, ("", None))
    begin = -start
    for piece in content:
        end = begin + len(piece)
        while entry is not None and entry.start < end:
            own = piece[max(entry.start, begin) - begin : min(entry.end, end) - begin]
            if not all_finite(own, entry.dtype):
                return name
            if entry.end > end:
                break
            name, entry = next(left, ("", None))
        begin = end
    return ""


def read_values(path: Path, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Small tensors of float32, or an integer type, as arrays."""
    entries, data_start = read_header(path)
    kinds = {"F32": "<f4", "F64": "<f8", "I64": "<i8", "U8": "u1", "U32": "<u4", "I32": "<i4"}
    found = {}
    with path.open("rb") as file:
        for name in names:
            entry = entries[name]
            file.seek(data_start + entry.start)
            raw = file.read(entry.end - entry.start)
            found[name] = np.frombuffer(raw, dtype=kinds[entry.dtype]).reshape(entry.shape)
    return found
