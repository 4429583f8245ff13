"""Builds one Definitions over the graphs of several recipes."""

from typing import Any

from dagster import AssetsDefinition, AssetSelection, Definitions, define_asset_job

from llm_assets.assets import build_assets, hit_finder
from llm_assets.executor import build_executor
from llm_assets.graph import ALIGNMENT, EVALUATION, wire
from llm_assets.recipe import Recipe
from llm_assets.resources import LocalLauncher, StoreResource
from llm_assets.sensors import build_failure_sensor, build_schedules, build_upkeep


def build_definitions(recipes: list[Recipe]) -> Definitions:
    """One Definitions over all recipes."""
    assets: list[AssetsDefinition] = []
    jobs: list[Any] = []
    schedules = []

    for recipe in recipes:
        assets.extend(build_assets(recipe))
        present = wire(recipe)
        name = recipe.pipeline
        parts = {
            f"{name}_pipeline": tuple(present),
            f"{name}_alignment": ALIGNMENT,
            f"{name}_evaluate_and_release": EVALUATION,
        }
        own = {
            job: define_asset_job(
                job,
                selection=AssetSelection.assets(
                    *([name, stage] for stage in stages if stage in present)
                ),
                tags={"llm_assets/pipeline": name},
            )
            for job, stages in parts.items()
        }
        jobs.extend(own.values())
        schedules.extend(build_schedules(name, own))

    upkeep, upkeep_schedules = build_upkeep(recipes)
    return Definitions(
        assets=assets,
        jobs=[*jobs, *upkeep],
        schedules=[*schedules, *upkeep_schedules],
        sensors=[build_failure_sensor(recipes)],
        executor=build_executor(hit_finder(recipes)),
        resources={
            "store": StoreResource(url=""),
            "launcher": LocalLauncher(threads=0, grace_s=20.0),
        },
    )
