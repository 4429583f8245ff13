"""Rules for a recipe whose trainings are shared by several processes."""

from __future__ import annotations

from collections.abc import Iterable

from llm_assets.errors import RecipeError
from llm_assets.graph import processes_of
from llm_assets.ranks import shared_batch
from llm_assets.recipe import Recipe

_NOT_SHARED = (
    "accelerator_config",
    "average_tokens_across_devices",
    "deepspeed",
    "fsdp",
    "fsdp_config",
    "parallelism_config",
)


def check_processes(recipe: Recipe, stages: Iterable[str]) -> None:
    """RecipeError when the launcher contradicts itself, or a stage cannot be shared as it says."""
    launcher = recipe.launcher
    several = launcher.num_processes > 1
    if several != (launcher.kind == "accelerate"):
        raise _error(
            recipe,
            "launcher",
            f"kind {launcher.kind}, num_processes {launcher.num_processes}",
            "`local` starts one process, `accelerate` several",
            "set kind: accelerate, or num_processes: 1"
            if several
            else "set num_processes, or kind: local",
        )
    if not several:
        return
    shared = [name for name in stages if processes_of(recipe, name) > 1]
    if not shared:
        raise _error(
            recipe,
            "launcher.num_processes",
            f"{launcher.num_processes} processes, and no stage that they could share",
            "stages 4 to 8 are shared where they train here; refined_policy and what does not "
            "train run in one process",
            "set kind: local and num_processes: 1",
        )
    _check_devices(recipe)
    for name in shared:
        _check_stage(recipe, name)


def _check_devices(recipe: Recipe) -> None:
    from llm_assets.costs.devices import find_device

    rates = recipe.rates
    device = find_device(rates.device, peak_tflops=rates.peak_tflops)
    if not device.is_cpu and rates.devices < recipe.launcher.num_processes:
        raise _error(
            recipe,
            "rates.devices",
            f"{rates.devices} for {recipe.launcher.num_processes} processes",
            "each process has a device of its own, and every device is paid",
            f"set rates.devices to {recipe.launcher.num_processes} or more",
        )


def _check_stage(recipe: Recipe, name: str) -> None:
    settings = recipe.stage_block(name)
    shared_batch(
        settings.per_device_train_batch_size,
        settings.gradient_accumulation_steps,
        recipe.launcher.num_processes,
        where=f"{recipe.path}: stages.{name}.per_device_train_batch_size",
    )
    for key in _NOT_SHARED:
        if key in settings.extra:
            raise _error(
                recipe,
                f"stages.{name}.{key}",
                repr(settings.extra[key]),
                "each process trains a copy of the whole model on an even share of the batch",
                f"remove {key}, or set launcher.num_processes: 1",
            )


def _error(recipe: Recipe, place: str, found: str, rule: str, remedy: str) -> RecipeError:
    return RecipeError(where=f"{recipe.path}: {place}", found=found, rule=rule, remedy=remedy)
