"""A clock that moves by hand."""

from __future__ import annotations

import datetime


class HandClock:
    """Seconds and UTC that move only when told."""

    def __init__(self, start: str = "2026-03-01T23:58:00+00:00") -> None:
        self._start = datetime.datetime.fromisoformat(start)
        self._seconds = 0.0

    def seconds(self) -> float:
        return self._seconds

    def now(self) -> datetime.datetime:
        return self._start + datetime.timedelta(seconds=self._seconds)

    def move(self, seconds: float) -> None:
        self._seconds += seconds
