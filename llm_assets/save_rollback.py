"""Going back to an earlier save of a training: rehearsed first, with what it costs, and recorded.

Weights and loop state (optimizer, schedule, generators, position in the data) go back together: a
save holds all of them. Nothing is deleted; newer saves are set aside.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llm_assets.checkpoint_rows import Course
from llm_assets.checkpoints import SaveInfo, choose
from llm_assets.checkpoints.choosing import now
from llm_assets.checkpoints.remote import ROLLBACKS
from llm_assets.costs.entries import ledger_entries
from llm_assets.errors import ConflictError, GuardError, RefusedError, SaveError, message
from llm_assets.jobs import StageJob
from llm_assets.store.protocol import RemoteSaves, Store

REHEARSED_BYTES = 2 * 2**30
"""Larger saves are validated in the scratch area; one step forward with them would not be cheap."""


@dataclass(frozen=True, kw_only=True)
class Impact:
    """What a rollback gives up: steps, tokens, seconds of training, and their price."""

    from_step: int
    to_step: int
    steps: int
    tokens: int
    seconds: float
    cost_usd: float | None
    set_aside: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return {**asdict(self), "set_aside": list(self.set_aside)}


@dataclass(frozen=True, kw_only=True)
class Rehearsal:
    """What a copy of the save did in a scratch area. `stepped`: a training step was taken from it;
    None when that was not tried."""

    verdict: str
    reasons: tuple[str, ...]
    stepped: bool | None
    said: str = ""

    @property
    def passed(self) -> bool:
        """The save can be gone on from."""
        return self.verdict in ("healthy", "review") and self.stepped is not False

    def as_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return {**asdict(self), "reasons": list(self.reasons), "passed": self.passed}


def impact_of(course: Course, target: SaveInfo | None, store: Store) -> Impact:
    """What going back to `target` gives up; None: to the first step."""
    step = target.step if target is not None else 0
    newest = next((save for save in course.saves if save.manifest is not None), None)
    now: Mapping[str, float] = newest.manifest.counters if newest and newest.manifest else {}
    then: Mapping[str, float] = target.manifest.counters if target and target.manifest else {}
    seconds = max(0.0, float(now.get("seconds", 0.0)) - float(then.get("seconds", 0.0)))
    rate = _usd_per_second(course, store)
    from_step = newest.step if newest is not None else 0
    return Impact(
        from_step=from_step,
        to_step=step,
        steps=max(0, from_step - step),
        tokens=max(0, int(now.get("tokens", 0)) - int(then.get("tokens", 0))),
        seconds=seconds,
        cost_usd=None if rate is None else seconds * rate,
        set_aside=tuple(save.path.name for save in course.saves if save.step > step),
    )


def _usd_per_second(course: Course, store: Store) -> float | None:
    """The rent of the newest attempt at the identity; None without one."""
    attempts = [e.info for e in ledger_entries(store) if e.info.identity == course.identity]
    if not attempts:
        return None
    newest = max(attempts, key=lambda info: info.started_at)
    return newest.usd_per_hour * newest.devices / 3600.0


def rehearse(save: SaveInfo, job: StageJob | None, remote: RemoteSaves | None = None) -> Rehearsal:
    """Copy a save into a scratch area, prove it there in a process of its own and, with a `job`,
    take one training step from it. The save itself is not touched. `remote`: where one that is not
    on this machine is fetched from; DamagedError when it is not whole there."""
    with tempfile.TemporaryDirectory(prefix="llm-assets-rehearsal-") as scratch:
        copy = Path(scratch) / "saves" / save.path.name
        if "machine" in save.places or remote is None:
            shutil.copytree(save.path, copy)
        else:
            remote.fetch(save.path.name, copy)
        (copy / "health.json").unlink(missing_ok=True)
        checked = _run("llm_assets.stages.save_checks", str(copy), "--dry-run")
        try:
            answer = json.loads(checked.stdout.splitlines()[-1])
        except (ValueError, IndexError) as error:
            raise SaveError(
                f"{save.path}: its validation gave no verdict ({checked.returncode})\n"
                f"{checked.stderr[-2000:]}"
            ) from error
        verdict, reasons = str(answer["verdict"]), tuple(str(r) for r in answer["reasons"])
        if job is None or verdict not in ("healthy", "review"):
            return Rehearsal(verdict=verdict, reasons=reasons, stepped=None)
        if save.manifest is not None and save.manifest.world_size > 1:
            said = f"a step takes {save.manifest.world_size} processes, as the training has"
            return Rehearsal(verdict=verdict, reasons=reasons, stepped=None, said=said)
        document = Path(scratch) / "job.json"
        document.write_text(json.dumps(job.as_json()))
        stepped = _run("llm_assets.rehearsing", str(document), str(copy.parent), str(save.step))
        lines = (stepped.stdout if stepped.returncode == 0 else stepped.stderr).splitlines()
        return Rehearsal(
            verdict=verdict,
            reasons=reasons,
            stepped=stepped.returncode == 0,
            said=lines[-1] if lines else "",
        )


def _run(*module: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *module], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )


def roll_back(
    store: Store,
    course: Course,
    target: SaveInfo | None,
    *,
    who: str,
    why: str,
    rehearsal: Rehearsal | None,
) -> dict[str, Any]:
    """Choose a save (None: the first step) for the next run, and record it in the store.

    GuardError while a process trains the identity; RefusedError when the rehearsal failed.
    """
    if not why.strip():
        raise RefusedError("rollback: --why: a rollback says why")
    if target is not None and target.kind != "full":
        raise RefusedError(
            message(
                where=str(target.path),
                found="a light save: weights and metrics only",
                rule="a training goes back to a full save, or to its first step",
                remedy="take a full one (`llm-assets checkpoints ls`), or --restart",
            )
        )
    if rehearsal is not None and not rehearsal.passed:
        raise RefusedError(
            message(
                where=str(target.path if target else course.folder),
                found=f"the rehearsal failed: {'; '.join(rehearsal.reasons) or rehearsal.said}",
                rule="a training goes back only to a save that was gone on from in a scratch area",
                remedy="take an earlier one (`llm-assets checkpoints ls`), or --restart",
            )
        )
    lease = store.acquire(f"stage/{course.identity}", owner=f"rollback, {who}", ttl_s=60)
    if lease is None:
        raise GuardError(
            message(
                where=f"{course.pipeline}/{course.stage}",
                found=f"{store.lease_owner(f'stage/{course.identity}')} is at it",
                rule="the saves of a running training are its own",
                remedy="stop the run, wait until it has ended, then roll back",
            )
        )
    try:
        impact = impact_of(course, target, store)
        step, at = (target.step if target else 0), now()
        body = {
            "identity": course.identity,
            "stage": course.stage,
            "pipeline": course.pipeline,
            "step": step,
            "who": who,
            "why": why,
            "at": at,
            "impact": impact.as_json(),
            "rehearsal": None if rehearsal is None else rehearsal.as_json(),
        }
        # Recorded first: a run on any machine then follows it, should this one end here.
        _record(store, course, body)
        choose(course.folder, step, who, why, at)
    finally:
        lease.release()
    return body


def _record(store: Store, course: Course, body: Mapping[str, Any]) -> None:
    number = 1 + sum(1 for _ in store.entries(ROLLBACKS, f"{course.identity}/"))
    while True:
        try:
            store.add_entry(ROLLBACKS, f"{course.identity}/{number:06d}", body)
        except ConflictError:
            number += 1
        else:
            return
