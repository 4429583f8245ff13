from __future__ import annotations

import datetime
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hand_clock import HandClock

from llm_assets.costs.entries import KIND, ledger_entries, spent_usd
from llm_assets.costs.ledger import Attempt, close_lost, open_attempt
from llm_assets.errors import DamagedError, StoreUnreachableError
from llm_assets.store import Store

WHO: dict[str, Any] = {
    "run_id": "run-1",
    "stage": "sft_checkpoint",
    "pipeline": "tiny",
    "campaign": "spring",
    "identity": "a" * 64,
    "device": "h100-sxm",
    "devices": 2,
    "usd_per_hour": 3.0,
}


def test_an_attempt_is_the_sum_of_its_segments(store: Store, clock: HandClock) -> None:
    with open_attempt(store, **WHO, estimate_usd=0.5, clock=clock, flush_every_s=0) as attempt:
        clock.move(60)
        attempt.progress(tokens=1000, flops=1e15)
        attempt.flush()
        clock.move(90)
        attempt.progress(tokens=2500, flops=4e15)
        attempt.flush()
        clock.move(30)
        assert attempt.spent_usd() == pytest.approx(180 * 2 * 3 / 3600)
    segments = [body for _, body in store.entries(KIND, "segment/")]
    assert [body["seconds"] for body in segments] == [60, 90, 30]
    assert [body["tokens"] for body in segments] == [1000, 1500, 0]
    (entry,) = ledger_entries(store)
    assert entry.status == "done"
    assert entry.usage.seconds == 180
    assert entry.usage.gpu_hours == pytest.approx(0.1)
    assert entry.usage.cost_usd == pytest.approx(0.3)
    assert entry.usage.tokens == 2500
    assert entry.info.estimate_usd == 0.5
    assert entry.utilization == pytest.approx(4e15 / (0.1 * 3600 * 989e12))
    # Two minutes before midnight and one after.
    assert {day: usage.seconds for day, usage in entry.days.items()} == {
        "2026-03-01": 60,
        "2026-03-02": 120,
    }


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError("bad"), "failed"),
        (KeyboardInterrupt(), "cancelled"),
        (SystemExit(), "cancelled"),
    ],
)
def test_what_fails_costs_too(
    store: Store, clock: HandClock, error: BaseException, status: str
) -> None:
    with pytest.raises(type(error)), open_attempt(store, **WHO, clock=clock, flush_every_s=0):
        clock.move(3600)
        raise error
    (entry,) = ledger_entries(store, "spring")
    assert entry.status == status
    assert type(error).__name__ in entry.reason
    assert spent_usd(store, "spring") == pytest.approx(6.0)
    assert spent_usd(store, "autumn") == 0


def test_a_running_attempt_counts_and_a_silent_one_is_lost(store: Store, clock: HandClock) -> None:
    with open_attempt(store, **WHO, clock=clock, flush_every_s=0) as attempt:
        clock.move(60)
        attempt.flush()
        (running,) = ledger_entries(store, now=clock.now())
        assert (running.status, running.usage.seconds) == ("running", 60)
        later = clock.now() + datetime.timedelta(minutes=5)
        (lost,) = ledger_entries(store, now=later)
        assert (lost.status, lost.usage.seconds) == ("lost", 60)
        (closed,) = close_lost(store, campaign="spring", now=later)
        assert closed.info.attempt == attempt.info.attempt
        (entry,) = ledger_entries(store, now=later)
        assert (entry.status, entry.usage.seconds) == ("killed", 60)
        assert close_lost(store, now=later) == []
    assert [entry.status for entry in ledger_entries(store)] == ["killed"]


def test_a_killed_process_leaves_what_it_spent(store: Store, tmp_path: Path) -> None:
    program = (
        "import sys, time\n"
        "from llm_assets.costs.ledger import open_attempt\n"
        "from llm_assets.store import open_store\n"
        f"who = {WHO!r}\n"
        "with open_attempt(open_store(sys.argv[1]), **who, flush_every_s=0.05) as attempt:\n"
        "    time.sleep(0.4)\n"
        "    print(attempt.usage().seconds, flush=True)\n"
        "    time.sleep(60)\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, store.url], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        seen = float(process.stdout.readline())
        os.kill(process.pid, signal.SIGKILL)
    (entry,) = ledger_entries(store)
    assert entry.status == "running"
    assert entry.usage.seconds > 0
    assert seen - entry.usage.seconds < 60


class AwayStore:
    """A store whose entries can't be written while `away`."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.away = False
        self.url = store.url

    def add_entry(self, kind: str, key: str, body: Any) -> None:
        if self.away:
            raise StoreUnreachableError("away")
        self._store.add_entry(kind, key, body)

    def entries(self, kind: str, prefix: str = "") -> Any:
        return self._store.entries(kind, prefix)


def test_a_store_that_is_away_for_a_while_loses_nothing(store: Store, clock: HandClock) -> None:
    away: Any = AwayStore(store)
    with open_attempt(away, **WHO, clock=clock, flush_every_s=0) as attempt:
        clock.move(60)
        away.away = True
        with pytest.raises(StoreUnreachableError):
            attempt.flush()
        clock.move(60)
        away.away = False
        attempt.flush()
    assert spent_usd(store, "spring") == pytest.approx(120 * 2 * 3 / 3600)


def test_a_store_away_at_the_end_does_not_hide_the_stage_s_error(
    store: Store, clock: HandClock
) -> None:
    away: Any = AwayStore(store)
    with (
        pytest.raises(ValueError, match="the real one"),
        open_attempt(away, **WHO, clock=clock, flush_every_s=0) as attempt,
    ):
        clock.move(60)
        attempt.flush()
        away.away = True
        raise ValueError("the real one")
    assert spent_usd(store, "spring") == pytest.approx(60 * 2 * 3 / 3600)


def test_a_write_whose_answer_was_lost_is_not_counted_twice(store: Store, clock: HandClock) -> None:
    class Deaf(AwayStore):
        def add_entry(self, kind: str, key: str, body: Any) -> None:
            self._store.add_entry(kind, key, body)
            if self.away:
                raise StoreUnreachableError("no answer")

    deaf: Any = Deaf(store)
    with open_attempt(deaf, **WHO, clock=clock, flush_every_s=0) as attempt:
        clock.move(60)
        deaf.away = True
        with pytest.raises(StoreUnreachableError):
            attempt.flush()
        deaf.away = False
        clock.move(60)
        attempt.flush()
        clock.move(60)
    (entry,) = ledger_entries(store)
    assert entry.usage.seconds == 180


def test_energy_is_summed_where_it_is_counted(store: Store, clock: HandClock) -> None:
    with open_attempt(store, **WHO, clock=clock, flush_every_s=0) as attempt:
        clock.move(10)
        attempt.flush()
        attempt.progress(energy_j=700.0)
        clock.move(10)
        attempt.flush()
        attempt.progress(energy_j=1000.0)
    (entry,) = ledger_entries(store)
    assert entry.usage.energy_j == 1000.0


def test_the_thread_flushes_by_itself(store: Store) -> None:
    import time

    with open_attempt(store, **WHO, flush_every_s=0.02):
        deadline = time.monotonic() + 20
        while not list(store.entries(KIND, "segment/")) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert list(store.entries(KIND, "segment/"))


def test_closing_twice_writes_once(store: Store, clock: HandClock) -> None:
    with open_attempt(store, **WHO, clock=clock, flush_every_s=0) as attempt:
        clock.move(10)
        attempt.close("cancelled", "by hand")
        clock.move(10)
        assert attempt.usage().seconds == 10
    (entry,) = ledger_entries(store)
    assert (entry.status, entry.usage.seconds) == ("cancelled", 10)


def test_campaigns_with_odd_names_stay_apart(store: Store, clock: HandClock) -> None:
    for name in ("a/b", "a", "a b", "ä", "a.json"):
        with open_attempt(
            store, **{**WHO, "campaign": name}, clock=clock, flush_every_s=0
        ) as attempt:
            clock.move(3600)
            assert isinstance(attempt, Attempt)
        assert spent_usd(store, name) == pytest.approx(6.0)


def test_a_newer_format_is_refused(store: Store) -> None:
    store.add_entry(KIND, "open/spring/x", {"format": 99})
    with pytest.raises(DamagedError, match="format 99"):
        ledger_entries(store)
