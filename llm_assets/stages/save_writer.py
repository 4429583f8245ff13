"""Writes saves beside the training: hash, flush, rename, prove, remove what is not kept.

The training hands over a `Pending` whose buffers hold the state of one step, and goes on. One
thread of the lowest priority writes it; never two at once, and the buffers are free again when
`wait` returns. A small save is waited for, with its proof: both are short, and a process that is
killed has lost no more than one interval.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llm_assets.checkpoints import Manifest, SaveInfo
from llm_assets.checkpoints.choosing import PUBLISHED
from llm_assets.checkpoints.listing import read_save
from llm_assets.checkpoints.manifest import (
    MANIFEST,
    Kind,
    flush_folder,
    save_name,
    write_json,
)
from llm_assets.stages.save_buffers import TensorBuffer
from llm_assets.stages.save_checks import validate

WRITING = ".writing-"
_PIECE = 4 * 1024 * 1024
SMALL_BYTES = 16 * 1024 * 1024
"""Smaller saves are waited for, and proved by the writing thread: a process of its own would cost
more than the proof."""
_LOWEST = 19


@dataclass(frozen=True, kw_only=True)
class Pending:
    """A save whose content stands in memory. `documents` are written as JSON."""

    kind: Kind
    step: int
    tensors: Mapping[str, TensorBuffer]
    documents: Mapping[str, Any]
    manifest: Mapping[str, Any]
    stall_s: float

    @property
    def small(self) -> bool:
        """Waited for."""
        return sum(len(buffer.content) for buffer in self.tensors.values()) <= SMALL_BYTES

    def stall_with(self, write_s: float) -> float:
        """How long the training stands still when writing takes `write_s`."""
        return self.stall_s + (write_s if self.small else 0.0)


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


@dataclass
class SaveWriter:
    """`retain` is called with the folder after each save, and removes what is not kept."""

    folder: Path
    retain: Callable[[Path], None]
    ended: deque[Written] = field(default_factory=deque)
    judged: deque[SaveInfo] = field(default_factory=deque)
    _thread: threading.Thread | None = None
    _pending: Pending | None = None
    _free: threading.Event = field(default_factory=threading.Event)
    _wake: threading.Condition = field(default_factory=threading.Condition)
    _closing: bool = False
    _prover: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        self._free.set()

    @property
    def busy(self) -> bool:
        """A save is being written."""
        return not self._free.is_set()

    def wait(self) -> None:
        """Until no save is being written."""
        self._free.wait()

    def submit(self, pending: Pending) -> None:
        """Write a save in the background; waits for the one before, and for a small one."""
        self.wait()
        self._free.clear()
        with self._wake:
            self._pending = pending
            self._wake.notify()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="save-writer", daemon=True)
            self._thread.start()
        if pending.small:
            self.wait()

    def close(self) -> None:
        """Finish the save that is being written; a proof that still runs is left to itself."""
        self.wait()
        with self._wake:
            self._closing = True
            self._wake.notify()
        prover = self._prover
        if prover is not None:
            with contextlib.suppress(ProcessLookupError):
                prover.terminate()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST)
        while True:
            with self._wake:
                while self._pending is None and not self._closing:
                    self._wake.wait()
                if self._pending is None:
                    return
                pending, self._pending = self._pending, None
            try:
                self.ended.append(written := self._write(pending))
                if not pending.small:
                    self._free.set()
                if not written.error and not self._closing:
                    self._prove(self.folder / save_name(pending.kind, pending.step))
                with contextlib.suppress(OSError):
                    self.retain(self.folder)
            finally:
                self._free.set()

    def _write(self, pending: Pending) -> Written:
        started = time.monotonic()
        aside = self.folder / f"{WRITING}{os.getpid()}-{save_name(pending.kind, pending.step)}"
        size, error, bad = 0, "", ""
        try:
            bad = pending.tensors["model.safetensors"].not_finite()
            if bad:
                error = f"{bad} holds NaN or infinity"
            else:
                size = self._publish(pending, aside, started)
        except (OSError, ValueError, TypeError) as problem:
            error = f"{type(problem).__name__}: {problem}"
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        write_s = time.monotonic() - started
        return Written(
            kind=pending.kind,
            step=pending.step,
            stall_s=pending.stall_with(write_s),
            write_s=write_s,
            size_bytes=size,
            error=error,
            not_finite=bad,
        )

    def _publish(self, pending: Pending, aside: Path, started: float) -> int:
        self.folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        files = {
            name: _write_pieces(aside / name, buffer) for name, buffer in pending.tensors.items()
        }
        for name, document in pending.documents.items():
            files[name] = _write_bytes(aside / name, json.dumps(document, indent=1).encode())
        write_s = time.monotonic() - started
        manifest = Manifest(
            kind=pending.kind,
            step=pending.step,
            created_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
            write_s=write_s,
            stall_s=pending.stall_with(write_s),
            files=files,
            **pending.manifest,
        )
        document = json.dumps(manifest.sealed(), indent=1, sort_keys=True)
        _write_bytes(aside / MANIFEST, document.encode())
        flush_folder(aside)
        target = self.folder / save_name(pending.kind, pending.step)
        # Only a save that was not gone on from can be there.
        shutil.rmtree(target, ignore_errors=True)
        aside.rename(target)
        flush_folder(self.folder)
        write_json(self.folder / PUBLISHED, {"kind": pending.kind, "step": pending.step})
        return manifest.size_bytes

    def _prove(self, save: Path) -> None:
        found = read_save(save)
        if found is None:
            return
        if found.manifest is not None and found.manifest.size_bytes > SMALL_BYTES:
            self._prove_apart(save)
        else:
            validate(save)
        judged = read_save(save)
        if judged is not None:
            self.judged.append(judged)

    def _prove_apart(self, save: Path) -> None:
        module = [sys.executable, "-m", "llm_assets.stages.save_checks", "--background", str(save)]
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
        with contextlib.suppress(OSError):
            self._prover = subprocess.Popen(
                module,
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
            if self._closing:
                self._prover.terminate()
            self._prover.wait()
        self._prover = None


def _write_pieces(path: Path, buffer: TensorBuffer) -> dict[str, Any]:
    """Write and hash a buffer in one pass, and flush it to the device."""
    digest, size = hashlib.sha256(), 0
    with path.open("wb", buffering=0) as file:
        for piece in buffer.pieces(_PIECE):
            digest.update(piece)
            at = 0
            while at < len(piece):
                at += file.write(piece[at:]) or 0
            size += len(piece)
        os.fsync(file.fileno())
    return {"size_bytes": size, "sha256": digest.hexdigest()}


def _write_bytes(path: Path, content: bytes) -> dict[str, Any]:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    return {"size_bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
