"""What happens when a stage fails: written down before a run starts, and computed after one failed.

`rollback_plan` says for every stage of a recipe what counts as its failure, what to do then, what
stays cached, what it costs at most and who owns it. `actual_rollback` says the same of a run that
failed, from the graph and the store.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from llm_assets.costs.entries import ledger_entries
from llm_assets.costs.forecast import Forecast, forecast
from llm_assets.costs.learning import StageEstimate
from llm_assets.costs.quantities import show_seconds, show_usd
from llm_assets.graph import STAGES, descendants
from llm_assets.planning import Plan, recipe_argument
from llm_assets.recipe import Recipe
from llm_assets.stage_settings import TrainSettings
from llm_assets.store.digest import Identity
from llm_assets.store.protocol import Store

KIND = "rollback_plans"
NONE_YET = "none yet"
_NOBODY = "whoever started the run"

_ACTIONS: Mapping[str, str] = {
    "cheap": "mend the cause and run again; it starts over",
    "medium": "mend the cause and run again; training goes on from its newest checkpoint",
    "expensive": "stop and tell the owner; nothing of it is thrown away: training goes on from its "
    "newest checkpoint, and a change of code is held until it is approved",
}


@dataclass(frozen=True, kw_only=True)
class RollbackStep:
    """The plan for one stage's failure.

    `invalidates`: the stage and all below it; `cached`: what stays. `lost_usd`, `lost_s`: of the
    stage, at most, when it fails at the worst moment. `rerun_usd`, `rerun_s`: of all that it
    invalidates. None where nobody can tell. `checkpoint`: what a rerun goes on from.
    """

    stage: str
    cost_class: str
    trigger: str
    action: str
    command: str
    invalidates: tuple[str, ...]
    cached: tuple[str, ...]
    lost_usd: float | None
    lost_s: float | None
    rerun_usd: float | None
    rerun_s: float | None
    owner: str
    checkpoint: str

    def as_json(self) -> dict[str, Any]:
        """Plain JSON."""
        document = asdict(self)
        document["class"] = document.pop("cost_class")
        return {**document, "invalidates": list(self.invalidates), "cached": list(self.cached)}


def rollback_plan(plan: Plan, store: Store) -> dict[str, RollbackStep]:
    """The plan for the failure of each stage of a recipe's graph, hits included."""
    inputs = {name: dict(plan.stages[name].inputs) for name in plan.nodes}
    estimates = forecast(plan.recipe, store, inputs, plan.history.estimating(inputs))
    return {name: _step(plan, store, estimates, name) for name in plan.nodes}


def _step(plan: Plan, store: Store, estimates: Forecast, name: str) -> RollbackStep:
    recipe, stage = plan.recipe, STAGES[name]
    below = descendants(plan.nodes, {name})
    invalidates = tuple(entry for entry in plan.nodes if entry in below)
    rerun = [estimates.estimates.get(entry) for entry in invalidates]
    known = [entry for entry in rerun if entry is not None]
    lost_s = _lost_s(recipe, name, estimates.estimates.get(name))
    return RollbackStep(
        stage=name,
        cost_class=stage.cost_class,
        trigger=_trigger(recipe, name),
        action=_ACTIONS[stage.cost_class],
        command=f"llm-assets run -r {recipe_argument(recipe)}",
        invalidates=invalidates,
        cached=tuple(entry for entry in plan.nodes if entry not in below),
        lost_usd=None if lost_s is None else lost_s / 3600 * _usd_per_hour(recipe),
        lost_s=lost_s,
        rerun_usd=sum(entry.cost_usd for entry in known) if len(known) == len(rerun) else None,
        rerun_s=sum(entry.wall_s for entry in known) if len(known) == len(rerun) else None,
        owner=owner_of(recipe, name, estimates.estimates.get(name)),
        checkpoint=last_good(plan, name, store),
    )


def _usd_per_hour(recipe: Recipe) -> float:
    return recipe.rates.usd_per_hour * recipe.rates.devices


def _trigger(recipe: Recipe, name: str) -> str:
    """What counts as a failure of the stage."""
    parts = ["its worker ends without a record"]
    if STAGES[name].trains:
        parts.append("its loss is not finite")
    limit = recipe.budget.stage_limits_usd.get(name)
    parts.append("its money is spent" if limit is None else f"it costs over {show_usd(limit)}")
    for metric, gate in recipe.gates.get(name, {}).items():
        if gate.min is not None:
            parts.append(f"{metric} is below {gate.min:g}")
        if gate.max is not None:
            parts.append(f"{metric} is above {gate.max:g}")
    if name == "release":
        parts.append("the decision is HOLD")
    return "; ".join(parts)


def _lost_s(recipe: Recipe, name: str, estimate: StageEstimate | None) -> float | None:
    """Seconds of work that a failure throws away at most: all of it, or since the last save."""
    if estimate is None:
        return None
    settings = getattr(recipe.stages, name, None)
    if not STAGES[name].trains or not isinstance(settings, TrainSettings) or settings.import_:
        return estimate.wall_s
    since_save = [estimate.wall_s]
    if isinstance(settings.checkpoint.every_minutes, float):
        since_save.append(settings.checkpoint.every_minutes * 60)
    if settings.checkpoint.every_steps is not None and settings.max_steps:
        share = settings.checkpoint.every_steps / settings.max_steps
        since_save.append(estimate.wall_s * share)
    return min(since_save)


def owner_of(recipe: Recipe, name: str, estimate: StageEstimate | None) -> str:
    """Who decides when the stage fails; "" when an expensive stage has nobody."""
    if recipe.owners:
        return ", ".join(recipe.owners)
    if STAGES[name].cost_class == "expensive":
        cost = None if estimate is None else estimate.cost_usd
        if cost is None or cost > recipe.budget.hold_over_usd:
            return ""
    return _NOBODY


def last_good(plan: Plan, name: str, store: Store) -> str:
    """What a rerun of a stage can go on from: a save, or the last good artifact."""
    mine = plan.stages[name]
    if mine.artifact is None and mine.identity is not None and STAGES[name].trains:
        folder = store.checkpoints(Identity.parse(mine.identity))
        saves = sorted(p.name for p in folder.glob("save-*") if (p / "manifest.json").is_file())
        if saves:
            return f"checkpoint {saves[-1]}"
    if mine.artifact is not None:
        return f"artifact {mine.artifact}"
    if mine.record is not None:
        return f"artifact {mine.record.output} of {mine.record.created_at[:10]}"
    return NONE_YET


def missing_plans(
    plan: Plan, steps: Mapping[str, RollbackStep], names: Iterable[str] | None = None
) -> list[str]:
    """Why a run may not start for want of a rollback plan; empty when every stage has one.

    `names`: the stages that run; without it the plan's rerun set.
    """
    missing = []
    for name in plan.rerun if names is None else names:
        step = steps.get(name)
        empty = [] if step is None else [k for k, v in asdict(step).items() if v == ""]
        if step is None or empty:
            what = "no rollback plan" if step is None else f"no {', '.join(empty)} in its plan"
            missing.append(
                f"{plan.recipe.path}: {name} has {what} for its failure\n"
                "  rule: a run starts when it is known what happens if a stage fails; an expensive "
                "stage has an owner\n"
                "  next: add `owners:` to the recipe, an e-mail or team:NAME"
            )
    return missing


def plan_json(plan: Plan, steps: Mapping[str, RollbackStep]) -> dict[str, Any]:
    """The whole rollback plan as a document."""
    return {
        "pipeline": plan.recipe.pipeline,
        "stages": {name: step.as_json() for name, step in steps.items()},
    }


def keep_plan(store: Store, document: Mapping[str, Any]) -> str:
    """Put a rollback plan into the store; its key. The same plan again is the same entry."""
    text = json.dumps(document, sort_keys=True)
    digest = hashlib.sha256(text.encode()).hexdigest()
    store.add_entry(KIND, f"{document['pipeline']}/{digest}", document)
    return digest


@dataclass(frozen=True, kw_only=True)
class Rollback:
    """What a failed run leaves behind.

    `failed`: stage to why. `invalidated`: the failed stages and what stands below them without a
    valid artifact. `cached`: what stays. `spent_usd`: by this run; `lost_usd` of it for nothing.
    """

    pipeline: str
    run_id: str
    failed: Mapping[str, str]
    invalidated: Sequence[str]
    cached: Sequence[str]
    spent_usd: float
    lost_usd: float
    lost_s: float
    rerun_usd: float | None
    owner: str
    checkpoints: Mapping[str, str]
    command: str

    def as_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)

    def text(self) -> str:
        """For people: what failed, what it takes along, what to type."""
        lines = [f"{self.pipeline}: run {self.run_id[:8]} failed at {', '.join(self.failed)}"]
        lines += [f"  {stage}: {why.splitlines()[0]}" for stage, why in self.failed.items() if why]
        lines.append(f"  rolled back: {', '.join(self.invalidated)}")
        lines.append(f"  stays cached: {', '.join(self.cached) or 'nothing'}")
        lines.append(
            f"  lost: {show_usd(self.lost_usd)} and {show_seconds(self.lost_s)}, of "
            f"{show_usd(self.spent_usd)} spent by this run"
        )
        if self.rerun_usd is not None:
            lines.append(f"  the rest costs about {show_usd(self.rerun_usd)}")
        lines += [f"  {stage} {_from(what)}" for stage, what in self.checkpoints.items()]
        lines.append(f"  owner: {self.owner}; next: {self.command}")
        return "\n".join(lines)


def _from(checkpoint: str) -> str:
    """What last_good found, in a sentence: only a save is gone on from."""
    if checkpoint.startswith("checkpoint"):
        return f"goes on from {checkpoint}"
    short = re.sub(r"([0-9a-f]{12})[0-9a-f]{52}", r"\1", checkpoint)
    return "starts over" + ("" if checkpoint == NONE_YET else f"; last good: {short}")


def actual_rollback(
    plan: Plan, store: Store, failed: Mapping[str, str], *, run_id: str, gates: Iterable[str] = ()
) -> Rollback:
    """The rollback set of a run that failed. `plan`: as it stands now. `gates`: those of the failed
    stages whose artifact is there and did not pass, which spoils all below them."""
    spoiled = descendants(plan.nodes, set(gates))
    stands = {name for name, entry in plan.stages.items() if entry.artifact is not None}
    below = descendants(plan.nodes, set(failed))
    invalidated = [
        name for name in plan.nodes if name in failed or name in spoiled or name in below - stands
    ]
    attempts = [
        entry
        for entry in ledger_entries(store, plan.recipe.campaign)
        if entry.info.run_id == run_id and run_id
    ]
    wasted = [entry for entry in attempts if entry.status != "done" or entry.info.stage in spoiled]
    estimates = forecast(
        plan.recipe,
        store,
        {name: dict(plan.stages[name].inputs) for name in invalidated},
        plan.history.estimating(invalidated),
    )
    return Rollback(
        pipeline=plan.recipe.pipeline,
        run_id=run_id,
        failed=dict(failed),
        invalidated=invalidated,
        cached=[name for name in plan.nodes if name in stands and name not in invalidated],
        spent_usd=sum((entry.usage.cost_usd for entry in attempts), 0.0),
        lost_usd=sum((entry.usage.cost_usd for entry in wasted), 0.0),
        lost_s=sum((entry.usage.seconds for entry in wasted), 0.0),
        rerun_usd=None if estimates.unknown else estimates.cost_usd,
        owner=", ".join(plan.recipe.owners) or _NOBODY,
        checkpoints={name: last_good(plan, name, store) for name in failed},
        command=_next_command(plan, gates),
    )


def _next_command(plan: Plan, gates: Iterable[str]) -> str:
    """A failed gate is looked at first; anything else is mended and run again."""
    return f"llm-assets {'report' if list(gates) else 'run'} -r {recipe_argument(plan.recipe)}"
