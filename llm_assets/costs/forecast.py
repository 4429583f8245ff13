"""What the stages of a rerun set will take: recipe, store and records brought together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from llm_assets.costs.devices import local_memory_gib
from llm_assets.costs.expected import (
    expected_info,
    record_info,
    stored_metadata,
    with_metadata,
)
from llm_assets.costs.learning import (
    StageEstimate,
    device_of,
    estimate_stage,
    recorded_work,
)
from llm_assets.costs.memory import check_memory, stage_memory
from llm_assets.errors import RecipeError
from llm_assets.graph import processes_of
from llm_assets.recipe import Recipe
from llm_assets.store.protocol import Record, Store


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Estimates by stage, in the order asked for. `unknown`: stage to why it has no estimate."""

    estimates: Mapping[str, StageEstimate]
    unknown: Mapping[str, str]

    @property
    def cost_usd(self) -> float:
        """Of all stages that have an estimate."""
        return sum(entry.cost_usd for entry in self.estimates.values())

    @property
    def wall_s(self) -> float:
        """Of all stages that have an estimate, one after another."""
        return sum(entry.wall_s for entry in self.estimates.values())

    @property
    def by_stage_usd(self) -> dict[str, float]:
        """What `check_budget` and `reserve` take."""
        return {name: entry.cost_usd for name, entry in self.estimates.items()}


def forecast(
    recipe: Recipe,
    store: Store,
    stages: Mapping[str, Mapping[str, str]],
    records: Iterable[Record],
) -> Forecast:
    """Estimate `stages`: name to the hashes of its inputs as far as they are known (maybe none).

    `records`: of the store, in any order. Those of the same pipeline are used where there are any,
    else those of other pipelines, each with the work that it did.
    """
    by_stage: dict[str, list[Record]] = {name: [] for name in stages}
    for record in records:
        if record.stage in by_stage:
            by_stage[record.stage].append(record)
    estimates: dict[str, StageEstimate] = {}
    unknown: dict[str, str] = {}
    for name, inputs in stages.items():
        own = [entry for entry in by_stage[name] if entry.pipeline == recipe.pipeline]
        try:
            estimates[name] = _estimate(recipe, store, name, inputs, own or by_stage[name])
        except RecipeError as error:
            unknown[name] = f"{error.found}: {error.rule}"
    return Forecast(estimates=estimates, unknown=unknown)


def _block(recipe: Recipe, stage: str) -> object:
    """The stage's settings: of the data for the four data sets, of the stages for the rest."""
    blocks = recipe.data if stage in type(recipe.data).model_fields else recipe.stages
    return getattr(blocks, stage)


def _estimate(
    recipe: Recipe,
    store: Store,
    stage: str,
    inputs: Mapping[str, str],
    records: list[Record],
) -> StageEstimate:
    expected = expected_info(recipe, stage)
    known = with_metadata(expected, stored_metadata(store, inputs))
    return estimate_stage(
        stage,
        _block(recipe, stage),
        known,
        recipe.rates,
        records,
        work_of=lambda record: recorded_work(record, record_info(store, record, known)),
        processes=processes_of(recipe, stage),
    )


def check_recipe_memory(recipe: Recipe, stages: Iterable[str]) -> None:
    """RecipeError for the first of `stages` that can't fit on the recipe's device.

    `rates.memory_gib` overrides the device table; for `cpu` it is this machine's without it.
    """
    device = device_of(recipe.rates)
    if device.memory_gib is None and device.is_cpu:
        device = replace(device, memory_gib=local_memory_gib())
    for name in stages:
        need = stage_memory(name, _block(recipe, name), expected_info(recipe, name))
        check_memory(name, need, device)
