"""Small real parts that the stage tests share: a two-layer Llama, a word tokenizer, a context."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch

from llm_assets.stages.context import StageContext, StageInput


class Recorder:
    """A Progress that keeps what it is told."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int, float | None, int | None]] = []
        self.lines: list[str] = []

    def step(
        self,
        step: int,
        total: int,
        *,
        loss: float | None = None,
        tokens: int | None = None,
        **metrics: float,
    ) -> None:
        self.steps.append((step, total, loss, tokens))

    def say(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def make_context(tmp_path: Path) -> Callable[..., StageContext]:
    """A context under tmp_path; `inputs` maps names to (folder, type)."""

    def make(
        stage: str,
        config: Any,
        *,
        inputs: dict[str, tuple[Path, str]] | None = None,
        seed: int = 7,
        name: str = "",
    ) -> StageContext:
        root = tmp_path / (name or stage)
        for folder in ("out", "scratch", "checkpoints"):
            (root / folder).mkdir(parents=True, exist_ok=True)
        return StageContext(
            stage=stage,
            pipeline="test",
            config=config,
            seed=seed,
            inputs={
                key: StageInput(path=path, type=type, artifact="0" * 64)
                for key, (path, type) in (inputs or {}).items()
            },
            out=root / "out",
            scratch=root / "scratch",
            checkpoints=root / "checkpoints",
            progress=Recorder(),
        )

    return make
