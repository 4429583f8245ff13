"""What Dagster loads: every recipe's graph in one Definitions.

`$LLM_ASSETS_RECIPES` names the recipes (paths, globs or packaged names, separated as in PATH);
without it, the packaged `tiny`.
"""

import glob
import os
from typing import Any

from dagster import AssetsDefinition, AssetSelection, Definitions, define_asset_job

from llm_assets.assets import build_assets
from llm_assets.errors import RecipeError
from llm_assets.executor import thread_executor
from llm_assets.graph import ALIGNMENT, EVALUATION, wire
from llm_assets.recipe import Recipe, load_recipe
from llm_assets.resources import LocalLauncher, StoreResource
from llm_assets.sensors import build_failure_sensor, build_schedules


def recipe_paths() -> list[str]:
    """The recipes that the environment names, else the packaged default."""
    named = os.environ.get("LLM_ASSETS_RECIPES", "tiny")
    paths: list[str] = []
    for entry in filter(None, named.split(os.pathsep)):
        found = sorted(glob.glob(entry)) if glob.has_magic(entry) else [entry]
        if not found:
            raise RecipeError(
                where="LLM_ASSETS_RECIPES",
                found=f"{entry!r} matches nothing",
                rule="an entry is a recipe's path, a glob or the name of a packaged recipe",
                remedy="mend the variable, or unset it for the packaged recipe `tiny`",
            )
        paths.extend(found)
    return paths


def load_recipes(paths: list[str]) -> list[Recipe]:
    """The recipes at `paths`; RecipeError when two of them have one name."""
    recipes = [load_recipe(path) for path in paths]
    seen: dict[str, Recipe] = {}
    for recipe in recipes:
        other = seen.setdefault(recipe.pipeline, recipe)
        if other is not recipe:
            raise RecipeError(
                where=f"{recipe.path}: pipeline",
                found=f"{recipe.pipeline!r}, which {other.path} has too",
                rule="a pipeline's name is the first part of its asset keys",
                remedy="rename one of them",
            )
    return recipes


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

    return Definitions(
        assets=assets,
        jobs=jobs,
        schedules=schedules,
        sensors=[build_failure_sensor(recipes)],
        executor=thread_executor,
        resources={
            "store": StoreResource(url=""),
            "launcher": LocalLauncher(threads=0, grace_s=20.0),
        },
    )


defs = build_definitions(load_recipes(recipe_paths()))
