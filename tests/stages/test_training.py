"""The training core: arguments, exact resume through SIGKILL, the finite-loss guard, curves."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import Recorder
from toy import Printer, Rows, toy_context, toy_model, toy_settings, train_toy
from transformers import Trainer, TrainingArguments
from trl import DPOConfig, GRPOConfig, SFTConfig

from llm_assets.checkpoints import list_saves
from llm_assets.errors import NonFiniteLossError, SaveError
from llm_assets.stage_settings import DpoSettings, RefineSettings, SftSettings
from llm_assets.stages.training import run_training, training_arguments

# Recorded on a CPU, one thread, torch 2.13: the trajectory of toy.py without dropout.
PINNED_LOSSES = (4.177976, 4.17038, 4.174801, 4.175061, 4.158108, 4.171232, 4.181716, 4.169568)


def equal_weights(first: torch.nn.Module, second: torch.nn.Module) -> bool:
    return all(
        torch.equal(one, other)
        for one, other in zip(
            first.state_dict().values(), second.state_dict().values(), strict=True
        )
    )


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> tuple[torch.nn.Module, object]:
    return train_toy(tmp_path_factory.mktemp("undisturbed"), Printer())


def test_a_killed_training_resumes_to_the_same_bits(
    tmp_path: Path, undisturbed: tuple[torch.nn.Module, object]
) -> None:
    toy = Path(__file__).parent / "toy.py"
    root = Path(__file__).parents[2]
    killed = subprocess.run(
        [sys.executable, str(toy), str(tmp_path), "11"],
        env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert killed.returncode == -9, killed.stderr
    assert [save.path.name for save in list_saves(tmp_path / "checkpoints")] == [
        "save-00000009",
        "save-00000006",
    ]
    progress = Recorder()
    model, log = train_toy(tmp_path, progress)
    expected_model, expected_log = undisturbed
    assert log.resumed_from == 9
    assert progress.lines[0] == "goes on from save-00000009"
    assert [step for step, *_ in progress.steps] == list(range(10, 21))
    assert equal_weights(model, expected_model)
    assert log.series == expected_log.series
    assert log.tokens == expected_log.tokens == 20 * 64


@pytest.mark.parametrize("kept", [10, 12])
def test_resume_at_and_off_an_epoch_boundary(
    tmp_path: Path, undisturbed: tuple[torch.nn.Module, object], kept: int
) -> None:
    # Ten steps are an epoch: a save at 10 goes on with the next epoch's order.
    settings = toy_settings(checkpoint={"every_steps": kept, "every_minutes": None, "keep": 2})

    class Stop(Exception):
        pass

    class Stopping(Recorder):
        def step(self, step: int, total: int, **metrics: float) -> None:
            if step == kept + 1:
                raise Stop

    with pytest.raises(Stop):
        train_toy(tmp_path, Stopping(), settings=settings)
    model, log = train_toy(tmp_path, Recorder(), settings=settings)
    assert log.resumed_from == kept
    assert equal_weights(model, undisturbed[0])


def test_a_corrupt_save_is_said_and_the_one_before_is_used(
    tmp_path: Path, undisturbed: tuple[torch.nn.Module, object]
) -> None:
    train_toy(tmp_path, Recorder(), settings=toy_settings())
    newest, older = (save.path for save in list_saves(tmp_path / "checkpoints"))
    (newest / "optimizer.safetensors").write_bytes(b"")
    progress = Recorder()
    model, log = train_toy(tmp_path, progress)
    assert progress.lines[0].startswith(f"{newest.name} is not resumed from: file optimizer")
    assert progress.lines[1] == f"goes on from {older.name}"
    assert log.resumed_from == 15
    assert equal_weights(model, undisturbed[0])


def test_no_healthy_save_left_stops_unless_the_recipe_says_restart(tmp_path: Path) -> None:
    settings = toy_settings(max_steps=4)
    train_toy(tmp_path, Recorder(), settings=settings)
    for save in list_saves(tmp_path / "checkpoints"):
        (save.path / "loop.json").unlink()
    with pytest.raises(SaveError, match=r"(?s)none of them can be gone on from.*rollback"):
        train_toy(tmp_path, Recorder(), settings=settings)
    checkpoint = {"every_steps": 3, "every_minutes": None, "on_no_healthy_save": "restart"}
    progress = Recorder()
    again = toy_settings(max_steps=4, checkpoint=checkpoint)
    _, log = train_toy(tmp_path, progress, settings=again)
    assert "no healthy save is left: starts over, as the recipe says" in progress.lines
    assert log.resumed_from == 0


def test_saves_by_minutes(tmp_path: Path) -> None:
    settings = toy_settings(
        max_steps=3, checkpoint={"every_steps": None, "every_minutes": 1e-9, "keep": 5}
    )
    train_toy(tmp_path, Recorder(), settings=settings)
    assert [save.path.name for save in list_saves(tmp_path / "checkpoints")] == [
        "save-00000002",
        "save-00000001",
    ]


def test_nan_stops_at_once_and_leaves_nothing(tmp_path: Path) -> None:
    model = toy_model()

    class Poison(Recorder):
        def step(self, step: int, total: int, **metrics: float) -> None:
            super().step(step, total, **metrics)  # type: ignore[arg-type]
            if step == 4:
                with torch.no_grad():
                    model.model.norm.weight.fill_(float("nan"))

    progress = Poison()
    with pytest.raises(NonFiniteLossError, match=r"base_checkpoint, step 5 of 20: loss is nan"):
        train_toy(tmp_path, progress, model=model)
    assert [step for step, *_ in progress.steps] == [1, 2, 3, 4]
    assert list((tmp_path / "out").iterdir()) == []
    assert [save.path.name for save in list_saves(tmp_path / "checkpoints")] == ["save-00000003"]


def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path) -> None:
    model = toy_model()
    settings = toy_settings(logging_steps=19, logging_first_step=False)

    class Poison(Rows):
        """A row drawn after the save of step 3 breaks the weights."""

        drawn = 0

        def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
            self.drawn += 1
            if self.drawn == 29:
                with torch.no_grad():
                    model.model.norm.weight.fill_(float("nan"))
            return super().__getitem__(index)

    context = toy_context(tmp_path, settings, Recorder())
    arguments = training_arguments(TrainingArguments, context)
    trainer = Trainer(model, arguments, train_dataset=Poison())
    with pytest.raises(NonFiniteLossError, match=r"step 6: .* holds NaN or infinity"):
        run_training(context, trainer)
    assert [save.path.name for save in list_saves(tmp_path / "checkpoints")] == ["save-00000003"]


def test_only_the_trained_parameters_are_saved(tmp_path: Path) -> None:
    model = toy_model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "layers.1" in name
    settings = toy_settings(max_steps=4)
    train_toy(tmp_path, Recorder(), settings=settings, model=model)
    from safetensors import safe_open

    with safe_open(
        list_saves(tmp_path / "checkpoints")[0].path / "model.safetensors", "pt"
    ) as file:
        assert all("layers.1" in name for name in file.keys())  # noqa: SIM118


def test_the_trajectory_is_pinned(tmp_path: Path) -> None:
    settings = toy_settings(max_steps=8)
    logs = [
        train_toy(
            tmp_path / name, Recorder(), settings=settings, model=toy_model(attention_dropout=0.0)
        )[1]
        for name in ("first", "second")
    ]
    assert logs[0].series == logs[1].series
    losses = [value for _, value in logs[0].series["loss"]]
    # Other processors round differently in the last bits.
    assert losses == pytest.approx(PINNED_LOSSES, rel=1e-4)


def test_curves_have_every_step_and_no_times(tmp_path: Path) -> None:
    _, log = train_toy(tmp_path, Recorder(), settings=toy_settings(max_steps=5))
    assert sorted(log.series) == ["grad_norm", "learning_rate", "loss"]
    assert [step for step, _ in log.series["loss"]] == [1, 2, 3, 4, 5]
    assert log.steps == 5
    assert log.last("loss", over=2) == pytest.approx(
        sum(value for _, value in log.series["loss"][-2:]) / 2
    )


def test_tokens_are_counted_by_the_trainer_without_a_number(tmp_path: Path) -> None:
    context = toy_context(tmp_path, toy_settings(max_steps=3), Recorder())
    arguments = training_arguments(TrainingArguments, context, include_num_input_tokens_seen="all")
    log = run_training(context, Trainer(toy_model(), arguments, train_dataset=Rows()))
    assert log.tokens == 3 * 4 * 16
    assert sorted(log.series) == ["grad_norm", "learning_rate", "loss"]


def test_arguments_take_own_fields_then_extras_then_fixed(tmp_path: Path) -> None:
    settings = toy_settings(adam_epsilon=1e-6, logging_steps=5, warmup_ratio=0.25)
    context = toy_context(tmp_path, settings, Recorder())
    arguments = training_arguments(TrainingArguments, context, adam_beta1=0.8)
    assert arguments.learning_rate == 1e-2
    assert arguments.max_steps == 20
    assert arguments.adam_epsilon == 1e-6
    assert arguments.adam_beta1 == 0.8
    assert arguments.logging_steps == 5
    assert arguments.get_warmup_steps(20) == 5
    assert arguments.seed == context.seed
    assert arguments.output_dir == str(context.checkpoints)
    assert arguments.report_to == []
    assert not arguments.bf16


def test_trl_arguments_take_the_fields_that_they_know(tmp_path: Path) -> None:
    def arguments(cls: type, settings: object, **fixed: object) -> object:
        return training_arguments(cls, toy_context(tmp_path, settings, Recorder()), **fixed)  # type: ignore[arg-type]

    sft = arguments(SFTConfig, SftSettings(max_length=99, precision="bfloat16"))
    assert (sft.max_length, sft.bf16, sft.gradient_checkpointing) == (99, True, False)  # type: ignore[attr-defined]
    dpo = arguments(DPOConfig, DpoSettings(beta=0.3))
    assert (dpo.beta, dpo.bf16) == (0.3, False)  # type: ignore[attr-defined]
    grpo = arguments(
        GRPOConfig, RefineSettings(num_generations=4, max_completion_length=17, temperature=0.5)
    )
    assert (grpo.num_generations, grpo.max_completion_length, grpo.temperature) == (4, 17, 0.5)  # type: ignore[attr-defined]
