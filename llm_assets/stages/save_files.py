"""Writing the files of one save: finite, hashed, flushed, and renamed when all of it is there.

Neither torch nor transformers is imported: a small save is written by the training's own process, a
large one by a process of its own (save_process.py).
"""

from __future__ import annotations

import datetime
import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llm_assets.checkpoints import Manifest
from llm_assets.checkpoints.choosing import PUBLISHED
from llm_assets.checkpoints.manifest import (
    MANIFEST,
    Kind,
    flush_folder,
    save_name,
    write_json,
)
from llm_assets.stages.save_tensors import not_finite_in
from llm_assets.store.direct_io import CHUNK_BYTES, Writer

WRITING = ".writing-"


@dataclass(frozen=True, kw_only=True)
class Request:
    """A save to be written. `documents` are written as JSON; `manifest`: what the writer does not
    know itself; `waits`: the training stands still until it is written."""

    folder: str
    kind: Kind
    step: int
    documents: Mapping[str, Any]
    manifest: Mapping[str, Any]
    stall_s: float
    waits: bool

    @property
    def save(self) -> Path:
        """Its place once it is published."""
        return Path(self.folder) / save_name(self.kind, self.step)

    def stall_with(self, write_s: float) -> float:
        """How long the training stands still when writing takes `write_s`."""
        return self.stall_s + (write_s if self.waits else 0.0)


@dataclass(frozen=True, kw_only=True)
class Written:
    """How a save ended: published (`error` empty), or why it is not there. `not_finite`: the name
    of a weight that is not."""

    kind: Kind
    step: int
    stall_s: float
    write_s: float
    size_bytes: int
    error: str = ""
    not_finite: str = ""


def write_save(
    request: Request, contents: Mapping[str, memoryview], wanted: Callable[[], bool]
) -> Written:
    """Write a save whose tensors stand in memory, by file name. Given up, with nothing left
    behind, when it is not `wanted` any more. Never raises for what the disk says."""
    started = time.monotonic()
    size, error, bad = 0, "", ""
    aside = Path(request.folder) / f"{WRITING}{os.getpid()}-{request.save.name}"
    try:
        bad = not_finite_in(contents["model.safetensors"])
        if bad:
            error = f"{bad} holds NaN or infinity"
        else:
            size = _publish(request, contents, aside, wanted, started)
    except (OSError, ValueError, TypeError) as problem:
        error = f"{type(problem).__name__}: {problem}"
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    write_s = time.monotonic() - started
    return Written(
        kind=request.kind,
        step=request.step,
        stall_s=request.stall_with(write_s),
        write_s=write_s,
        size_bytes=size,
        error=error,
        not_finite=bad,
    )


def _publish(
    request: Request,
    contents: Mapping[str, memoryview],
    aside: Path,
    wanted: Callable[[], bool],
    started: float,
) -> int:
    Path(request.folder).mkdir(parents=True, exist_ok=True)
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    # All at once: a training whose threads wait for each other loses as much to one busy processor
    # as to two, and for half the time.
    with ThreadPoolExecutor(len(contents), "save-file") as pool:
        writes = {
            name: pool.submit(_write_pieces, aside / name, content, wanted)
            for name, content in contents.items()
        }
    files = {name: write.result() for name, write in writes.items()}
    for name, document in request.documents.items():
        files[name] = _write_bytes(aside / name, json.dumps(document, indent=1).encode())
    write_s = time.monotonic() - started
    manifest = Manifest(
        kind=request.kind,
        step=request.step,
        created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
        write_s=write_s,
        stall_s=request.stall_with(write_s),
        files=files,
        **request.manifest,
    )
    document = json.dumps(manifest.sealed(), indent=1, sort_keys=True)
    _write_bytes(aside / MANIFEST, document.encode())
    flush_folder(aside)
    if not wanted():
        raise InterruptedError(_UNWANTED)
    # Only a save that was not gone on from can be there.
    shutil.rmtree(request.save, ignore_errors=True)
    aside.rename(request.save)
    flush_folder(Path(request.folder))
    write_json(Path(request.folder) / PUBLISHED, {"kind": request.kind, "step": request.step})
    return manifest.size_bytes


_UNWANTED = "the training is gone"


def _write_pieces(path: Path, content: memoryview, wanted: Callable[[], bool]) -> dict[str, Any]:
    """Write one file, hash what is written meanwhile, and flush it to the device. What does not
    stand in the page cache is read from the device by the proof."""
    digest = hashlib.sha256()
    file = Writer(path, len(content), os.O_TRUNC, 0o666)
    with ThreadPoolExecutor(1, "save-hasher") as hasher, closing(file):
        for at in range(0, len(content), CHUNK_BYTES):
            if not wanted():
                raise InterruptedError(_UNWANTED)
            piece = content[at : at + CHUNK_BYTES]
            hashed = hasher.submit(digest.update, piece)
            file.write(piece, at)
            hashed.result()
        os.fsync(file.handle)
    return {"size_bytes": len(content), "sha256": digest.hexdigest()}


def _write_bytes(path: Path, content: bytes) -> dict[str, Any]:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return {"size_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
