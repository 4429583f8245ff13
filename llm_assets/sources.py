"""What comes into a pipeline from outside the store, as the identity sees it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llm_assets.caching import cache_folder
from llm_assets.data_settings import VillageSettings
from llm_assets.errors import DataError, RecipeError
from llm_assets.identity import digest_of, hashed_part
from llm_assets.reading.fingerprint import HashCache, expand, resolve_files, source_hash_of
from llm_assets.recipe import Recipe

# Which of the village's settings each data set depends on, beside those of the world itself.
_VILLAGE_PARTS = {
    "corpus": {"corpus_documents"},
    "instructions": {"instructions"},
    "preferences": {
        "preferences",
        "annotators",
        "annotator_error",
        "votes_per_pair",
        "length_biased_vendor",
    },
    "evals": {"eval_items"},
}
_WORLD = set(VillageSettings.model_fields).difference(*_VILLAGE_PARTS.values())


def _cache_path() -> Path:
    return cache_folder() / "files.json"


def _village_part(recipe: Recipe, name: str) -> dict[str, Any] | None:
    if not getattr(recipe.data, name).has_village:
        return None
    return recipe.data.village.model_dump(mode="json", include=_WORLD | _VILLAGE_PARTS[name])


def hashed_data(recipe: Recipe, name: str) -> dict[str, Any]:
    """The part of the recipe that a data set's identity covers: no paths, and of the village only
    what this data set depends on."""
    part = hashed_part(getattr(recipe.data, name))
    part["village"] = _village_part(recipe, name)
    for source in part["sources"]:
        source.pop("files", None)
    return part


def data_fingerprint(recipe: Recipe, name: str) -> str:
    """Content hash of a data set's sources. DataError when one cannot be read."""
    settings = getattr(recipe.data, name)
    outside = source_hash_of(settings, recipe.folder, _cache_path())
    return digest_of({"outside": outside, "village": _village_part(recipe, name)})


def import_path(recipe: Recipe, path: str) -> Path:
    """Where an imported checkpoint lies; relative paths start at the recipe's folder."""
    return recipe.folder / Path(expand(path, where=f"{recipe.path}: import.path")).expanduser()


def path_fingerprint(recipe: Recipe, path: str) -> str:
    """Content hash of an imported file or folder: names inside it and contents, no place."""
    root = import_path(recipe, path)
    cache = HashCache(_cache_path())
    files = sorted(entry for entry in root.rglob("*") if entry.is_file()) if root.is_dir() else []
    if root.is_file():
        entries = {"": cache.sha256(root)}
    else:
        entries = {entry.relative_to(root).as_posix(): cache.sha256(entry) for entry in files}
    cache.save()
    if not entries:
        raise RecipeError(
            where=str(root),
            found="nothing",
            rule="an imported checkpoint is a safetensors folder or a .gguf file",
            remedy="check the path; relative paths start at the recipe's folder",
        )
    return digest_of(entries)


def check_reachable(recipe: Recipe, name: str) -> None:
    """RecipeError unless every file source of a data set names at least one readable file."""
    for position, source in enumerate(getattr(recipe.data, name).sources):
        if source.source != "files":
            continue
        try:
            resolve_files(source, recipe.folder)
        except DataError as error:
            raise RecipeError(
                where=f"{recipe.path}: data.{name}.sources.{position}.files: {error.where}",
                found=error.found,
                rule=error.rule,
                remedy=error.remedy,
            ) from error
