"""`llm-assets report`."""

from __future__ import annotations

import click

from llm_assets.places import store_url
from llm_assets.planning import make_plan
from llm_assets.recipe import load_recipe
from llm_assets.report_card import all_gates_pass, print_report, wide_console
from llm_assets.store import open_store


@click.command()
@click.option("-r", "--recipe", "recipe_path", default="tiny", help="A path, or a packaged name.")
def report(recipe_path: str) -> int:
    """Print the report card of a recipe; exit 1 when something is stale or a gate failed."""
    store = open_store(store_url())
    plan = make_plan(load_recipe(recipe_path), store)
    print_report(wide_console(), plan, store)
    return 0 if plan.complete and all_gates_pass(plan, store) else 1
