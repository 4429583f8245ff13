"""Writing the ledger: an attempt accounts for itself while it runs, and is closed when it ends.

entries.py says what is written and reads it back; `spent_usd` and `ledger_entries` are its own.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import threading
import time
import uuid
from collections.abc import Iterator
from typing import Protocol

from llm_assets.costs.entries import (
    FORMAT,
    KIND,
    AttemptInfo,
    LedgerEntry,
    Usage,
    by_day,
    ledger_entries,
    segments_of,
    spent_usd,
    total_usage,
    usage_of,
)
from llm_assets.errors import ConflictError, StoreError
from llm_assets.store.protocol import Store

__all__ = [
    "Attempt",
    "AttemptInfo",
    "Clock",
    "LedgerEntry",
    "SystemClock",
    "Usage",
    "close_killed",
    "close_lost",
    "ledger_entries",
    "open_attempt",
    "spent_usd",
]

FLUSH_EVERY_S = 30.0
"""Seconds between two segments: half of the promised minute, so that a slow store keeps it."""

_log = logging.getLogger(__name__)


class Clock(Protocol):
    """Time as the ledger needs it."""

    def seconds(self) -> float:
        """Seconds that never go back."""

    def now(self) -> datetime.datetime:
        """UTC."""


class SystemClock:
    """The machine's clocks."""

    def seconds(self) -> float:
        """See Clock."""
        return time.monotonic()

    def now(self) -> datetime.datetime:
        """See Clock."""
        return datetime.datetime.now(datetime.UTC)


class Attempt:
    """A running attempt. `progress` may be called at every step: it only keeps numbers, and never
    waits for the store.

    A thread flushes each `flush_every_s` seconds; 0 leaves flushing to the caller. A store that is
    away for a while loses nothing: what was not written goes into the next segment.
    """

    def __init__(
        self,
        store: Store,
        info: AttemptInfo,
        *,
        clock: Clock | None = None,
        flush_every_s: float = FLUSH_EVERY_S,
    ) -> None:
        self.info = info
        self._store = store
        self._clock: Clock = clock or SystemClock()
        self._numbers = threading.Lock()
        self._tokens = 0
        self._flops = 0.0
        self._energy_j: float | None = None
        self._ended: float | None = None
        self._writing = threading.Lock()
        self._segments: list[tuple[str, Usage]] = []
        self._written = Usage()
        self._closed = False
        self._started = self._clock.seconds()
        store.add_entry(KIND, info.key("open"), {"format": FORMAT, **info.as_json()})
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        if flush_every_s > 0:
            self._thread = threading.Thread(
                target=self._keep_flushing, args=(flush_every_s,), name="ledger", daemon=True
            )
            self._thread.start()

    def progress(
        self,
        *,
        tokens: int | None = None,
        flops: float | None = None,
        energy_j: float | None = None,
    ) -> None:
        """Totals since the attempt began; one that is not given stays as it was."""
        with self._numbers:
            self._tokens = self._tokens if tokens is None else tokens
            self._flops = self._flops if flops is None else flops
            self._energy_j = self._energy_j if energy_j is None else energy_j

    def usage(self) -> Usage:
        """Of this attempt, up to now."""
        with self._numbers:
            ended = self._clock.seconds() if self._ended is None else self._ended
            seconds = ended - self._started
            hours = seconds * self.info.devices / 3600.0
            return Usage(
                seconds=seconds,
                gpu_hours=hours,
                cost_usd=hours * self.info.usd_per_hour,
                tokens=self._tokens,
                flops=self._flops,
                energy_j=self._energy_j,
            )

    def spent_usd(self) -> float:
        """Of this attempt, up to now."""
        return self.usage().cost_usd

    def flush(self) -> None:
        """Write what was used since the last flush. Raises the store's errors; nothing is lost."""
        with self._writing:
            if not self._closed:
                self._flush()

    def _flush(self) -> None:
        now, before = self.usage(), self._written
        segment = Usage(
            seconds=now.seconds - before.seconds,
            gpu_hours=now.gpu_hours - before.gpu_hours,
            cost_usd=now.cost_usd - before.cost_usd,
            tokens=now.tokens - before.tokens,
            flops=now.flops - before.flops,
            energy_j=None if now.energy_j is None else now.energy_j - (before.energy_j or 0.0),
        )
        at = self._clock.now().isoformat(timespec="seconds")
        key = f"{self.info.key('segment')}/{len(self._segments) + 1:08d}"
        try:
            self._store.add_entry(KIND, key, {"format": FORMAT, "at": at, **segment.as_json()})
        except ConflictError:
            # A write that stood although its answer was lost, with the numbers of that moment.
            stood = dict(self._store.entries(KIND, key)).get(key)
            if stood is None:
                raise
            at, segment = str(stood["at"]), usage_of(stood, key)
        self._segments.append((at, segment))
        self._written = self._written + segment

    def _keep_flushing(self, every_s: float) -> None:
        while not self._done.wait(every_s):
            try:
                self.flush()
            except (StoreError, OSError) as error:
                _log.warning("ledger of %s: not written, tried again: %s", self.info.stage, error)

    def close(self, status: str, reason: str = "") -> None:
        """End the attempt: the last segment and the total. Does nothing the second time."""
        self._done.set()
        with self._numbers:
            self._ended = self._clock.seconds() if self._ended is None else self._ended
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        with self._writing:
            if self._closed:
                return
            self._flush()
            if self._written.seconds < self.usage().seconds:
                self._flush()  # after a segment that stood with older numbers
            _write_total(self._store, self.info, self._segments, status, reason)
            self._closed = True


@contextlib.contextmanager
def open_attempt(
    store: Store,
    *,
    run_id: str,
    stage: str,
    pipeline: str,
    campaign: str,
    identity: str,
    device: str,
    devices: int,
    usd_per_hour: float,
    estimate_usd: float | None = None,
    reservation: str = "",
    clock: Clock | None = None,
    flush_every_s: float = FLUSH_EVERY_S,
) -> Iterator[Attempt]:
    """An attempt that stands in the ledger while the block runs and whatever its end.

    Closed as `done`; as `failed` when the block raises an Exception; as `cancelled` when it is
    interrupted (any other BaseException). A store that fails at the very end is logged and not
    raised: the stage's record or its own error is what counts, and the segments stand.
    """
    clock = clock or SystemClock()
    info = AttemptInfo(
        attempt=f"{clock.now():%Y%m%dT%H%M%S}-{stage}-{uuid.uuid4().hex[:10]}",
        campaign=campaign,
        pipeline=pipeline,
        run_id=run_id,
        stage=stage,
        identity=identity,
        device=device,
        devices=devices,
        usd_per_hour=usd_per_hour,
        started_at=clock.now().isoformat(timespec="seconds"),
        estimate_usd=estimate_usd,
        reservation=reservation,
    )
    attempt = Attempt(store, info, clock=clock, flush_every_s=flush_every_s)
    status, reason = "done", ""
    try:
        yield attempt
    except BaseException as error:
        status = "failed" if isinstance(error, Exception) else "cancelled"
        reason = f"{type(error).__name__}: {error}"[:500]
        raise
    finally:
        try:
            attempt.close(status, reason)
        except StoreError as error:
            _log.error("ledger of %s: the end was not written: %s", stage, error)


def _write_total(
    store: Store,
    info: AttemptInfo,
    segments: list[tuple[str, Usage]],
    status: str,
    reason: str,
) -> None:
    body = {
        "format": FORMAT,
        **info.as_json(),
        **total_usage(part for _, part in segments).as_json(),
        "status": status,
        "reason": reason,
        "ended_at": segments[-1][0] if segments else info.started_at,
        "days": {day: usage.as_json() for day, usage in by_day(segments).items()},
    }
    try:
        store.add_entry(KIND, info.key("total"), body)
    except ConflictError:
        _log.warning("ledger of %s: the attempt was closed by somebody else", info.stage)


def close_lost(
    store: Store, *, campaign: str | None = None, now: datetime.datetime | None = None
) -> list[LedgerEntry]:
    """Write the total of attempts whose process is gone, as `killed`; give them back."""
    lost = [entry for entry in ledger_entries(store, campaign, now=now) if entry.status == "lost"]
    for entry in lost:
        segments = segments_of(store, entry.info)
        _write_total(store, entry.info, segments, "killed", "the process ended without a word")
    return lost


def close_killed(
    store: Store, *, campaign: str, run_id: str, stage: str, identity: str
) -> LedgerEntry | None:
    """Close a stage's attempt whose process has just died, as `killed`, with all the time from its
    start to now; None when there is no open one."""
    for entry in ledger_entries(store, campaign):
        info = entry.info
        mine = (info.run_id, info.stage, info.identity) == (run_id, stage, identity)
        if not mine or entry.status not in ("running", "lost"):
            continue
        now = datetime.datetime.now(datetime.UTC)
        lived_s = (now - datetime.datetime.fromisoformat(info.started_at)).total_seconds()
        rest = max(0.0, lived_s - entry.usage.seconds)
        hours = rest * info.devices / 3600.0
        at = now.isoformat(timespec="seconds")
        last = Usage(seconds=rest, gpu_hours=hours, cost_usd=hours * info.usd_per_hour)
        segments = [*segments_of(store, info), (at, last)]
        _write_total(store, info, segments, "killed", "the process was killed")
        return entry
    return None
