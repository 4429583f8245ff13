"""The manifest of a save: what it holds, whose it is, and the hash of every file.

A save is a folder `save-NNNNNNNN` (full) or `light-NNNNNNNN`, named by its optimizer step:

    model.safetensors       trained parameters and persistent buffers, by name        (both kinds)
    optimizer.safetensors   optimizer moments, `<parameter index>.<name>`
    rng.safetensors         the generators of every process, `<process>.<generator>`
    loop.json               parameter groups, scheduler and what the schedule says
    data.json               position in the data, the rows that come next, their hash
    trainer_state.json      transformers' TrainerState
    manifest.json           this; written last                                        (both kinds)
    health.json             the verdict, once the save was validated                  (both kinds)

The manifest's `sha256` covers its other keys in their canonical encoding.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from llm_assets.store.direct_io import pieces

FORMAT = 2
MANIFEST = "manifest.json"
FULL_PREFIX = "save-"
LIGHT_PREFIX = "light-"
FULL_FILES = (
    "model.safetensors",
    "optimizer.safetensors",
    "rng.safetensors",
    "loop.json",
    "data.json",
    "trainer_state.json",
)
LIGHT_FILES = ("model.safetensors",)

Kind = Literal["full", "light"]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a save says of itself.

    `counters`: tokens and seconds of training up to `step`. `metrics`: means over the last logged
    steps. `data`: position and order hash. `architecture`: tensors, parameters and the hash of
    names, shapes and types. `lineage`: where the training went on from and what was lost then.
    `stall_s`: the training stood still for this save; `write_s`: written in the background.
    """

    kind: Kind
    step: int
    identity: str
    stage: str
    pipeline: str
    created_at: str
    world_size: int
    environment: Mapping[str, str]
    counters: Mapping[str, float]
    metrics: Mapping[str, float]
    data: Mapping[str, Any]
    architecture: Mapping[str, Any]
    lineage: Mapping[str, Any]
    write_s: float
    stall_s: float
    files: Mapping[str, Mapping[str, Any]]
    format: int = FORMAT
    sha256: str = field(default="")

    @property
    def size_bytes(self) -> int:
        """Of all files together."""
        return sum(int(entry["size_bytes"]) for entry in self.files.values())

    def sealed(self) -> dict[str, Any]:
        """The document, with its own hash."""
        document = asdict(self)
        document["sha256"] = body_hash(document)
        return document


def save_name(kind: Kind, step: int) -> str:
    """The folder's name."""
    return f"{FULL_PREFIX if kind == 'full' else LIGHT_PREFIX}{step:08d}"


def parse_name(name: str) -> tuple[Kind, int] | None:
    """Kind and step of a folder's name; None for a folder that is no save."""
    for prefix, kind in ((FULL_PREFIX, "full"), (LIGHT_PREFIX, "light")):
        number = name.removeprefix(prefix)
        if name.startswith(prefix) and number.isdecimal() and len(number) >= 8:
            return ("full" if kind == "full" else "light"), int(number)
    return None


def read_manifest(save: Path) -> Manifest | str:
    """The manifest of a save's folder; or what is wrong with it."""
    try:
        content = (save / MANIFEST).read_bytes()
    except OSError as error:
        return f"{MANIFEST}: {type(error).__name__}: {error}"
    return parse_manifest(content, save.name)


def parse_manifest(content: bytes | str, name: str) -> Manifest | str:
    """The manifest, when it has its own hash, is of a format that is known and of the save `name`;
    else what is wrong with it."""
    try:
        document = json.loads(content)
        if not isinstance(document, dict):
            return f"{MANIFEST}: no object"
        if document.get("format", FORMAT) != FORMAT:
            return f"{MANIFEST}: format {document['format']}; this version reads {FORMAT}"
        if document.get("sha256") != body_hash(document):
            return f"{MANIFEST}: does not have its own hash"
        manifest = Manifest(**document)
    except (ValueError, TypeError) as error:
        return f"{MANIFEST}: {type(error).__name__}: {error}"
    if parse_name(name) != (manifest.kind, manifest.step):
        return f"{MANIFEST}: is of {save_name(manifest.kind, manifest.step)}"
    return manifest


def file_problems(save: Path, manifest: Manifest) -> dict[str, str]:
    """File name to what is wrong with it; empty when all are there with size and hash."""
    expected = FULL_FILES if manifest.kind == "full" else LIGHT_FILES
    found = {}
    for name in expected:
        entry = manifest.files.get(name)
        if entry is None:
            found[name] = "not in the manifest"
            continue
        wrong = _file_problem(save / name, entry)
        if wrong:
            found[name] = wrong
    return found


def _file_problem(path: Path, entry: Mapping[str, Any]) -> str:
    try:
        size = path.stat().st_size
        if size != entry["size_bytes"]:
            return f"{size} bytes, expected {entry['size_bytes']}"
        if file_hash(path) != entry["sha256"]:
            return "does not have its hash"
    except FileNotFoundError:
        return "missing"
    except OSError as error:
        return f"cannot be read: {error}"
    return ""


def file_hash(path: Path) -> str:
    """SHA-256, hex."""
    digest = hashlib.sha256()
    for piece in pieces(path):
        digest.update(piece)
    return digest.hexdigest()


def body_hash(document: Mapping[str, Any]) -> str:
    """SHA-256 of a document without its key `sha256`."""
    body = {key: value for key, value in document.items() if key != "sha256"}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Write aside, flush to the device, rename: a reader sees the old or the new document."""
    aside = path.with_name(f".{path.name}-{os.getpid()}-{time.monotonic_ns()}")
    try:
        with aside.open("w", encoding="utf-8") as file:
            json.dump(document, file, indent=1, sort_keys=True)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    flush_folder(path.parent)


def flush_folder(folder: Path) -> None:
    """Names in a folder reach the device."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
