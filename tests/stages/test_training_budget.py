"""A training whose money is spent saves, stops, and goes on from there."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Recorder
from toy import Rows, toy_context, toy_model, toy_settings, train_toy
from transformers import Trainer, TrainingArguments

from llm_assets.checkpoints import list_saves
from llm_assets.errors import BudgetError
from llm_assets.stages.training import run_training, training_arguments


def test_spent_money_stops_with_a_save_to_go_on_from(tmp_path: Path) -> None:
    progress = Recorder()

    def should_stop() -> str | None:
        return "the money is spent" if len(progress.steps) >= 7 else None

    settings = toy_settings(checkpoint={"every_steps": None, "every_minutes": None, "keep": 2})
    context = dataclasses.replace(
        toy_context(tmp_path / "stopped", settings, progress), should_stop=should_stop
    )
    trainer: Any = Trainer(
        model=toy_model(), args=training_arguments(TrainingArguments, context), train_dataset=Rows()
    )
    with pytest.raises(BudgetError, match=r"(?s)the money is spent.*saved: step 7"):
        run_training(context, trainer, tokens_per_step=64)
    assert [save.path.name for save in list_saves(context.checkpoints)] == ["save-00000007"]

    model, log = train_toy(tmp_path / "stopped", Recorder())
    undisturbed, expected = train_toy(tmp_path / "undisturbed", Recorder())
    assert log.resumed_from == 7
    assert log.series == expected.series
    for one, other in zip(
        model.state_dict().values(), undisturbed.state_dict().values(), strict=True
    ):
        assert torch.equal(one, other)
