from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from hand_clock import HandClock

from llm_assets.costs.budget import (
    budget_log,
    check_budget,
    current_limit,
    record_recipe_limit,
    set_limit,
    standing,
)
from llm_assets.costs.ledger import open_attempt
from llm_assets.costs.meter import Meter
from llm_assets.costs.reservations import reserve
from llm_assets.errors import BudgetError, ConflictError, UserError
from llm_assets.store import Store

SPRING: dict[str, Any] = {"campaign": "spring"}


def spend(store: Store, clock: HandClock, usd: float, **more: Any) -> None:
    """One attempt of `usd` dollars, in the campaign `spring`."""
    who = {"run_id": "r", "stage": "s", "pipeline": "p", "identity": "i", "device": "cpu"}
    with open_attempt(
        store,
        **who,
        **{"campaign": "spring", **more},
        devices=1,
        usd_per_hour=usd,
        clock=clock,
        flush_every_s=0,
    ):
        clock.move(3600)


def test_an_estimate_that_fits_may_start(store: Store, clock: HandClock) -> None:
    spend(store, clock, 4.0)
    check_budget(store, **SPRING, limit_usd=10.0, estimate_usd=6.0)
    check_budget(store, **SPRING, limit_usd=10.0, estimate_usd={"sft": 2.0, "dpo": 4.0})
    check_budget(store, **SPRING, limit_usd=None, estimate_usd=1e9)


def test_an_estimate_just_over_is_refused_and_says_what_fits(
    store: Store, clock: HandClock
) -> None:
    spend(store, clock, 4.0)
    stages = {"sft_checkpoint": 3.0, "reward_model": 2.0, "dpo_policy": 1.5}
    with pytest.raises(BudgetError) as caught:
        check_budget(store, **SPRING, limit_usd=10.0, estimate_usd=stages)
    text = str(caught.value)
    assert "campaign spring" in text
    assert "the estimate is 6.50 USD, 0.50 USD over the 6.00 USD that are left of 10.00" in text
    assert "4.00 USD spent" in text
    assert "sft_checkpoint 3.00 USD, reward_model 2.00 USD, dpo_policy 1.50 USD" in text
    assert "what fits: sft_checkpoint, reward_model (5.00 USD)" in text
    assert "at least 10.50 USD" in text
    assert "budget set 10.5 --campaign spring" in text


def test_hits_cost_nothing_even_when_nothing_is_left(store: Store, clock: HandClock) -> None:
    spend(store, clock, 10.0)
    check_budget(store, **SPRING, limit_usd=10.0, estimate_usd={})
    check_budget(store, **SPRING, limit_usd=9.0, estimate_usd=0.0)
    with pytest.raises(BudgetError, match=r"the 0 USD that are left .*\n.*\n.*costs at most 0 USD"):
        check_budget(store, **SPRING, limit_usd=9.0, estimate_usd=0.01)


def test_when_the_first_stage_is_too_dear_nothing_fits(store: Store) -> None:
    with pytest.raises(BudgetError, match="nothing fits: base alone is over it"):
        check_budget(store, **SPRING, limit_usd=1.0, estimate_usd={"base": 5.0, "sft": 0.1})


def test_an_amount_below_a_cent_is_rounded_up_usefully(store: Store) -> None:
    with pytest.raises(BudgetError) as caught:
        check_budget(store, **SPRING, limit_usd=0.001, estimate_usd=0.00234)
    asked = float(str(caught.value).split("budget set ")[1].split()[0])
    assert 0.00234 <= asked < 0.003


def test_the_last_change_of_the_limit_holds(store: Store) -> None:
    tiny: dict[str, Any] = {"pipeline": "tiny"}
    assert current_limit(store, "spring", 10.0, **tiny) == 10.0
    assert record_recipe_limit(store, "spring", 10.0, **tiny, who="ann") == 10.0
    change = set_limit(
        store, "spring", 25.0, who="bob", why="one more run", recipe_usd=10.0, **tiny
    )
    assert (change.before_usd, change.after_usd) == (10.0, 25.0)
    assert current_limit(store, "spring", 10.0, **tiny) == 25.0
    # The recipe that says the same as ever changes nothing; an edited one does.
    assert record_recipe_limit(store, "spring", 10.0, **tiny, who="ann") == 25.0
    assert current_limit(store, "spring", 40.0, **tiny) == 40.0
    assert record_recipe_limit(store, "spring", 40.0, **tiny, who="ann") == 40.0
    log = budget_log(store, "spring")
    assert [(entry.who, entry.before_usd, entry.after_usd) for entry in log] == [
        ("ann", None, 10.0),
        ("bob", 10.0, 25.0),
        ("ann", 25.0, 40.0),
    ]
    assert log[1].why == "one more run"
    assert log[1].as_json()["from"] == 10.0


def test_two_recipes_of_one_campaign_do_not_fight(store: Store) -> None:
    record_recipe_limit(store, "spring", 10.0, pipeline="one", who="ann")
    record_recipe_limit(store, "spring", 20.0, pipeline="two", who="ann")
    for _ in range(2):
        assert record_recipe_limit(store, "spring", 10.0, pipeline="one", who="ann") == 20.0
        assert record_recipe_limit(store, "spring", 20.0, pipeline="two", who="ann") == 20.0
    assert len(budget_log(store, "spring")) == 2


def test_a_limit_command_records_the_recipe_first(store: Store) -> None:
    set_limit(store, "spring", 5.0, who="bob", why="less", recipe_usd=10.0, pipeline="tiny")
    assert [entry.source for entry in budget_log(store, "spring")] == ["recipe tiny", "command"]
    set_limit(store, "other", 5.0, who="bob", why="new", recipe_usd=None, pipeline=None)
    assert current_limit(store, "other", None, pipeline=None) == 5.0
    assert current_limit(store, "third", None, pipeline=None) is None


@pytest.mark.parametrize("wrong", [{"who": " "}, {"why": ""}, {"limit_usd": -1.0}])
def test_a_change_without_a_name_a_reason_or_a_sense(store: Store, wrong: dict[str, Any]) -> None:
    good: dict[str, Any] = {"limit_usd": 5.0, "who": "bob", "why": "more"}
    with pytest.raises(UserError):
        set_limit(store, "spring", **{**good, **wrong}, recipe_usd=None, pipeline=None)
    assert budget_log(store, "spring") == []


def test_a_reservation_keeps_money_from_others(store: Store, clock: HandClock) -> None:
    first = reserve(store, **SPRING, limit_usd=10.0, estimate_usd=6.0, owner="run-1")
    with pytest.raises(BudgetError, match=r"6\.00 USD reserved by other runs"):
        reserve(store, **SPRING, limit_usd=10.0, estimate_usd=6.0, owner="run-2")
    # What the first run spends comes out of its own reservation, not on top of it.
    spend(store, clock, 5.0, reservation=first.name)
    assert standing(store, "spring", 10.0).left_usd == pytest.approx(4.0)
    assert standing(store, "spring", 10.0, own=first.name).left_usd == pytest.approx(5.0)
    check_budget(store, **SPRING, limit_usd=10.0, estimate_usd=1.0, own=first.name)
    first.check()
    first.release()
    first.release()
    now = standing(store, "spring", 10.0)
    assert (now.spent_usd, now.reserved_usd) == (pytest.approx(5.0), 0.0)
    with reserve(store, **SPRING, limit_usd=10.0, estimate_usd={"a": 5.0}, owner="run-2"):
        assert standing(store, "spring", 10.0).left_usd == pytest.approx(0.0)
    assert standing(store, "spring", 10.0).left_usd == pytest.approx(5.0)


def test_spending_more_than_reserved_counts_in_full(store: Store, clock: HandClock) -> None:
    with reserve(store, **SPRING, limit_usd=10.0, estimate_usd=2.0, owner="run-1") as own:
        spend(store, clock, 3.0, reservation=own.name)
        assert standing(store, "spring", 10.0).left_usd == pytest.approx(7.0)


_RUN = """
import sys, time
from llm_assets.costs.reservations import reserve
from llm_assets.errors import BudgetError
from llm_assets.store import open_store
store = open_store(sys.argv[1])
sys.stdin.readline()
try:
    with reserve(store, campaign="spring", limit_usd=10.0, estimate_usd=6.0, owner=sys.argv[2]):
        print("reserved", flush=True)
        sys.stdin.readline()
except BudgetError:
    print("refused", flush=True)
"""


def test_of_four_runs_at_once_one_gets_the_last_money(store: Store) -> None:
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", _RUN, store.url, f"run-{number}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for number in range(4)
    ]
    answers = []
    for run in runs:
        assert run.stdin is not None
        run.stdin.write("go\n")
        run.stdin.flush()
    for run in runs:
        assert run.stdout is not None
        answers.append(run.stdout.readline().strip())
    assert sorted(answers) == ["refused", "refused", "refused", "reserved"]
    winner = runs[answers.index("reserved")]
    for run in runs:
        if run is not winner:
            run.communicate()
    winner.kill()
    winner.communicate()
    # Its heartbeat stops with it; until then the money stays reserved.
    assert standing(store, "spring", 10.0).reserved_usd == 6.0


def test_a_dead_run_s_reservation_ends(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llm_assets.costs.reservations.RESERVATION_TTL_S", 1e-6)
    reserve(store, **SPRING, limit_usd=10.0, estimate_usd=6.0, owner="run-1")
    assert standing(store, "spring", 10.0).reserved_usd == 0.0
    check_budget(store, **SPRING, limit_usd=10.0, estimate_usd=10.0)


def test_a_lock_that_never_comes_free_is_said(store: Store) -> None:
    lock = store.acquire("budget/spring", owner="somebody", ttl_s=600.0)
    assert lock is not None
    naps: list[float] = []
    with pytest.raises(ConflictError, match="one at a time"):
        reserve(
            store,
            **SPRING,
            limit_usd=10.0,
            estimate_usd=1.0,
            owner="run-1",
            wait_s=1.0,
            sleep=naps.append,
        )
    assert sum(naps) == pytest.approx(1.0)


def test_a_meter_follows_the_spending() -> None:
    meter = Meter(rate_usd_per_hour=3.0, devices=2, limit_usd=1.0, already_usd=0.4, started=100.0)
    assert meter.spent(100.0) == pytest.approx(0.4)
    assert meter.spent(460.0) == pytest.approx(1.0)
    assert not meter.over_limit(459.0)
    assert meter.over_limit(461.0)
    assert meter.seconds_left(100.0) == pytest.approx(360.0)
    free = Meter(rate_usd_per_hour=0.0, devices=1, limit_usd=1.0, started=0.0)
    assert free.seconds_left(1e9) is None
    assert not free.over_limit(1e9)
    unlimited = Meter(rate_usd_per_hour=5.0, devices=1, started=0.0)
    assert (unlimited.left(1e9), unlimited.over_limit(1e9)) == (None, False)
