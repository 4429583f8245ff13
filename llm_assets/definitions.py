"""What Dagster loads: every recipe's graph in one Definitions.

`$LLM_ASSETS_RECIPES` names the recipes (paths, globs or packaged names, separated as in PATH);
without it, the packaged `tiny`.
"""

import glob
import os

from dagster import Definitions

from llm_assets.building import build_definitions
from llm_assets.errors import RecipeError
from llm_assets.recipe import Recipe, load_recipe

__all__ = ["Definitions", "build_definitions", "defs", "load_recipes", "recipe_paths"]


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


defs: Definitions = build_definitions(load_recipes(recipe_paths()))
