"""Trees and records as documents: encoding, strict parsing, hashes."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from llm_assets.errors import DamagedError, RefusedError, message
from llm_assets.store.canonical import FORMAT, check_format, decode, encode, plain, unseal
from llm_assets.store.digest import ArtifactHash, BlobHash, Identity
from llm_assets.store.hashing import num_parts
from llm_assets.store.names import check_clashes, check_path
from llm_assets.store.protocol import FileEntry, Record, Tree

_MAX_SIZE = 2**63


def make_tree(type: str, files: Iterable[FileEntry], metadata: Mapping[str, Any]) -> Tree:
    """A tree with its files in path order; RefusedError for bad paths, clashes or metadata."""
    where = f"artifact of type {type}"
    ordered = tuple(sorted(files, key=lambda entry: entry.path))
    for entry in ordered:
        check_path(entry.path, where)
    check_clashes((entry.path for entry in ordered), where)
    return Tree(type=type, files=ordered, metadata=plain(metadata, f"{where}, metadata"))


def encode_tree(tree: Tree) -> tuple[ArtifactHash, bytes]:
    """The tree's name and its canonical bytes."""
    content = encode(
        {
            "files": [
                {"blob": str(e.blob), "path": e.path, "size_bytes": e.size_bytes}
                for e in tree.files
            ],
            "format": FORMAT,
            "metadata": tree.metadata,
            "type": tree.type,
        },
        f"artifact of type {tree.type}",
    )
    return ArtifactHash(hashlib.sha256(content).hexdigest()), content


def parse_tree(content: bytes, artifact: ArtifactHash | None = None) -> Tree:
    """The tree in `content`. DamagedError when it has not the hash `artifact` or is no tree;
    RefusedError for another format version or for paths that no artifact may have."""
    where = f"artifact {artifact[:12]}" if artifact else "artifact"
    if artifact is not None and hashlib.sha256(content).hexdigest() != artifact:
        raise _damaged(where, "a tree that has not its hash")
    value = decode(content, where)
    check_format(value, where)
    if set(value) != {"files", "format", "metadata", "type"}:
        raise _damaged(where, f"the fields {sorted(value)}")
    kind, metadata, files = value["type"], value["metadata"], value["files"]
    if not isinstance(kind, str) or not isinstance(metadata, dict) or not isinstance(files, list):
        raise _damaged(where, "type, metadata or files of the wrong JSON type")
    entries = tuple(_parse_file(entry, where) for entry in files)
    if [entry.path for entry in entries] != sorted(entry.path for entry in entries):
        raise _damaged(where, "files that are not in path order")
    check_clashes((entry.path for entry in entries), where)
    return Tree(type=kind, files=entries, metadata=metadata)


def _parse_file(value: Any, where: str) -> FileEntry:
    if not isinstance(value, dict) or set(value) != {"blob", "path", "size_bytes"}:
        raise _damaged(where, "a file entry with other fields than blob, path, size_bytes")
    path, size = value["path"], value["size_bytes"]
    if not isinstance(path, str) or isinstance(size, bool) or not isinstance(size, int):
        raise _damaged(where, "a file entry with values of the wrong type")
    check_path(path, where)
    try:
        blob = BlobHash.parse(value["blob"])
    except ValueError as error:
        raise _damaged(where, f"{path}: {error}") from None
    if not 0 <= size < _MAX_SIZE or num_parts(size) != blob_parts(blob):
        raise _damaged(where, f"{path}: {size} bytes under the blob {blob}")
    return FileEntry(path=path, size_bytes=size, blob=blob)


def blob_parts(blob: BlobHash) -> int:
    """The number of parts that the blob's name tells."""
    return int(blob[65:] or 1)


@cache
def _record_fields() -> tuple[frozenset[str], frozenset[str]]:
    fields = dataclasses.fields(Record)
    required = frozenset(
        f.name
        for f in fields
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING
    )
    return frozenset(f.name for f in fields), required


def record_body(record: Record) -> dict[str, Any]:
    """The record as a document's body; RefusedError for a value that is not JSON."""
    where = f"record of {record.stage or 'a stage'}"
    body = {name: plain(getattr(record, name), f"{where}, {name}") for name in _record_fields()[0]}
    try:
        parse_record(body, where)
    except DamagedError as error:
        raise RefusedError(str(error)) from None
    return body


def parse_record(body: Mapping[str, Any], where: str) -> Record:
    """The record in a document's body; DamagedError when it is none."""
    known, required = _record_fields()
    # A later field of the same format has a default, so a reader may leave it out but not meet one
    # that it does not know: that would be dropped silently when it is written again.
    if not required <= set(body) <= known:
        wrong = sorted(set(body) ^ known)
        raise _damaged(where, f"fields missing or unknown: {', '.join(wrong)}")
    values = dict(body)
    try:
        values["identity"] = Identity.parse(values["identity"])
        values["output"] = ArtifactHash.parse(values["output"])
    except ValueError as error:
        raise _damaged(where, str(error)) from None
    for name in known & set(values):
        if not _KINDS[name](values[name]):
            raise _damaged(where, f"{name}: {str(values[name])[:80]!r}")
    values["samples"] = tuple(values.get("samples", ()))
    return Record(**values)


def unseal_record(content: bytes, where: str) -> Record:
    """The record of a sealed document."""
    return parse_record(unseal(content, where), where)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_map(value: Any) -> bool:
    return isinstance(value, dict)


def _is_text_map(value: Any) -> bool:
    return isinstance(value, dict) and all(isinstance(entry, str) for entry in value.values())


def _is_metrics(value: Any) -> bool:
    return isinstance(value, dict) and all(
        isinstance(metric, dict) and _is_number(metric.get("value")) for metric in value.values()
    )


def _is_rows(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(row, dict) for row in value)


_KINDS = {
    "identity": _is_text,
    "stage": _is_text,
    "pipeline": _is_text,
    "output": _is_text,
    "type": _is_text,
    "source_hash": _is_text,
    "recipe": _is_map,
    "seed": _is_int,
    "inputs": _is_text_map,
    "metrics": _is_metrics,
    "cost_usd": _is_number,
    "wall_s": _is_number,
    "measure_s": _is_number,
    "created_at": _is_text,
    "run_id": _is_text,
    "tokens": _is_int,
    "flops": _is_number,
    "device": _is_text,
    "modules": _is_text_map,
    "libraries": _is_text_map,
    "environment": _is_text_map,
    "series": _is_map,
    "samples": _is_rows,
    "tables": _is_map,
}


def _damaged(where: str, found: str) -> DamagedError:
    return DamagedError(
        message(
            where=where,
            found=found,
            rule="a stored document has the fields and types of its kind",
            remedy="run `llm-assets store verify`, and put the artifact or record again",
        )
    )
