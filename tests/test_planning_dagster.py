"""Where the plan and Dagster's own staleness agree, and the one place where they need not.

Claims, for every stage but `release`, as long as no artifact is lost:

1. What the plan would run is STALE or MISSING in Dagster, never FRESH. What it may run is as fresh
   as its inputs still are: Dagster does not look ahead.
2. What is a hit is FRESH, unless Dagster was shown something else last: the recipe went back to an
   earlier state, for which there are records but no new materialization.
3. After `llm-assets run` of a state that is new, everything is FRESH.
4. After materializing everything, hits too, everything is FRESH.

Sources are observed first, so a changed data file shows without a run.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dagster import DagsterInstance, Definitions
from dagster._core.definitions.observe import observe
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from llm_assets import assets, planning
from llm_assets.assets import asset_key, build_assets, code_version
from llm_assets.compat import stale_statuses
from llm_assets.graph import Node, ancestors
from llm_assets.identity import Source, digest_of
from llm_assets.planning import Plan, make_plan
from llm_assets.recipe import Recipe, load_recipe
from llm_assets.resources import LocalLauncher, StoreResource
from llm_assets.store import open_store
from llm_assets.store.protocol import Store
from tests.road import take_road
from tests.test_recipe import changed, write

# An imported base and few stages: the shape is what matters here, not the number.
SMALL: dict[str, object] = {
    "stages.base_checkpoint": {"import": {"path": "model.gguf"}},
    "stages.dpo_policy": {"enabled": False, "max_steps": 1},
    "stages.refined_policy": {"enabled": False, "max_steps": 1},
    "stages.quantized_weights.enabled": False,
    "data.instructions.sources": [{"from": "files", "files": "rows.jsonl"}],
}
QUIET = {"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}}
RATES = (0.001, 0.002)


@dataclasses.dataclass
class World:
    """The recipe, the code and the data of now, and what Dagster was shown last."""

    folder: Path
    store: Store
    instance: DagsterInstance
    code: dict[str, int] = dataclasses.field(default_factory=dict)
    state: dict[str, object] = dataclasses.field(default_factory=dict)
    shown: dict[str, tuple[str, str]] = dataclasses.field(default_factory=dict)

    def change(self, kind: str, value: int) -> None:
        if kind == "data":
            (self.folder / "rows.jsonl").write_text(f'{{"prompt": "p{value}", "response": "r"}}\n')
        elif kind.startswith("code "):
            self.code[kind[5:]] = value
        elif kind == "rate":
            self.state["stages.sft_checkpoint.learning_rate"] = RATES[value]
        elif kind == "seed":
            self.state["seed"] = value
        else:
            self.state["gates.sft_checkpoint"] = {"held_out_loss": {"max": 1.0 + value}}

    def recipe(self) -> Recipe:
        return load_recipe(write(self.folder, changed({**SMALL, **self.state})))

    def statuses(self, recipe: Recipe) -> dict[str, str]:
        launcher = LocalLauncher(threads=1, grace_s=1.0)
        defs = Definitions(
            assets=build_assets(recipe),
            resources={"store": StoreResource(url=""), "launcher": launcher},
        )
        # As the UI's *Observe* does: that is how a changed file shows without a run.
        sources = [entry for entry in build_assets(recipe) if entry.is_observable]
        assert observe(sources, instance=self.instance, run_config=QUIET).success
        found = stale_statuses(self.instance, defs)
        return {
            name: found[asset_key(recipe, name)] for name in make_plan(recipe, self.store).nodes
        }

    def now(self, plan: Plan, name: str) -> tuple[str, str]:
        version = code_version(plan.recipe, plan.nodes[name])
        return str(plan.stages[name].artifact), version

    def run(self, recipe: Recipe, *stages: str) -> None:
        result = take_road(
            recipe, self.instance, *stages, metrics={"ship": 1.0, "held_out_loss": 0.5}
        )
        assert result.success
        plan = make_plan(recipe, self.store)
        self.shown.update({name: self.now(plan, name) for name in stages or plan.nodes})


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Versions of the stages' code, as plan and assets see it."""
    versions: dict[str, int] = {}

    def node_source(node: Node) -> Source:
        modules = {node.stage.module: str(versions.get(node.stage.name, 0))}
        return Source(modules=modules, libraries={}, hash=digest_of([node.stage.name, modules]))

    monkeypatch.setattr(planning, "node_source", node_source)
    monkeypatch.setattr(assets, "node_source", node_source)
    return versions


@pytest.fixture
def worlds(
    tmp_path: Path, source: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    made: list[World] = []

    def make() -> World:
        source.clear()
        folder = tmp_path / str(len(made))
        folder.mkdir()
        (folder / "model.gguf").write_bytes(b"GGUF")
        monkeypatch.setenv("LLM_ASSETS_STORE", str(folder / "store"))
        store = open_store(str(folder / "store"))
        world = World(folder, store, DagsterInstance.ephemeral(), code=source)
        world.change("data", 0)
        made.append(world)
        return world

    yield make
    for world in made:
        world.instance.dispose()


def check(world: World, recipe: Recipe) -> None:
    plan = make_plan(recipe, world.store)
    for name, status in world.statuses(recipe).items():
        if name == "release":
            continue
        if plan.stages[name].status == "run":
            assert status in ("STALE", "MISSING"), (name, plan.stages[name].reasons)
        elif plan.stages[name].status == "hit" and status != "FRESH":
            above = [name, *ancestors(plan.nodes, name)]
            assert any(world.shown.get(other) != world.now(plan, other) for other in above)


KINDS = ["data", "code sft_checkpoint", "code eval_report", "rate", "seed", "gate"]
CHANGES = st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 1)), min_size=1, max_size=3)


@settings(
    max_examples=3,
    phases=[Phase.generate],  # shrinking takes minutes: each step is a run of Dagster
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(changes=CHANGES)
def test_plan_and_dagster_agree(changes: list[tuple[str, int]], worlds: Any) -> None:
    world = worlds()
    world.run(world.recipe())
    for kind, value in changes:
        world.change(kind, value)
        recipe = world.recipe()
        check(world, recipe)
        plan = make_plan(recipe, world.store)
        known = {name for name, entry in plan.stages.items() if entry.artifact}
        old = all(world.shown[name] == world.now(plan, name) for name in known)
        if plan.rerun:
            world.run(recipe, *plan.rerun)
        assert make_plan(recipe, world.store).complete
        check(world, recipe)
        if old:
            assert set(world.statuses(recipe).values()) == {"FRESH"}
    world.run(world.recipe())
    assert set(world.statuses(world.recipe()).values()) == {"FRESH"}


def test_going_back_is_a_hit_that_dagster_must_be_shown(worlds: Any) -> None:
    world = worlds()
    world.run(world.recipe())
    world.change("rate", 1)
    world.run(world.recipe())
    world.state.clear()
    recipe = world.recipe()
    assert make_plan(recipe, world.store).complete
    assert world.statuses(recipe)["sft_checkpoint"] == "STALE"
    world.run(recipe)
    assert set(world.statuses(recipe).values()) == {"FRESH"}


def test_the_same_output_ends_the_wave_in_both(worlds: Any) -> None:
    world = worlds()
    kept = {"same_output": ["sft_checkpoint"], "metrics": {"ship": 1.0}}
    assert take_road(world.recipe(), world.instance, **kept).success
    world.change("code sft_checkpoint", 1)
    recipe = world.recipe()
    assert world.statuses(recipe)["sft_checkpoint"] == "STALE"
    assert make_plan(recipe, world.store).stages["eval_report"].status == "maybe"
    assert take_road(recipe, world.instance, "sft_checkpoint", **kept).success
    assert make_plan(recipe, world.store).complete
    assert set(world.statuses(recipe).values()) == {"FRESH"}
