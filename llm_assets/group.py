"""The processes of a worker that trains with several, started by `accelerate launch`.

The first one (rank 0) is the worker: lease, money, progress, artifact and record are its alone.
The others wait for its word, run the same stage on the same inputs, and end with the training.
"""

from __future__ import annotations

import importlib
import os
import signal
import threading
import time
from typing import Any

from llm_assets.interruption import Interruption
from llm_assets.ranks import rank, world_size

GO, END = b"go", b"end"

_WORD = "first"
_POLL_S = 0.1
_ORPHAN_POLL_S = 0.5
_LOST = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "Broken pipe")


class SilentProgress:
    """Progress of a process that is not the first: it says nothing."""

    def step(self, step: int, total: int, **metrics: Any) -> None:
        """See stages.context.Progress.step."""

    def say(self, text: str) -> None:
        """See stages.context.Progress.say."""


def tell_others(word: bytes) -> None:
    """The first process tells the others to begin (GO: the lease is held and the inputs are here)
    or to END."""
    if world_size() > 1:
        _store().set(_WORD, word)


def first_word() -> bytes:
    """Wait for what the first process says. When that one ends without a word, the launcher ends
    this process."""
    store = _store()
    # A blocking get would not see a signal.
    while not store.check([_WORD]):
        time.sleep(_POLL_S)
    return bytes(store.get(_WORD))


def _store() -> Any:
    """The launcher's key-value store, which lives as long as it does."""
    distributed: Any = importlib.import_module("torch.distributed")
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = distributed.TCPStore(address, port, is_master=False)
    return distributed.PrefixStore("llm-assets", store)


def use_own_device() -> None:
    """`cuda` is a GPU of this process's own from now on."""
    if world_size() == 1:
        return
    import torch

    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))


def is_lost_process(error: BaseException) -> bool:
    """The error of one process when another one has gone: a collective that cannot end."""
    if world_size() == 1:
        return False
    from torch.distributed import DistError

    if isinstance(error, DistError):
        return True
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _LOST)


def lost_process_text(error: BaseException) -> str:
    """One line about it."""
    first = (str(error).splitlines() or [""])[0]
    return f"one of {world_size()} processes of the training was lost (rank {rank()} saw: {first})"


def end_with_launcher(interruption: Interruption) -> None:
    """End this process when its launcher is gone: save within the grace period, then SIGKILL.

    torchrun starts each process in a session of its own, so no signal to the launcher's process
    group reaches it.
    """
    if world_size() == 1:
        return
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_ORPHAN_POLL_S)
        if not interruption.requested:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(interruption.grace_s / 0.75)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="launcher-watch", daemon=True).start()
