"""Limits, and the check before money is spent.

The limit of a campaign is the last one that was recorded: by a recipe that is new or was edited, or
by `llm-assets budget set`. Every change stands in the store (who, when, from, to, why), kind
`budgets`.

`check_budget` compares an estimate with what is left: the limit less what the ledger says, less
what other runs have reserved (reservations.py).
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llm_assets.costs.entries import campaign_key, ledger_entries
from llm_assets.costs.quantities import show_usd
from llm_assets.errors import BudgetError, ConflictError, UserError, message
from llm_assets.signing import check_signed, now
from llm_assets.store.protocol import Store

LIMITS = "budgets"
RESERVATIONS = "reservations"
_CENT = 1e-9  # USD: below this a difference is rounding


@dataclass(frozen=True, kw_only=True)
class BudgetChange:
    """One change of a campaign's limit, in USD; None: no limit. `source`: `command`, or `recipe`
    and the pipeline."""

    campaign: str
    at: str
    who: str
    before_usd: float | None
    after_usd: float | None
    why: str
    source: str

    def as_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "campaign": self.campaign,
            "at": self.at,
            "who": self.who,
            "from": self.before_usd,
            "to": self.after_usd,
            "why": self.why,
            "source": self.source,
        }


def budget_log(store: Store, campaign: str) -> list[BudgetChange]:
    """The changes of a campaign's limit, oldest first."""
    return [
        BudgetChange(
            campaign=str(body["campaign"]),
            at=str(body["at"]),
            who=str(body["who"]),
            before_usd=body["from"],
            after_usd=body["to"],
            why=str(body["why"]),
            source=str(body["source"]),
        )
        for _, body in store.entries(LIMITS, f"{campaign_key(campaign)}/")
    ]


def current_limit(
    store: Store, campaign: str, recipe_usd: float | None, *, pipeline: str | None
) -> float | None:
    """The limit that holds now, USD: the last recorded change, or the recipe's when that pipeline's
    recipe is new or was edited since it was recorded. Writes nothing. `pipeline` None: no recipe
    speaks for this campaign here."""
    log = budget_log(store, campaign)
    if pipeline is not None and _is_news(log, recipe_usd, pipeline):
        return recipe_usd
    return log[-1].after_usd if log else None


def record_recipe_limit(
    store: Store, campaign: str, recipe_usd: float | None, *, pipeline: str, who: str
) -> float | None:
    """Record the recipe's limit when it is new or was edited; give back the limit that holds."""
    log = budget_log(store, campaign)
    if not _is_news(log, recipe_usd, pipeline):
        return log[-1].after_usd
    source = f"recipe {pipeline}"
    _append(store, campaign, recipe_usd, who=who, why="the recipe says so", source=source)
    return recipe_usd


def _is_news(log: list[BudgetChange], recipe_usd: float | None, pipeline: str) -> bool:
    # Several pipelines may share a campaign: each recipe is compared with what it said itself.
    said = [change.after_usd for change in log if change.source == f"recipe {pipeline}"]
    return not said or said[-1] != recipe_usd


def set_limit(
    store: Store,
    campaign: str,
    limit_usd: float,
    *,
    who: str,
    why: str,
    recipe_usd: float | None,
    pipeline: str | None,
) -> BudgetChange:
    """Record a new limit; what the recipe of `pipeline` says is recorded first, when it is news."""
    check_signed(f"budget of {campaign}", who=who, why=why)
    if not limit_usd >= 0:
        raise UserError(
            where=f"budget of {campaign}",
            found=str(limit_usd),
            rule="a limit is not negative",
            remedy="give the whole campaign's limit in USD",
        )
    if pipeline is not None:
        record_recipe_limit(store, campaign, recipe_usd, pipeline=pipeline, who=who)
    return _append(store, campaign, limit_usd, who=who, why=why, source="command")


def _append(
    store: Store, campaign: str, limit_usd: float | None, *, who: str, why: str, source: str
) -> BudgetChange:
    while True:
        log = budget_log(store, campaign)
        change = BudgetChange(
            campaign=campaign,
            at=now(),
            who=who,
            before_usd=log[-1].after_usd if log else None,
            after_usd=limit_usd,
            why=why,
            source=source,
        )
        key = f"{campaign_key(campaign)}/{len(log) + 1:06d}"
        try:
            # The id keeps two equal changes of one second apart.
            store.add_entry(LIMITS, key, {**change.as_json(), "id": uuid.uuid4().hex})
        except ConflictError:
            continue
        return change


@dataclass(frozen=True, kw_only=True)
class Standing:
    """A campaign's money, USD. `reserved`: by runs that live, beyond what they have spent."""

    campaign: str
    limit_usd: float | None
    spent_usd: float
    reserved_usd: float

    @property
    def left_usd(self) -> float | None:
        """Of the limit, below zero when it is overdrawn; None without a limit."""
        if self.limit_usd is None:
            return None
        return self.limit_usd - self.spent_usd - self.reserved_usd


def standing(
    store: Store, campaign: str, limit_usd: float | None, *, own: str | None = None
) -> Standing:
    """Where a campaign stands. `own`: a reservation that does not count, the asking run's."""
    entries = ledger_entries(store, campaign)
    by_reservation: dict[str, float] = {}
    for entry in entries:
        name = entry.info.reservation
        by_reservation[name] = by_reservation.get(name, 0.0) + entry.usage.cost_usd
    reserved = 0.0
    prefix = f"{campaign_key(campaign)}/"
    closed = {key for key, _ in store.entries(RESERVATIONS, f"released/{prefix}")}
    for key, body in store.entries(RESERVATIONS, f"made/{prefix}"):
        name = key.rsplit("/", 1)[-1]
        if name == own or f"released/{prefix}{name}" in closed:
            continue
        if store.lease_owner(lease_name(name)) is None:
            continue
        reserved += max(0.0, float(body["amount_usd"]) - by_reservation.get(name, 0.0))
    return Standing(
        campaign=campaign,
        limit_usd=limit_usd,
        spent_usd=sum(entry.usage.cost_usd for entry in entries),
        reserved_usd=reserved,
    )


def check_budget(
    store: Store,
    *,
    campaign: str,
    limit_usd: float | None,
    estimate_usd: float | Mapping[str, float],
    own: str | None = None,
) -> None:
    """BudgetError when the estimate is over what is left of the campaign's budget.

    `estimate_usd`: the whole, or stage to USD in the order in which they run; then the error says
    which of them fit. `own`: the run's reservation, when it has one already.
    """
    check_standing(standing(store, campaign, limit_usd, own=own), estimate_usd)


def check_standing(now: Standing, estimate_usd: float | Mapping[str, float]) -> None:
    """`check_budget` for a standing that was read before."""
    stages = dict(estimate_usd) if isinstance(estimate_usd, Mapping) else {}
    needed = sum(stages.values()) if stages or isinstance(estimate_usd, Mapping) else estimate_usd
    left = now.left_usd
    if left is None or now.limit_usd is None or needed <= left + _CENT or needed == 0:
        return
    taken = f"{show_usd(now.spent_usd)} spent"
    if now.reserved_usd > 0:
        taken += f", {show_usd(now.reserved_usd)} reserved by other runs"
    found = (
        f"the estimate is {show_usd(needed)}, {show_usd(needed - left)} over the "
        f"{show_usd(max(0.0, left))} that are left of {show_usd(now.limit_usd)} ({taken})"
    )
    if stages:
        found += "\n  stages: " + ", ".join(
            f"{name} {show_usd(cost)}" for name, cost in stages.items() if cost > 0
        )
    needs = now.spent_usd + now.reserved_usd + needed
    raise BudgetError(
        message(
            where=f"budget of campaign {now.campaign}",
            found=found,
            rule="a run starts only when its estimate fits what is left",
            remedy=f"{_what_fits(stages, left)}; or raise the limit to at least "
            f"{show_usd(_round_up(needs))}: "
            f"`llm-assets budget set {_round_up(needs):g} --campaign {now.campaign} --why ...`",
        )
    )


def _what_fits(stages: Mapping[str, float], left: float) -> str:
    fitting: list[str] = []
    total = 0.0
    for name, cost in stages.items():
        if total + cost > left + _CENT:
            break
        total += cost
        fitting.append(name)
    if not stages:
        return f"run something that costs at most {show_usd(max(0.0, left))}"
    if not any(stages[name] > 0 for name in fitting):
        first = next(name for name in stages if name not in fitting)
        return f"nothing fits: {first} alone is over it; make it smaller"
    return f"what fits: {', '.join(fitting)} ({show_usd(total)})"


def _round_up(usd: float) -> float:
    """To the cent above, or to three digits of an amount below a cent."""
    step = 0.01
    while usd < 10 * step and step > 1e-9:
        step /= 10
    return round(-(-usd // step) * step, 12)


def lease_name(reservation: str) -> str:
    """The lease that the owner of a reservation holds while it lives."""
    return f"reservation/{reservation}"
