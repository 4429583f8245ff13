"""How every training stage (4 to 9) trains: callbacks around transformers' and TRL's trainers.

    arguments = training_arguments(SFTConfig, context, max_length=256)
    log = run_training(context, SFTTrainer(model, args=arguments, ...))

`run_training` reports progress, stops at once on a loss that is not finite, saves full training
states into `context.checkpoints` and goes on from the newest healthy one. Of several processes it
returns on the first one alone.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import PrinterCallback, TrainerState

from llm_assets.errors import LlmAssetsError, NonFiniteLossError
from llm_assets.ranks import PartDone, shared_batch, world_size
from llm_assets.stage_settings import TrainSettings
from llm_assets.stages.context import StageContext
from llm_assets.stages.keeper import Keeper
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
from llm_assets.stages.resuming import Source, find_source, trainer_folder

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
    `seconds`: spent in training, by all processes that took part one after another. `saves`: a row
    each, with what it cost; `lost`: parts of a save that a resume did without, and what to expect.
    """

    series: Mapping[str, list[tuple[int, float]]]
    tokens: int
    steps: int
    seconds: float
    resumed_from: int
    saves: tuple[Mapping[str, Any], ...] = ()
    lost: tuple[Mapping[str, Any], ...] = ()

    @property
    def tables(self) -> dict[str, Sequence[Mapping[str, Any]]]:
        """For the record: `saves`, and `lost_in_resume` if anything was."""
        tables: dict[str, Sequence[Mapping[str, Any]]] = {}
        if self.saves:
            tables["saves"] = list(self.saves)
        if self.lost:
            tables["lost_in_resume"] = list(self.lost)
        return tables

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
    default. Of several processes each takes its share of a step's batch (ranks.shared_batch).
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
    values["per_device_train_batch_size"], values["gradient_accumulation_steps"] = shared_batch(
        settings.per_device_train_batch_size,
        settings.gradient_accumulation_steps,
        world_size(),
        where=f"stages.{context.stage}.per_device_train_batch_size",
    )
    values.update(settings.extra)
    values.update(fixed)
    values["output_dir"] = str(context.checkpoints)
    arguments = cls(**values)
    if arguments.n_gpu > 1:
        # A process that sees several GPUs would take a batch for each of them.
        arguments._n_gpu = 1
    return arguments


def run_training(
    context: StageContext, trainer: Any, *, tokens_per_step: int | None = None
) -> TrainingLog:
    """Train to the end, from the newest healthy save of `context.checkpoints` if there is one.

    `tokens_per_step`: tokens of one optimizer step; without it they are taken from what the trainer
    counts. Raises NonFiniteLossError; SaveError (see resuming.py, keeper.py); and after a save
    BudgetError when `should_stop` says so, Terminated when the process was told to end; PartDone
    on all processes but the first, once they have trained.
    """
    trainer.remove_callback(PrinterCallback)
    source = _source(context, trainer)
    keeper = Keeper(context, trainer, source)
    watcher = _Watcher(context, keeper, source, tokens_per_step)
    folder = None
    if source is not None:
        context.progress.say(f"goes on from {source.path.name}")
        folder = trainer_folder(source, context.scratch, _bare_state(trainer, source))
    trainer.add_callback(watcher)
    trainer.add_callback(keeper)
    try:
        with context.interruption.deferred():
            output = trainer.train(resume_from_checkpoint=None if folder is None else str(folder))
    finally:
        keeper.close()
        trainer.remove_callback(keeper)
        trainer.remove_callback(watcher)
    keeper.report()
    if trainer.args.process_index > 0:
        raise PartDone
    return TrainingLog(
        series=_curves(trainer.state.log_history),
        tokens=watcher.tokens,
        steps=int(output.global_step),
        seconds=watcher.seconds,
        resumed_from=keeper.resumed_from,
        saves=tuple(keeper.rows),
        lost=tuple(keeper.lost),
    )


def _source(context: StageContext, trainer: Any) -> Source | None:
    """The save to go on from; the first of several processes looks, the others are told."""
    args = trainer.args
    found: list[Any] = [None, None]
    if args.process_index == 0:
        try:
            if context.copies is not None:
                context.copies.bring(context.config.checkpoint)
            found[0] = find_source(
                context.checkpoints,
                identity=context.identity,
                world_size=args.world_size,
                settings=context.config.checkpoint,
                say=context.progress.say,
            )
        except LlmAssetsError as error:
            found[1] = error
    if args.world_size > 1:
        torch.distributed.broadcast_object_list(found)
    if found[1] is not None:
        raise found[1]
    source: Source | None = found[0]
    return source


def _bare_state(trainer: Any, source: Source) -> dict[str, Any]:
    """A TrainerState that knows its step and nothing else."""
    args = trainer.args
    state = TrainerState(
        global_step=source.manifest.step,
        logging_steps=args.logging_steps,
        eval_steps=args.eval_steps,
        save_steps=args.save_steps,
        train_batch_size=args.train_batch_size,
    )
    return dataclasses.asdict(state)


class _Watcher(TrainerCallback):  # type: ignore[misc]
    """Progress, the finite-loss guard, and the counts that saves carry on."""

    def __init__(
        self, context: StageContext, keeper: Keeper, source: Source | None, per_step: int | None
    ) -> None:
        self.context = context
        self.keeper = keeper
        self.tokens_per_step = per_step
        counters = source.manifest.counters if source is not None else {}
        self.tokens = int(counters.get("tokens", 0))
        self._seconds_before = float(counters.get("seconds", 0.0))
        self._started = time.monotonic()
        self._counted = 0

    @property
    def seconds(self) -> float:
        """Seconds in training, with those of the processes before a resume."""
        return self._seconds_before + time.monotonic() - self._started

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Count from what the trainer has counted before."""
        self._started = time.monotonic()
        self._counted = int(state.num_input_tokens_seen)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Hand the counts to the save that may come."""
        self.keeper.tokens, self.keeper.seconds = self.tokens, self.seconds

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
                raise NonFiniteLossError(
                    f"stage {self.context.stage}, step {step} of {state.max_steps}: {name} is "
                    f"{value}\n"
                    "  rule: a loss that is not finite stops the stage and leaves no artifact\n"
                    "  next: lower learning_rate, set max_grad_norm, or look for rows without "
                    "supervised tokens"
                )
        self._count(state, logs)
        self.context.progress.step(
            step,
            int(state.max_steps),
            loss=float(logs["loss"]),
            tokens=self.tokens,
            learning_rate=float(logs.get("learning_rate", 0.0)),
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
