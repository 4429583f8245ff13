"""The callback that keeps a training's saves: when, what, and how it goes on from one."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from transformers import TrainerCallback

from llm_assets.checkpoints.interval import FIRST_S, automatic_interval_s
from llm_assets.checkpoints.manifest import Kind
from llm_assets.checkpoints.retention import remove_old
from llm_assets.errors import BudgetError, NonFiniteLossError, SaveError, message
from llm_assets.interruption import Terminated
from llm_assets.stages import putting_back
from llm_assets.stages.context import StageContext
from llm_assets.stages.resuming import Source
from llm_assets.stages.save_buffers import TensorBuffer
from llm_assets.stages.save_files import Request, Written
from llm_assets.stages.save_order import POSITION_SUMMARY, DataPosition, generators
from llm_assets.stages.save_writer import SMALL_BYTES, Pending, SaveWriter
from llm_assets.stages.saves import (
    architecture_of,
    loop_document,
    moment_tensors,
    recent_metrics,
    schedule_arguments,
    state_document,
    trained_tensors,
)

_STEPS_TIMED = 20
_ROWS_KEPT = 500
_LAST_COPY_S = 300.0
_PATIENCE, _PATIENCE_S = 0.1, 30.0
"""The share of an interval, and the seconds at most, for which writing a save gives way to the
steps: what a kill may cost more, against steps that are as fast as without a save."""


class Keeper(TrainerCallback):  # type: ignore[misc]
    """Saves in the background, and the second half of a resume. Of several processes the first one
    writes; all of them call it at the same steps."""

    def __init__(self, context: StageContext, trainer: Any, source: Source | None) -> None:
        self.context = context
        self.trainer = trainer
        self.settings = context.config.checkpoint
        self.resumed = source
        self._pending_resume = source
        lineage = dict(source.manifest.lineage) if source is not None else {}
        self.resumed_from = source.manifest.step if source is not None else 0
        self.lost: list[dict[str, Any]] = [
            *lineage.get("lost", []),
            *(source.lost if source else []),
        ]
        self.rows: list[dict[str, Any]] = list(lineage.get("saves", []))
        self._warmup = putting_back.Warmup(lineage.get("warmup"))
        self._architecture: dict[str, Any] = {}
        self._last_save = time.monotonic()
        self._measured: tuple[float, float] | None = None
        self._model, self._moments, self._generators = (TensorBuffer() for _ in range(3))
        self._writer = SaveWriter(retain=lambda: remove_old(context.checkpoints, self.settings))
        self._step_s: deque[float] = deque(maxlen=_STEPS_TIMED)
        self._step_began = 0.0
        self._beside_s = 0.0
        self._stopping = False
        self.tokens, self.seconds = 0, 0.0

    # Callbacks of transformers' Trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Put optimizer and scheduler back; weights and TrainerState are there already."""
        self._last_save = time.monotonic()
        self._architecture = architecture_of(self._plain_model())
        self._data = DataPosition(
            kwargs["train_dataloader"],
            accumulation=args.gradient_accumulation_steps,
            world_size=args.world_size,
        )
        if self._pending_resume is not None:
            warmup = putting_back.put_back(
                self._pending_resume, kwargs["optimizer"], kwargs["lr_scheduler"], state.max_steps
            )
            if warmup is not None:
                self._warmup = warmup
                self.context.progress.say(f"the optimizer's moments are lost: {warmup}")

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The order of an epoch is drawn after this."""
        source = self._pending_resume
        self._data.epoch_begins(
            putting_back.epoch_generators(source, args.process_index) if source else None
        )

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Save, or finish the resume.

        A save is taken here and not at the end of the step before: by now that step is logged, and
        the batch is drawn, so generators that the draw uses stand where they do after a resume.
        """
        step = int(state.global_step)
        position = self._data.at(step)
        self._time_step()
        self.report()
        if self._pending_resume is not None:
            putting_back.finish(self._pending_resume, position, args.process_index)
            self._pending_resume = None
        elif step > 0 and self._may_save(args, step):
            self._save_or_stop(args, state, position, kwargs["optimizer"], kwargs["lr_scheduler"])
        self._step_began = time.monotonic()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The rate of this step, lower during a warm-up."""
        self._warmup.before_step(kwargs["optimizer"], int(state.global_step))

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The schedule's rate again."""
        self._warmup.after_step(kwargs["optimizer"])

    # Saves

    def _may_save(self, args: Any, step: int) -> bool:
        """An online trainer has no answers left over."""
        # GRPO and RLOO use the answers of one generation for several micro-batches; a save in
        # between could not be resumed exactly.
        every = getattr(args, "steps_per_generation", None) or 1
        every *= getattr(args, "num_iterations", None) or 1
        return bool(step * args.gradient_accumulation_steps % every == 0)

    def _save_or_stop(
        self, args: Any, state: Any, position: Any, optimizer: Any, scheduler: Any
    ) -> None:
        step = int(state.global_step)
        money = self.context.should_stop()
        told = self.context.interruption.requested
        light = self.settings.light_every_steps
        wishes = [
            money is not None,
            told,
            self._is_due(step),
            light is not None and step % light == 0,
        ]
        spent, told, full, thin = _agreed(wishes, args)
        if full or spent or told:
            self._save("full", args, state, position, optimizer, scheduler)
        elif thin:
            self._save("light", args, state, position, optimizer, scheduler)
        elif self._share_of_interval(step) > 0.5 and args.process_index == 0:
            self._prepare(optimizer)
        if spent or told:
            self._stop(step, args, money, told)

    def _stop(self, step: int, args: Any, money: str | None, told: bool) -> None:
        """The save stands, then all processes end."""
        self._stopping = True
        self._writer.wait()
        failed = [written.error for written in self._writer.ended if written.step == step]
        ending = f"saved: step {step}, to go on from"
        if any(failed):
            ending = f"step {step} was not saved: {failed[-1]}"
        if args.world_size > 1:
            torch.distributed.barrier()
        if told:
            self.context.progress.say(f"told to end; {ending}")
            raise Terminated(ending)
        raise BudgetError(f"{money or 'another process must stop'}\n  {ending}")

    def _is_due(self, step: int) -> bool:
        """A full save is due by steps or by time."""
        every = self.settings.every_steps
        if every is not None and step % every == 0:
            return True
        interval = self._interval_s()
        return interval is not None and time.monotonic() - self._last_save >= interval

    def _interval_s(self) -> float | None:
        minutes = self.settings.every_minutes
        if minutes != "auto":
            return None if minutes is None else float(minutes) * 60
        if self._measured is None:
            return FIRST_S
        return automatic_interval_s(*self._measured, self.settings.mtbf_hours * 3600)

    def _share_of_interval(self, step: int) -> float:
        """How much of the interval has passed, by steps or by time."""
        every, interval = self.settings.every_steps, self._interval_s()
        by_steps = step % every / every if every is not None else 0.0
        by_time = (time.monotonic() - self._last_save) / interval if interval else 0.0
        return max(by_steps, by_time)

    def _prepare(self, optimizer: Any) -> None:
        """Touch the memory before it is needed: the first save is as short as the others."""
        if self._writer.busy:
            return
        # What there is no room for is told by the save itself.
        with contextlib.suppress(MemoryError, OSError):
            self._model.prepare(trained_tensors(self._plain_model()))
            self._moments.prepare(moment_tensors(optimizer))

    def _save(
        self, kind: Kind, args: Any, state: Any, position: Any, optimizer: Any, scheduler: Any
    ) -> None:
        """Copy the state and hand it to the writer. The time until then is the stall."""
        began = time.monotonic()
        states = _gathered({**generators(), **putting_back.of_epoch(self._data.epoch_start)}, args)
        if args.process_index == 0:
            self._writer.wait()
            try:
                pending = self._capture(
                    kind, args, state, position, optimizer, scheduler, states, began
                )
            except (MemoryError, OSError, RuntimeError, ValueError) as error:
                self._failed(f"{type(error).__name__}: {error}", int(state.global_step))
            else:
                self._writer.submit(pending)
                self.report()
        self._last_save = time.monotonic() if kind == "full" else self._last_save

    def _capture(
        self,
        kind: Kind,
        args: Any,
        state: Any,
        position: Mapping[str, Any],
        optimizer: Any,
        scheduler: Any,
        states: list[dict[str, torch.Tensor]],
        began: float,
    ) -> Pending:
        model = self._plain_model()
        tensors = {"model.safetensors": self._model}
        documents: dict[str, Any] = {}
        self._model.take(trained_tensors(model))
        if kind == "full":
            self._generators.take(
                {f"{i}.{n}": t for i, each in enumerate(states) for n, t in each.items()}
            )
            self._moments.take(moment_tensors(optimizer))
            tensors |= {
                "optimizer.safetensors": self._moments,
                "rng.safetensors": self._generators,
            }
            schedule = schedule_arguments(args, int(state.max_steps))
            documents = {
                "loop.json": loop_document(model, optimizer, scheduler, schedule),
                "data.json": dict(position),
                "trainer_state.json": state_document(state),
            }
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        size = sum(len(buffer.content) for buffer in tensors.values())
        request = Request(
            folder=str(self.context.checkpoints),
            kind=kind,
            step=int(state.global_step),
            documents=documents,
            manifest={
                "identity": self.context.identity,
                "stage": self.context.stage,
                "pipeline": self.context.pipeline,
                "world_size": int(args.world_size),
                "environment": dict(self.context.environment),
                "counters": {
                    "step": int(state.global_step),
                    "tokens": self.tokens,
                    "seconds": self.seconds,
                },
                "metrics": recent_metrics(state.log_history[-200:]),
                "data": {name: position[name] for name in POSITION_SUMMARY},
                "architecture": self._architecture,
                "lineage": {
                    "resumed_from": self.resumed_from,
                    "lost": self.lost,
                    "warmup": self._warmup.document,
                    "judge_loss": not hasattr(args, "steps_per_generation"),
                    "saves": self.rows[-_ROWS_KEPT:],
                },
            },
            stall_s=time.monotonic() - began,
            waits=size <= SMALL_BYTES,
        )
        patience_s = min(_PATIENCE * (began - self._last_save), _PATIENCE_S)
        return Pending(request=request, tensors=tensors, patience_s=patience_s)

    def _plain_model(self) -> Any:
        # Without the wrapper of mixed precision the live model would lose TRL's forward too.
        return self.trainer.accelerator.unwrap_model(self.trainer.model, keep_fp32_wrapper=True)

    # What became of them

    def _time_step(self) -> None:
        """What the steps lose beside a save that is being written counts for that save."""
        if not self._step_began:
            return
        took = time.monotonic() - self._step_began
        if self._writer.busy:
            self._beside_s += took - (statistics.median(self._step_s) if self._step_s else took)
        else:
            self._step_s.append(took)

    def report(self) -> None:
        """Tell what the writer did since the last call. NonFiniteLossError for weights that are
        not finite; SaveError for a save that failed, where the recipe says stop."""
        while self._writer.ended:
            written = self._writer.ended.popleft()
            if written.not_finite:
                raise NonFiniteLossError(
                    f"stage {self.context.stage}, step {written.step}: {written.error}\n"
                    "  rule: weights that are not finite are not saved, and stop the stage\n"
                    "  next: lower learning_rate, set max_grad_norm, or look for rows without "
                    "supervised tokens"
                )
            if written.error:
                self._failed(written.error, written.step)
                continue
            self._measured = (written.stall_s, written.write_s)
            self._note(written)
        while self._writer.judged:
            save = self._writer.judged.popleft()
            if save.verdict == "healthy" and self.context.copies is not None:
                self.context.copies.offer(save.path.name)
            if save.verdict not in ("healthy", "light"):
                why = "; ".join(save.health.reasons) if save.health else save.problem
                self.context.progress.say(f"{save.path.name} is {save.verdict}: {why}")
        for text in self.context.copies.told() if self.context.copies is not None else ():
            self.context.progress.say(text)

    def _note(self, written: Written) -> None:
        beside = max(0.0, self._beside_s)
        self._beside_s = 0.0
        row = {
            **dataclasses.asdict(written),
            "beside_s": beside,
        }
        del row["error"], row["not_finite"]
        self.rows.append(row)
        lasting = written.stall_s + beside
        self.context.progress.say(
            f"saved step {written.step} ({written.kind}, {written.size_bytes / 1e6:,.1f} MB): "
            f"stall {written.stall_s:.3f} s, {lasting:.3f} s with what the steps lost, written in "
            f"{written.write_s:.1f} s"
        )

    def _failed(self, error: str, step: int) -> None:
        text = f"the save of step {step} failed: {error}"
        if self.settings.on_save_error == "stop":
            raise SaveError(
                message(
                    where=str(self.context.checkpoints),
                    found=text,
                    rule="checkpoint.on_save_error: stop",
                    remedy="make room or mend the storage, then run again: it goes on from the "
                    "last good save",
                )
            )
        self.context.progress.say(f"{text}; the training goes on, the last good save stands")

    def close(self) -> None:
        """Finish what is being written. A training that stops before its end waits for the copy of
        its last save: the machine may not be there any more when it goes on."""
        self._writer.close()
        if self.context.copies is not None and self.trainer.args.process_index == 0:
            told = self.context.interruption
            wait_s = told.left_s if told.requested else _LAST_COPY_S
            self.context.copies.finish(wait_s if self._stopping else 0.0)


def _agreed(wishes: list[bool], args: Any) -> list[bool]:
    """All processes do what one of them must; only the first one's clock decides what is due."""
    if args.world_size == 1:
        return wishes
    own = [
        wish if number < 2 or args.process_index == 0 else False
        for number, wish in enumerate(wishes)
    ]
    tensor = torch.tensor([int(wish) for wish in own], device=args.device)
    torch.distributed.all_reduce(tensor, op=torch.distributed.ReduceOp.MAX)
    return [bool(wish) for wish in tensor.tolist()]


def _gathered(states: dict[str, torch.Tensor], args: Any) -> list[dict[str, torch.Tensor]]:
    """The generators of all processes."""
    if args.world_size == 1:
        return [states]
    every: list[Any] = [None] * args.world_size
    torch.distributed.all_gather_object(every, states)
    return every
