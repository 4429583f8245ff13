"""What is a hit, what must run and why: computed from the graph, the recipe and the store.

`make_plan(recipe, store)` walks the graph once. A stage whose inputs are known has an identity; the
identity has a valid record (hit) or not (run). Below a stage that must run the inputs are not known
yet: the stage may run, or hit if that output comes out as before (maybe).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, Literal

from llm_assets.damage import Wholeness
from llm_assets.errors import NotFoundError
from llm_assets.graph import STAGES, Node, ancestors, descendants, import_of, stages_off, wire
from llm_assets.history import History
from llm_assets.holding import Hold, approval_of
from llm_assets.identity import Source, hashed_part, identity_of, source_of
from llm_assets.overriding import override_inputs
from llm_assets.reasons import code_reasons, input_reasons, own_reasons
from llm_assets.recipe import RECIPES_FOLDER, Recipe
from llm_assets.sources import data_fingerprint, hashed_data, path_fingerprint
from llm_assets.store.digest import ArtifactHash, Identity
from llm_assets.store.protocol import Record, Store

CHOICES = "choices"
"""Kind of the entries that say which of an identity's records answers (see adopting.py)."""

Status = Literal["hit", "run", "maybe", "held", "pinned", "off"]


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """What will happen to one stage, and why.

    `identity` is None when an input is not known yet. `record` is the valid record of a hit, what a
    pinned artifact was made with (None: made elsewhere), or the newest record of the stage in this
    pipeline otherwise (what it would replace). `inputs` are all
    that the identity covers, or those that are known. `hold`: why a held stage is held.
    `useless_records`: of the identity, whose artifacts are gone or damaged.
    """

    name: str
    status: Status
    reasons: tuple[str, ...] = ()
    identity: Identity | None = None
    artifact: ArtifactHash | None = None
    type: str | None = None
    record: Record | None = None
    inputs: Mapping[str, str] = field(default_factory=dict)
    hold: Hold | None = None
    useless_records: int = 0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The plan of one recipe: every stage of the design by name, those that are off too.

    `replay`: only records of that replay count; "" for the ordinary plan.
    """

    recipe: Recipe
    nodes: Mapping[str, Node]
    stages: Mapping[str, StagePlan]
    sources: Mapping[str, Source]
    history: History
    replay: str = ""

    @property
    def rerun(self) -> list[str]:
        """Stages that run or may run, in graph order."""
        return [name for name, plan in self.stages.items() if plan.status in ("run", "maybe")]

    @property
    def complete(self) -> bool:
        """Everything is a hit or pinned: nothing to do."""
        return not any(plan.status in ("run", "maybe", "held") for plan in self.stages.values())

    def upstream(self, name: str) -> Iterable[StagePlan]:
        """The plans of all that stands above a stage."""
        return (self.stages[current] for current in ancestors(self.nodes, name))


@cache
def _source(module: str, libraries: tuple[str, ...]) -> Source:
    return source_of(module, libraries)


def node_source(node: Node) -> Source:
    """The source of a node: an imported stage runs the importing code.

    Read once a process, so that all stages of a run are planned on the code that the run started
    with. The worker reads it again, and refuses when the code on disk is another by then.
    """
    module = "llm_assets.stages.importing" if node.imported else node.stage.module
    return _source(module, node.stage.libraries)


def recipe_part(recipe: Recipe, node: Node) -> dict[str, Any]:
    """What of the recipe the identity of a stage covers."""
    stage = node.stage
    if stage.data:
        return hashed_data(recipe, stage.data)
    settings = getattr(recipe.stages, stage.name)
    part = hashed_part(settings)
    part.pop("import", None)
    if node.imported:
        found = import_of(recipe, stage.name)
        return {"import": {"hub": found.hub, "revision": found.revision} if found else {}}
    if stage.name == "release":
        part["gates"] = {
            name: {metric: gate.model_dump(mode="json") for metric, gate in gates.items()}
            for name, gates in recipe.gates.items()
        }
    return part


def outside_inputs(recipe: Recipe, node: Node) -> dict[str, str]:
    """Content hashes of what comes from outside the store: data files, an imported checkpoint."""
    if node.stage.data:
        return {"source": data_fingerprint(recipe, node.stage.data)}
    found = import_of(recipe, node.stage.name)
    if found is not None and found.path is not None:
        return {"import": path_fingerprint(recipe, found.path)}
    return {}


def recipe_argument(recipe: Recipe) -> str:
    """How a recipe is named on the command line: as packaged, or by its path from here."""
    path = recipe.path
    return path.stem if path.parent == RECIPES_FOLDER else os.path.relpath(path)


def make_plan(recipe: Recipe, store: Store, *, replay: str = "") -> Plan:
    """The plan of a recipe against a store. Reads records; writes nothing."""
    nodes = wire(recipe)
    planner = _Planner(recipe, store, nodes, replay)
    for name in STAGES:
        if name in nodes:
            planner.plans[name] = planner.stage(name)
        else:
            reason = stages_off(recipe)[name]
            planner.plans[name] = StagePlan(name=name, status="off", reasons=(reason,))
    return Plan(
        recipe=recipe,
        nodes=nodes,
        stages=planner.plans,
        sources=planner.sources,
        history=planner.history,
        replay=replay,
    )


class _Planner:
    """One walk over the graph: each stage is planned on the plans of those above it."""

    def __init__(
        self, recipe: Recipe, store: Store, nodes: Mapping[str, Node], replay: str
    ) -> None:
        self.recipe = recipe
        self.store = store
        self.nodes = nodes
        self.replay = replay
        self.history = History(store, recipe.pipeline)
        self.whole = Wholeness(store)
        self.plans: dict[str, StagePlan] = {}
        self.sources: dict[str, Source] = {}

    def stage(self, name: str) -> StagePlan:
        """The plan of one stage; all above it are planned."""
        node = self.nodes[name]
        source = self.sources[name] = node_source(node)
        if node.pin is not None:
            return self._pinned(node)
        part = recipe_part(self.recipe, node)
        known, missing = _known_inputs(self.recipe, self.nodes, self.plans, name)
        if name == "release":
            known.update(override_inputs(self.store, known.values()))
        if missing:
            return self._waiting(name, part, source, known, missing)
        seed = self.recipe.seed
        identity = identity_of(source_hash=source.hash, recipe=part, seed=seed, inputs=known)
        reasons: list[str] = []
        for record in self._answers(identity):
            problem = self.whole.problem(record.output)
            if not problem:
                return StagePlan(
                    name=name,
                    status="hit",
                    identity=identity,
                    artifact=record.output,
                    type=record.type,
                    record=record,
                    inputs=known,
                )
            reasons.append(f"artifact {record.output.short} {problem}")
        useless = 0 if self.replay else len(reasons)
        if useless and identity in self._choices:
            useless = len(self.store.records(identity))
        previous = self.history.newest(name)
        if self.replay:
            reasons = reasons or [f"replay {self.replay}"]
        reasons = reasons or own_reasons(previous, source, part, seed)
        reasons = reasons or input_reasons(previous, known)
        hold = self._hold(name, identity, part, source, known)
        return StagePlan(
            name=name,
            status="run" if hold is None else "held",
            reasons=tuple(reasons or ["no record"]),
            identity=identity,
            record=previous,
            inputs=known,
            hold=hold,
            useless_records=useless,
        )

    def _pinned(self, node: Node) -> StagePlan:
        name = node.stage.name
        artifact = ArtifactHash.parse(node.pin or "")
        try:
            kind = self.store.tree(artifact).type
        except NotFoundError as error:
            raise NotFoundError(
                f"stages.{name}.pin: the store has no artifact {artifact}\n"
                f"  next: put it there, or take the pin out of the recipe"
            ) from error
        records = [r for r in self.history.givers(artifact) if r.stage == name]
        whole = self.store.records(records[-1].identity) if records else []
        return StagePlan(
            name=name,
            status="pinned",
            reasons=(f"pinned to {artifact.short}",),
            artifact=artifact,
            type=kind,
            record=next((r for r in reversed(whole) if r.output == artifact), None),
        )

    def _waiting(
        self,
        name: str,
        part: Mapping[str, Any],
        source: Source,
        known: Mapping[str, str],
        missing: Iterable[str],
    ) -> StagePlan:
        """A stage whose inputs are not known yet."""
        previous = self.history.newest(name)
        if self.replay:
            reasons, status = [f"replay {self.replay}"], "run"
        else:
            reasons = own_reasons(previous, source, part, self.recipe.seed)
            # A changed stage runs whatever its inputs turn out to be.
            status = "run" if reasons else "maybe"
        reasons = reasons or [f"if {' or '.join(missing)} gives another output"]
        return StagePlan(
            name=name,
            status="run" if status == "run" else "maybe",
            reasons=tuple(reasons),
            record=previous,
            inputs=known,
        )

    def _answers(self, identity: Identity) -> list[Record]:
        """The records that may answer for an identity: the first one stays the answer, until
        somebody chooses another. Then only that one counts, and what was added since. In a replay
        only its own count."""
        records = self.store.records(identity)
        if self.replay:
            return [r for r in records if r.environment.get("replay") == self.replay]
        chosen = self._choices.get(identity)
        if chosen is None:
            return records
        since = int(chosen["num_records"])
        return [*(r for r in records[:since] if r.output == chosen["artifact"]), *records[since:]]

    @cached_property
    def _choices(self) -> dict[str, Mapping[str, Any]]:
        """Identity to its newest choice."""
        return {str(body["identity"]): body for _, body in self.store.entries(CHOICES)}

    def _hold(
        self,
        name: str,
        identity: Identity,
        part: Mapping[str, Any],
        source: Source,
        known: Mapping[str, str],
    ) -> Hold | None:
        """Why a stale stage is held; None when it may run."""
        if self.nodes[name].stage.cost_class != "expensive" or self.replay:
            return None
        twin = self.history.twin(
            name,
            part=part,
            seed=self.recipe.seed,
            inputs=known,
            is_there=lambda record: not self.whole.problem(record.output),
        )
        if twin is None or approval_of(self.store, identity) is not None:
            return None
        from llm_assets.costs.forecast import forecast

        earlier = self.history.estimating([name])
        estimates = forecast(self.recipe, self.store, {name: known}, earlier).estimates
        cost = estimates[name].cost_usd if name in estimates else None
        if cost is not None and cost <= self.recipe.budget.hold_over_usd:
            return None
        return Hold(
            stage=name,
            identity=identity,
            changes=code_reasons(twin, source),
            last_good=twin,
            estimate_usd=cost,
        )


def _known_inputs(
    recipe: Recipe, nodes: Mapping[str, Node], plans: Mapping[str, StagePlan], name: str
) -> tuple[dict[str, str], list[str]]:
    """Hashes of the inputs by name, as far as known, and the stages that must give the rest."""
    node = nodes[name]
    inputs = outside_inputs(recipe, node)
    wanted = dict(node.sources)
    if name == "release":
        # The manifest holds every stage's hashes, so every stage's output is an input of it.
        wanted.update({f"all.{above}": above for above in ancestors(nodes, name)})
    missing: dict[str, None] = {}
    for entry, giver in wanted.items():
        artifact = plans[giver].artifact
        if artifact is None:
            missing[giver] = None
        else:
            inputs[entry] = artifact
    direct = [giver for giver in dict.fromkeys(node.sources.values()) if giver in missing]
    return inputs, direct or list(missing)


def invalidated_by(recipe: Recipe, names: set[str]) -> list[str]:
    """What a failed or changed stage or data set invalidates: itself and its descendants."""
    nodes = wire(recipe)
    found = descendants(nodes, names)
    return [name for name in nodes if name in found]
