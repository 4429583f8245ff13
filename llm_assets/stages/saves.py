"""The state of a training, taken at a step boundary and put back. No pickle.

What a save holds stands in checkpoints/manifest.py. `model.safetensors` and `trainer_state.json`
are what Trainer.train(resume_from_checkpoint=...) reads; the rest is put back by the keeper
(keeper.py).
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from llm_assets.stages.save_buffers import dtype_name
from llm_assets.stages.save_tensors import layout_hash

_METRIC_STEPS = 10
_ACCURACIES = ("mean_token_accuracy", "rewards/accuracies", "accuracy")


def trained_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters that are trained and persistent buffers, tied ones once, by name."""
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    aliases = {name for name, _ in model.named_parameters(remove_duplicate=False)} - {
        name for name, _ in model.named_parameters()
    }
    return {
        name: tensor.detach()
        for name, tensor in model.state_dict().items()
        if name not in frozen and name not in aliases and isinstance(tensor, torch.Tensor)
    }


def moment_tensors(optimizer: Any) -> dict[str, torch.Tensor]:
    """The optimizer's moments as `<parameter index>.<name>`."""
    return {
        f"{index}.{name}": value.detach()
        for index, moments in optimizer.state_dict()["state"].items()
        for name, value in moments.items()
        if isinstance(value, torch.Tensor)
    }


def architecture_of(model: torch.nn.Module) -> dict[str, Any]:
    """What the weights of a save must be: number of tensors, values and parameters, layout."""
    tensors = trained_tensors(model)
    return {
        "class": type(model).__name__,
        "num_tensors": len(tensors),
        "num_elements": sum(tensor.numel() for tensor in tensors.values()),
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "sha256": layout_hash({n: (dtype_name(t), tuple(t.shape)) for n, t in tensors.items()}),
    }


def loop_document(model: torch.nn.Module, optimizer: Any, scheduler: Any, args: Any) -> Any:
    """Parameter groups, the scheduler, and what the schedule says of the next step."""
    by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    state = optimizer.state_dict()
    groups = state["param_groups"]
    step, total = int(scheduler.last_epoch), int(args.total_steps)
    factors = [f(step) for f in getattr(scheduler, "lr_lambdas", []) if callable(f)]
    expected = None
    if len(factors) == len(groups):
        expected = [base * f for base, f in zip(scheduler.base_lrs, factors, strict=True)]
    return {
        "param_groups": copy.deepcopy(groups),
        "parameters": [by_id[id(p)] for group in optimizer.param_groups for p in group["params"]],
        "with_moments": sorted(state["state"]),
        "scheduler": copy.deepcopy(scheduler.state_dict()),
        "schedule": {
            "kind": args.kind,
            "kwargs": args.kwargs,
            "warmup_steps": args.warmup_steps,
            "steps": total,
            "base": list(getattr(scheduler, "base_lrs", [])),
            "expected": expected,
        },
    }


@dataclass(frozen=True, kw_only=True)
class ScheduleArguments:
    """The recipe's schedule: transformers' name, its arguments, steps of the warm-up and in all."""

    kind: str
    kwargs: Mapping[str, Any]
    warmup_steps: int
    total_steps: int


def schedule_arguments(args: Any, max_steps: int) -> ScheduleArguments:
    """Of transformers' TrainingArguments."""
    return ScheduleArguments(
        kind=str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)),
        kwargs=dict(args.lr_scheduler_kwargs or {}),
        warmup_steps=int(args.get_warmup_steps(max_steps)),
        total_steps=max_steps,
    )


def state_document(state: Any) -> dict[str, Any]:
    """TrainerState as its save_to_json writes it; log entries are shared, they never change."""
    document = {field.name: getattr(state, field.name) for field in dataclasses.fields(state)}
    document["log_history"] = list(state.log_history)
    document["stateful_callbacks"] = copy.deepcopy(document.get("stateful_callbacks") or {})
    return document


def recent_metrics(history: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Of the last logged steps: means of every number; the spread of the loss; `accuracy` under
    one name; `calibration_gap`, |entropy - loss|: a calibrated model's entropy is its loss."""
    last = [entry for entry in history if "loss" in entry][-_METRIC_STEPS:]
    names = {name for entry in last for name in entry if name not in {"step", "epoch"}}
    metrics = {}
    for name in sorted(names):
        values = [float(e[name]) for e in last if isinstance(e.get(name), int | float)]
        if values:
            metrics[name] = sum(values) / len(values)
    losses = [float(entry["loss"]) for entry in last]
    if len(losses) > 1:
        mean = metrics["loss"]
        metrics["loss_std"] = (sum((v - mean) ** 2 for v in losses) / (len(losses) - 1)) ** 0.5
    for name in _ACCURACIES:
        if name in metrics:
            metrics["accuracy"] = metrics[name]
            break
    if "entropy" in metrics and "mean_token_accuracy" in metrics:
        metrics["calibration_gap"] = abs(metrics["entropy"] - metrics["loss"])
    return metrics


def read_moments(save: Path) -> dict[int, dict[str, torch.Tensor]]:
    """The optimizer's state of a save, by parameter index."""
    state: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in load_file(save / "optimizer.safetensors").items():
        index, key = name.split(".", 1)
        state.setdefault(int(index), {})[key] = tensor
    return state


def read_groups(save: Path) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Parameter groups and scheduler state of a save."""
    loop = json.loads((save / "loop.json").read_bytes())
    groups = [
        {**group, "betas": tuple(group["betas"])} if "betas" in group else group
        for group in loop["param_groups"]
    ]
    return groups, loop["scheduler"]


def read_generators(save: Path, process: int) -> dict[str, torch.Tensor]:
    """The generators of one process; those at the start of the epoch as `epoch_<name>`."""
    prefix = f"{process}."
    return {
        name.removeprefix(prefix): tensor
        for name, tensor in load_file(save / "rng.safetensors").items()
        if name.startswith(prefix)
    }
