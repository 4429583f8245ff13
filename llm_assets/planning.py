"""What is a hit, what must run and why: computed from the graph, the recipe and the store.

`make_plan(recipe, store)` walks the graph once. A stage whose inputs are known has an identity; the
identity has a valid record (hit) or not (run). Below a stage that must run the inputs are not known
yet: the stage may run, or hit if that output comes out as before (maybe).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, Literal

from llm_assets.errors import NotFoundError
from llm_assets.graph import STAGES, Node, ancestors, descendants, import_of, stages_off, wire
from llm_assets.identity import Source, changed_keys, hashed_part, identity_of, source_of
from llm_assets.recipe import Recipe
from llm_assets.sources import data_fingerprint, hashed_data, path_fingerprint
from llm_assets.store.digest import ArtifactHash, Identity
from llm_assets.store.protocol import Record, Store

Status = Literal["hit", "run", "maybe", "held", "pinned", "off"]


@dataclass(frozen=True, kw_only=True)
class StagePlan:
    """What will happen to one stage, and why.

    `identity` is None when an input is not known yet. `record` is the valid record of a hit, or the
    newest record of the stage in this pipeline otherwise (what it would replace).
    """

    name: str
    status: Status
    reasons: tuple[str, ...] = ()
    identity: Identity | None = None
    artifact: ArtifactHash | None = None
    type: str | None = None
    record: Record | None = None
    inputs: Mapping[str, str] = field(default_factory=dict)


class History:
    """The newest record of each stage of one pipeline: read once, only when something is stale."""

    def __init__(self, store: Store, pipeline: str) -> None:
        self._store = store
        self._pipeline = pipeline

    @cached_property
    def records(self) -> dict[str, list[Record]]:
        """Stage to its records in this pipeline, oldest first."""
        found: dict[str, list[Record]] = {}
        for record in self._store.all_records():
            if record.pipeline == self._pipeline:
                found.setdefault(record.stage, []).append(record)
        for records in found.values():
            records.sort(key=lambda record: record.created_at)
        return found

    def newest(self, stage: str) -> Record | None:
        """The newest record of a stage; None when it never ran."""
        records = self.records.get(stage)
        return records[-1] if records else None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The plan of one recipe: every stage of the design by name, those that are off too."""

    recipe: Recipe
    nodes: Mapping[str, Node]
    stages: Mapping[str, StagePlan]
    sources: Mapping[str, Source]

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


def make_plan(recipe: Recipe, store: Store) -> Plan:
    """The plan of a recipe against a store. Reads records; writes nothing."""
    nodes = wire(recipe)
    off = stages_off(recipe)
    history = History(store, recipe.pipeline)
    sources: dict[str, Source] = {}
    plans: dict[str, StagePlan] = {}
    for name in STAGES:
        if name in nodes:
            sources[name] = node_source(nodes[name])
            plans[name] = _plan_stage(recipe, store, nodes, plans, sources[name], history, name)
        else:
            plans[name] = StagePlan(name=name, status="off", reasons=(off[name],))
    return Plan(recipe=recipe, nodes=nodes, stages=plans, sources=sources)


def _plan_stage(
    recipe: Recipe,
    store: Store,
    nodes: Mapping[str, Node],
    plans: Mapping[str, StagePlan],
    source: Source,
    history: History,
    name: str,
) -> StagePlan:
    node = nodes[name]
    if node.pin is not None:
        return _pinned(store, node)
    known = _known_inputs(recipe, nodes, plans, name)
    part = recipe_part(recipe, node)
    if known is None:
        waiting = [s for s in node.sources.values() if plans[s].status in ("run", "maybe", "held")]
        previous = history.newest(name)
        own = _own_reasons(previous, source, part, recipe.seed)
        reasons = own or [f"if {' or '.join(dict.fromkeys(waiting))} gives another output"]
        # A changed stage runs whatever its inputs turn out to be.
        status: Status = "run" if own else "maybe"
        return StagePlan(name=name, status=status, reasons=tuple(reasons), record=previous)
    identity = identity_of(source_hash=source.hash, recipe=part, seed=recipe.seed, inputs=known)
    reasons = []
    for record in store.records(identity):
        if store.has(record.output):
            return StagePlan(
                name=name,
                status="hit",
                identity=identity,
                artifact=record.output,
                type=record.type,
                record=record,
                inputs=known,
            )
        reasons.append(f"artifact {record.output.short} is gone or damaged")
    previous = history.newest(name)
    reasons = reasons or _own_reasons(previous, source, part, recipe.seed)
    reasons = reasons or _input_reasons(previous, known)
    return StagePlan(
        name=name,
        status="run",
        reasons=tuple(reasons or ["no record"]),
        identity=identity,
        record=previous,
        inputs=known,
    )


def _pinned(store: Store, node: Node) -> StagePlan:
    artifact = ArtifactHash.parse(node.pin or "")
    try:
        kind = store.tree(artifact).type
    except NotFoundError as error:
        raise NotFoundError(
            f"stages.{node.stage.name}.pin: the store has no artifact {artifact}\n"
            f"  next: put it there, or take the pin out of the recipe"
        ) from error
    return StagePlan(
        name=node.stage.name,
        status="pinned",
        reasons=(f"pinned to {artifact.short}",),
        artifact=artifact,
        type=kind,
    )


def _known_inputs(
    recipe: Recipe, nodes: Mapping[str, Node], plans: Mapping[str, StagePlan], name: str
) -> dict[str, str] | None:
    """Hashes of all inputs by name; None when one of them is not known yet."""
    node = nodes[name]
    inputs = outside_inputs(recipe, node)
    wanted = dict(node.sources)
    if name == "release":
        # The manifest holds every stage's hashes, so every stage's output is an input of it.
        wanted.update({f"all.{above}": above for above in ancestors(nodes, name)})
    for entry, giver in wanted.items():
        artifact = plans[giver].artifact
        if artifact is None:
            return None
        inputs[entry] = artifact
    return inputs


def _own_reasons(
    previous: Record | None, source: Source, part: Mapping[str, Any], seed: int
) -> list[str]:
    """Why a stage itself is stale, whatever its inputs: no record, code, libraries or recipe."""
    if previous is None:
        return ["no record"]
    reasons = []
    for module in sorted({*previous.modules, *source.modules}):
        if previous.modules.get(module) != source.modules.get(module):
            reasons.append(f"code changed: {module}")
    for library in sorted({*previous.libraries, *source.libraries}):
        before, now = previous.libraries.get(library), source.libraries.get(library)
        if before != now:
            reasons.append(f"library changed: {library} {before} → {now}")
    for key, before, now in changed_keys(previous.recipe, part):
        reasons.append(f"recipe changed: {key} from {before!r} to {now!r}")
    if previous.seed != seed:
        reasons.append(f"recipe changed: seed from {previous.seed} to {seed}")
    return reasons


def _input_reasons(previous: Record | None, inputs: Mapping[str, str]) -> list[str]:
    if previous is None:
        return []
    return [
        f"input changed: {name}"
        for name in sorted({*previous.inputs, *inputs})
        if previous.inputs.get(name) != inputs.get(name) and not name.startswith("all.")
    ]


def invalidated_by(recipe: Recipe, names: set[str]) -> list[str]:
    """What a failed or changed stage or data set invalidates: itself and its descendants."""
    nodes = wire(recipe)
    found = descendants(nodes, names)
    return [name for name in nodes if name in found]
