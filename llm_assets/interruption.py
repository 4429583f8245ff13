"""SIGTERM: a training finishes its step, saves, and ends; everything else ends at once.

A preempted or cancelled worker gets SIGTERM, and SIGKILL after a grace period.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass

_REPEATED_S = 1.0
"""Signals this close together are one: a process group and its launcher may both send it."""


class Terminated(BaseException):
    """Unwind, so that leases are released and work folders removed."""


@dataclass
class Interruption:
    """Whether this process was told to end. `grace_s`: how long a training may take to save."""

    grace_s: float = 15.0
    requested: bool = False
    _deferring: bool = False
    _at_once: bool = False
    _first: float = 0.0

    def install(self) -> None:
        """Take over SIGTERM and SIGALRM of this process. Main thread only."""
        signal.signal(signal.SIGTERM, self._on_sigterm)
        signal.signal(signal.SIGALRM, self._on_alarm)

    @property
    def left_s(self) -> float:
        """What is left of the grace period of a request."""
        return max(0.0, self.grace_s - (time.monotonic() - self._first))

    def end_at_once(self) -> None:
        """From now on nothing is saved: the lease is somebody else's."""
        self._at_once = True

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Within, the first signal only sets `requested`; a second one, or the end of the grace
        period, raises Terminated. So does leaving with a request that nobody answered."""
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = False
            if self.requested:
                signal.setitimer(signal.ITIMER_REAL, 0)
        if self.requested:
            raise Terminated("the training had ended")

    def _on_sigterm(self, _number: int, _frame: object) -> None:
        now = time.monotonic()
        if self._at_once or not self._deferring:
            raise Terminated
        if not self.requested:
            self.requested, self._first = True, now
            signal.setitimer(signal.ITIMER_REAL, self.grace_s)
        elif now - self._first > _REPEATED_S:
            raise Terminated("a second signal")

    def _on_alarm(self, _number: int, _frame: object) -> None:
        raise Terminated(f"not saved within {self.grace_s:g} s")
