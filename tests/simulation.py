"""Runs stages without running them: each gets an output that is a function of its identity."""

import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from llm_assets.planning import Plan, make_plan, recipe_part
from llm_assets.recipe import Recipe
from llm_assets.store.digest import ArtifactHash, Identity
from llm_assets.store.protocol import Record, Store

PASSING = {
    name: {"value": value, "n": None}
    for name, value in {"kl_per_token": 0.0, "capability": 1.0}.items()
}
"""What the gates that every recipe must have compare."""


def put_output(store: Store, content: str, **files: str) -> ArtifactHash:
    """A small artifact with this content, and with JSON files by their stems."""
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            (Path(folder) / f"{name}.json").write_text(text)
        (Path(folder) / "documents.jsonl").write_text(content)
        return store.put(Path(folder), type="corpus", metadata={"num_rows": 1})


def add_record(
    plan: Plan, name: str, store: Store, *, output: ArtifactHash, at: str = "", **fields: Any
) -> Record:
    """The record that a worker would add for a stage of a plan."""
    mine = plan.stages[name]
    source = plan.sources[name]
    assert mine.identity is not None
    record = Record(
        identity=Identity.parse(mine.identity),
        stage=name,
        pipeline=plan.recipe.pipeline,
        output=output,
        type=plan.nodes[name].stage.gives,
        source_hash=source.hash,
        recipe=json.loads(json.dumps(recipe_part(plan.recipe, plan.nodes[name]))),
        seed=plan.recipe.seed,
        inputs=mine.inputs,
        metrics=fields.pop("metrics", PASSING),
        cost_usd=fields.pop("cost_usd", 0.0),
        wall_s=fields.pop("wall_s", 1.0),
        created_at=at or f"2026-01-01T00:00:00.{sum(1 for _ in store.all_records()):06d}+00:00",
        modules=source.modules,
        libraries=source.libraries,
        **fields,
    )
    store.add_record(record)
    return record


def simulate(
    recipe: Recipe,
    store: Store,
    *,
    same_output: Iterable[str] = (),
    stop_before: str = "",
    **fields: Any,
) -> list[str]:
    """Bring a recipe up to date; the stages that ran. `same_output`: stages whose output is always
    the same, whatever their identity. `fields`: of every record."""
    ran: list[str] = []
    while True:
        plan = make_plan(recipe, store)
        ready = [n for n in plan.rerun if plan.stages[n].identity is not None and n != stop_before]
        if not ready:
            return ran
        name = ready[0]
        content = name if name in same_output else f"{name} {plan.stages[name].identity}"
        add_record(plan, name, store, output=put_output(store, content), **fields)
        ran.append(name)
