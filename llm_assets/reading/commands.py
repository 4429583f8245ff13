"""`llm-assets check-data`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from llm_assets.data_settings import DataSettings, FileSource
from llm_assets.errors import DataError
from llm_assets.reading.checking import Context, as_document, check
from llm_assets.reading.fingerprint import resolve_files
from llm_assets.reading.forms import FORMS, PURPOSES, names_for
from llm_assets.reading.lengths import Measure, characters, tokens_of

if TYPE_CHECKING:
    from llm_assets.recipe import Recipe

_CONTEXTS = {
    "instructions": ("sft_checkpoint",),
    "preferences": ("reward_model", "dpo_policy"),
}


@click.command("check-data")
@click.argument("files", nargs=-1)
@click.option(
    "--as",
    "purpose",
    type=click.Choice(PURPOSES),
    help="What the rows are for. Only a recipe without FILE can leave it out: all its data.",
)
@click.option("-r", "--recipe", "recipe_path", help="Take limits, forms and tokenizer from it.")
@click.option("--form", help="Form of the rows; recognized without it.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def check_data(
    files: tuple[str, ...],
    purpose: str | None,
    recipe_path: str | None,
    form: str | None,
    as_json: bool,
) -> None:
    """Read data files as a run would, and say what is wrong with them.

    FILE is a path or a quoted glob; all FILEs together are one source. Without any, the sources of
    the recipe are read. Exit 0: the stages would take it; 1: an error in the data; 2: wrong usage.
    """
    if not files and recipe_path is None:
        raise click.UsageError("name a FILE, or a recipe with --recipe")
    if files and purpose is None:
        choices = ", ".join(PURPOSES)
        raise click.UsageError(f"say what the rows are for: --as, one of {choices}")
    if form not in (None, "auto") and (purpose is None or form not in names_for(purpose)):
        known = names_for(purpose) if purpose else list(FORMS)
        raise click.UsageError(f"unknown form {form!r}: one of {', '.join(known)}")
    recipe, folder, measure, said = None, Path.cwd(), characters(), ""
    if recipe_path is not None:
        from llm_assets.recipe import load_recipe

        recipe = load_recipe(recipe_path)
        measure, said = _measure_of(recipe)
    results = []
    for name in [purpose] if purpose else PURPOSES:
        if recipe is not None and not files:
            config = DataSettings.model_validate(recipe.data_block(name))
            folder = recipe.folder
            if not config.sources:
                continue
        else:
            config = _settings_for(files, name, form, recipe)
        contexts = _contexts(recipe, name)
        results.append(check(config, name, folder, measure=measure, contexts=contexts))
    if as_json:
        documents = [as_document(result) for result in results]
        click.echo(json.dumps(documents if purpose is None else documents[0], indent=2))
    else:
        from llm_assets.reading.printing import print_check

        for result in results:
            print_check(result, said)
    click.get_current_context().exit(0 if all(result.ok for result in results) else 1)


def _settings_for(
    files: tuple[str, ...], purpose: str, form: str | None, recipe: Recipe | None
) -> DataSettings:
    """One source of all FILEs; with a recipe, by the source of the recipe that names each file."""
    if recipe is None:
        return _one_source(files, {"form": form or "auto"}, DataSettings.model_validate({}))
    settings: DataSettings = getattr(recipe.data, purpose)
    known = _sources_by_file(settings, recipe.folder)
    groups: dict[int, list[str]] = {}
    for file in files:
        groups.setdefault(known.get(Path(file).resolve(), -1), []).append(file)
    sources: list[Any] = []
    for index, group in sorted(groups.items()):
        like: dict[str, Any] = {"form": form or "auto"}
        if index >= 0:
            given = settings.sources[index].model_dump(include={"form", "columns", "limit"})
            like = given | ({"form": form} if form else {})
        sources.extend(_one_source(tuple(group), like, settings).sources)
    return settings.model_copy(update={"sources": sources})


def _one_source(
    files: tuple[str, ...], like: dict[str, Any], settings: DataSettings
) -> DataSettings:
    source = FileSource.model_validate({"from": "files", "files": list(files), **like})
    return settings.model_copy(update={"sources": [source]})


def _sources_by_file(settings: DataSettings, folder: Path) -> dict[Path, int]:
    known: dict[Path, int] = {}
    for index, source in enumerate(settings.sources):
        if not isinstance(source, FileSource):
            continue
        try:
            for file in resolve_files(source, folder):
                known.setdefault(file.path.resolve(), index)
        except DataError:
            # The recipe's own source may be elsewhere: the FILEs are what is checked here.
            continue
    return known


def _contexts(recipe: Recipe | None, purpose: str) -> list[Context]:
    """The stages that take the rows, each with its limit."""
    found = []
    for stage in _CONTEXTS.get(purpose, ()):
        settings = getattr(recipe.stages, stage) if recipe is not None else None
        if settings is not None and settings.enabled and settings.pin is None:
            found.append(
                Context(stage=stage, max_length=settings.max_length, too_long=settings.too_long)
            )
    return found


def _measure_of(recipe: Recipe) -> tuple[Measure, str]:
    """The tokenizer of the recipe's imported base; characters when it trains its own."""
    imported = recipe.stages.base_checkpoint.import_
    if imported is None:
        return characters(), "the recipe trains its own tokenizer: characters are counted"
    from transformers import AutoTokenizer

    try:
        if imported.path is not None:
            from llm_assets.sources import import_path

            path = import_path(recipe, imported.path)
            if path.is_file():
                tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
            else:
                tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        else:
            tokenizer = AutoTokenizer.from_pretrained(imported.hub, revision=imported.revision)
    except (OSError, ValueError, ImportError) as error:
        first = str(error).strip().splitlines()[0]
        return characters(), f"the tokenizer cannot be loaded ({first}): characters are counted"
    # Rows are measured, not run: no warning about the model's length.
    tokenizer.model_max_length = sys.maxsize
    return tokens_of(tokenizer), f"tokens of {imported.path or imported.hub}"
