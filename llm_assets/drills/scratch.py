"""The scratch pipeline of the drills: a place of its own, runs in it, and what they report."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from llm_assets.checkpoints import SaveInfo, list_saves
from llm_assets.errors import WorkerError, message
from llm_assets.planning import make_plan
from llm_assets.recipe import load_recipe
from llm_assets.store import open_store
from llm_assets.store.digest import Identity
from llm_assets.store.protocol import Store

RECIPE = Path(__file__).parent / "recipe.yaml"
STAGE = "base_checkpoint"
_BEFORE = ("corpus", "vocabulary", "tokenizer", "shards")
_PATIENCE_S = 300.0
_LOOK_S = 0.02
_LOOK_AT = "see why with `llm-assets drill crash --keep FOLDER` and FOLDER/base/course.log"


class ScratchError(WorkerError):
    """There is no scratch pipeline to disrupt: no drill can be carried out."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One line that a run printed, and when (monotonic seconds)."""

    at: float
    event: dict[str, Any]


class Course:
    """A run in a process of its own. Always ended by `close`, workers too."""

    def __init__(self, place: Place, stages: Sequence[str], prefix: Sequence[str] = ()) -> None:
        self._place = place
        self.seen: list[Seen] = []
        self.started = time.monotonic()
        command = [sys.executable, "-m", "llm_assets.drills.course", str(place.recipe), *stages]
        with (place.folder / "course.log").open("ab") as log:
            self.process = subprocess.Popen(
                [*prefix, *command],
                env=place.environment,
                cwd=place.folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            if line.startswith("{"):
                self.seen.append(Seen(at=time.monotonic(), event=json.loads(line)))

    def until(self, what: Callable[[], Any], wanted: str) -> Any:
        """Wait until `what` gives something true, and give that. WorkerError when the run ends
        before, or nothing comes for five minutes."""
        looks = int(_PATIENCE_S / _LOOK_S)
        while True:
            ended = self.process.poll() is not None
            found = what()
            if found:
                return found
            looks -= 1
            if ended or looks < 0:
                log = (self._place.folder / "course.log").read_text(errors="replace")[-2000:]
                texts = "\n".join(json.dumps(entry.event) for entry in self.seen[-5:])
                raise WorkerError(f"drill: no {wanted}\n{texts}\n{log}")
            time.sleep(_LOOK_S)

    def says(self, text: str, after: float = 0.0) -> Seen | None:
        """The first line after a time with `text` in what it says."""
        for entry in list(self.seen):
            if entry.at >= after and text in str(entry.event.get("text", "")):
                return entry
        return None

    def step_after(self, step: int, after: float) -> Seen | None:
        """The first report of a step beyond `step`, after a time."""
        for entry in list(self.seen):
            if entry.at >= after and int(entry.event.get("step") or 0) > step:
                return entry
        return None

    @property
    def ended(self) -> Seen | None:
        """The last line of a run that came to its end."""
        return next((entry for entry in list(self.seen) if "end" in entry.event), None)

    @property
    def last_step(self) -> int:
        """The last step that was reported."""
        steps = [int(entry.event.get("step") or 0) for entry in list(self.seen)]
        return next((step for step in reversed(steps) if step), 0)

    def end(self) -> dict[str, Any]:
        """Wait for the end: succeeded, errors, retries."""
        entry = self.until(lambda: self.ended, "end of the run")
        self.process.wait()
        end: dict[str, Any] = entry.event["end"]
        return end

    def close(self) -> None:
        """End the run if it still goes on: SIGTERM ends its worker too."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout=40)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._reader.join(timeout=5)
        if self.process.stdout is not None:
            self.process.stdout.close()

    def __enter__(self) -> Course:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class Place:
    """A folder with a recipe, a home with its store, and a Dagster home."""

    folder: Path

    @property
    def recipe(self) -> Path:
        """The recipe's file."""
        return self.folder / "recipe.yaml"

    @property
    def store_folder(self) -> Path:
        """The store's folder."""
        return self.folder / "home" / "store"

    @property
    def environment(self) -> dict[str, str]:
        """Of every process of the drill: nothing of the user's own places."""
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("LLM_ASSETS_", "DAGSTER_", "OTEL_"))
        }
        root = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
        return {
            **environment,
            "LLM_ASSETS_HOME": str(self.folder / "home"),
            "DAGSTER_HOME": str(self.folder / "dagster"),
            "PYTHONPATH": path,
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }

    def store(self) -> Store:
        """The store, opened."""
        return open_store(str(self.store_folder))

    def course(self, *stages: str, prefix: Sequence[str] = ()) -> Course:
        """Start a run."""
        return Course(self, stages or (STAGE,), prefix)

    def artifact(self) -> str | None:
        """What the stage gave; None before it did."""
        plan = make_plan(load_recipe(self.recipe), self.store())
        found = plan.stages[STAGE].artifact
        return None if found is None else str(found)

    @cached_property
    def identity(self) -> Identity:
        """Of the stage that is disrupted."""
        plan = make_plan(load_recipe(self.recipe), self.store())
        return Identity.parse(str(plan.stages[STAGE].identity))

    def saves(self) -> list[SaveInfo]:
        """Full saves of the stage, newest first."""
        return list_saves(self.store_folder / "checkpoints" / self.identity, "full")

    def worker(self) -> int:
        """The process id of the worker that is at the stage; 0 when there is none."""
        owner = self.store().lease_owner(f"stage/{self.identity}") or ""
        pid = owner.split(":")[1] if owner.count(":") >= 2 else ""
        return int(pid) if pid.isdigit() else 0

    def no_retries(self) -> None:
        """A failure ends the run at once."""
        document = yaml.safe_load(self.recipe.read_text())
        document["launcher"]["retries"]["max_retries"] = 0
        self.recipe.write_text(yaml.safe_dump(document))


@dataclass
class Scratch:
    """Everything below one folder. `base` has all that the stage takes; copies of it are
    disrupted. `expected` is what the stage gives undisturbed."""

    root: Path
    _number: int = field(default=0)

    @cached_property
    def base(self) -> Place:
        """The stages before are run once. ScratchError when they can't be."""
        place = Place(self.root / "base")
        try:
            (place.folder / "dagster").mkdir(parents=True)
            shutil.copyfile(RECIPE, place.recipe)
            with place.course(*_BEFORE) as course:
                end = course.end()
        except FileExistsError:
            raise self._no_base("an earlier drill is there", "give an empty folder") from None
        except (OSError, WorkerError) as error:
            raise self._no_base(str(error), _LOOK_AT) from error
        if not end["succeeded"]:
            raise self._no_base(f"its stages failed: {end['errors']}", _LOOK_AT)
        return place

    def _no_base(self, found: str, remedy: str) -> ScratchError:
        return ScratchError(
            message(
                where=str(self.root),
                found=found,
                rule="a drill disrupts a small pipeline, run there as far as the shards",
                remedy=remedy,
            )
        )

    @cached_property
    def expected(self) -> str:
        """The stage's artifact when nothing happens."""
        place = self.copy()
        with place.course() as course:
            end = course.end()
        artifact = place.artifact()
        if artifact is None:
            raise WorkerError(f"drill: the undisturbed run failed: {end['errors']}")
        return artifact

    @cached_property
    def wreck(self) -> Place:
        """A run killed after its third save, without a retry: saves, and nobody at the stage."""
        place = self.copy()
        place.no_retries()
        with place.course() as course:
            course.until(lambda: num_healthy(place) >= 3, "third save")
            os.kill(place.worker(), signal.SIGKILL)
            course.end()
        (place.folder / "reached").write_text(str(max(course.last_step, place.saves()[0].step)))
        return place

    def copy(self, of: Place | None = None) -> Place:
        """A place of its own with the state of another one (without: of `base`)."""
        source = of or self.base
        self._number += 1
        target = Place(self.root / f"drill-{self._number}")
        shutil.copytree(source.folder, target.folder, symlinks=True)
        return target


def num_healthy(place: Place) -> int:
    """Saves that were proved."""
    return sum(save.verdict == "healthy" for save in place.saves())
