"""What each stage of a recipe has to compute: operations, tokens, and time that no device saves.

`stage_work(stage, settings, info)` turns a block of the recipe and what is known of the stage's
inputs into a `StageWork`. Its operations follow estimate.py. Three things stand beside them:

- `startup_s`: interpreter, imports, loading and storing. For a tiny model this is most of the wall
  time, and it is paid for like the rest.
- `host_s`: work on text that runs on the host (tokenizing, deduplication, reading files).
- Operations of token-by-token generation are kept apart: a decoder reads all weights for each token
  and reaches about a quarter of the utilization of training (`GENERATION_SHARE`).

The constants are first guesses. A stage that ran once is estimated from its records (learning.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from llm_assets.costs.devices import Device
from llm_assets.costs.estimate import (
    attention_flops,
    dpo_flops,
    forward_flops,
    online_flops,
    tuning_flops,
)
from llm_assets.costs.parameters import Architecture, lora_parameters
from llm_assets.errors import RecipeError
from llm_assets.stage_settings import (
    BaseSettings,
    DpoSettings,
    EvalSettings,
    LoraSettings,
    QuantizeSettings,
    RefineSettings,
    RewardSettings,
    ServerSettings,
    SftSettings,
    TrainSettings,
)

GENERATION_SHARE = 0.25
MEASURED_TOKENS = 64
"""Tokens of an answer when a training stage measures itself on held-out prompts."""

_DEFAULT_EPOCHS = 3.0  # of transformers' and TRL's arguments
_DEFAULT_ROWS = 1000  # eval items when nothing is known

STARTUP_S: Mapping[str, float] = {
    "corpus": 0.5,
    "instructions": 0.5,
    "preferences": 0.5,
    "evals": 0.5,
    "vocabulary": 2.0,
    "tokenizer": 6.0,
    "shards": 8.0,
    "base_checkpoint": 12.0,
    "midtrained_checkpoint": 12.0,
    "sft_checkpoint": 16.0,
    "reward_model": 16.0,
    "dpo_policy": 16.0,
    "refined_policy": 18.0,
    "eval_report": 18.0,
    "quantized_weights": 20.0,
    "inference_server": 25.0,
    "release": 1.0,
}

_ROWS_A_SECOND: Mapping[str, float] = {
    "corpus": 30_000.0,
    "instructions": 20_000.0,
    "preferences": 10_000.0,
    "evals": 5_000.0,
    "vocabulary": 10_000.0,
    "shards": 1_500.0,
}
"""Rows or documents that one core reads, tokenizes or deduplicates."""


@dataclass(frozen=True, kw_only=True)
class InputsInfo:
    """What is known of a stage's inputs; None where it is not.

    `rows`: training rows (pairs, for preferences), or documents of the corpus. `row_tokens`: mean
    tokens of a row. `sequence_length`: of a packed row. `eval_items`: of all tasks together.
    """

    architecture: Architecture | None = None
    num_parameters: int | None = None
    rows: int | None = None
    row_tokens: float | None = None
    prompt_tokens: float | None = None
    sequence_length: int | None = None
    eval_items: int | None = None

    def compute(self, where: str, *, head: bool = True) -> float:
        """Parameters that multiply one token, with or without the output matrix. RecipeError when
        neither architecture nor number is known."""
        if self.architecture is not None:
            known = self.architecture
            return float(known.compute if head else known.compute_without_head)
        if self.num_parameters is not None:
            return float(self.num_parameters)
        raise RecipeError(
            where=where,
            found="no architecture",
            rule="an estimate needs the number of parameters",
            remedy="run the stages above first, or import a folder that has a config.json",
        )


@dataclass(frozen=True, kw_only=True)
class StageWork:
    """Operations by part (`parts`: dense passes, `generated`: token by token), tokens processed,
    seconds of start-up and of host work."""

    parts: Mapping[str, float] = field(default_factory=dict)
    generated: Mapping[str, float] = field(default_factory=dict)
    tokens: int = 0
    startup_s: float = 0.0
    host_s: float = 0.0

    @property
    def flops(self) -> float:
        """All operations."""
        return sum(self.parts.values()) + sum(self.generated.values())

    def variable_s(self, device: Device, *, utilization: float, devices: int) -> float:
        """Seconds that grow with the work: all but the start-up."""
        weighed = sum(self.parts.values()) + sum(self.generated.values()) / GENERATION_SHARE
        return self.host_s + weighed / (device.peak_tflops * 1e12 * utilization * devices)

    def wall_s(self, device: Device, *, utilization: float, devices: int) -> float:
        """Seconds from first principles."""
        return self.startup_s + self.variable_s(device, utilization=utilization, devices=devices)

    def flops_of(self, tokens: int) -> float:
        """The operations when `tokens` were really processed, such as those of a record."""
        if tokens <= 0 or self.tokens <= 0:
            return self.flops
        return self.flops * tokens / self.tokens


def stage_work(stage: str, settings: Any, info: InputsInfo) -> StageWork:
    """What `stage` has to compute. `settings` is its block of the recipe; however many processes
    train, they share the batch that it says.

    RecipeError when something is missing that the work depends on (parameters; the number of rows
    when the length of training is given in epochs).
    """
    if stage not in STARTUP_S:
        raise RecipeError(
            where=f"stages.{stage}",
            found="an unknown stage",
            rule="work is known for the stages of the design",
            remedy=f"one of {', '.join(STARTUP_S)}",
        )
    if getattr(settings, "import_", None) is not None:
        return StageWork(startup_s=STARTUP_S[stage])
    builder = _BUILDERS.get(stage)
    work = StageWork() if builder is None else builder(stage, settings, info)
    host_s = (info.rows or 0) / _ROWS_A_SECOND[stage] if stage in _ROWS_A_SECOND else 0.0
    return replace(work, startup_s=STARTUP_S[stage], host_s=work.host_s + host_s)


def num_steps(stage: str, settings: TrainSettings, rows: int | None) -> int:
    """Optimizer steps: `max_steps`, or epochs over `rows` as transformers' Trainer counts them."""
    if settings.max_steps is not None:
        return settings.max_steps
    epochs = settings.num_train_epochs or _DEFAULT_EPOCHS
    if rows is None:
        raise RecipeError(
            where=f"stages.{stage}.num_train_epochs",
            found=f"{epochs:g} epochs over an unknown number of rows",
            rule="an estimate needs the number of steps",
            remedy="set max_steps, or max_rows of the data, or run the data stages first",
        )
    batches = math.ceil(rows / settings.per_device_train_batch_size)
    return max(1, math.ceil(epochs * max(1, batches // settings.gradient_accumulation_steps)))


def rows_per_step(settings: TrainSettings) -> int:
    """Rows of one optimizer step over all processes."""
    return settings.per_device_train_batch_size * settings.gradient_accumulation_steps


def _adapters(info: InputsInfo, lora: LoraSettings | None) -> float:
    """Adapter weights. Without the architecture, a hundredth of the parameters."""
    if lora is None:
        return 0.0
    if info.architecture is None:
        return 0.01 * (info.num_parameters or 0)
    return float(lora_parameters(info.architecture, r=lora.r, target_modules=lora.target_modules))


def _attention(info: InputsInfo, tokens: float, length: float, *, trained: bool) -> float:
    if info.architecture is None:
        return 0.0
    return attention_flops(info.architecture, tokens, length, trained=trained)


def _row_length(info: InputsInfo, max_length: int) -> float:
    """Mean tokens of a row as it goes through the model: the limit, unless the rows are shorter."""
    return min(float(max_length), info.row_tokens or float(max_length))


def _measuring(info: InputsInfo, where: str, prompts: int, models: int) -> dict[str, float]:
    """Answers that a stage generates to measure itself, before and after."""
    tokens = models * prompts * (MEASURED_TOKENS + (info.prompt_tokens or MEASURED_TOKENS))
    return {"measuring": forward_flops(info.compute(where), tokens)}


def _pretraining(stage: str, settings: TrainSettings, info: InputsInfo) -> StageWork:
    where = f"stages.{stage}"
    length = info.sequence_length or 0
    if isinstance(settings, BaseSettings) and settings.model is not None and not length:
        length = settings.model.max_position_embeddings
    if not length:
        raise RecipeError(
            where="stages.shards.sequence_length",
            found="no sequence length",
            rule="an estimate needs the tokens of a packed row",
            remedy="run the shards first, or set the length",
        )
    steps = num_steps(stage, settings, info.rows)
    tokens = steps * rows_per_step(settings) * length
    return StageWork(
        parts={
            "training": tuning_flops(info.compute(where), 0, tokens),
            "attention": _attention(info, tokens, length, trained=True),
        },
        tokens=tokens,
    )


def _sft(stage: str, settings: SftSettings, info: InputsInfo) -> StageWork:
    where = f"stages.{stage}"
    length = _row_length(info, settings.max_length)
    rows = num_steps(stage, settings, info.rows) * rows_per_step(settings)
    tokens = rows * length
    adapters = _adapters(info, settings.lora)
    return StageWork(
        parts={
            "training": tuning_flops(info.compute(where), adapters, tokens),
            "attention": _attention(info, tokens, length, trained=True),
        },
        generated=_measuring(info, where, settings.eval_prompts, 2),
        tokens=round(tokens),
    )


def _reward(stage: str, settings: RewardSettings, info: InputsInfo) -> StageWork:
    length = _row_length(info, settings.max_length)
    pairs = num_steps(stage, settings, info.rows) * rows_per_step(settings)
    tokens = 2 * pairs * length
    body = info.compute(f"stages.{stage}", head=False)
    adapters = _adapters(info, settings.lora)
    return StageWork(
        parts={
            "training": tuning_flops(body, adapters, tokens),
            "attention": _attention(info, tokens, length, trained=True),
        },
        tokens=round(tokens),
    )


def _dpo(stage: str, settings: DpoSettings, info: InputsInfo) -> StageWork:
    where = f"stages.{stage}"
    length = _row_length(info, settings.max_length)
    pairs = num_steps(stage, settings, info.rows) * rows_per_step(settings)
    tokens = 2 * pairs * length
    adapters = _adapters(info, settings.lora)
    attention = _attention(info, tokens, length, trained=True)
    return StageWork(
        parts={
            **dpo_flops(info.compute(where), tokens, adapters=adapters),
            # The reference adds a forward pass, a third of what training takes.
            "attention": attention * 4 / 3,
        },
        generated=_measuring(info, where, settings.eval_prompts, 2),
        tokens=round(tokens),
    )


def _refine(stage: str, settings: RefineSettings, info: InputsInfo) -> StageWork:
    where = f"stages.{stage}"
    answer = settings.max_completion_length
    prompt = info.prompt_tokens or float(answer)
    policy, body = info.compute(where), info.compute(where, head=False)
    answers = num_steps(stage, settings, info.rows) * rows_per_step(settings)
    tokens = answers * (prompt + answer)
    measured = _measuring(info, where, settings.eval_prompts, 2)
    if settings.method == "constitutional":
        # An answer, its critique and its revision for each row that is trained on, then scored.
        parts = {
            "reward": forward_flops(body, 2 * tokens),
            "policy": tuning_flops(policy, 0, tokens),
        }
        generation = forward_flops(policy, 3 * tokens)
    else:
        passes = settings.extra.get("num_iterations", 1)
        parts = online_flops(
            policy,
            reward_parameters=body,
            prompt_tokens=answers * prompt,
            completion_tokens=answers * answer,
            passes=passes if isinstance(passes, int) else 1,
        )
        generation = parts.pop("generation")
    parts["attention"] = 2 * _attention(info, tokens, prompt + answer, trained=True)
    return StageWork(
        parts=parts, generated={"generation": generation, **measured}, tokens=round(tokens)
    )


def _evaluate(stage: str, settings: EvalSettings, info: InputsInfo) -> StageWork:
    policy = info.compute(f"stages.{stage}")
    items = info.eval_items or _DEFAULT_ROWS
    if settings.limit is not None:
        items = min(items, settings.limit)
    prompt = info.prompt_tokens or float(MEASURED_TOKENS)
    length = prompt + settings.max_new_tokens
    asked, compared = 2 * items * length, 2 * settings.kl_prompts * length
    return StageWork(
        parts={"kl": forward_flops(policy, compared)},
        generated={"answers": forward_flops(policy, asked + compared / 2)},
        tokens=round(asked + compared),
    )


def _quantize(stage: str, settings: QuantizeSettings, info: InputsInfo) -> StageWork:
    """GPTQ passes the calibration rows twice (to collect, then with the quantized layer), and both
    models are compared on held-out rows."""
    tokens = settings.calibration_rows * settings.calibration_length
    policy = info.compute(f"stages.{stage}")
    return StageWork(
        parts={
            "calibration": forward_flops(policy, 2 * tokens),
            "comparison": forward_flops(policy, 2 * tokens),
        },
        tokens=2 * tokens,
    )


def _serve(stage: str, settings: ServerSettings, info: InputsInfo) -> StageWork:
    prompts = len(settings.smoke_prompts) or settings.num_smoke_prompts
    tokens = 2 * prompts * (settings.max_new_tokens + (info.prompt_tokens or MEASURED_TOKENS))
    flops = forward_flops(info.compute(f"stages.{stage}"), tokens)
    return StageWork(generated={"answers": flops}, tokens=round(tokens))


_BUILDERS: Mapping[str, Callable[[str, Any, InputsInfo], StageWork]] = {
    "base_checkpoint": _pretraining,
    "midtrained_checkpoint": _pretraining,
    "sft_checkpoint": _sft,
    "reward_model": _reward,
    "dpo_policy": _dpo,
    "refined_policy": _refine,
    "eval_report": _evaluate,
    "quantized_weights": _quantize,
    "inference_server": _serve,
}
