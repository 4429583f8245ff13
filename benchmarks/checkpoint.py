"""What a save costs: ours, Trainer's own, torch.distributed.checkpoint's asynchronous one.

    python benchmarks/checkpoint.py [--sizes 10m 135m] [--rounds 3] [--every N] [--json]

Random weights, Llama architecture, float32, AdamW, transformers' Trainer, the same rows. A round
runs each way once, beside an undisturbed run. Two saves a run, and as many steps after each as lie
between them. A save's cost is all that the training took longer than the undisturbed one, from the
first save until the last step ended and the last byte was written: what the steps lose beside a
background save counts too. What a run does once, before its first save, does not: memory for ours.
Ours hashes, flushes and publishes each save, and proves it beside the steps; a proof that still
runs at the end of the run is given up.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback

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
WAYS = ("none", "ours", "trainer", "async")
# Steps between two saves: some fifteen seconds on two cores.
EVERY = {"10m": 400, "135m": 30}
_LENGTH = 32


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
    """When each step began."""

    def __init__(self) -> None:
        self.began: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.began.append(time.monotonic())


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


def run_once(way: str, size: str, every: int) -> float:
    """Seconds from the first save to the end of the last step, or of the last save, whichever is
    later. Without saves: as many steps of the median length."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES[size], tie_word_embeddings=True))
    # Not /tmp: often a file system in memory, where every way of writing looks fast.
    folder = Path(tempfile.mkdtemp(prefix="checkpoint-", dir="."))
    try:
        return _train(way, model, folder, every)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _train(way: str, model: Any, folder: Path, every: int) -> float:
    # The last save is at the step before the window's last `every` steps; none is at the end.
    steps = 3 * every - 1
    settings = TrainSettings(
        learning_rate=1e-4,
        max_steps=steps,
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
    clock = Clock()
    trainer = Trainer(
        model=model,
        args=arguments,
        train_dataset=Rows(model.config.vocab_size),
        callbacks=[clock],
    )
    trainer.remove_callback(PrinterCallback)
    saves = AsyncSaves(folder, every)
    if way == "async":
        trainer.add_callback(saves)
    if way == "ours":
        run_training(context, trainer, tokens_per_step=_LENGTH)
    else:
        trainer.train()
        saves.wait()
    if way == "none":
        steps_s = [b - a for a, b in zip(clock.began[1:], clock.began[2:], strict=False)]
        return statistics.median(steps_s) * (steps - every + 1)
    # Trainer saves at the end of the step before, the others at the beginning of the next.
    return time.monotonic() - clock.began[every - 1]


def measure(size: str, rounds: int, every: int) -> dict[str, Any]:
    """Median seconds a save for each way, and the ratios of the rounds."""
    # Trainer also saves at its end.
    num_saves = {"ours": 2, "trainer": 3, "async": 2}
    stalls: dict[str, list[float]] = {way: [] for way in WAYS[1:]}
    for number in range(rounds):
        # Another order each round: what warms up or throttles does not favour one of them.
        order = WAYS[number % len(WAYS) :] + WAYS[: number % len(WAYS)]
        took = {way: run_once(way, size, every) for way in order}
        for way in stalls:
            stalls[way].append((took[way] - took["none"]) / num_saves[way])
    ours = stalls["ours"]
    return {
        "size": size,
        "rounds": rounds,
        "saves": num_saves,
        **{f"{way}_s": statistics.median(values) for way, values in stalls.items()},
        "ours_to_trainer": statistics.median(
            [a / b for a, b in zip(ours, stalls["trainer"], strict=True)]
        ),
        "ours_to_async": statistics.median(
            [a / b for a, b in zip(ours, stalls["async"], strict=True)]
        ),
        "all_s": stalls,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", nargs="+", default=list(SIZES), choices=list(SIZES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--every", type=int, help="steps between two saves")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    rows = [measure(size, options.rounds, options.every or EVERY[size]) for size in options.sizes]
    if options.json:
        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        print(
            f"{row['size']}: a save costs ours {row['ours_s']:.3f} s, Trainer's own "
            f"{row['trainer_s']:.3f} s, asynchronous {row['async_s']:.3f} s; ours / Trainer "
            f"{row['ours_to_trainer']:.2f}, ours / asynchronous {row['ours_to_async']:.2f}"
        )
        print("  " + json.dumps({k: [round(v, 3) for v in vs] for k, vs in row["all_s"].items()}))


if __name__ == "__main__":
    main()
