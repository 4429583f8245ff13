"""Rules of a recipe that no single field can say: checked when it is loaded."""

from __future__ import annotations

import difflib
from typing import Any

from llm_assets.errors import RecipeError, UserError
from llm_assets.graph import STAGES, import_of, stages_off, wire
from llm_assets.recipe import Recipe
from llm_assets.recipe_processes import check_processes
from llm_assets.recipe_safety import check_safety
from llm_assets.sources import check_reachable, import_path
from llm_assets.stage_settings import TrainSettings
from llm_assets.trainer_fields import OWNED, trainer_fields


def check_rules(recipe: Recipe) -> None:
    """RecipeError for the first impossible combination; UserError for a device nobody knows."""
    _check_trainer_settings(recipe)
    _check_pins(recipe)
    _check_imports(recipe)
    _check_training_length(recipe)
    _check_gates(recipe)
    _check_stage_limits(recipe)
    _check_device(recipe)
    _check_campaign(recipe)
    nodes = wire(recipe)
    _check_sources(recipe, set(nodes))
    check_safety(recipe, nodes)
    check_processes(recipe, nodes)


def _error(recipe: Recipe, place: str, found: str, rule: str, remedy: str) -> RecipeError:
    return RecipeError(where=f"{recipe.path}: {place}", found=found, rule=rule, remedy=remedy)


def _check_trainer_settings(recipe: Recipe) -> None:
    for name in STAGES:
        settings = getattr(recipe.stages, name, None)
        if not isinstance(settings, TrainSettings) or not settings.extra:
            continue
        known = trainer_fields(name)
        for key in settings.extra:
            place = f"stages.{name}.{key}"
            if key in OWNED:
                raise _error(
                    recipe,
                    place,
                    "a setting that the pipeline itself sets",
                    "resume, identity and reporting depend on it",
                    "remove it; `seed`, `checkpoint` and `precision` are the recipe's own keys",
                )
            if key not in known:
                own = [field.alias or n for n, field in type(settings).model_fields.items()]
                close = difflib.get_close_matches(key, [*own, *known], n=1)
                raise _error(
                    recipe,
                    place,
                    f"unknown key {key!r}",
                    "a key is the stage's own or a setting of its trainer's arguments class",
                    f"did you mean {close[0]!r}?" if close else "remove it",
                )


def _check_pins(recipe: Recipe) -> None:
    from llm_assets.store.digest import ArtifactHash

    for name in STAGES:
        pin = getattr(getattr(recipe.stages, name, None), "pin", None)
        if pin is None:
            continue
        try:
            ArtifactHash.parse(pin)
        except ValueError as error:
            raise _error(
                recipe,
                f"stages.{name}.pin",
                repr(pin),
                f"a pin is an artifact hash ({error})",
                "copy it from `llm-assets store ls`",
            ) from error


def _check_imports(recipe: Recipe) -> None:
    for name in STAGES:
        found = import_of(recipe, name)
        if found is None:
            continue
        place = f"stages.{name}.import"
        if (found.path is None) == (found.hub is None):
            raise _error(
                recipe,
                place,
                "both `path` and `hub`" if found.path else "neither `path` nor `hub`",
                "an import has one source",
                "give `path: FOLDER_OR_GGUF`, or `hub: NAME` with `revision: COMMIT`",
            )
        if found.hub is not None and not found.revision:
            raise _error(
                recipe,
                place,
                f"hub: {found.hub} without a revision",
                "a name is no identity: what it points at can change",
                "add `revision:` with the commit hash",
            )
        if found.path is not None:
            path = import_path(recipe, found.path)
            if not path.exists():
                raise _error(
                    recipe,
                    f"{place}.path",
                    f"{path} does not exist",
                    "an imported checkpoint is a safetensors folder or a .gguf file",
                    "check the path; relative paths start at the recipe's folder",
                )


def _check_training_length(recipe: Recipe) -> None:
    for name in set(STAGES) - set(stages_off(recipe)):
        settings = getattr(recipe.stages, name, None)
        if not isinstance(settings, TrainSettings) or settings.pin or settings.import_:
            continue
        if (settings.max_steps is None) == (settings.num_train_epochs is None):
            raise _error(
                recipe,
                f"stages.{name}",
                "both" if settings.max_steps else "neither max_steps nor num_train_epochs",
                "a stage that trains says how long, in one way",
                "set `max_steps:` or `num_train_epochs:`",
            )
    base = recipe.stages.base_checkpoint
    if base.model is None and base.import_ is None and base.pin is None:
        raise _error(
            recipe,
            "stages.base_checkpoint",
            "neither `model` nor `import`",
            "a base is trained from an architecture, imported or pinned",
            "add `model:` with hidden_size, num_hidden_layers, …, or `import:`",
        )


def _check_gates(recipe: Recipe) -> None:
    known = set(STAGES)
    for stage, gates in recipe.gates.items():
        if stage not in known:
            close = difflib.get_close_matches(stage, known, n=1)
            raise _error(
                recipe,
                f"gates.{stage}",
                f"unknown stage {stage!r}",
                "gates stand under the name of a stage",
                f"did you mean {close[0]!r}?" if close else f"one of {', '.join(STAGES)}",
            )
        for metric, gate in gates.items():
            if gate.min is None and gate.max is None:
                raise _error(
                    recipe,
                    f"gates.{stage}.{metric}",
                    "neither min nor max",
                    "a gate is a numeric threshold",
                    "set `min:` or `max:`",
                )
            if not metric.isidentifier():
                raise _error(
                    recipe,
                    f"gates.{stage}.{metric}",
                    repr(metric),
                    "a metric's name is letters, digits and _",
                    "see the metrics in the stage's report card",
                )


def _check_stage_limits(recipe: Recipe) -> None:
    for stage, limit in recipe.budget.stage_limits_usd.items():
        place = f"budget.stage_limits_usd.{stage}"
        if stage not in STAGES:
            close = difflib.get_close_matches(stage, STAGES, n=1)
            raise _error(
                recipe,
                place,
                f"unknown stage {stage!r}",
                "a limit stands under the name of a stage",
                f"did you mean {close[0]!r}?" if close else f"one of {', '.join(STAGES)}",
            )
        if not limit > 0:
            raise _error(
                recipe, place, str(limit), "a limit is more than zero", "give it in US dollars"
            )


def _check_device(recipe: Recipe) -> None:
    from llm_assets.costs.devices import find_device

    rates = recipe.rates
    find_device(rates.device, where=f"{recipe.path}: rates.device", peak_tflops=rates.peak_tflops)


def _check_campaign(recipe: Recipe) -> None:
    from llm_assets.costs.entries import campaign_key

    try:
        campaign_key(recipe.campaign)
    except UserError as error:
        raise _error(
            recipe, "budget.campaign", error.found, error.rule, "give it a short name"
        ) from error


def _check_sources(recipe: Recipe, present: set[str]) -> None:
    for name in ("corpus", "instructions", "preferences", "evals"):
        if name not in present:
            continue
        settings: Any = getattr(recipe.data, name)
        if not settings.sources:
            raise _error(
                recipe,
                f"data.{name}.sources",
                "no source",
                f"{name} needs at least one source",
                "add `- from: village`, or `- from: files` with `files: GLOB`",
            )
        check_reachable(recipe, name)
