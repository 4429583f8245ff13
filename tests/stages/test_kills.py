"""SIGKILL at random moments, also inside a save: the weights of the undisturbed run, to the bit.

A child is forked for every attempt, so that libraries are imported once. The default run kills a
small pre-training a few times; `-m slow` kills each kind of training, a hundred times in all.
"""

from __future__ import annotations

import dataclasses
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from alignment_parts import STAGES, STEPS, Shop, refine_settings, weights_hash
from toy import toy_settings, train_toy

from llm_assets.checkpoints import list_saves
from llm_assets.stage_settings import DpoSettings, RewardSettings, SftSettings
from llm_assets.stages import keeper

EVERY = 3
STAGE_KILLS = 15
SAVES = {"checkpoint": {"every_steps": EVERY, "every_minutes": None}}


class Steps:
    """A Progress that leaves the last step in a file, where it survives a kill."""

    def __init__(self, root: Path) -> None:
        self.file = os.open(root / "step", os.O_RDWR | os.O_CREAT)

    def step(self, step: int, total: int, **_: Any) -> None:
        os.pwrite(self.file, f"{step:08d}".encode(), 0)

    def say(self, text: str) -> None:
        """Nothing."""


def forked(work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    finally:
        os._exit(code)


def newest_step(folder: Path) -> int:
    return max((save.step for save in list_saves(folder, "full")), default=0)


@dataclasses.dataclass
class Tally:
    kills: int = 0
    inside_a_save: int = 0
    lost: list[int] = dataclasses.field(default_factory=list)


def run_through_kills(
    train: Callable[[Path], None], root: Path, kills: int, takes_s: float, seed: int
) -> Tally:
    """Run `train(root)` until it ends by itself, killed at most `kills` times on the way."""
    draw, tally = random.Random(seed), Tally()
    folder = root / "checkpoints"
    folder.mkdir(parents=True)
    while True:
        (root / "step").unlink(missing_ok=True)
        pid = forked(lambda: train(root))
        if tally.kills < kills:
            # From the first step on, at a random moment.
            patience = time.monotonic() + 60
            while not _reached(root) and time.monotonic() < patience:
                time.sleep(0.001)
            time.sleep(draw.uniform(0, takes_s))
            until = time.monotonic() + takes_s
            if draw.random() < 0.5:
                while time.monotonic() < until and not list(folder.glob(".writing-*")):
                    time.sleep(0.0005)
            inside = bool(list(folder.glob(".writing-*")))
            ended, _ = os.waitpid(pid, os.WNOHANG)
            if ended == 0:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                tally.kills += 1
                tally.inside_a_save += inside
                if _reached(root):
                    tally.lost.append(_reached(root) - newest_step(folder))
                continue
            return tally
        _, status = os.waitpid(pid, 0)
        assert status == 0
        return tally


def _reached(root: Path) -> int:
    """The last step that this attempt took; 0 before one."""
    try:
        return int((root / "step").read_bytes() or b"0")
    except FileNotFoundError:
        return 0


def train_the_toy(root: Path) -> None:
    model, _ = train_toy(root, Steps(root), settings=toy_settings(max_steps=40, **SAVES))
    torch.save(model.state_dict(), root / "weights.tmp")


def train_the_toy_with_saves_apart(root: Path) -> None:
    """Each save is written by a process of its own, as those of large models are."""
    keeper.SMALL_BYTES = 0
    train_the_toy(root)


def kill_the_toy(
    root: Path, kills: int, seed: int, train: Callable[[Path], None] = train_the_toy
) -> Tally:
    """Courses until there were `kills` kills."""
    began = time.monotonic()
    (root / "whole").mkdir(parents=True)
    pid = forked(lambda: train(root / "whole"))
    assert os.waitpid(pid, 0)[1] == 0
    takes_s = time.monotonic() - began
    tally = Tally()
    expected = torch.load(root / "whole" / "weights.tmp", weights_only=True)
    course = 0
    while tally.kills < kills:
        course += 1
        course_root = root / f"killed-{course}"
        got = run_through_kills(train, course_root, kills - tally.kills, takes_s / 3, seed + course)
        weights = torch.load(course_root / "weights.tmp", weights_only=True)
        assert all(torch.equal(weights[name], expected[name]) for name in expected)
        tally.kills += got.kills
        tally.inside_a_save += got.inside_a_save
        tally.lost += got.lost
        shutil.rmtree(course_root)
    return tally


def test_a_training_that_is_killed_again_and_again_ends_with_the_same_bits(tmp_path: Path) -> None:
    tally = kill_the_toy(tmp_path, 4, seed=1)
    assert tally.kills >= 4
    assert max(tally.lost) <= EVERY


def test_kills_beside_a_process_that_writes(tmp_path: Path) -> None:
    tally = kill_the_toy(tmp_path, 2, seed=3, train=train_the_toy_with_saves_apart)
    assert tally.kills >= 2
    # The save that was being written goes too: two intervals at most.
    assert max(tally.lost) <= 2 * EVERY


@pytest.mark.slow
def test_forty_kills_beside_a_process_that_writes(tmp_path: Path) -> None:
    tally = kill_the_toy(tmp_path, 40, seed=4, train=train_the_toy_with_saves_apart)
    print(f"pre-training, saves apart: {tally}")
    assert max(tally.lost) <= 2 * EVERY


@pytest.mark.slow
def test_forty_kills_of_a_pretraining(tmp_path: Path) -> None:
    tally = kill_the_toy(tmp_path, 40, seed=2)
    print(f"pre-training: {tally}")
    assert max(tally.lost) <= EVERY


PAIRS = {"sft_checkpoint": "sft_checkpoint", "preferences": "preferences"}
LONG = {**STEPS, "max_steps": 15, "learning_rate": 5e-3}
ALIGNED: dict[str, tuple[Any, dict[str, str]]] = {
    "sft_checkpoint": (
        SftSettings(eval_prompts=2, **LONG, **SAVES),
        {"midtrained_checkpoint": "base", "instructions": "instructions"},
    ),
    "reward_model": (RewardSettings(**LONG, **SAVES), PAIRS),
    "dpo_policy": (
        DpoSettings(eval_prompts=2, lora={"r": 2, "dropout": 0.1}, **LONG, **SAVES),
        PAIRS,
    ),
    "refined_policy": (
        refine_settings(max_steps=12, eval_prompts=2, **SAVES),
        {
            "dpo_policy": "dpo_policy",
            "reward_model": "reward_model",
            "preferences": "preferences",
        },
    ),
}


@pytest.mark.slow
def test_fifteen_kills_of_each_alignment_stage(tmp_path: Path) -> None:
    shop = Shop(tmp_path)
    for number, (stage, (config, inputs)) in enumerate(ALIGNED.items()):
        began = time.monotonic()
        whole = shop.run(stage, config, **inputs)
        takes_s = time.monotonic() - began
        kills, course, lost, inside = 0, 0, [], 0
        while kills < STAGE_KILLS:
            course += 1
            root = tmp_path / f"killed-{stage}-{course}"

            def train(root: Path, whole: Any = whole, stage: str = stage) -> None:
                for name in ("out", "scratch"):
                    shutil.rmtree(root / name, ignore_errors=True)
                    (root / name).mkdir(parents=True)
                context = dataclasses.replace(
                    whole.context,
                    progress=Steps(root),
                    out=root / "out",
                    scratch=root / "scratch",
                    checkpoints=root / "checkpoints",
                )
                STAGES[stage].run(context)

            tally = run_through_kills(
                train, root, STAGE_KILLS - kills, takes_s / 8, seed=50 * number + course
            )
            assert weights_hash(root / "out") == weights_hash(whole.out), stage
            kills += tally.kills
            inside += tally.inside_a_save
            lost += tally.lost
        print(f"{stage}: {kills} kills, {inside} inside a save, lost {sorted(lost)}")
        assert max(lost) <= EVERY, stage
