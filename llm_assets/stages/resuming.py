"""From which save a training goes on, and with which parts of it.

The newest save that is proved healthy now, whatever was said of it before. One of another identity
or number of processes is never taken. When saves were published and none is left, the training
stops: starting over is a decision.
"""

from __future__ import annotations

import datetime
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llm_assets.checkpoints import Manifest, list_saves
from llm_assets.checkpoints.choosing import PUBLISHED, SET_ASIDE, read_choice, settle
from llm_assets.errors import SaveError, message
from llm_assets.stage_settings import CheckpointSettings
from llm_assets.stages.save_checks import damaged_files, validate
from llm_assets.stages.save_files import WRITING

EXPECT: Mapping[str, str] = {
    "optimizer.safetensors": "the moments start from zero and the learning rate is warmed up: the "
    "loss may rise for about as long",
    "loop.json": "the schedule is computed anew for this step: no difference is expected",
    "rng.safetensors": "dropout and sampling draw other numbers: the same run, not the same bits",
    "data.json": "the position follows from the step; that the rows are the same is not proved",
    "trainer_state.json": "curves begin at this step; token counts of the trainer too",
}
"""What the loss of a part means for the training that goes on."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """The save that is gone on from. `damaged`: its files that are not used."""

    path: Path
    manifest: Manifest
    damaged: frozenset[str] = frozenset()

    @property
    def lost(self) -> list[dict[str, Any]]:
        """Rows for the record: part, step, what to expect."""
        return [
            {"part": name, "step": self.manifest.step, "expect": EXPECT[name]}
            for name in sorted(self.damaged)
        ]


def find_source(
    folder: Path,
    *,
    identity: str,
    world_size: int,
    settings: CheckpointSettings,
    say: Callable[[str], None],
) -> Source | None:
    """The save to go on from; None for a training that has none yet.

    What is newer is set aside. SaveError when a save is of another number of processes, or when
    saves were published and none can be gone on from.
    """
    for left in folder.glob(f"{WRITING}*"):
        shutil.rmtree(left, ignore_errors=True)
    settle(folder)
    choice = read_choice(folder)
    source = _newest(folder, identity, world_size, settings, say)
    if source is None and _published(folder):
        if choice is not None and choice.step == 0:
            say(f"starts over, as {choice.who} chose: {choice.why}")
        elif settings.on_no_healthy_save == "restart":
            say("no healthy save is left: starts over, as the recipe says")
        else:
            raise SaveError(
                message(
                    where=str(folder),
                    found="saves were published, and none of them can be gone on from",
                    rule="a training that should have a save does not silently start over",
                    remedy="look with `llm-assets checkpoints ls`; then choose one, or start over, "
                    "with `llm-assets checkpoints rollback`; or set checkpoint.on_no_healthy_save: "
                    "restart",
                )
            )
    _set_aside_after(folder, source.manifest.step if source is not None else 0)
    return source


def _newest(
    folder: Path,
    identity: str,
    world_size: int,
    settings: CheckpointSettings,
    say: Callable[[str], None],
) -> Source | None:
    choice = read_choice(folder)
    for save in list_saves(folder, "full"):
        if save.manifest is None:
            say(f"{save.path.name} is not resumed from: {save.problem}")
            continue
        if save.manifest.identity != identity:
            say(f"{save.path.name} is not resumed from: it is of identity {save.manifest.identity}")
            continue
        if save.manifest.world_size != world_size:
            raise SaveError(
                message(
                    where=str(save.path),
                    found=f"written by {save.manifest.world_size} processes, here are {world_size}",
                    rule="a training goes on with the number of processes that it began with: "
                    "batches, order and generators belong to it",
                    remedy=f"set launcher.num_processes to {save.manifest.world_size}, or start "
                    "over with `llm-assets checkpoints rollback`",
                )
            )
        health = validate(save.path)
        damaged = damaged_files(health)
        chosen = choice is not None and choice.step == save.step and health.verdict == "review"
        if health.verdict == "healthy" or chosen:
            return Source(path=save.path, manifest=save.manifest)
        why = "; ".join(health.reasons)
        if settings.partial == "restore" and damaged and "model.safetensors" not in damaged:
            say(f"{save.path.name} is resumed from in part: {why}")
            return Source(path=save.path, manifest=save.manifest, damaged=damaged)
        say(f"{save.path.name} is not resumed from: {why}")
    return None


def _published(folder: Path) -> bool:
    return (folder / PUBLISHED).exists() or bool(list_saves(folder, "full"))


def _set_aside_after(folder: Path, step: int) -> None:
    """Saves after `step` belong to a course that is not followed any more."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%S%f")
    for save in list_saves(folder):
        if save.step > step:
            aside = folder / SET_ASIDE / f"{now}-passed-over"
            aside.mkdir(parents=True, exist_ok=True)
            save.path.rename(aside / save.path.name)


def trainer_folder(source: Source, scratch: Path, state: Mapping[str, Any]) -> Path:
    """What transformers reads: the save, or a copy with `state` in place of a damaged one."""
    if "trainer_state.json" not in source.damaged:
        return source.path
    folder = scratch / "resumed"
    folder.mkdir(parents=True, exist_ok=True)
    link = folder / "model.safetensors"
    link.unlink(missing_ok=True)
    link.symlink_to(source.path / "model.safetensors")
    (folder / "trainer_state.json").write_text(json.dumps(dict(state)))
    return folder
