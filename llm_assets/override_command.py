"""`llm-assets override`: let one artifact through one gate that it failed."""

from __future__ import annotations

import difflib

import click

from llm_assets.engine import gate_results
from llm_assets.errors import NotFoundError, UserError
from llm_assets.gates.thresholds import GateResult
from llm_assets.overriding import override as record_override
from llm_assets.places import store_url
from llm_assets.planning import Plan, make_plan
from llm_assets.recipe import load_recipe
from llm_assets.store import open_store
from llm_assets.store.digest import ArtifactHash
from llm_assets.store.protocol import Store

_SHORTEST_PREFIX = 8


@click.command()
@click.argument("gate")
@click.option("--artifact", required=True, help="The hash; its first 8 digits do.")
@click.option("--reviewer", required=True, help="Who answers for it. Recorded.")
@click.option("--reason", required=True, help="Recorded, and shown wherever the gate is.")
@click.option("-r", "--recipe", "recipe_path", default="tiny", help="A path, or a packaged name.")
def override(gate: str, artifact: str, reviewer: str, reason: str, recipe_path: str) -> int:
    """Let one artifact through GATE (STAGE.METRIC, or METRIC), which it failed.

    For that artifact only: another one has to pass. The gate then shows a warning, not a pass, and
    the manifest holds the override. The next run decides the release again.
    """
    recipe = load_recipe(recipe_path)
    store = open_store(store_url(), create=False)
    plan = make_plan(recipe, store)
    stage, found = _artifact(plan, artifact)
    result = _gate(plan, store, stage, gate)
    body = record_override(
        store,
        artifact=found,
        stage=stage,
        gate=result.name,
        pipeline=recipe.pipeline,
        verdict=result.as_dict(),
        reviewer=reviewer,
        reason=reason,
    )
    click.echo(
        f"{stage}.{result.name} overridden for {found} by {body['reviewer']}: {body['reason']}"
    )
    click.echo(f"  the gate said: {result.why}")
    click.echo(f"  next: llm-assets run -r {recipe_path}: the release is decided again")
    return 0


def _artifact(plan: Plan, text: str) -> tuple[str, ArtifactHash]:
    """The stage that gives an artifact under this recipe, and the whole hash."""
    given = {
        name: entry.artifact for name, entry in plan.stages.items() if entry.artifact is not None
    }
    matching = {name: a for name, a in given.items() if a.startswith(text)}
    if len(text) < _SHORTEST_PREFIX or len(set(matching.values())) != 1:
        what = "no artifact" if not matching else f"{len(matching)} artifacts"
        raise NotFoundError(
            f"{plan.recipe.pipeline}: {what} begins with {text!r}\n"
            "  rule: an override names an artifact that the recipe gives now, by its hash or the "
            f"first {_SHORTEST_PREFIX} digits at least\n"
            "  next: `llm-assets report` lists the gates that failed; `llm-assets store ls` the "
            "artifacts"
        )
    return next(iter(matching.items()))


def _gate(plan: Plan, store: Store, stage: str, text: str) -> GateResult:
    """The verdict of a gate of that stage. UserError unless it is one that blocks the artifact."""
    where = f"override of {text}"
    if stage == "release":
        raise UserError(
            where=where,
            found="a release",
            rule="a release ships when every gate above it passed or was overridden",
            remedy="override the gate that its reasons name",
        )
    named, _, metric = text.rpartition(".")
    results = {result.name: result for result in gate_results(plan, stage, store)}
    if metric not in results or named not in ("", stage):
        close = difflib.get_close_matches(metric, results, n=1)
        raise UserError(
            where=where,
            found=f"no such gate of {stage}, which gives this artifact",
            rule=f"gates of {stage}: {', '.join(results) or 'none'}",
            remedy=f"did you mean {stage}.{close[0]}?" if close else "name one of these",
        )
    result = results[metric]
    if not result.blocks:
        raise UserError(
            where=where,
            found=f"its verdict is {result.verdict}: {result.why}",
            rule="an override lets through what a gate holds back",
            remedy="nothing is to be done",
        )
    return result
