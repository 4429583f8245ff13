"""A training that a test can run, kill and run again: `python toy.py ROOT [KILL_AT_STEP]`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from llm_assets.ranks import PartDone
from llm_assets.stage_settings import TrainSettings
from llm_assets.stages.context import StageContext
from llm_assets.stages.training import TrainingLog, run_training, training_arguments


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Random rows of 16 tokens out of 64."""

    def __init__(self, rows: int = 40) -> None:
        self.rows = torch.randint(0, 64, (rows, 16), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.rows[index], "labels": self.rows[index]}


def toy_model(**changes: Any) -> LlamaForCausalLM:
    """Two layers, 32 wide, with dropout, so that the generators matter."""
    torch.manual_seed(3)
    values = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "attention_dropout": 0.1,
        "tie_word_embeddings": True,
        "attn_implementation": "eager",
        **changes,
    }
    return LlamaForCausalLM(LlamaConfig(**values))


def toy_settings(**changes: Any) -> TrainSettings:
    """20 steps of two micro-batches of two rows: two epochs of ten steps, a save each three."""
    values: dict[str, Any] = {
        "learning_rate": 1e-2,
        "max_steps": 20,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "weight_decay": 0.1,
        "checkpoint": {"every_steps": 3, "every_minutes": None, "keep": 2},
        **changes,
    }
    return TrainSettings(**values)


class Printer:
    """Progress on stdout; kills its own process at a step."""

    def __init__(self, kill_at: int | None = None) -> None:
        self.kill_at = kill_at

    def step(self, step: int, total: int, **metrics: Any) -> None:
        if step == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def say(self, text: str) -> None:
        print(text, flush=True)


def toy_context(root: Path, settings: TrainSettings, progress: Any) -> StageContext:
    """A context whose folders lie under `root`."""
    for name in ("out", "scratch", "checkpoints"):
        (root / name).mkdir(parents=True, exist_ok=True)
    return StageContext(
        stage="base_checkpoint",
        pipeline="test",
        config=settings,
        seed=5,
        inputs={},
        out=root / "out",
        scratch=root / "scratch",
        checkpoints=root / "checkpoints",
        progress=progress,
    )


def train_toy(
    root: Path, progress: Any, *, settings: TrainSettings | None = None, model: Any = None
) -> tuple[Any, TrainingLog]:
    """Train the toy and give the model and the log."""
    context = toy_context(root, settings or toy_settings(), progress)
    model = model if model is not None else toy_model()
    arguments = training_arguments(TrainingArguments, context)
    trainer = Trainer(model=model, args=arguments, train_dataset=Rows())
    return model, run_training(context, trainer, tokens_per_step=4 * 16)


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    kill_at = int(sys.argv[2]) if len(sys.argv) > 2 else None
    try:
        trained, log = train_toy(folder, Printer(kill_at))
    except PartDone:
        sys.exit()
    torch.save(trained.state_dict(), folder / "weights.tmp")
    print(f"resumed from {log.resumed_from}, {log.steps} steps, {log.tokens} tokens")
