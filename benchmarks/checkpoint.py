"""What a save costs: ours, Trainer's own, torch.distributed.checkpoint's asynchronous one.

    python benchmarks/checkpoint.py [--sizes 10m 135m] [--rounds 2] [--every N] [--json]

Random weights, Llama architecture, float32, AdamW, transformers' Trainer, the same rows. A round
trains once in each way, with five saves. A save's cost is all that the steps took longer, from the
beginning of the save until all of it is on the disk, than as many undisturbed steps just before and
after it: a machine whose speed changes from minute to minute would hide it otherwise. So what the
steps lose beside a background save counts. Ours hashes, flushes and publishes in that time, and is
then proved beside the steps; the cost until the verdict stands apart. So does the first save of a
run: it makes room in memory.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

from llm_assets.checkpoints.listing import list_saves
from llm_assets.stage_settings import TrainSettings
from llm_assets.stages.context import StageContext
from llm_assets.stages.training import run_training, training_arguments

SIZES: dict[str, dict[str, int]] = {
    "10m": {
        "vocab_size": 8192,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 10,
        "num_attention_heads": 8,
    },
    # SmolLM2-135M's own.
    "135m": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
    },
}
WAYS = ("ours", "trainer", "async")
# Steps between two saves: as many as a save lasts, and its proof, and as many again.
EVERY = {
    "10m": {"ours": 200, "trainer": 60, "async": 60},
    "135m": {"ours": 45, "trainer": 15, "async": 20},
}
SAVES = 5
WRITING, PROVING, NOTHING = "writing", "proving", ""
_LENGTH = 32


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Seconds that the steps lost to one save, until it was written and until it was proved."""

    save_s: float
    proved_s: float


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random rows of one length."""

    def __init__(self, vocab_size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.rows = torch.randint(0, vocab_size, (64, _LENGTH), generator=generator)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


class Clock(TrainerCallback):  # type: ignore[misc]
    """When each step began, and what ran beside the training then."""

    def __init__(self, beside: Callable[[int], str]) -> None:
        self.beside = beside
        self.began: list[float] = []
        self.ran: list[str] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.ran.append(self.beside(int(state.global_step)))
        self.began.append(time.monotonic())

    def costs(self, every: int, first: int) -> list[Cost]:
        """Of each save; the first is taken in the step of index `first`."""
        steps = [b - a for a, b in zip(self.began, self.began[1:], strict=False)]
        begins = range(first, first + every * SAVES, every)
        ends = [self._end(begin, len(steps), WRITING) for begin in begins]
        quiet_from = [self._end(begin, len(steps), WRITING, PROVING) for begin in begins]
        costs = []
        for number, (begin, written, proved) in enumerate(
            zip(begins, ends, quiet_from, strict=True)
        ):
            # The first steps of a run warm up.
            before = quiet_from[number - 1] if number else every // 2
            near = every // 3
            quiet = [
                *steps[max(before, begin - near) : begin],
                *steps[proved : min(begin + every, proved + near)],
            ]
            if len(quiet) < near:
                raise SystemExit("a save took longer than the steps until the next: raise --every")
            a_step = statistics.fmean(quiet)
            costs.append(
                Cost(
                    save_s=sum(steps[begin:written]) - (written - begin) * a_step,
                    proved_s=sum(steps[begin:proved]) - (proved - begin) * a_step,
                )
            )
        return costs

    def _end(self, begin: int, num_steps: int, *what: str) -> int:
        """The first step after `begin` beside which none of this ran."""
        end = begin + 1
        while end < num_steps and self.ran[end] in what:
            end += 1
        return end


class AsyncSaves(TrainerCallback):  # type: ignore[misc]
    """torch.distributed.checkpoint.async_save of model and optimizer each `every` steps."""

    def __init__(self, folder: Path, every: int) -> None:
        self.folder, self.every = folder, every
        self.running: Any = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 0 or state.global_step % self.every:
            return
        self.wait()
        optimizer = kwargs["optimizer"].state_dict()
        moments = {
            f"{i}.{name}": value
            for i, entry in optimizer["state"].items()
            for name, value in entry.items()
        }
        tensors = {"model": kwargs["model"].state_dict(), "optimizer": moments}
        target = self.folder / f"async-{state.global_step}"
        self.running = dcp.async_save(tensors, checkpoint_id=target, no_dist=True)

    def is_busy(self) -> bool:
        return self.running is not None and not self.running.done()

    def wait(self) -> None:
        if self.running is not None:
            self.running.result()


class Quiet:
    """Progress of a stage that nobody reads; what was said of the saves is kept."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def step(self, *args: Any, **kwargs: Any) -> None:
        return None

    def say(self, text: str) -> None:
        self.said.append(text)


def run_once(way: str, size: str, every: int) -> list[Cost]:
    """What each save of one training cost."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES[size], tie_word_embeddings=True))
    # Not /tmp: often a file system in memory, where every way of writing looks fast.
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-", dir="."))
    try:
        return _train(way, model, folder, every)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _train(way: str, model: Any, folder: Path, every: int) -> list[Cost]:
    settings = TrainSettings(
        learning_rate=1e-4,
        max_steps=(SAVES + 1) * every,
        per_device_train_batch_size=1,
        lr_scheduler_type="constant",
        checkpoint={"every_steps": every if way == "ours" else None, "every_minutes": None},
    )
    for name in ("out", "scratch", "checkpoints"):
        (folder / name).mkdir()
    context = StageContext(
        stage="base_checkpoint",
        pipeline="benchmark",
        config=settings,
        seed=0,
        inputs={},
        out=folder / "out",
        scratch=folder / "scratch",
        checkpoints=folder / "checkpoints",
        progress=Quiet(),
    )
    own = {"save_strategy": "steps", "save_steps": every} if way == "trainer" else {}
    arguments = training_arguments(TrainingArguments, context, **own)
    saves = AsyncSaves(folder, every)
    beside = {
        "ours": lambda step: _beside(context.checkpoints, (step - 1) // every * every),
        "trainer": lambda step: NOTHING,
        "async": lambda step: WRITING if saves.is_busy() else NOTHING,
    }
    clock = Clock(beside[way])
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=Rows(model.config.vocab_size),
        callbacks=[clock],
    )
    trainer.remove_callback(PrinterCallback)
    if way == "async":
        trainer.add_callback(saves)
    if way == "ours":
        run_training(context, trainer, tokens_per_step=_LENGTH)
    else:
        trainer.train()
        saves.wait()
    # Trainer saves at the end of the step before, the others at the beginning of the next.
    return clock.costs(every, every - 1 if way == "trainer" else every)


def _beside(folder: Path, step: int) -> str:
    """What is still done for the save of this step, if there is one."""
    verdicts = {save.step: save.verdict for save in list_saves(folder)}
    if step == 0:
        return NOTHING
    if step not in verdicts:
        return WRITING
    return PROVING if verdicts[step] == "unjudged" else NOTHING


def measure(size: str, rounds: int, every: Mapping[str, int]) -> dict[str, Any]:
    """Median seconds a save for each way, and their ratios."""
    costs: dict[str, list[Cost]] = {way: [] for way in WAYS}
    first: dict[str, list[Cost]] = {way: [] for way in WAYS}
    for number in range(rounds):
        # Another order each round: what warms up or throttles does not favour one of them.
        for way in WAYS[number % len(WAYS) :] + WAYS[: number % len(WAYS)]:
            each = run_once(way, size, every[way])
            text = " ".join(f"{cost.save_s:.3f} ({cost.proved_s:.3f})" for cost in each)
            print(f"{size} {way}: {text}", file=sys.stderr, flush=True)
            first[way].append(each[0])
            costs[way] += each[1:]
    median = {way: statistics.median(cost.save_s for cost in costs[way]) for way in WAYS}
    return {
        "size": size,
        "saves": rounds * (SAVES - 1),
        **{f"{way}_s": value for way, value in median.items()},
        "ours_to_trainer": median["ours"] / median["trainer"],
        "ours_to_async": median["ours"] / median["async"],
        "ours_proved_s": statistics.median(cost.proved_s for cost in costs["ours"]),
        "first_s": {way: statistics.median(c.save_s for c in first[way]) for way in WAYS},
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--every", type=int, help="steps between two saves")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    every = dict.fromkeys(WAYS, options.every)
    rows = [
        measure(size, options.rounds, every if options.every else EVERY[size])
        for size in options.sizes
    ]
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        print(
            f"{row['size']}: a save costs ours {row['ours_s']:.3f} s, Trainer's own "
            f"{row['trainer_s']:.3f} s, asynchronous {row['async_s']:.3f} s; ours / Trainer "
            f"{row['ours_to_trainer']:.2f}, ours / asynchronous {row['ours_to_async']:.2f}"
        )
        first = ", ".join(f"{way} {value:.3f} s" for way, value in row["first_s"].items())
        print(f"  the first save of a run: {first}")
        print(f"  ours until its verdict: {row['ours_proved_s']:.3f} s")


if __name__ == "__main__":
    main()
