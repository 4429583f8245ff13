"""`llm-assets plan`."""

from __future__ import annotations

import json
from typing import Any

import click
from rich import box
from rich.console import Console
from rich.table import Table

from llm_assets.costs.budget import Standing, current_limit, standing
from llm_assets.costs.forecast import Forecast
from llm_assets.costs.learning import StageEstimate
from llm_assets.costs.quantities import show_seconds, show_usd
from llm_assets.graph import STAGES
from llm_assets.guards import forecast_plan, refusals
from llm_assets.places import store_url
from llm_assets.planning import Plan, invalidated_by, make_plan
from llm_assets.recipe import load_recipe
from llm_assets.report_card import wide_console
from llm_assets.rollback import rollback_plan
from llm_assets.store import open_store
from llm_assets.store.protocol import Store

_NOTHING = {"cost_usd": 0.0, "wall_s": 0.0}


def plan_document(plan: Plan, store: Store) -> dict[str, Any]:
    """The plan for machines. `estimate` is null where nobody can tell; a hit costs nothing."""
    estimates = forecast_plan(plan, store)
    steps = rollback_plan(plan, store)
    found = refusals(plan, store, estimates)
    money = _standing(plan, store)
    return {
        "pipeline": plan.recipe.pipeline,
        "may_start": not found,
        "refusals": found,
        "stages": [
            {
                "name": name,
                "status": entry.status,
                "reasons": list(entry.reasons),
                "cost_class": STAGES[name].cost_class,
                "identity": entry.identity,
                "artifact": entry.artifact,
                "estimate": _estimate(name, estimates),
                "on_failure": steps[name].as_json() if name in steps else None,
            }
            for name, entry in plan.stages.items()
        ],
        "totals": {
            "cost_usd": estimates.cost_usd,
            "wall_s": estimates.wall_s,
            "unknown": dict(estimates.unknown),
        },
        "budget": {
            "campaign": money.campaign,
            "limit_usd": money.limit_usd,
            "spent_usd": money.spent_usd,
            "reserved_usd": money.reserved_usd,
            "left_usd": money.left_usd,
        },
    }


def _standing(plan: Plan, store: Store) -> Standing:
    recipe = plan.recipe
    limit = current_limit(store, recipe.campaign, recipe.budget.limit_usd, pipeline=recipe.pipeline)
    return standing(store, recipe.campaign, limit)


def _estimate(name: str, estimates: Forecast) -> dict[str, Any] | None:
    if name in estimates.unknown:
        return None
    found = estimates.estimates.get(name)
    return dict(_NOTHING) if found is None else found.as_json()


@click.command()
@click.option("-r", "--recipe", "recipe_path", default="tiny", help="A path, or a packaged name.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
@click.option("--failed", metavar="STAGE", help="What the failure of a stage would invalidate.")
@click.option("--changed", metavar="STAGE|DATA", help="What a change of it would invalidate.")
def plan(recipe_path: str, as_json: bool, failed: str | None, changed: str | None) -> int:
    """What would run, why, and what it would cost. Exit 0: may start; 3: refused; 2: wrong usage.

    Time and money are at most: a stage that may run counts whole.
    """
    recipe = load_recipe(recipe_path)
    if failed is not None or changed is not None:
        if failed is not None and changed is not None:
            raise click.UsageError("--failed and --changed exclude each other")
        event = failed if failed is not None else str(changed)
        if event not in STAGES:
            raise click.UsageError(f"unknown stage {event!r}: one of {', '.join(STAGES)}")
        names = invalidated_by(recipe, {event})
        click.echo(json.dumps({"invalidated": names}) if as_json else "\n".join(names))
        return 0
    store = open_store(store_url())
    made = make_plan(recipe, store)
    document = plan_document(made, store)
    if as_json:
        click.echo(json.dumps(document, indent=2))
    else:
        _print(document, forecast_plan(made, store))
    return 0 if document["may_start"] else 3


def _print(document: dict[str, Any], estimates: Forecast) -> None:
    console = wide_console()
    table = Table(title=f"{document['pipeline']}: plan", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("stage", "status", "class"):
        table.add_column(heading, no_wrap=True)
    for heading in ("time", "cost"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("estimated from", overflow="fold")
    table.add_column("why", overflow="fold")
    for entry in document["stages"]:
        found = estimates.estimates.get(entry["name"])
        table.add_row(
            entry["name"],
            entry["status"],
            entry["cost_class"],
            show_seconds(found.wall_s) if found else "",
            show_usd(found.cost_usd) if found else "",
            _source(found) if found else estimates.unknown.get(entry["name"], ""),
            "\n".join(entry["reasons"]),
        )
    console.print(table)
    _print_failures(document, console)
    totals, money = document["totals"], document["budget"]
    line = f"at most {show_usd(totals['cost_usd'])} and {show_seconds(totals['wall_s'])}"
    if totals["unknown"]:
        line += f", without {', '.join(totals['unknown'])}"
    if money["left_usd"] is not None:
        line += (
            f"; {show_usd(max(0.0, money['left_usd']))} left of {show_usd(money['limit_usd'])} "
            f"in campaign {money['campaign']}"
        )
    console.print(line, markup=False, highlight=False)
    for text in document["refusals"]:
        console.print(f"refused: {text}", markup=False)
    if document["may_start"]:
        console.print("may start", highlight=False)


def _print_failures(document: dict[str, Any], console: Console) -> None:
    """What each stage that may run takes along when it fails; `rollback-plan` has the rest."""
    table = Table(
        "if it fails", "loses at most", "takes along", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for entry in document["stages"]:
        if entry["status"] not in ("run", "maybe", "held"):
            continue
        step = entry["on_failure"]
        lost = "" if step["lost_s"] is None else show_seconds(step["lost_s"])
        below = [name for name in step["invalidates"] if name != entry["name"]]
        table.add_row(entry["name"], lost, f"{len(below)} below" if below else "nothing")
    if table.row_count:
        console.print(table)


def _source(estimate: StageEstimate) -> str:
    """`measured: 2 earlier runs, off by 4 %`."""
    if estimate.error_share is None:
        return estimate.source
    return f"{estimate.source}, off by {estimate.error_share:.0%}"
