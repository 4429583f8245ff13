"""Which save the next run of an identity goes on from, when a person decides; and the best one."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llm_assets.checkpoints.listing import SaveInfo, list_saves
from llm_assets.checkpoints.manifest import write_json
from llm_assets.errors import DamagedError, message

CHOSEN = "chosen.json"
SET_ASIDE = "set-aside"
PUBLISHED = "published.json"


@dataclass(frozen=True, kw_only=True)
class Choice:
    """`step` 0: the training starts over. `earlier`: the choices before this one."""

    step: int
    who: str
    why: str
    at: str
    set_aside: str = ""
    earlier: tuple[Mapping[str, Any], ...] = ()


def now() -> str:
    """The time of a choice."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds")


def choose(folder: Path, step: int, who: str, why: str, at: str = "") -> Choice:
    """The next run of this identity goes on from the full save of `step`; 0: it starts over. `at`:
    when that was chosen, if not now: perhaps on another machine.

    Newer saves move into `set-aside/<time>/`, where no run takes them and retention removes
    nothing. The choice is written before they move: a rollback that is cut off goes on with the
    next run.
    """
    moved = datetime.datetime.now(datetime.UTC)
    before = read_choice(folder)
    earlier = () if before is None else (*before.earlier, {**asdict(before), "earlier": ()})
    choice = Choice(
        step=step,
        who=who,
        why=why,
        at=at or now(),
        set_aside=f"{SET_ASIDE}/{moved.strftime('%Y%m%dT%H%M%S%f')}",
        earlier=earlier,
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / CHOSEN, {**asdict(choice), "settled": False})
    settle(folder)
    return choice


def settle(folder: Path) -> None:
    """Move what a choice sets aside, if that was cut off."""
    document = _document(folder)
    if document is None or document["settled"]:
        return
    aside = folder / document["set_aside"]
    for save in list_saves(folder):
        if save.step > document["step"]:
            aside.mkdir(parents=True, exist_ok=True)
            save.path.rename(aside / save.path.name)
    write_json(folder / CHOSEN, {**document, "settled": True})


def read_choice(folder: Path) -> Choice | None:
    """The last choice; None without one. DamagedError for one that cannot be read: it stops a
    run, since going on without it would undo what a person decided."""
    document = _document(folder)
    if document is None:
        return None
    document.pop("settled", None)
    return Choice(**{**document, "earlier": tuple(document["earlier"])})


def _document(folder: Path) -> dict[str, Any] | None:
    try:
        document: dict[str, Any] = json.loads((folder / CHOSEN).read_bytes())
        if not isinstance(document["step"], int) or not isinstance(document["settled"], bool):
            raise TypeError("step or settled")
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedError(
            message(
                where=str(folder / CHOSEN),
                found=f"{type(error).__name__}: {error}",
                rule="a choice is read whole, or nothing goes on",
                remedy="choose again with `llm-assets checkpoints rollback`, or remove the file",
            )
        ) from error
    return document


def best(saves: Sequence[SaveInfo], criteria: Mapping[str, str]) -> SaveInfo | None:
    """The best save by `criteria`, a metric's name to "min" or "max".

    Each metric ranks the saves that have it; the mean rank decides, then the newer save. Corrupt
    saves, and those that lack a metric of the criteria, are left out.
    """
    known = [
        save
        for save in saves
        if save.manifest is not None
        and save.verdict != "corrupt"
        and all(math.isfinite(_metric(save, name)) for name in criteria)
    ]
    if not known or not criteria:
        return None
    ranks = {id(save): 0.0 for save in known}
    for name, direction in criteria.items():
        sign = -1.0 if direction == "max" else 1.0
        values = sorted(sign * _metric(save, name) for save in known)
        for save in known:
            ranks[id(save)] += values.index(sign * _metric(save, name))
    return min(known, key=lambda save: (ranks[id(save)], -save.step))


def _metric(save: SaveInfo, name: str) -> float:
    return float(save.manifest.metrics.get(name, math.nan)) if save.manifest else math.nan
