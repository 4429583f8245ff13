"""Writes saves beside the training: hash, flush, rename, prove, remove what is not kept.

The training hands over a `Pending` whose buffers hold the state of one step, and goes on. A process
of the lowest priority writes it and proves it (save_process.py), at the ordinary one once that
takes too long; never two write at once, and the buffers are free again when `wait` returns. A small
save is written and proved by the training itself: both are short, and a process that is killed has
lost no more than one interval.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from llm_assets.checkpoints import SaveInfo
from llm_assets.checkpoints.listing import read_save
from llm_assets.stages.save_buffers import TensorBuffer
from llm_assets.stages.save_checks import validate
from llm_assets.stages.save_files import Request, Written, write_save
from llm_assets.stages.save_process import hurry

_STARTS_S = 1.0
"""A process that starts sets its own priority."""
_PROOF_PATIENCE = 5
"""A proof gives way for so many times as long as the writing: nobody waits for it."""

SMALL_BYTES = 16 * 1024 * 1024
"""Smaller saves are waited for: a process of its own would cost more than the save."""


@dataclass(frozen=True, kw_only=True)
class Pending:
    """A save whose tensors stand in memory, by file name. `patience_s`: how long its writing gives
    way to the training; from then on it has the ordinary priority."""

    request: Request
    tensors: Mapping[str, TensorBuffer]
    patience_s: float = 0.0


@dataclass
class SaveWriter:
    """`retain` is called after each save and each proof, and removes what is not kept."""

    retain: Callable[[], None]
    ended: deque[Written] = field(default_factory=deque)
    judged: deque[SaveInfo] = field(default_factory=deque)
    _writing: _Apart | None = None
    _apart: list[_Apart] = field(default_factory=list)
    _retaining: threading.Lock = field(default_factory=threading.Lock)
    _proving: threading.Lock = field(default_factory=threading.Lock)
    _closing: threading.Event = field(default_factory=threading.Event)

    @property
    def busy(self) -> bool:
        """A save is being written."""
        return self._writing is not None and not self._writing.written.is_set()

    def wait(self) -> None:
        """Until no save is being written; the one that is goes faster now."""
        if self._writing is not None:
            self._writing.wait()

    def submit(self, pending: Pending) -> None:
        """Write a save in the background; waits for the one before, and for a small one."""
        self.wait()
        request = pending.request
        if request.waits:
            contents = {name: buffer.content for name, buffer in pending.tensors.items()}
            self.ended.append(written := write_save(request, contents, lambda: True))
            if not written.error:
                validate(request.save)
                self.add_judged(request.save)
            self.remove_old()
            return
        self._apart = [each for each in self._apart if each.thread.is_alive()]
        self._writing = _Apart(self, pending, self._proving, self._closing)
        self._apart.append(self._writing)
        self._writing.thread.start()

    def close(self) -> None:
        """Finish the save that is being written; proofs that are not at their end are given up: who
        goes on from a save without one proves it first."""
        self.wait()
        self._closing.set()
        for each in self._apart:
            each.give_up()
            each.thread.join()

    def add_judged(self, save: Path) -> None:
        """A save was proved."""
        judged = read_save(save)
        if judged is not None:
            self.judged.append(judged)

    def remove_old(self) -> None:
        """What is not kept goes."""
        with self._retaining, contextlib.suppress(OSError):
            self.retain()


class _Apart:
    """One save that a process of its own writes and proves; a thread listens to it."""

    def __init__(
        self,
        writer: SaveWriter,
        pending: Pending,
        proving: threading.Lock,
        closing: threading.Event,
    ) -> None:
        self.written = threading.Event()
        self.thread = threading.Thread(target=self._run, name="save-writer", daemon=True)
        self._writer, self._pending = writer, pending
        self._proving, self._closing = proving, closing
        self._process: subprocess.Popen[bytes] | None = None

    def wait(self) -> None:
        """Until it is written, at the ordinary priority from now on."""
        while not self.written.wait(0.1):
            if self._process is not None:
                hurry(self._process.pid)

    def give_up(self) -> None:
        """End the proof, unless it is at its end."""
        if self._process is not None:
            self._process.kill()

    def _run(self) -> None:
        request = self._pending.request
        try:
            written = self._write()
        except (OSError, ValueError, TypeError) as problem:
            error = f"{type(problem).__name__}: {problem}"
            written = dataclasses.replace(_nothing(request), error=error)
        self._writer.ended.append(written)
        self._writer.remove_old()
        self.written.set()
        if written.error:
            self._end()
            return
        # One proof at a time: more would only take the disk from each other.
        with self._proving:
            # By now it may be too old to be kept.
            if not self._closing.is_set() and read_save(request.save) is not None:
                self._say(b"prove\n")
            with self._hurried_after(_PROOF_PATIENCE * self._pending.patience_s):
                self._end()
        if not self._closing.is_set():
            self._writer.add_judged(request.save)
            self._writer.remove_old()

    def _write(self) -> Written:
        tensors = self._pending.tensors
        memory = {name: (each.descriptor, len(each.content)) for name, each in tensors.items()}
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
        self._process = process = subprocess.Popen(
            [sys.executable, "-m", "llm_assets.stages.save_process"],
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=[descriptor for descriptor, _ in memory.values()],
            # Ctrl-C is for the training.
            process_group=0,
        )
        job = {
            "request": dataclasses.asdict(self._pending.request),
            "memory": memory,
            "trainer": os.getpid(),
        }
        self._say(json.dumps(job).encode() + b"\n")
        with self._hurried_after(self._pending.patience_s):
            answer = process.stdout.readline() if process.stdout is not None else b""
        if not answer:
            raise OSError(f"the process that writes it ended with {process.wait()}")
        return Written(**json.loads(answer))

    @contextlib.contextmanager
    def _hurried_after(self, patience_s: float) -> Iterator[None]:
        """Within, the process gives way to the training for `patience_s` and no longer."""
        timer = None
        if self._process is not None:
            timer = threading.Timer(max(_STARTS_S, patience_s), hurry, [self._process.pid])
            timer.daemon = True
            timer.start()
        try:
            yield
        finally:
            if timer is not None:
                timer.cancel()

    def _say(self, line: bytes) -> None:
        """BrokenPipeError is no news: its end is seen by what it does not answer."""
        process = self._process
        if process is not None and process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(line)
                process.stdin.flush()

    def _end(self) -> None:
        """Wait for its end; without a line to its input it has nothing more to do."""
        process = self._process
        if process is None:
            return
        with contextlib.suppress(BrokenPipeError):
            process.communicate()


def _nothing(request: Request) -> Written:
    return Written(
        kind=request.kind, step=request.step, stall_s=request.stall_s, write_s=0.0, size_bytes=0
    )
