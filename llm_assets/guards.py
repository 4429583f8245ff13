"""What must hold before money is spent: of a whole run, and of each stage again.

`refusals` answers the plan; `start_run` is the same with the money set aside, for `llm-assets run`;
`stage_money` stands before each stage in every kind of run: one that a run command started draws on
the run's reservation, any other (the UI, a schedule, `dagster asset materialize`) reserves for the
stage alone.
"""

from __future__ import annotations

import contextlib
import getpass
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from llm_assets.costs.budget import (
    check_budget,
    current_limit,
    lease_name,
    record_recipe_limit,
    standing,
)
from llm_assets.costs.forecast import Forecast, check_recipe_memory, forecast
from llm_assets.costs.learning import StageEstimate
from llm_assets.costs.ledger import close_lost
from llm_assets.costs.quantities import show_usd
from llm_assets.costs.reservations import Reservation, reserve
from llm_assets.engine import failed_gates
from llm_assets.errors import BudgetError, GuardError, HeldError, LlmAssetsError, message
from llm_assets.gates.thresholds import NOT_MEASURED
from llm_assets.graph import descendants
from llm_assets.planning import Plan, recipe_argument
from llm_assets.recipe import Recipe
from llm_assets.rollback import keep_plan, missing_plans, plan_json, rollback_plan
from llm_assets.spending import earlier_attempts_usd
from llm_assets.store.protocol import Store


def me() -> str:
    """Who runs this process, for what is recorded."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return os.environ.get("USER", "unknown")


def forecast_plan(plan: Plan, store: Store) -> Forecast:
    """The estimates of all that runs, may run or is held; hits and pins cost nothing."""
    stale = {
        name: dict(entry.inputs)
        for name, entry in plan.stages.items()
        if entry.status in ("run", "maybe", "held")
    }
    return forecast(plan.recipe, store, stale, plan.history.estimating(stale) if stale else ())


def refusals(plan: Plan, store: Store, estimates: Forecast) -> list[str]:
    """Why the run of a plan may not start; empty when it may. Writes nothing."""
    if plan.complete:
        return []
    recipe = plan.recipe
    stopped = [
        entry.hold.ways(recipe_argument(recipe))
        for entry in plan.stages.values()
        if entry.hold is not None
    ]
    stopped += _gate_refusals(plan, store)
    stopped += missing_plans(plan, rollback_plan(plan, store))
    checks: tuple[Callable[[], None], ...] = (
        lambda: check_recipe_memory(recipe, plan.rerun),
        lambda: _check_stage_limits(plan, store),
        lambda: check_budget(
            store,
            campaign=recipe.campaign,
            limit_usd=_limit(store, recipe),
            estimate_usd=estimates.by_stage_usd,
        ),
    )
    for check in checks:
        try:
            check()
        except LlmAssetsError as error:
            stopped.append(str(error))
    return stopped


def _gate_refusals(plan: Plan, store: Store) -> list[str]:
    """Failed gates above something that would run. `release` runs all the same: its answer is HOLD
    with each reason."""
    found = []
    for name in plan.nodes:
        below = descendants(plan.nodes, {name}) - {name, "release"}
        stopped = [stage for stage in plan.rerun if stage in below]
        for result in failed_gates(plan, name, store) if stopped else ():
            if result.verdict == NOT_MEASURED:
                continue  # the run measures it, and stops before it spends
            found.append(
                f"gate {result.name} of {name} failed: {result.why}\n"
                f"  rule: {', '.join(stopped)} would take what {name} gives\n"
                f"  next: change stages.{name} or its data, the gate, or override the gate"
            )
    return found


def _limit(store: Store, recipe: Recipe) -> float | None:
    return current_limit(store, recipe.campaign, recipe.budget.limit_usd, pipeline=recipe.pipeline)


def _check_stage_limits(plan: Plan, store: Store) -> None:
    for name in plan.rerun:
        _check_stage_limit(plan, name, store)


def _check_stage_limit(plan: Plan, name: str, store: Store) -> None:
    """BudgetError when earlier attempts spent all that the stage may."""
    recipe = plan.recipe
    limit = recipe.budget.stage_limits_usd.get(name)
    identity = plan.stages[name].identity
    if limit is None or identity is None:
        return
    spent = earlier_attempts_usd(store, recipe.campaign, identity)
    if spent >= limit:
        raise BudgetError(
            message(
                where=f"{recipe.path}: budget.stage_limits_usd.{name}",
                found=f"{show_usd(spent)} spent by earlier attempts, of {show_usd(limit)}",
                rule="a stage starts only with money left of its own limit",
                remedy="raise the limit; the stage goes on from its newest checkpoint",
            )
        )


def start_run(plan: Plan, store: Store, estimates: Forecast, *, owner: str) -> Reservation:
    """Set the money of a run aside, after `refusals` found nothing. BudgetError when another run
    took it meanwhile. The reservation is a context manager: keep it open while the run lasts."""
    recipe = plan.recipe
    close_lost(store, campaign=recipe.campaign)
    keep_plan(store, plan_json(plan, rollback_plan(plan, store)))
    limit = record_recipe_limit(
        store, recipe.campaign, recipe.budget.limit_usd, pipeline=recipe.pipeline, who=me()
    )
    return reserve(
        store,
        campaign=recipe.campaign,
        limit_usd=limit,
        estimate_usd=estimates.by_stage_usd,
        owner=owner,
    )


@dataclass(frozen=True, kw_only=True)
class StageMoney:
    """What a stage may draw on. `estimate` is None when nobody can tell."""

    reservation: str
    estimate: StageEstimate | None


@contextlib.contextmanager
def stage_money(
    plan: Plan, name: str, store: Store, *, owner: str, reservation: str = ""
) -> Iterator[StageMoney]:
    """Check a stage against what is really spent by now, and let it draw on `reservation`, or on
    one of its own when the run has none. GuardError when it may not start."""
    recipe = plan.recipe
    mine = plan.stages[name]
    if mine.hold is not None:
        raise HeldError(mine.hold.ways(recipe_argument(recipe)))
    _check_rollback(plan, name, store)
    check_recipe_memory(recipe, [name])
    _check_stage_limit(plan, name, store)
    close_lost(store, campaign=recipe.campaign)
    limit = record_recipe_limit(
        store, recipe.campaign, recipe.budget.limit_usd, pipeline=recipe.pipeline, who=me()
    )
    found = forecast(recipe, store, {name: dict(mine.inputs)}, plan.history.estimating([name]))
    estimate = found.estimates.get(name)
    cost = {name: estimate.cost_usd} if estimate is not None else {}
    campaign = recipe.campaign
    lives = bool(reservation) and store.lease_owner(lease_name(reservation)) is not None
    if estimate is None:
        _check_money_left(store, campaign, limit, own=reservation if lives else None)
    if lives:
        check_budget(store, campaign=campaign, limit_usd=limit, estimate_usd=cost, own=reservation)
        yield StageMoney(reservation=reservation, estimate=estimate)
        return
    with reserve(store, campaign=campaign, limit_usd=limit, estimate_usd=cost, owner=owner) as made:
        yield StageMoney(reservation=made.name, estimate=estimate)


def _check_rollback(plan: Plan, name: str, store: Store) -> None:
    """GuardError when nobody knows what happens if the stage fails."""
    for text in missing_plans(plan, rollback_plan(plan, store), [name]):
        raise GuardError(text)


def _check_money_left(
    store: Store, campaign: str, limit_usd: float | None, own: str | None
) -> None:
    """BudgetError when a stage of unknown cost finds nothing left at all."""
    now = standing(store, campaign, limit_usd, own=own)
    if now.left_usd is not None and now.left_usd <= 0:
        raise BudgetError(
            message(
                where=f"budget of campaign {campaign}",
                found=f"{show_usd(now.spent_usd)} spent of {show_usd(limit_usd or 0.0)}",
                rule="a stage starts only while money is left",
                remedy=f"`llm-assets budget set USD --campaign {campaign} --why ...`",
            )
        )
