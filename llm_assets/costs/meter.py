"""Spending followed while a stage runs."""

from __future__ import annotations

import time


class Meter:
    """What a running stage has spent, against its limit. Cheap: call it at every step.

    `already_usd`: what earlier attempts at the same identity cost, which counts against the limit
    too. `limit_usd` None means none. `started` is in `time.monotonic()` seconds, and so is `now`.
    """

    def __init__(
        self,
        *,
        rate_usd_per_hour: float,
        devices: int,
        limit_usd: float | None = None,
        already_usd: float = 0.0,
        started: float | None = None,
    ) -> None:
        self._usd_per_s = rate_usd_per_hour * devices / 3600.0
        self._limit_usd = limit_usd
        self._already_usd = already_usd
        self._started = time.monotonic() if started is None else started

    def spent(self, now: float | None = None) -> float:
        """USD up to `now`, earlier attempts included."""
        seconds = (time.monotonic() if now is None else now) - self._started
        return self._already_usd + max(0.0, seconds) * self._usd_per_s

    def left(self, now: float | None = None) -> float | None:
        """USD until the limit, below zero past it; None without a limit."""
        return None if self._limit_usd is None else self._limit_usd - self.spent(now)

    def over_limit(self, now: float | None = None) -> bool:
        """The limit is crossed: save and stop."""
        left = self.left(now)
        return left is not None and left < 0

    def seconds_left(self, now: float | None = None) -> float | None:
        """Until the limit, at this rent; None without a limit or where a device costs nothing."""
        left = self.left(now)
        if left is None or self._usd_per_s == 0:
            return None
        return left / self._usd_per_s
