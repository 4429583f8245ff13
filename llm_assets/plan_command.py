"""`llm-assets plan`."""

from __future__ import annotations

import json
from typing import Any

import click
from rich import box
from rich.table import Table

from llm_assets.engine import failed_gates
from llm_assets.graph import STAGES
from llm_assets.places import store_url
from llm_assets.planning import Plan, invalidated_by, make_plan
from llm_assets.recipe import load_recipe
from llm_assets.report_card import wide_console
from llm_assets.store import open_store
from llm_assets.store.protocol import Store


def refusals(plan: Plan, store: Store) -> list[str]:
    """Why the run of a plan may not start; empty when it may."""
    if not plan.rerun:
        return []
    stopped = []
    for name in plan.nodes:
        if name == "release":
            continue
        for result in failed_gates(plan.recipe, plan.stages[name], store):
            stopped.append(f"gate {result.name} of {name} failed: {result.why}")
    return stopped


def plan_document(plan: Plan, store: Store) -> dict[str, Any]:
    """The plan for machines."""
    found = refusals(plan, store)
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
            }
            for name, entry in plan.stages.items()
        ],
    }


@click.command()
@click.option("-r", "--recipe", "recipe_path", default="tiny", help="A path, or a packaged name.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
@click.option("--failed", metavar="STAGE", help="What the failure of a stage would invalidate.")
@click.option("--changed", metavar="STAGE|DATA", help="What a change of it would invalidate.")
def plan(recipe_path: str, as_json: bool, failed: str | None, changed: str | None) -> int:
    """What would run, and why. Exit 0: may start; 3: refused; 2: wrong usage."""
    recipe = load_recipe(recipe_path)
    event = failed or changed
    if event is not None:
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
        _print(made, document["refusals"])
    return 0 if document["may_start"] else 3


def _print(made: Plan, stopped: list[str]) -> None:
    console = wide_console()
    table = Table(title=f"{made.recipe.pipeline}: plan", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("stage", "status", "class", "why"):
        table.add_column(heading, overflow="fold")
    for name, entry in made.stages.items():
        table.add_row(name, entry.status, STAGES[name].cost_class, "\n".join(entry.reasons))
    console.print(table)
    for text in stopped:
        console.print(f"refused: {text}", markup=False)
