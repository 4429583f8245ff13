"""`llm-assets approve`: let a held stage run, once, for one identity."""

from __future__ import annotations

import click

from llm_assets.errors import UserError
from llm_assets.guards import me
from llm_assets.holding import approve as record_approval
from llm_assets.places import store_url
from llm_assets.planning import make_plan
from llm_assets.recipe import load_recipe
from llm_assets.store import open_store

_SHORTEST_PREFIX = 8


@click.command()
@click.argument("stage")
@click.option("--identity", required=True, help="As the plan shows it; the first 8 digits do.")
@click.option("-r", "--recipe", "recipe_path", default="tiny", help="A path, or a packaged name.")
@click.option("--why", required=True, help="Recorded.")
@click.option("--who", help="Recorded; default: you.")
def approve(stage: str, identity: str, recipe_path: str, why: str, who: str | None) -> int:
    """Approve the run of a held stage. It counts for that identity only, and is recorded."""
    recipe = load_recipe(recipe_path)
    store = open_store(store_url())
    plan = make_plan(recipe, store)
    mine = plan.stages.get(stage)
    if mine is None:
        raise click.UsageError(f"unknown stage {stage!r}: one of {', '.join(plan.stages)}")
    if mine.hold is None:
        raise UserError(
            where=f"{recipe.pipeline}/{stage}",
            found=f"its status is {mine.status}",
            rule="a stage is approved while it is held",
            remedy=f"look at `llm-assets plan -r {recipe_path}`",
        )
    if len(identity) < _SHORTEST_PREFIX or not mine.hold.identity.startswith(identity):
        raise UserError(
            where=f"--identity of {stage}",
            found=identity,
            rule="an approval names the identity that waits, or its first 8 digits at least",
            remedy=f"the one that waits is {mine.hold.identity}",
        )
    body = record_approval(
        store,
        stage=stage,
        identity=mine.hold.identity,
        pipeline=recipe.pipeline,
        who=who or me(),
        why=why,
    )
    click.echo(f"{stage} {mine.hold.identity}: approved by {body['who']}: {body['why']}")
    return 0
