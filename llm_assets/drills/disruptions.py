"""The drills: each disrupts one copy of the scratch pipeline and says what came of it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from llm_assets.checkpoints import newest_healthy
from llm_assets.drills.scratch import Course, Place, Scratch, ScratchError, num_healthy
from llm_assets.errors import LlmAssetsError

_GOES_ON = re.compile(r"goes on from save-0*(\d+)")


@dataclass(frozen=True, kw_only=True)
class DrillResult:
    """`detected`: somebody was told what happened. `recovered`: the training ended, bit for bit as
    without the disruption. `steps_lost`: done again. `recovery_s`: from the disruption until the
    training was further than before."""

    name: str
    detected: bool
    recovered: bool
    steps_lost: int | None
    recovery_s: float | None
    said: str = ""

    @property
    def passed(self) -> bool:
        """Detected and recovered."""
        return self.detected and self.recovered

    def as_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)


def _finish(
    name: str,
    scratch: Scratch,
    place: Place,
    course: Course,
    *,
    at: float,
    reached: int,
    detected: str,
    resumed: bool = True,
) -> DrillResult:
    """The result of a run that has ended. `detected`: what was said about it, "" for nothing."""
    # A worker whose store is away trains on for a while: what counts is the attempt after it.
    again = course.says("fetching inputs", at)
    ahead = course.step_after(reached, again.at if again else at) or course.ended
    texts = [str(e.event.get("text", "")) for e in course.seen if e.at >= at]
    found = [int(m.group(1)) for text in texts if (m := _GOES_ON.search(text))]
    lost = (max(0, reached - found[-1]) if found else reached) if resumed else 0
    return DrillResult(
        name=name,
        detected=bool(detected),
        recovered=place.artifact() == scratch.expected,
        steps_lost=lost,
        recovery_s=None if ahead is None else round(ahead.at - at, 1),
        said=detected.strip().splitlines()[0][:200] if detected.strip() else "",
    )


def _signalled(scratch: Scratch, name: str, number: int, sign: str) -> DrillResult:
    """Send a signal to the worker after its second save; the run tries again by itself."""
    place = scratch.copy()
    with place.course() as course:
        course.until(lambda: num_healthy(place) >= 2, "second save")
        saved_at = place.saves()[0].step
        course.until(lambda: course.last_step > saved_at, "step after the save")
        before = course.last_step
        at = time.monotonic()
        os.kill(place.worker(), number)
        course.until(lambda: course.says("fetching inputs", at), "second attempt")
        steps = [int(e.event.get("step") or 0) for e in course.seen if e.at <= at + 0.5]
        reached = max(before, *steps, 0)
        saved = course.says("saved: step", at)
        if saved is not None:
            reached = int(re.findall(r"saved: step (\d+)", str(saved.event["text"]))[0])
        else:
            reached = max(reached, place.saves()[0].step)
        end = course.end()
    told = next((text for text in end["retries"] if sign in text), "")
    shown = next((line for line in told.splitlines() if sign in line), told)
    return _finish(name, scratch, place, course, at=at, reached=reached, detected=shown)


def crash(scratch: Scratch) -> DrillResult:
    """SIGKILL in the middle of the training."""
    return _signalled(scratch, "crash", signal.SIGKILL, "signal 9")


def preempt(scratch: Scratch) -> DrillResult:
    """SIGTERM: the worker saves, ends in the grace period, and is started again."""
    return _signalled(scratch, "preempt", signal.SIGTERM, "SIGTERM")


def _damaged(scratch: Scratch, name: str, damage: Callable[[Path], None]) -> DrillResult:
    """Damage the newest save of a killed run, and run again."""
    place = scratch.copy(scratch.wreck)
    reached = int((place.folder / "reached").read_text())
    newest = place.saves()[0].path
    damage(newest)
    with place.course() as course:
        course.end()
    told = course.says(f"{newest.name} is not resumed from")
    return _finish(
        name,
        scratch,
        place,
        course,
        at=course.started,
        reached=reached,
        detected=str(told.event["text"]) if told else "",
    )


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-len(content) // 3] ^= 1
    path.write_bytes(bytes(content))


def corrupt_weights(scratch: Scratch) -> DrillResult:
    """One bit of the newest save's weights is another."""
    return _damaged(scratch, "corrupt-weights", lambda save: _flip(save / "model.safetensors"))


def corrupt_optimizer(scratch: Scratch) -> DrillResult:
    """One bit of the newest save's moments is another."""
    return _damaged(
        scratch, "corrupt-optimizer", lambda save: _flip(save / "optimizer.safetensors")
    )


def torn_save(scratch: Scratch) -> DrillResult:
    """The newest save ends in the middle of a file, as a power failure may leave it, and another
    one was only begun."""

    def tear(save: Path) -> None:
        weights = save / "model.safetensors"
        with weights.open("r+b") as file:
            file.truncate(weights.stat().st_size // 2)
        (save / "loop.json").write_bytes(b"")
        begun = save.with_name(f".writing-1-{save.name}")
        begun.mkdir()
        (begun / "model.safetensors").write_bytes(b"\0" * 100)

    return _damaged(scratch, "torn-save", tear)


def disk_full(scratch: Scratch) -> DrillResult:
    """The disk takes one save and half of the next; the training goes on and the first stands."""
    size = sum(f.stat().st_size for f in scratch.wreck.saves()[0].path.iterdir())
    place = scratch.copy()
    folder = place.store_folder / "checkpoints"
    folder.mkdir(exist_ok=True)
    prefix = _limited_mount(folder, int(size * 1.5) + 65536)
    with place.course(prefix=prefix) as course:
        course.until(lambda: course.says("saved step"), "first save")
        if not prefix:
            _limit_files(place.worker(), size // 4)
        told = course.until(lambda: course.says("failed:"), "failed save")
        at, reached = told.at, course.last_step
        seen_by = Path(f"/proc/{course.process.pid}/root") if prefix else Path("/")
        inside = seen_by / str(folder / place.identity).lstrip("/")
        stands = newest_healthy(inside) is not None
        if not prefix:
            _limit_files(place.worker(), -1)
        course.end()
    return _finish(
        "disk-full",
        scratch,
        place,
        course,
        at=at,
        reached=reached,
        detected=str(told.event["text"]) if stands else "",
        resumed=False,
    )


def _limited_mount(folder: Path, size_bytes: int) -> list[str]:
    """A command prefix under which `folder` is a file system of that size, seen by the run only;
    empty where this machine allows none."""
    mount = f"mount -t tmpfs -o size={size_bytes} none '{folder}'"
    probe = (
        subprocess.run(
            ["unshare", "-rm", "sh", "-c", mount], capture_output=True, stdin=subprocess.DEVNULL
        )
        if shutil.which("unshare")
        else None
    )
    if probe is None or probe.returncode != 0:
        return []
    return ["unshare", "-rm", "sh", "-c", f'{mount} && exec "$@"', "sh"]


def _limit_files(pid: int, size_bytes: int) -> None:
    """No file of a process may grow beyond a size (-1: any): writing fails as on a full disk."""
    import resource

    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    soft = hard if size_bytes < 0 else size_bytes
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))


def store_down(scratch: Scratch) -> DrillResult:
    """The store's folder is gone while the worker trains, and back after it gave up."""
    place = scratch.copy()
    folder, away = place.store_folder, place.folder / "away"
    with place.course() as course:
        course.until(lambda: num_healthy(place) >= 2, "second save")
        at = time.monotonic()
        worker = place.worker()
        folder.rename(away)
        folder.write_text("")  # nobody makes a new store in its place
        try:
            course.until(lambda: not _lives(worker), "end of the worker")
            reached = course.last_step
        finally:
            folder.unlink()
            away.rename(folder)
        end = course.end()
    told = next(iter(end["retries"]), "")
    shown = next((line for line in told.splitlines() if "base_checkpoint:" in line), told)
    return _finish("store-down", scratch, place, course, at=at, reached=reached, detected=shown)


def _lives(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


DRILLS: Mapping[str, Callable[[Scratch], DrillResult]] = {
    "crash": crash,
    "preempt": preempt,
    "corrupt-weights": corrupt_weights,
    "corrupt-optimizer": corrupt_optimizer,
    "torn-save": torn_save,
    "disk-full": disk_full,
    "store-down": store_down,
}


def run_drill(name: str, scratch: Scratch) -> DrillResult:
    """One drill; one that could not be carried out has failed, and says why. ScratchError when
    none can be."""
    try:
        return DRILLS[name](scratch)
    except ScratchError:
        raise
    except (LlmAssetsError, OSError) as error:
        return DrillResult(
            name=name,
            detected=False,
            recovered=False,
            steps_lost=None,
            recovery_s=None,
            said=str(error),
        )
