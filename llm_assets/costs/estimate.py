"""Cost from first principles: floating-point operations, then hours, then US dollars.

A matrix of n parameters costs 2 n operations a token in the forward pass (a multiplication and an
addition), 2 n for the gradient of its input and 2 n for its own gradient (Kaplan et al. 2020,
section 2.1; Hoffmann et al. 2022, appendix F). With N parameters that multiply and T tokens:

    training                 6 N T
    forward only             2 N T                       evaluation, scoring, quantization
    LoRA, n adapter weights  4 (N + n) T + 2 n T         no gradients of the frozen weights
    reward model             6 N T                       T: chosen and rejected
    DPO                      6 N T + 2 N T               policy, and the frozen reference
    GRPO, RLOO               2 N T generated, 2 R T scored by a reward model of R parameters,
                             2 N T by the reference, 6 N T trained

The attention scores are no parameters: they add 12 L H Q S operations a trained token, with L
layers, H heads of size Q and S tokens of context, and a third of it forward only (Chowdhery et al.
2022, appendix B). A causal kernel needs half; the convention counts all. For contexts far below
6 times the hidden size the term is small. It is left out of a bare question.

Recomputing activations in the backward pass repeats the forward one, 8 N T (Narayanan et al. 2021).
By convention that is no useful work: it lowers the utilization, and counts only when asked for.

    wall seconds = operations / (peak of a device x utilization x devices)
    hours        = wall seconds x devices / 3600
    USD          = hours x rent of one device an hour
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from llm_assets.costs.devices import Device
from llm_assets.costs.parameters import Architecture
from llm_assets.errors import UserError

DEFAULT_UTILIZATION = 0.40
"""Of peak, for training without a measurement: Llama 3 reports 0.38 to 0.43, PaLM 0.46."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """`flops` operations, `gpu_hours` hours of all devices together, `wall_s` seconds, USD."""

    flops: float
    gpu_hours: float
    cost_usd: float
    wall_s: float


def price(
    flops: float, *, device: Device, utilization: float, devices: int, usd_per_hour: float
) -> Estimate:
    """What `flops` operations take and cost. UserError on a number that makes no sense."""
    checks: tuple[tuple[str, float, bool, str], ...] = (
        ("flops", flops, flops >= 0, "not negative"),
        ("utilization", utilization, 0 < utilization <= 1, "above 0 and at most 1"),
        ("devices", devices, devices >= 1, "at least 1"),
        ("usd_per_hour", usd_per_hour, usd_per_hour >= 0, "not negative"),
    )
    for name, value, good, rule in checks:
        if not (good and math.isfinite(value)):
            raise UserError(
                where=name,
                found=str(value),
                rule=f"{name} is finite and {rule}",
                remedy="correct the number",
            )
    wall_s = flops / (device.peak_tflops * 1e12 * utilization * devices)
    return from_wall(wall_s, flops=flops, devices=devices, usd_per_hour=usd_per_hour)


def from_wall(wall_s: float, *, flops: float, devices: int, usd_per_hour: float) -> Estimate:
    """What `wall_s` seconds on `devices` devices cost."""
    hours = wall_s * devices / 3600.0
    return Estimate(flops=flops, gpu_hours=hours, cost_usd=hours * usd_per_hour, wall_s=wall_s)


def training_flops(parameters: float, tokens: float, *, recompute: bool = False) -> float:
    """6 N T; 8 N T when the repeated forward pass of activation checkpointing is to count."""
    return (8.0 if recompute else 6.0) * parameters * tokens


def forward_flops(parameters: float, tokens: float) -> float:
    """2 N T."""
    return 2.0 * parameters * tokens


def lora_flops(frozen: float, adapters: float, tokens: float) -> float:
    """Forward 2 (N + n) T, gradients of activations 2 (N + n) T, of adapter weights 2 n T."""
    return 4.0 * (frozen + adapters) * tokens + 2.0 * adapters * tokens


def tuning_flops(parameters: float, adapters: float, tokens: float) -> float:
    """Full fine-tuning without adapters (`adapters` 0), LoRA with them."""
    if adapters:
        return lora_flops(parameters, adapters, tokens)
    return training_flops(parameters, tokens)


def dpo_flops(parameters: float, tokens: float, *, adapters: float = 0) -> dict[str, float]:
    """The policy's training and the reference's forward pass; `tokens`: chosen and rejected.

    With LoRA the reference is the frozen part, run once more without its adapters.
    """
    return {
        "policy": tuning_flops(parameters, adapters, tokens),
        "reference": forward_flops(parameters, tokens),
    }


def online_flops(
    parameters: float,
    *,
    reward_parameters: float,
    prompt_tokens: float,
    completion_tokens: float,
    reference: bool = True,
    adapters: float = 0,
    passes: int = 1,
) -> dict[str, float]:
    """GRPO and RLOO, by part. Tokens are those of all completions, each with its prompt.

    `passes`: how often each batch is trained on (TRL's `num_iterations`); more than one also needs
    the old policy's probabilities once, a forward pass.
    """
    tokens = prompt_tokens + completion_tokens
    parts = {
        "generation": forward_flops(parameters + adapters, tokens),
        "reward": forward_flops(reward_parameters, tokens),
        "policy": passes * tuning_flops(parameters, adapters, tokens),
    }
    if reference:
        parts["reference"] = forward_flops(parameters, tokens)
    if passes > 1:
        parts["old policy"] = forward_flops(parameters + adapters, tokens)
    return parts


def attention_flops(
    architecture: Architecture, tokens: float, length: float, *, trained: bool
) -> float:
    """Scores and weighted sums of `tokens` tokens, each over a context of `length` tokens.

    2 H (Q + V) S a token and layer forward, with V the size of a value; three times that trained.
    """
    sizes = architecture.head_size + architecture.value_head_size
    forward = 2.0 * architecture.num_layers * architecture.num_heads * sizes * length * tokens
    return 3.0 * forward if trained else forward
