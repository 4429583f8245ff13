"""How a training goes on from a save: optimizer and schedule, the rows that come next, generators,
and the warm-up of moments that were lost."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from llm_assets.errors import SaveError, message
from llm_assets.stages.resuming import Source
from llm_assets.stages.save_order import put_generators
from llm_assets.stages.saves import read_generators, read_groups, read_moments

_EPOCH = "epoch_"


class Warmup:
    """Lowers the learning rate while moments that were lost build up again.

    `document` is {"from": step, "steps": number}, as saves keep it; None when there is none to do.
    """

    def __init__(self, document: Mapping[str, int] | None) -> None:
        self.document = document
        self._rates: list[float] = []

    def __str__(self) -> str:
        return f"warmed up over {self.document['steps']} steps" if self.document else "warm"

    def before_step(self, optimizer: Any, step: int) -> None:
        """Lower the rates for the update after `step` steps."""
        if self.document is None:
            return
        done = step + 1 - self.document["from"]
        if done >= self.document["steps"]:
            self.document = None
            return
        self._rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] *= done / self.document["steps"]

    def after_step(self, optimizer: Any) -> None:
        """Put the schedule's rates back."""
        for group, rate in zip(optimizer.param_groups, self._rates, strict=False):
            group["lr"] = rate
        self._rates = []


def put_back(source: Source, optimizer: Any, scheduler: Any, max_steps: int) -> Warmup | None:
    """Optimizer and schedule as they were saved. What is damaged starts anew: the schedule is wound
    to the step; for moments the warm-up that they need is given back."""
    step = source.manifest.step
    if "loop.json" in source.damaged:
        _wind(scheduler, optimizer, step)
        groups = optimizer.state_dict()["param_groups"]
    else:
        groups, schedule = read_groups(source.path)
        scheduler.load_state_dict(dict(schedule))
    lost = "optimizer.safetensors" in source.damaged
    moments: Any = {} if lost else read_moments(source.path)
    optimizer.load_state_dict({"state": moments, "param_groups": groups})
    return (
        Warmup({"from": step, "steps": _warmup_steps(groups, max_steps - step)}) if lost else None
    )


def of_epoch(states: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Generators at the start of the epoch, under the names that a save has for them."""
    return {f"{_EPOCH}{name}": value for name, value in states.items()}


def epoch_generators(source: Source, process: int) -> dict[str, torch.Tensor] | None:
    """Generators at the start of the epoch; None where they are damaged."""
    if "rng.safetensors" in source.damaged:
        return None
    return {
        name.removeprefix(_EPOCH): value
        for name, value in read_generators(source.path, process).items()
        if name.startswith(_EPOCH)
    }


def finish(source: Source, position: Mapping[str, Any], process: int) -> None:
    """The rows that come now must be those that came next, else SaveError; then the generators."""
    if not source.damaged & {"data.json", "rng.safetensors"}:
        expected = json.loads((source.path / "data.json").read_bytes())
        for name in ("num_rows", "rows_sha256", "drawn", "order_sha256", "next_rows"):
            if position[name] != expected[name]:
                here, there = _short(position[name]), _short(expected[name])
                raise SaveError(
                    message(
                        where=f"{source.path}/data.json, {name}",
                        found=f"{here}, the save has {there}",
                        rule="a training goes on with the rows that it would have seen",
                        remedy="bring the data back, or start over with `llm-assets "
                        "checkpoints rollback`",
                    )
                )
    if "rng.safetensors" not in source.damaged:
        put_generators(read_generators(source.path, process))


def _wind(scheduler: Any, optimizer: Any, step: int) -> None:
    """Bring a fresh schedule to where it stands after `step` steps."""
    lambdas = getattr(scheduler, "lr_lambdas", None)
    if lambdas is None:
        with warnings.catch_warnings():
            # torch warns that no optimizer step came before: those were before the resume.
            warnings.simplefilter("ignore", UserWarning)
            for _ in range(step):
                scheduler.step()
        return
    rates = [base * f(step) for base, f in zip(scheduler.base_lrs, lambdas, strict=True)]
    scheduler.last_epoch, scheduler._step_count = step, step + 1
    scheduler._last_lr = rates
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def _warmup_steps(groups: list[dict[str, Any]], left: int) -> int:
    """Steps over which fresh moments are trusted more and more: 2 / (1 - beta2), the untuned
    warm-up of Ma and Yarats 2021, and at most a tenth of the steps that are left."""
    beta2 = max((group["betas"][1] for group in groups if "betas" in group), default=0.9)
    return max(1, min(math.ceil(2 / (1 - beta2)), left // 10))


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
