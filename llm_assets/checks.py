"""Gates that need a second stage's artifact, as asset checks of their own.

A gate on what the stage itself gives is checked in the asset's own step. One on, say, the overlap
of a training set with the evals waits for both, and blocks all that stands below the training set.
"""

from collections.abc import Callable, Mapping
from typing import Any

from dagster import (
    AssetCheckEvaluation,
    AssetCheckExecutionContext,
    AssetCheckResult,
    AssetChecksDefinition,
    AssetKey,
    DagsterInstance,
    Failure,
    asset_check,
)

from llm_assets.engine import gate_results, gates_of
from llm_assets.errors import LlmAssetsError
from llm_assets.graph import Node, descendants
from llm_assets.measured import measure_missing, waits_for
from llm_assets.overriding import overrides_of
from llm_assets.planning import Plan, make_plan
from llm_assets.presenting import check_result, threshold_text
from llm_assets.recipe import Recipe
from llm_assets.resources.store import StoreResource
from llm_assets.run_tags import REPLAY_TAG
from llm_assets.store.protocol import Store


def blocks(nodes: Mapping[str, Node], name: str) -> bool:
    """Whether a failed gate of the stage keeps Dagster from going on. Where `release` alone stands
    below, it goes on: the release takes no artifact whose gate failed, and says HOLD with each
    reason; its own check blocks."""
    return descendants(nodes, {name}) - {name} != {"release"}


def own_gates(recipe: Recipe, name: str) -> dict[str, dict[str, Any]]:
    """The gates of a stage that its asset's own step checks."""
    return {
        metric: gate
        for metric, gate in gates_of(recipe, name).items()
        if waits_for(recipe, name, metric) is None
    }


def build_checks(
    recipe: Recipe, name: str, keys: Mapping[str, AssetKey]
) -> list[AssetChecksDefinition]:
    """The checks of a stage that wait for another one. `keys`: the asset of each stage."""
    return [
        _build_check(recipe, name, metric, gate, keys[name], keys[other])
        for metric, gate in gates_of(recipe, name).items()
        if (other := waits_for(recipe, name, metric)) is not None
    ]


def _build_check(
    recipe: Recipe,
    name: str,
    metric: str,
    gate: Mapping[str, Any],
    key: AssetKey,
    other: AssetKey,
) -> AssetChecksDefinition:
    @asset_check(
        asset=key,
        name=metric,
        additional_deps=[other],
        blocking=True,
        description=threshold_text(metric, gate),
    )
    def check(context: AssetCheckExecutionContext, store: StoreResource) -> AssetCheckResult:
        try:
            replay = context.run.tags.get(REPLAY_TAG, "")
            return _verdict(recipe, name, metric, key, store.open(), replay)
        except LlmAssetsError as error:
            raise Failure(description=str(error), allow_retries=False) from error

    return check


def _verdict(
    recipe: Recipe, name: str, metric: str, key: AssetKey, store: Store, replay: str
) -> AssetCheckResult:
    plan = make_plan(recipe, store, replay=replay)
    measure_missing(plan, [name], store)
    artifact = plan.stages[name].artifact
    overrides = overrides_of(store, artifact) if artifact is not None else {}
    for result in gate_results(plan, name, store):
        if result.name == metric:
            return check_result(key, result, overrides.get(metric))
    raise LlmAssetsError(
        f"{recipe.pipeline}/{name}: no valid record under this recipe\n"
        f"  rule: a check looks at what the recipe as it stands now gives\n"
        f"  next: materialize {recipe.pipeline}/{name}, then check again"
    )


def show_overrides(
    instance: DagsterInstance, plan: Plan, store: Store, key_of: Callable[[str], AssetKey]
) -> None:
    """Turn the checks of overridden gates into warnings: the release that counts them is decided
    again, while the assets whose gates they are have no reason to run."""
    for above in plan.upstream("release"):
        overrides = {} if above.artifact is None else overrides_of(store, above.artifact)
        for result in gate_results(plan, above.name, store) if overrides else ():
            if not result.blocks or result.name not in overrides:
                continue
            check = check_result(key_of(above.name), result, overrides[result.name])
            instance.report_runless_asset_event(
                AssetCheckEvaluation(
                    asset_key=key_of(above.name),
                    check_name=result.name,
                    passed=check.passed,
                    severity=check.severity,
                    description=check.description,
                    metadata=check.metadata,
                )
            )
