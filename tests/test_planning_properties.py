"""Properties of the plan over random graphs and random histories of changes.

The graph, the code, the recipe and the source data are drawn; what a stage gives is a function of
its identity, or always the same, or one of a few outputs. An oracle that knows nothing of hashes
says what must run: a stage whose (code, recipe part, seed, input outputs) was never seen.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from llm_assets import planning
from llm_assets.graph import Input, Node, Stage
from llm_assets.identity import Source, digest_of
from llm_assets.planning import Plan, make_plan
from llm_assets.recipe import Recipe, load_recipe
from llm_assets.store.digest import Identity
from llm_assets.store.protocol import Record
from tests.memory_store import MemoryStore

NAMES = ("a", "b", "c", "d", "e", "f", "g")
QUICK = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@dataclass
class World:
    """A graph and what stands at its stages now: all that an identity can depend on."""

    parents: Mapping[str, tuple[str, ...]]
    outputs: Mapping[str, str]
    code: dict[str, int] = field(default_factory=dict)
    part: dict[str, int] = field(default_factory=dict)
    data: dict[str, int] = field(default_factory=dict)
    seed: int = 0

    def own(self, name: str) -> tuple[int, int, int, int]:
        return (
            self.code.get(name, 0),
            self.part.get(name, 0),
            self.data.get(name, 0) if not self.parents[name] else 0,
            self.seed,
        )

    def state(self) -> tuple[Any, ...]:
        return (dict(self.code), dict(self.part), dict(self.data), self.seed)

    def go_to(self, state: tuple[Any, ...]) -> None:
        code, part, data, self.seed = state
        self.code, self.part, self.data = dict(code), dict(part), dict(data)


@dataclass
class Oracle:
    """What ran so far, and what it gave: (stage, own, inputs) to output."""

    seen: dict[tuple[Any, ...], str] = field(default_factory=dict)

    def must_run(self, world: World) -> tuple[set[str], set[str]]:
        """Stages that have never been seen so; and those below one of them."""
        outputs: dict[str, str] = {}
        run, unknown = set(), set()
        for name, parents in world.parents.items():
            if any(parent not in outputs for parent in parents):
                unknown.add(name)
                continue
            key = self.key(world, name, outputs)
            if key in self.seen:
                outputs[name] = self.seen[key]
            else:
                run.add(name)
        return run, unknown

    @staticmethod
    def key(world: World, name: str, outputs: Mapping[str, str]) -> tuple[Any, ...]:
        inputs = tuple(outputs[parent] for parent in world.parents[name])
        return (name, world.own(name), inputs)


@st.composite
def worlds(draw: st.DrawFn) -> World:
    count = draw(st.integers(2, len(NAMES)))
    parents: dict[str, tuple[str, ...]] = {}
    for place, name in enumerate(NAMES[:count]):
        above = st.sampled_from(NAMES[:place]) if place else st.nothing()
        parents[name] = tuple(sorted(draw(st.sets(above, max_size=min(place, 3)))))
    kinds = st.sampled_from(["fresh", "constant", "few"])
    return World(parents=parents, outputs={name: draw(kinds) for name in parents})


CHANGES = st.lists(
    st.tuples(
        st.sampled_from(["code", "part", "data", "seed", "back"]),
        st.sampled_from(NAMES),
        st.integers(0, 2),
    ),
    max_size=6,
)


@pytest.fixture
def recipe() -> Recipe:
    return load_recipe("tiny")


class Pipeline:
    """The world as planning.py sees it, and workers that pretend."""

    def __init__(self, world: World, recipe: Recipe, patch: pytest.MonkeyPatch) -> None:
        self.world = world
        self.recipe = recipe
        self.store = MemoryStore()
        self.stages = {
            name: Stage(
                name=name,
                number=place,
                gives="corpus",
                module=f"m.{name}",
                inputs=tuple(Input(name=above, accepts=("corpus",)) for above in parents),
            )
            for place, (name, parents) in enumerate(world.parents.items())
        }
        self.nodes = {
            name: Node(stage=stage, sources={above: above for above in world.parents[name]})
            for name, stage in self.stages.items()
        }
        patch.setattr(planning, "STAGES", self.stages)
        patch.setattr(planning, "wire", lambda recipe: self.nodes)
        patch.setattr(planning, "recipe_part", lambda recipe, node: self._part(node.stage.name))
        patch.setattr(planning, "node_source", lambda node: self._source(node.stage.name))
        patch.setattr(planning, "outside_inputs", lambda recipe, node: self._data(node.stage.name))

    def _part(self, name: str) -> dict[str, Any]:
        return {"rate": self.world.part.get(name, 0)}

    def _source(self, name: str) -> Source:
        modules = {f"m.{name}": str(self.world.code.get(name, 0))}
        return Source(modules=modules, libraries={}, hash=digest_of([modules]))

    def _data(self, name: str) -> dict[str, str]:
        if self.world.parents[name]:
            return {}
        return {"source": str(self.world.data.get(name, 0))}

    def plan(self) -> Plan:
        recipe = self.recipe.model_copy(update={"seed": self.world.seed})
        return make_plan(recipe, self.store)  # type: ignore[arg-type]

    def run(self, plan: Plan, name: str) -> str:
        """What the worker of one stage does; gives the output."""
        mine = plan.stages[name]
        assert mine.identity is not None
        text = {
            "fresh": f"{name} {mine.identity}",
            "constant": name,
            "few": f"{name} {int(str(mine.identity)[:8], 16) % 2}",
        }[self.world.outputs[name]]
        output = self.store.put_text(text)
        source = self._source(name)
        self.store.add_record(
            Record(
                identity=Identity.parse(mine.identity),
                stage=name,
                pipeline=self.recipe.pipeline,
                output=output,
                type="corpus",
                source_hash=source.hash,
                recipe=self._part(name),
                seed=self.world.seed,
                inputs=mine.inputs,
                metrics={},
                cost_usd=0.0,
                wall_s=1.0,
                created_at=f"{sum(1 for _ in self.store.all_records()):06d}",
                modules=source.modules,
            )
        )
        return str(output)

    def bring_up_to_date(self, oracle: Oracle) -> list[str]:
        """Run what is stale, tell the oracle; what ran, in order."""
        ran: list[str] = []
        while True:
            plan = self.plan()
            ready = [name for name in plan.rerun if plan.stages[name].identity is not None]
            if not ready:
                return ran
            outputs = {
                name: str(entry.artifact) for name, entry in plan.stages.items() if entry.artifact
            }
            key = oracle.key(self.world, ready[0], outputs)
            oracle.seen.setdefault(key, self.run(plan, ready[0]))
            ran.append(ready[0])


def change(world: World, kind: str, name: str, value: int, past: list[tuple[Any, ...]]) -> None:
    if kind == "seed":
        world.seed = value
    elif kind == "back":
        world.go_to(past[value % len(past)])
    elif name in world.parents:
        getattr(world, kind)[name] = value


def check(plan: Plan, oracle: Oracle, world: World) -> None:
    """The plan and the oracle say the same of every stage."""
    run, unknown = oracle.must_run(world)
    for name, entry in plan.stages.items():
        if name in run:
            assert entry.status == "run"
            assert entry.identity is not None
            assert entry.reasons
        elif name in unknown:
            assert entry.status in ("run", "maybe")
            assert entry.identity is None
        else:
            assert entry.status == "hit"
    assert set(plan.rerun) == run | unknown
    assert plan.complete == (not run and not unknown)


@QUICK
@given(world=worlds(), changes=CHANGES)
def test_the_rerun_set_is_what_was_never_seen(
    world: World, changes: list[tuple[str, str, int]], recipe: Recipe
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        pipeline, oracle = Pipeline(world, recipe, patch), Oracle()
        past = [world.state()]
        for kind, name, value in [("seed", "a", 0), *changes]:
            change(world, kind, name, value, past)
            plan = pipeline.plan()
            check(plan, oracle, world)
            possible = set(plan.rerun)
            known = len(oracle.seen)
            ran = pipeline.bring_up_to_date(oracle)
            # Minimal: nothing ran twice or that was seen before. Sufficient: all is a hit then.
            assert len(ran) == len(set(ran)) == len(oracle.seen) - known
            assert set(ran) <= possible
            assert pipeline.plan().complete
            past.append(world.state())


@QUICK
@given(world=worlds(), changes=CHANGES)
def test_going_back_needs_no_run(
    world: World, changes: list[tuple[str, str, int]], recipe: Recipe
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        pipeline, oracle = Pipeline(world, recipe, patch), Oracle()
        past = [world.state()]
        pipeline.bring_up_to_date(oracle)
        answers = [artifacts(pipeline.plan())]
        for kind, name, value in changes:
            change(world, kind, name, value, past)
            pipeline.bring_up_to_date(oracle)
            past.append(world.state())
            answers.append(artifacts(pipeline.plan()))
        for state, answer in zip(past, answers, strict=True):
            world.go_to(state)
            plan = pipeline.plan()
            assert plan.complete
            assert artifacts(plan) == answer


@QUICK
@given(world=worlds(), lost=st.sets(st.sampled_from(NAMES)))
def test_a_lost_artifact_reruns_what_gave_it(world: World, lost: set[str], recipe: Recipe) -> None:
    with pytest.MonkeyPatch.context() as patch:
        pipeline, oracle = Pipeline(world, recipe, patch), Oracle()
        pipeline.bring_up_to_date(oracle)
        whole = artifacts(pipeline.plan())
        gone = {name for name in lost if name in world.parents}
        for name in gone:
            pipeline.store.lose(whole[name])  # type: ignore[arg-type]
        plan = pipeline.plan()
        # What stands below one that is gone may be asked only when it is there again.
        below = {
            name
            for name in world.parents
            if gone.intersection(ancestry(world, name)) and name not in gone
        }
        assert set(plan.rerun) == gone | below
        again = pipeline.bring_up_to_date(Oracle())
        assert set(again) == gone
        assert artifacts(pipeline.plan()) == whole


def artifacts(plan: Plan) -> dict[str, str | None]:
    return {name: entry.artifact for name, entry in plan.stages.items()}


def ancestry(world: World, name: str) -> Iterator[str]:
    for parent in world.parents[name]:
        yield parent
        yield from ancestry(world, parent)
