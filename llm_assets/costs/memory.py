"""Memory that a stage needs on each device, and the error before it starts when that can't fit.

For a model of N parameters of which n are trained (all of them without LoRA), in bytes:

    weights      4 N, and 2 N more for the copies that bfloat16 autocast keeps
    gradients    4 n
    optimizer    8 n: AdamW's two moments in float32; 2 n in 8 bits, nothing for plain SGD
    activations  what the backward pass keeps, for the tokens of one forward pass

Of a token and layer, PyTorch keeps for the backward pass of a Llama block with fused attention: the
residual stream before and after each norm in float32 (4 d values; 5 d under autocast), and in the
type of the matrices their inputs and outputs as far as the backward pass reads them: 2 d + 3 q +
2 k + 4 f values, with d the hidden size, q and k the sizes of all queries and keys, f the inner
size. The test measures this on real blocks. The logits add 12 bytes (14 under autocast) a token
and entry of the vocabulary: themselves, their log-softmax, their gradient. With gradient
checkpointing a layer keeps only its input, and one layer at a time the rest. Korthikanti et al.
2022 count the same way for the block of GPT-3.

Fully sharded training (ZeRO-3, FSDP) divides weights, gradients and optimizer by the devices.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from llm_assets.costs.devices import Device
from llm_assets.costs.parameters import Architecture, lora_parameters
from llm_assets.costs.work import InputsInfo
from llm_assets.errors import RecipeError
from llm_assets.stage_settings import (
    DpoSettings,
    EvalSettings,
    QuantizeSettings,
    RefineSettings,
    RewardSettings,
    ServerSettings,
    TrainSettings,
)

USABLE_SHARE = 0.92
"""Of a device's memory: the rest goes to its context, the allocator's gaps and the libraries."""

_GIB = 2**30
_OPTIMIZER_BYTES = {"sgd": 0.0, "adafactor": 0.1, "8bit": 2.0, "lomo": 0.0}


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes on one device. `others`: frozen models beside the trained one (reference, judge), and
    the cache of generation where it is larger than the activations."""

    weights: float
    gradients: float = 0.0
    optimizer: float = 0.0
    activations: float = 0.0
    others: float = 0.0

    @property
    def total(self) -> float:
        """All of it."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.others

    @property
    def gib(self) -> float:
        """All of it, in GiB."""
        return self.total / _GIB

    def shown(self) -> str:
        """For people: the whole and its parts."""
        parts = {
            "weights": self.weights,
            "gradients": self.gradients,
            "optimizer": self.optimizer,
            "activations": self.activations,
            "other models": self.others,
        }
        listed = ", ".join(
            f"{name} {value / _GIB:.2f}" for name, value in parts.items() if value > 0
        )
        return f"{self.gib:.2f} GiB ({listed})"


def activation_bytes(
    architecture: Architecture,
    tokens: float,
    *,
    bfloat16: bool,
    checkpointing: bool = False,
    logits: bool = True,
) -> float:
    """What a forward pass over `tokens` tokens keeps for the backward pass."""
    hidden, heads = architecture.hidden_size, architecture.num_heads
    queries = heads * architecture.head_size
    inner = _inner_size(architecture)
    values = 2 * hidden + 3 * queries + architecture.key_value_size + inner
    layer = 4.0 * (5 if bfloat16 else 4) * hidden + (2.0 if bfloat16 else 4.0) * values
    layers = architecture.num_layers
    kept = 4.0 * hidden * layers + layer if checkpointing else layer * layers
    if logits:
        kept += (14.0 if bfloat16 else 12.0) * architecture.vocabulary_size
    return kept * tokens


def _inner_size(architecture: Architecture) -> float:
    """Values that the feed-forward network of a layer keeps for a token: gate, its activation, up
    and their product; two for a network without gate. The mean over layers, chosen experts only."""
    gated = [entry for entry in architecture.matrices if entry.name.endswith("gate_proj")]
    if not gated:
        return 3.0 * architecture.intermediate_size
    return 4.0 * sum(entry.outputs * entry.active for entry in gated) / architecture.num_layers


def cache_bytes(architecture: Architecture, tokens: float, *, bfloat16: bool) -> float:
    """Keys and values of `tokens` tokens in all layers."""
    size = 2.0 if bfloat16 else 4.0
    return size * architecture.key_value_size * architecture.num_layers * tokens


def stage_memory(stage: str, settings: Any, info: InputsInfo, *, shards: int = 1) -> Memory | None:
    """What a stage needs on each device; None for one that runs no model, or whose model is not
    known yet. Without the architecture activations are left out, so the need is a lower bound.

    `shards`: devices over which weights, gradients and optimizer are divided; 1 for plain data
    parallel training, where each device holds all.
    """
    total = info.architecture.total if info.architecture is not None else info.num_parameters
    if total is None:
        return None
    if isinstance(settings, TrainSettings):
        if getattr(settings, "import_", None) is not None:
            return Memory(weights=4.0 * total)
        return _training(settings, info, total, shards)
    if isinstance(settings, EvalSettings | QuantizeSettings | ServerSettings):
        return _inference(settings, info, total)
    return None


def _training(settings: TrainSettings, info: InputsInfo, total: int, shards: int) -> Memory:
    bfloat16 = settings.precision == "bfloat16"
    lora = getattr(settings, "lora", None)
    trained = float(total)
    weights = (6.0 if bfloat16 else 4.0) * total
    if lora is not None:
        trained = 0.01 * total
        if info.architecture is not None:
            trained = float(
                lora_parameters(info.architecture, r=lora.r, target_modules=lora.target_modules)
            )
        if lora.quantize_base == "nf4":
            weights = 0.55 * total  # 4 bits, and the constants of their blocks
        weights += 4.0 * trained
    tokens = _tokens_of_a_pass(settings, info)
    activations = 0.0
    if info.architecture is not None:
        activations = activation_bytes(
            info.architecture,
            tokens,
            bfloat16=bfloat16,
            checkpointing=bool(settings.extra.get("gradient_checkpointing", False)),
            logits=not isinstance(settings, RewardSettings),
        )
    optimizer = _optimizer_bytes(str(settings.extra.get("optim", "adamw_torch")))
    return Memory(
        weights=weights / shards,
        gradients=4.0 * trained / shards,
        optimizer=optimizer * trained / shards,
        activations=activations,
        others=_others(settings, info, total, tokens, lora is not None, activations),
    )


def _optimizer_bytes(name: str) -> float:
    for part, size in _OPTIMIZER_BYTES.items():
        if part in name:
            return size
    return 8.0


def _tokens_of_a_pass(settings: TrainSettings, info: InputsInfo) -> float:
    """Tokens of one forward pass on one device, at the longest."""
    rows = settings.per_device_train_batch_size
    if isinstance(settings, RefineSettings):
        answer = settings.max_completion_length
        return rows * (answer + (info.prompt_tokens or answer))
    length = getattr(settings, "max_length", None) or info.sequence_length or 0
    both = 2 if isinstance(settings, DpoSettings | RewardSettings) else 1
    return float(both * rows * length)


def _others(
    settings: TrainSettings,
    info: InputsInfo,
    total: int,
    tokens: float,
    has_adapters: bool,
    activations: float,
) -> float:
    # With LoRA the reference is the trained model without its adapters.
    reference = 0.0 if has_adapters else 4.0 * total
    if isinstance(settings, DpoSettings):
        return reference
    if isinstance(settings, RefineSettings):
        cache = 0.0
        if info.architecture is not None:
            bfloat16 = settings.precision == "bfloat16"
            cache = cache_bytes(info.architecture, tokens, bfloat16=bfloat16)
        judge = 4.0 * total
        return reference + judge + max(0.0, cache - activations)
    return 0.0


def _inference(
    settings: EvalSettings | QuantizeSettings | ServerSettings, info: InputsInfo, total: int
) -> Memory:
    weights = 4.0 * total
    if isinstance(settings, ServerSettings):
        return Memory(weights=weights)
    if isinstance(settings, QuantizeSettings):
        # The full weights stay beside the quantized copy for the comparison.
        return Memory(weights=weights, others=weights)
    cache = 0.0
    if info.architecture is not None:
        prompt = info.prompt_tokens or settings.max_new_tokens
        tokens = settings.batch_size * (prompt + settings.max_new_tokens)
        cache = cache_bytes(info.architecture, tokens, bfloat16=False)
    return Memory(weights=weights, activations=cache, others=weights)


def check_memory(stage: str, need: Memory | None, device: Device) -> None:
    """RecipeError when `need` is more than a device of this kind holds. A device whose memory is
    not known fits everything; for `cpu` give it the machine's (`devices.local_memory_gib`)."""
    if need is None or device.memory_gib is None:
        return
    usable = device.memory_gib * USABLE_SHARE
    if need.gib <= usable:
        return
    fixed = need.weights + need.gradients + need.optimizer + need.others
    if fixed / _GIB < usable:
        fits = int((usable * _GIB - fixed) / need.activations * 100)
        remedy = (
            f"lower per_device_train_batch_size to {max(1, fits)} % of it or less and raise "
            "gradient_accumulation_steps, or set gradient_checkpointing: true"
        )
    else:
        remedy = "train with lora, shard over more devices, or take a device with more memory"
    raise RecipeError(
        where=f"stages.{stage}",
        found=f"it needs {need.shown()} on each device",
        rule=f"a {device.name} has {device.memory_gib:g} GiB, of which about {usable:.1f} are free "
        "for training",
        remedy=remedy,
    )
