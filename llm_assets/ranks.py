"""Several processes of one training: which of them this is, and how they share its batch.

`accelerate launch` says it in the environment, as torchrun does: RANK and WORLD_SIZE.
"""

from __future__ import annotations

import math
import os

from llm_assets.errors import RecipeError


class PartDone(BaseException):
    """The training is over; the rest of the stage is the first process's alone."""


def rank() -> int:
    """Of this process among those of the training; 0 is the first one."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Processes of the training."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def shared_batch(rows: int, accumulation: int, processes: int, *, where: str) -> tuple[int, int]:
    """What each process takes of a step of `accumulation` forward passes with `rows` rows each:
    (rows of a forward pass, passes).

    A step has the rows of the recipe, however many processes share it, so that the number of
    processes changes no result beyond rounding and is no part of the identity. Passes are shared
    first, then the rows of a pass. RecipeError when they cannot be shared evenly.
    """
    passes = math.gcd(accumulation, processes)
    parts = processes // passes
    if rows % parts:
        raise RecipeError(
            where=where,
            found=f"{rows} rows x {accumulation} gradient_accumulation_steps for {processes} "
            "processes",
            rule="the processes of a training share the batch of a step evenly",
            remedy=f"make the batch a multiple of {processes}, or change launcher.num_processes",
        )
    return rows // parts, accumulation // passes
