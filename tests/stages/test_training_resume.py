"""A training that is told to end, damaged in part, out of space, or of several processes."""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Recorder
from toy import Rows, toy_context, toy_model, toy_settings, train_toy
from transformers import Trainer, TrainingArguments

from llm_assets.checkpoints import list_saves
from llm_assets.errors import SaveError
from llm_assets.interruption import Interruption, Terminated
from llm_assets.stages import keeper
from llm_assets.stages.training import run_training, training_arguments

NO_SAVES = {"every_steps": None, "every_minutes": None}


def equal(first: torch.nn.Module, second: torch.nn.Module) -> bool:
    pairs = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    return all(torch.equal(one, other) for one, other in pairs)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return train_toy(tmp_path_factory.mktemp("undisturbed"), Recorder())


class At(Recorder):
    """Does something once, when a step is reported."""

    def __init__(self, step: int, action: Callable[[], object]) -> None:
        super().__init__()
        self.at, self.action = step, action

    def step(self, step: int, total: int, **metrics: Any) -> None:
        super().step(step, total, **metrics)
        if step == self.at:
            self.action()


@pytest.fixture
def interruption() -> Any:
    """One that listens to this process's signals."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGALRM)}
    listening = Interruption(grace_s=30)
    listening.install()
    yield listening
    signal.setitimer(signal.ITIMER_REAL, 0)
    for number, handler in handlers.items():
        signal.signal(number, handler)


def preempted(root: Path, interruption: Interruption, progress: Recorder) -> None:
    context = dataclasses.replace(
        toy_context(root, toy_settings(checkpoint=NO_SAVES), progress), interruption=interruption
    )
    arguments = training_arguments(TrainingArguments, context)
    trainer = Trainer(model=toy_model(), args=arguments, train_dataset=Rows())
    run_training(context, trainer, tokens_per_step=64)


def test_sigterm_saves_and_ends_and_the_next_run_goes_on_to_the_same_bits(
    tmp_path: Path, interruption: Interruption, undisturbed: Any
) -> None:
    progress = At(7, lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(Terminated, match="saved: step 7"):
        preempted(tmp_path, interruption, progress)
    assert [save.path.name for save in list_saves(tmp_path / "checkpoints")] == ["save-00000007"]
    assert progress.steps[-1][0] == 7
    model, log = train_toy(tmp_path, Recorder())
    assert log.resumed_from == 7
    assert equal(model, undisturbed[0])


def test_a_second_sigterm_and_the_end_of_the_grace_period_end_at_once(
    tmp_path: Path, interruption: Interruption
) -> None:
    def twice() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        interruption._first -= 5
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Terminated, match="a second signal"):
        preempted(tmp_path / "twice", interruption, At(7, twice))
    late = Interruption(grace_s=0.01)
    late.install()

    def too_long() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        signal.pause()

    with pytest.raises(Terminated, match=r"not saved within 0\.01 s"):
        preempted(tmp_path / "late", late, At(7, too_long))
    assert list_saves(tmp_path / "twice" / "checkpoints") == []
    assert list_saves(tmp_path / "late" / "checkpoints") == []


def test_a_lost_lease_ends_without_a_save(tmp_path: Path, interruption: Interruption) -> None:
    def lose() -> None:
        interruption.end_at_once()
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Terminated):
        preempted(tmp_path, interruption, At(7, lose))
    assert list_saves(tmp_path / "checkpoints") == []


RESTORE = {"every_steps": 3, "every_minutes": None, "partial": "restore"}


@pytest.mark.parametrize(
    ("name", "exact"),
    [
        ("optimizer.safetensors", False),
        ("loop.json", True),
        ("rng.safetensors", False),
        ("data.json", True),
        ("trainer_state.json", True),
    ],
)
def test_whole_parts_of_a_damaged_save_are_restored_with_consent(
    tmp_path: Path, undisturbed: Any, name: str, exact: bool
) -> None:
    with pytest.raises(RuntimeError, match="crash"):
        train_toy(tmp_path, At(8, _crash))
    newest = list_saves(tmp_path / "checkpoints")[0]
    assert newest.step == 6
    (newest.path / name).write_bytes(b"{}")
    progress = Recorder()
    settings = toy_settings(checkpoint=RESTORE)
    model, log = train_toy(tmp_path, progress, settings=settings)
    assert progress.lines[0].startswith("save-00000006 is resumed from in part: ")
    assert log.resumed_from == 6
    assert [(row["part"], row["step"]) for row in log.lost] == [(name, 6)]
    assert log.tables["lost_in_resume"][0]["expect"]
    # The schedule follows from the step, and so does the position.
    assert equal(model, undisturbed[0]) == exact
    rates = dict(log.series["learning_rate"])
    assert all(
        rates[step] == value for step, value in undisturbed[1].series["learning_rate"] if step > 6
    )
    last = list_saves(tmp_path / "checkpoints")[0].manifest
    assert last is not None
    assert last.lineage["lost"] == list(log.lost)


def _crash() -> None:
    raise RuntimeError("crash")


def test_damaged_weights_are_never_restored_in_part(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="crash"):
        train_toy(tmp_path, At(8, _crash))
    newest, older = list_saves(tmp_path / "checkpoints")
    (newest.path / "model.safetensors").write_bytes(b"")
    _, log = train_toy(tmp_path, Recorder(), settings=toy_settings(checkpoint=RESTORE))
    assert log.resumed_from == older.step == 3
    assert log.lost == ()


def test_lost_moments_are_warmed_up_and_the_warm_up_survives_a_resume(tmp_path: Path) -> None:
    settings = toy_settings(
        max_steps=60, lr_scheduler_type="constant", warmup_ratio=0.0, checkpoint=RESTORE
    )
    with pytest.raises(RuntimeError, match="crash"):
        train_toy(tmp_path, At(5, _crash), settings=settings)
    newest = list_saves(tmp_path / "checkpoints")[0]
    (newest.path / "optimizer.safetensors").unlink()
    with pytest.raises(RuntimeError, match="crash"):
        train_toy(tmp_path, At(7, _crash), settings=settings)
    manifest = list_saves(tmp_path / "checkpoints")[0].manifest
    assert manifest is not None
    # A tenth of the 57 steps that are left; the save of step 6 stands in the middle of them.
    assert manifest.step == 6
    assert manifest.lineage["warmup"] == {"from": 3, "steps": 5}
    _, log = train_toy(tmp_path, Recorder(), settings=settings)
    manifest = list_saves(tmp_path / "checkpoints")[0].manifest
    assert manifest is not None
    assert manifest.lineage["warmup"] is None
    assert log.resumed_from == 6


def test_rows_that_are_others_stop_before_a_step(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="crash"):
        train_toy(tmp_path, At(8, _crash))
    context = toy_context(tmp_path, toy_settings(), Recorder())
    arguments = training_arguments(TrainingArguments, context, data_seed=99)
    trainer = Trainer(model=toy_model(), args=arguments, train_dataset=Rows())
    with pytest.raises(SaveError, match=r"(?s)order_sha256.*the rows that it would have seen"):
        run_training(context, trainer)
    changed = Rows()
    changed.rows[0] = 5
    arguments = training_arguments(TrainingArguments, context)
    trainer = Trainer(model=toy_model(), args=arguments, train_dataset=changed)
    with pytest.raises(SaveError, match="rows_sha256"):
        run_training(context, trainer)
    assert context.progress.steps == []  # type: ignore[attr-defined]


@pytest.mark.parametrize("strategy", ["random", "sequential", "group_by_length"])
def test_any_order_is_resumed_in_a_later_epoch(tmp_path: Path, strategy: str) -> None:
    settings = toy_settings(train_sampling_strategy=strategy)
    whole, _ = train_toy(tmp_path / "whole", Recorder(), settings=settings)
    with pytest.raises(RuntimeError, match="crash"):
        train_toy(tmp_path / "crashed", At(14, _crash), settings=settings)
    torch.rand(3)
    model, log = train_toy(tmp_path / "crashed", Recorder(), settings=settings)
    assert log.resumed_from == 12
    assert equal(model, whole)


@pytest.mark.parametrize("policy", ["continue", "stop"])
def test_a_save_without_space_leaves_the_last_good_one(
    tmp_path: Path, policy: str, undisturbed: Any
) -> None:
    checkpoint = {"every_steps": 3, "every_minutes": None, "on_save_error": policy}
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def full() -> None:
        # Files end at 20 kB from now on: what a full device does to a write.
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))

    progress = At(4, full)
    try:
        if policy == "stop":
            with pytest.raises(SaveError, match=r"the save of step 6 failed: OSError"):
                train_toy(tmp_path, progress, settings=toy_settings(checkpoint=checkpoint))
        else:
            model, _ = train_toy(tmp_path, progress, settings=toy_settings(checkpoint=checkpoint))
            assert equal(model, undisturbed[0])
            assert any("the last good save stands" in line for line in progress.lines)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    saves = list_saves(tmp_path / "checkpoints")
    assert [(save.step, save.verdict) for save in saves] == [(3, "healthy")]
    assert not list((tmp_path / "checkpoints").glob(".writing-*"))


@pytest.mark.parametrize("policy", ["continue", "stop"])
def test_saves_whose_folder_is_away_leave_the_last_good_one(
    tmp_path: Path, policy: str, undisturbed: Any
) -> None:
    checkpoint = {"every_steps": 3, "every_minutes": None, "on_save_error": policy, "keep": 9}
    folder, away = tmp_path / "checkpoints", tmp_path / "away"

    class Away(Recorder):
        """The folder of the saves cannot be reached from step 4 to step 10."""

        def step(self, step: int, total: int, **metrics: Any) -> None:
            super().step(step, total, **metrics)
            if step == 4:
                folder.rename(away)
                folder.write_text("not mounted")
            elif step == 10:
                back()

    def back() -> None:
        folder.unlink()
        away.rename(folder)

    progress = Away()
    settings = toy_settings(checkpoint=checkpoint)
    if policy == "stop":
        with pytest.raises(SaveError, match=r"the save of step 6 failed: "):
            train_toy(tmp_path, progress, settings=settings)
        back()
        model, log = train_toy(tmp_path, Recorder(), settings=settings)
        assert log.resumed_from == 3
        expected = [18, 15, 12, 9, 6, 3]
    else:
        model, _ = train_toy(tmp_path, progress, settings=settings)
        failed = [line for line in progress.lines if "the last good save stands" in line]
        assert [line.split(" failed")[0] for line in failed] == [
            "the save of step 6",
            "the save of step 9",
        ]
        expected = [18, 15, 12, 3]
    assert equal(model, undisturbed[0])
    saves = list_saves(folder)
    assert [save.step for save in saves] == expected
    assert {save.verdict for save in saves} == {"healthy"}
    assert not list(folder.glob(".writing-*"))


def test_an_automatic_interval_follows_what_saves_cost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "FIRST_S", 0.05)
    steps = {}
    for name, hours in (("often", 1e-5), ("seldom", 1e4)):
        settings = toy_settings(
            max_steps=60,
            checkpoint={"every_steps": None, "every_minutes": "auto", "mtbf_hours": hours},
        )
        _, log = train_toy(tmp_path / name, Recorder(), settings=settings)
        steps[name] = [row["step"] for row in log.saves]
    # The first comes after FIRST_S; by then a save is measured, and the interval is Daly's.
    assert len(steps["seldom"]) == 1
    assert len(steps["often"]) >= 3


def test_light_saves_come_in_between(tmp_path: Path) -> None:
    checkpoint = {"every_steps": 6, "every_minutes": None, "light_every_steps": 2, "keep_light": 9}
    _, log = train_toy(
        tmp_path, Recorder(), settings=toy_settings(max_steps=9, checkpoint=checkpoint)
    )
    assert [(row["kind"], row["step"]) for row in log.saves] == [
        ("light", 2),
        ("light", 4),
        ("full", 6),
        ("light", 8),
    ]
    assert all(row["stall_s"] > 0 and row["size_bytes"] > 0 for row in log.saves)


def _launch(root: Path, kill_at: str = "", processes: int = 2) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    script = [str(Path(__file__).parent / "toy.py"), str(root), *([kill_at] if kill_at else [])]
    return subprocess.run(
        [sys.executable, *launcher, *script],
        env={
            **os.environ,
            "PYTHONPATH": str(Path(__file__).parents[2]),
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_two_processes_go_on_exactly_and_another_number_is_refused(tmp_path: Path) -> None:
    whole = _launch(tmp_path / "whole")
    assert whole.returncode == 0, whole.stderr
    killed = _launch(tmp_path / "killed", "8")
    assert killed.returncode != 0
    newest = list_saves(tmp_path / "killed" / "checkpoints")[0]
    assert (newest.step, newest.verdict) == (6, "healthy")
    assert newest.manifest is not None
    assert newest.manifest.world_size == 2
    data = json.loads((newest.path / "data.json").read_text())
    # Four rows a step, as with one process: the seventh step of the first epoch is drawn.
    assert (data["epoch"], data["steps"], data["drawn"]) == (0, 6, 28)
    with pytest.raises(SaveError, match="written by 2 processes, here are 1"):
        train_toy(tmp_path / "killed", Recorder())
    again = _launch(tmp_path / "killed")
    assert again.returncode == 0, again.stderr
    assert "resumed from 6, 20 steps" in again.stdout
    weights = [
        torch.load(tmp_path / name / "weights.tmp", weights_only=True)
        for name in ("whole", "killed")
    ]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
