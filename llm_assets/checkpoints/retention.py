"""Which saves are kept while a stage trains. When it ends well, all of them go."""

from __future__ import annotations

import shutil
from pathlib import Path

from llm_assets.checkpoints.choosing import SET_ASIDE, best
from llm_assets.checkpoints.listing import SaveInfo, list_saves
from llm_assets.stage_settings import CheckpointSettings

_SET_ASIDE_KEPT = 3


def kept(saves: list[SaveInfo], settings: CheckpointSettings) -> list[SaveInfo]:
    """Of the saves of a folder, newest first, those that stay: the last `keep` that are not
    corrupt, the newest healthy one, the `keep_best` best, every `keep_every_steps`-th step, and the
    last `keep_light` light ones."""
    full = [save for save in saves if save.kind == "full" and save.verdict != "corrupt"]
    stay = full[: settings.keep]
    stay += [save for save in full if save.verdict == "healthy"][:1]
    if settings.keep_every_steps is not None:
        stay += [save for save in full if save.step % settings.keep_every_steps == 0]
    left = list(full)
    for _ in range(settings.keep_best):
        good = best(left, settings.best_by)
        if good is None:
            break
        stay.append(good)
        left.remove(good)
    stay += [save for save in saves if save.kind == "light"][: settings.keep_light]
    return [save for save in saves if save in stay]


def dropped(saves: list[SaveInfo], settings: CheckpointSettings) -> list[SaveInfo]:
    """Those that go: neither kept nor corrupt and without a later healthy one."""
    stay = kept(saves, settings)
    healthy = [save.step for save in saves if save.verdict == "healthy"]
    return [
        save
        for save in saves
        if save not in stay
        and (save.verdict != "corrupt" or any(step > save.step for step in healthy))
    ]


def remove_old(folder: Path, settings: CheckpointSettings) -> None:
    """Remove what is not kept. A corrupt save stays until a later one is healthy, to be looked at;
    of what was set aside, the newest three."""
    for save in dropped(list_saves(folder), settings):
        shutil.rmtree(save.path, ignore_errors=True)
    aside = folder / SET_ASIDE
    if aside.is_dir():
        for old in sorted(aside.iterdir())[:-_SET_ASIDE_KEPT]:
            shutil.rmtree(old, ignore_errors=True)
