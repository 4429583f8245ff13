"""How every training stage (4 to 9) trains: callbacks around transformers' and TRL's trainers.

    arguments = training_arguments(SFTConfig, context, max_length=256)
    log = run_training(context, SFTTrainer(model, args=arguments, ...))

`run_training` reports progress, stops at once on a loss that is not finite, saves full training
states into `context.checkpoints` and goes on from the newest healthy one.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import PrinterCallback

from llm_assets.errors import BudgetError, NonFiniteLossError
from llm_assets.stage_settings import TrainSettings
from llm_assets.stages.context import StageContext
from llm_assets.stages.models import (
    align_tokens,
    check_model_folder,
    check_pair,
    check_tokenizer,
    load_model,
    load_tokenizer,
    num_parameters,
    refuse_pickles,
    sample,
    save_model,
)
from llm_assets.stages.saves import (
    LoopState,
    list_saves,
    newest_healthy,
    read_loop,
    remove_old,
    restore_rng,
    write_save,
)

__all__ = [
    "TrainingLog",
    "align_tokens",
    "check_model_folder",
    "check_pair",
    "check_tokenizer",
    "load_model",
    "load_tokenizer",
    "num_parameters",
    "refuse_pickles",
    "run_training",
    "sample",
    "save_model",
    "training_arguments",
]

# Fields of the stage's block that are ours although an arguments class may have the same name.
_OWN_FIELDS = frozenset({"enabled", "pin", "checkpoint", "precision", "warmup_ratio", "lora"})
_NOT_CURVES = frozenset({"step", "epoch", "total_flos", "num_input_tokens_seen"})


@dataclass(frozen=True, kw_only=True)
class TrainingLog:
    """What a training gave beside the weights.

    `series`: name to [(step, value), ...]; `loss`, `learning_rate`, `grad_norm` and whatever else
    the trainer logs, over the whole training, also the part before a resume. `tokens`: processed.
    `seconds`: spent in training, by all processes that took part one after another.
    """

    series: Mapping[str, list[tuple[int, float]]]
    tokens: int
    steps: int
    seconds: float
    resumed_from: int

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of training."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    def last(self, name: str, *, over: int = 10) -> float:
        """Mean of the last `over` values of a curve; NaN when there is none."""
        values = [value for _, value in self.series.get(name, [])[-over:]]
        return sum(values) / len(values) if values else math.nan


def training_arguments(cls: type[Any], context: StageContext, **fixed: Any) -> Any:
    """The arguments of a trainer: an instance of `cls` (TrainingArguments or a TRL config).

    Every field of the stage's block that `cls` has goes in under its own name, then the settings
    that are passed through, then `fixed`, which wins. A field that is None keeps the class's own
    default.
    """
    settings: TrainSettings = context.config
    known = {field.name for field in dataclasses.fields(cls)}
    on_gpu = torch.cuda.is_available()
    values: dict[str, Any] = {
        "report_to": [],
        "disable_tqdm": True,
        "logging_steps": 1,
        "logging_first_step": True,
        # The filter would replace a NaN by the mean of the losses before it.
        "logging_nan_inf_filter": False,
        "save_strategy": "no",
        "eval_strategy": "no",
        "seed": context.seed,
        "data_seed": context.seed,
        "use_cpu": not on_gpu,
        "dataloader_pin_memory": on_gpu,
        "warmup_steps": settings.warmup_ratio,
        # TRL switches both on by itself: recomputation costs a third of the speed, and bfloat16 is
        # the recipe's choice.
        "gradient_checkpointing": False,
        "bf16": settings.precision == "bfloat16",
    }
    for name in type(settings).model_fields:
        value = getattr(settings, name)
        if name in known and name not in _OWN_FIELDS and value is not None:
            values[name] = value
    values.update(settings.extra)
    values.update(fixed)
    values["output_dir"] = str(context.checkpoints)
    return cls(**values)


def run_training(
    context: StageContext, trainer: Any, *, tokens_per_step: int | None = None
) -> TrainingLog:
    """Train to the end, from the newest healthy save of `context.checkpoints` if there is one.

    `tokens_per_step`: tokens of one optimizer step; without it they are taken from what the trainer
    counts. Raises NonFiniteLossError, and BudgetError after a save when `should_stop` says so.
    """
    trainer.remove_callback(PrinterCallback)
    save = newest_healthy(context.checkpoints, context.progress.say)
    loop = read_loop(save) if save is not None else None
    if save is not None:
        context.progress.say(f"goes on from {save.name}")
    elif list_saves(context.checkpoints):
        context.progress.say("no healthy save is left: starts from the first step")
    keeper = _Keeper(context, trainer, loop, tokens_per_step)
    trainer.add_callback(keeper)
    try:
        output = trainer.train(resume_from_checkpoint=str(save) if save is not None else None)
    finally:
        trainer.remove_callback(keeper)
    return TrainingLog(
        series=_curves(trainer.state.log_history),
        tokens=keeper.tokens,
        steps=int(output.global_step),
        seconds=keeper.seconds,
        resumed_from=keeper.resumed_from,
    )


class _Keeper(TrainerCallback):  # type: ignore[misc]
    """Progress, the finite-loss guard, saves and the second half of a resume."""

    def __init__(
        self,
        context: StageContext,
        trainer: Any,
        loop: LoopState | None,
        tokens_per_step: int | None,
    ) -> None:
        self.context = context
        self.trainer = trainer
        self.loop = loop
        self.tokens_per_step = tokens_per_step
        counters = loop.counters if loop is not None else {}
        self.tokens = int(counters.get("tokens", 0))
        self.resumed_from = int(counters.get("step", 0))
        self._seconds_before = float(counters.get("seconds", 0.0))
        self._started = self._last_save = time.monotonic()
        self._counted = 0

    @property
    def seconds(self) -> float:
        """Seconds in training, with those of the processes before a resume."""
        return self._seconds_before + time.monotonic() - self._started

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Put optimizer and scheduler back; weights and TrainerState are there already."""
        self._started = self._last_save = time.monotonic()
        self._counted = int(state.num_input_tokens_seen)
        if self.loop is not None:
            kwargs["optimizer"].load_state_dict(self.loop.optimizer)
            kwargs["lr_scheduler"].load_state_dict(dict(self.loop.scheduler))

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save, or put the generators back.

        A save is taken here and not at the end of the step before: by now that step is logged, and
        the batch is drawn, so generators that the draw uses stand where they do after a resume.
        """
        if self.loop is not None:
            restore_rng(self.loop.rng)
            self.loop = None
        elif state.global_step > 0 and self._may_save(args, state.global_step):
            stop = self.context.should_stop()
            if stop is not None or self._is_due(state.global_step):
                self._save(state, kwargs["optimizer"], kwargs["lr_scheduler"])
            if stop is not None:
                raise BudgetError(f"{stop}\n  saved: step {state.global_step}, to go on from")

    def on_log(
        self, args: Any, state: Any, control: Any, logs: Mapping[str, Any], **kwargs: Any
    ) -> None:
        """Check that loss and gradient are finite, then report."""
        if "loss" not in logs:
            return
        step = int(state.global_step)
        for name in ("loss", "grad_norm"):
            value = float(logs.get(name, 0.0))
            if not math.isfinite(value):
                raise self._not_finite(state, f"{name} is {value}")
        self._count(state, logs)
        self.context.progress.step(
            step,
            int(state.max_steps),
            loss=float(logs["loss"]),
            tokens=self.tokens,
            learning_rate=float(logs.get("learning_rate", 0.0)),
        )

    def _not_finite(self, state: Any, what: str) -> NonFiniteLossError:
        return NonFiniteLossError(
            f"stage {self.context.stage}, step {state.global_step} of {state.max_steps}: {what}\n"
            "  rule: a loss that is not finite stops the stage and leaves no artifact\n"
            "  next: lower learning_rate, set max_grad_norm, or look for rows without supervised "
            "tokens"
        )

    def _count(self, state: Any, logs: Mapping[str, Any]) -> None:
        if self.tokens_per_step is not None:
            self.tokens = int(state.global_step) * self.tokens_per_step
            return
        # TRL counts in `num_tokens`: since the process started, or, for the online trainers, in
        # TrainerState, which a resume puts back.
        counted = int(logs.get("num_tokens", state.num_input_tokens_seen))
        self.tokens += counted - self._counted
        self._counted = counted

    def _may_save(self, args: Any, step: int) -> bool:
        """An online trainer has no answers left over."""
        # GRPO and RLOO use the answers of one generation for several micro-batches; a save in
        # between could not be resumed exactly.
        every = getattr(args, "steps_per_generation", None) or 1
        every *= getattr(args, "num_iterations", None) or 1
        return bool(step * args.gradient_accumulation_steps % every == 0)

    def _is_due(self, step: int) -> bool:
        """A save is due by steps or by minutes."""
        settings = self.context.config.checkpoint
        if settings.every_steps is not None and step % settings.every_steps == 0:
            return True
        minutes = (time.monotonic() - self._last_save) / 60
        return settings.every_minutes is not None and minutes >= settings.every_minutes

    def _save(self, state: Any, optimizer: Any, scheduler: Any) -> None:
        if not self.trainer.is_world_process_zero():
            return
        folder: Path = self.context.checkpoints
        model = self.trainer.accelerator.unwrap_model(self.trainer.model)
        # A recipe may log, and so look at the loss, more rarely than it saves.
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and not bool(torch.isfinite(parameter).all()):
                raise self._not_finite(state, f"{name} holds NaN or infinity")
        write_save(
            folder,
            step=int(state.global_step),
            model=model,
            optimizer=optimizer,
            scheduler=scheduler,
            write_trainer_state=state.save_to_json,
            counters={
                "tokens": self.tokens,
                "step": int(state.global_step),
                "seconds": self.seconds,
            },
        )
        remove_old(folder, keep=self.context.config.checkpoint.keep)
        self._last_save = time.monotonic()


def _curves(history: list[dict[str, Any]]) -> dict[str, list[tuple[int, float]]]:
    """TrainerState's log history as curves, without times (`train_...`) and the closing entry."""
    curves: dict[str, list[tuple[int, float]]] = {}
    for entry in history:
        if "train_loss" in entry:
            continue
        for name, value in entry.items():
            if name in _NOT_CURVES or name.startswith("train_"):
                continue
            if isinstance(value, int | float):
                curves.setdefault(name, []).append((int(entry["step"]), float(value)))
    return curves
