"""The same damage done to transformers' own checkpoints: what its resume takes without a word."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Recorder
from test_saves import FILES, damage, find
from toy import Rows, toy_context, toy_model, toy_settings, train_toy
from transformers import Trainer, TrainingArguments
from transformers.trainer_callback import PrinterCallback
from transformers.trainer_utils import get_last_checkpoint

from llm_assets.checkpoints import list_saves
from llm_assets.stages.training import training_arguments

HOW = ("truncated", "emptied", "flipped", "removed", "swapped")
THEIRS = (
    "model.safetensors",
    "optimizer.pt",
    "scheduler.pt",
    "rng_state.pth",
    "trainer_state.json",
    "training_args.bin",
)


def plain_trainer(root: Path) -> Any:
    context = toy_context(root, toy_settings(max_steps=8), Recorder())
    arguments = training_arguments(
        TrainingArguments, context, save_strategy="steps", save_steps=3, save_total_limit=None
    )
    trainer: Any = Trainer(model=toy_model(), args=arguments, train_dataset=Rows())
    trainer.remove_callback(PrinterCallback)
    return trainer


def equal(first: Any, second: Any) -> bool:
    return all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
def test_silent_acceptances_of_both_are_counted(tmp_path: Path) -> None:
    whole = plain_trainer(tmp_path / "theirs")
    whole.train()
    expected = whole.model.state_dict()
    cases, silent, wrong, refused = 0, 0, 0, 0
    for name in THEIRS:
        for how in HOW:
            root = tmp_path / "damaged"
            shutil.copytree(tmp_path / "theirs", root)
            shutil.rmtree(root / "checkpoints" / "checkpoint-8", ignore_errors=True)
            last = get_last_checkpoint(str(root / "checkpoints"))
            assert last is not None
            older = Path(last).with_name("checkpoint-3")
            damage(Path(last) / name, how, older / name)
            cases += 1
            trainer = plain_trainer(root)
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    trainer.train(resume_from_checkpoint=last)
            except Exception:  # whatever it says counts as noticed
                refused += 1
            else:
                silent += 1
                wrong += not equal(trainer.model.state_dict(), expected)
            shutil.rmtree(root)
    print(
        f"transformers: {cases} cases, {refused} end with an error and go on from nothing, "
        f"{silent} taken without a word, {wrong} of those end with other weights"
    )
    assert cases == silent + refused

    train_toy(tmp_path / "ours", Recorder(), settings=toy_settings(max_steps=8))
    taken, fallen_back = 0, 0
    for name in FILES:
        for how in HOW:
            root = tmp_path / "damaged"
            shutil.copytree(tmp_path / "ours" / "checkpoints", root)
            newest, older = (save.path for save in list_saves(root, "full"))
            damage(newest / name, how, older / name)
            source = find(root)
            assert source is not None
            taken += source.path == newest
            fallen_back += source.path == older
            shutil.rmtree(root)
    print(
        f"llm-assets: {len(FILES) * len(HOW)} cases, {taken} taken without a word, "
        f"{fallen_back} go on from the save before"
    )
    assert taken == 0
