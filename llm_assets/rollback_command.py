"""`llm-assets rollback-plan`."""

from __future__ import annotations

import json
import re

import click
from rich import box
from rich.table import Table

from llm_assets.costs.quantities import show_seconds, show_usd
from llm_assets.places import store_url
from llm_assets.planning import make_plan
from llm_assets.recipe import load_recipe
from llm_assets.report_card import wide_console
from llm_assets.rollback import RollbackStep, keep_plan, missing_plans, plan_json, rollback_plan
from llm_assets.store import open_store


@click.command("rollback-plan")
@click.option("-r", "--recipe", "recipe_path", default="tiny", help="A path, or a packaged name.")
@click.option("--stage", metavar="STAGE", help="Of one stage, in full.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def rollback(recipe_path: str, stage: str | None, as_json: bool) -> int:
    """What happens when a stage fails: what to do, what stays, what it costs, who decides.

    The plan is kept in the store, and a run keeps it with its manifest. Exit 3: a stage that would
    run has none.
    """
    recipe = load_recipe(recipe_path)
    store = open_store(store_url())
    plan = make_plan(recipe, store)
    steps = rollback_plan(plan, store)
    if stage is not None and stage not in steps:
        raise click.UsageError(f"unknown stage {stage!r}: one of {', '.join(steps)}")
    document = plan_json(plan, steps)
    digest = keep_plan(store, document)
    missing = missing_plans(plan, steps)
    if as_json:
        shown = document if stage is None else document["stages"][stage]
        click.echo(json.dumps(shown, indent=2))
    elif stage is not None:
        _print_step(steps[stage])
    else:
        _print(recipe.pipeline, list(steps.values()))
        click.echo(f"kept as {digest}")
    if not as_json:
        for text in missing:
            click.echo(f"refused: {text}")
    return 3 if missing else 0


def _print(pipeline: str, steps: list[RollbackStep]) -> None:
    table = Table(title=f"{pipeline}: rollback plan", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("when it fails", "class", "it takes along"):
        table.add_column(heading, no_wrap=True)
    for heading in ("lost at most", "rerun"):
        table.add_column(heading, justify="right", no_wrap=True)
    for heading in ("last good", "owner"):
        table.add_column(heading, overflow="fold")
    for step in steps:
        table.add_row(
            step.stage,
            step.cost_class,
            f"{len(step.invalidates) - 1} below",
            _money(step.lost_usd, step.lost_s),
            _money(step.rerun_usd, step.rerun_s),
            _short(step.checkpoint),
            step.owner or "nobody",
        )
    wide_console().print(table)


def _short(checkpoint: str) -> str:
    """`artifact 9f4fab4f63e5 of 2026-03-01`: twelve digits tell a hash."""
    return re.sub(r"([0-9a-f]{12})[0-9a-f]{52}", r"\1", checkpoint)


def _money(usd: float | None, seconds: float | None) -> str:
    if usd is None or seconds is None:
        return "unknown"
    return f"{show_usd(usd)}, {show_seconds(seconds)}"


def _print_step(step: RollbackStep) -> None:
    rows = {
        "stage": f"{step.stage} ({step.cost_class})",
        "fails when": step.trigger,
        "action": step.action,
        "command": step.command,
        "invalidates": ", ".join(step.invalidates),
        "stays cached": ", ".join(step.cached) or "nothing",
        "lost at most": _money(step.lost_usd, step.lost_s),
        "rerun": _money(step.rerun_usd, step.rerun_s),
        "last good": step.checkpoint,
        "owner": step.owner or "nobody",
    }
    for name, text in rows.items():
        click.echo(f"{name:<14}{text}")
