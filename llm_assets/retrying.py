"""Which failures may pass by themselves, and how long to wait before the next attempt.

Transient: a worker that was killed (out of memory, lost node) or preempted (SIGTERM that no
person's cancel sent), a store that was away, a lease that was lost. Not transient: bad data, NaN,
budget, guards, a damaged artifact, a full disk: a person must look first.
"""

from __future__ import annotations

import random
import signal

from llm_assets.errors import ConflictError, LostWorkerError, StoreError, StoreUnreachableError
from llm_assets.recipe import RetrySettings
from llm_assets.worker_codes import INTERRUPTED, LOST_PROCESS

_KINDS = frozenset(
    {
        "Terminated",
        LOST_PROCESS,
        "StoreError",
        "StoreUnreachableError",
        "ConflictError",
        "ConnectionError",
        "ConnectionResetError",
        "ConnectionRefusedError",
        "BrokenPipeError",
        "TimeoutError",
    }
)
_SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGBUS)
_CODES = frozenset({INTERRUPTED, *(-n for n in _SIGNALS), *(128 + n for n in _SIGNALS)})


def is_transient(error: BaseException) -> bool:
    """Another attempt may end well without anybody doing anything."""
    transient = (LostWorkerError, StoreUnreachableError, ConflictError, ConnectionError)
    # A plain StoreError is an I/O error of the store's file system.
    return isinstance(error, (*transient, TimeoutError)) or type(error) is StoreError


def was_lost(*, code: int, kind: str, num_processes: int = 1) -> bool:
    """A worker that ended with this exit code, and left an error of this kind ("" for none), was
    killed, preempted or cut off from its store."""
    if kind:
        return kind in _KINDS
    # Of several processes the launcher reports 1 when one of them is gone without a word.
    return code in _CODES or (num_processes > 1 and code == 1)


def wait_s(settings: RetrySettings, attempt: int, chance: random.Random | None = None) -> float:
    """Seconds before retry number `attempt` (from 1): exponential backoff with a cap, and jitter
    so that workers that were lost together do not come back together."""
    wait = min(settings.max_delay_s, settings.delay_s * 2.0 ** (attempt - 1))
    by = (chance or random.Random()).uniform(-settings.jitter, settings.jitter)
    return float(wait * (1.0 + by))
