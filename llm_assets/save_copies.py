"""In-training saves that outlive a lost machine: copies in the store, made beside the training.

The worker makes a `SaveCopies` for each stage that trains when its store is not this machine's own
folder. Before the stage looks for a save, `bring` fetches the newest copy that can be gone on from,
if this machine has none as new. Each save that was proved healthy is offered to a process of its
own, which copies the newest one and removes the copies that the recipe does not keep. Nothing of
this can fail a training: what goes wrong is told, and the next save is tried.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import shutil
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llm_assets.checkpoints import Health, SaveInfo, list_saves
from llm_assets.checkpoints.choosing import PUBLISHED, SET_ASIDE, Choice, choose, read_choice
from llm_assets.checkpoints.manifest import write_json
from llm_assets.checkpoints.remote import judge, list_copies, rollbacks_of
from llm_assets.errors import DamagedError, StoreError
from llm_assets.stage_settings import CheckpointSettings
from llm_assets.stages.save_checks import validate
from llm_assets.stages.save_process import hurry
from llm_assets.store.digest import Identity
from llm_assets.store.protocol import RemoteSaves, Store

FETCHING = ".fetching"
SENDING = ".sending"


def follow_rollbacks(store: Store, identity: Identity, folder: Path) -> list[Choice]:
    """Do in this folder what the last recorded rollback chose, if that was not done here yet; all
    of them, oldest first."""
    rollbacks = rollbacks_of(store, identity)
    if rollbacks:
        last, here = rollbacks[-1], read_choice(folder)
        if here is None or (here.step, here.who, here.at) != (last.step, last.who, last.at):
            choose(folder, last.step, last.who, last.why, last.at)
    return rollbacks


class SaveCopies:
    """The copies of one training's saves. See stages.context.SaveCopies."""

    def __init__(
        self,
        store: Store,
        remote: RemoteSaves,
        identity: Identity,
        folder: Path,
        say: Callable[[str], None],
        rollbacks: list[Choice],
    ) -> None:
        self.store, self.remote, self.identity = store, remote, identity
        self.folder, self.say, self.rollbacks = folder, say, rollbacks
        self._settings = CheckpointSettings()
        self._sender: subprocess.Popen[str] | None = None
        self._listener: threading.Thread | None = None
        self._offered = self._answered = ""
        self._idle = threading.Condition()
        self._told: deque[str] = deque()

    # Before the stage trains

    def bring(self, settings: CheckpointSettings) -> None:
        """Have the newest save on this machine. StoreError when the store cannot be asked."""
        self._settings = settings
        shutil.rmtree(self.folder / SENDING, ignore_errors=True)
        copies = [
            s for s in list_copies(self.remote, self.folder, self.rollbacks) if s.kind == "full"
        ]
        if not copies:
            return
        # A training that should have a save does not silently start over.
        if not (self.folder / PUBLISHED).exists():
            write_json(self.folder / PUBLISHED, {"kind": "full", "step": copies[0].step})
        here = self._newest_here(copies[0].step)
        for copy in copies:
            if copy.step <= here or self._take(copy):
                break
        shutil.rmtree(self.folder / FETCHING, ignore_errors=True)

    def _newest_here(self, newest_copy: int) -> int:
        """The step of the newest save of this machine that can be gone on from now; 0 without one.
        Bytes are read only where a copy might be better."""
        for save in list_saves(self.folder, "full"):
            if save.step > newest_copy and save.verdict == "healthy":
                return save.step
            if self._may_go_on(save, validate(save.path)):
                return save.step
        return 0

    def _may_go_on(self, save: SaveInfo, health: Health) -> bool:
        chosen = read_choice(self.folder)
        is_chosen = chosen is not None and chosen.step == save.step
        return health.verdict == "healthy" or (is_chosen and health.verdict == "review")

    def _take(self, copy: SaveInfo) -> bool:
        """Fetch and prove a copy, aside; only then it is a save of this machine."""
        name = copy.path.name
        if copy.verdict in ("corrupt", "review") and not (
            copy.health is not None and self._may_go_on(copy, copy.health)
        ):
            why = "; ".join(copy.health.reasons) if copy.health else copy.problem
            self.say(f"the copy of {name} is {copy.verdict}: {why}")
            return False
        aside = self.folder / FETCHING / name
        try:
            self.remote.fetch(name, aside)
        except DamagedError as error:
            return self._refuse(copy, Health(**_damage(str(error).splitlines()[0])))
        health = validate(aside)
        if not self._may_go_on(copy, health):
            return self._refuse(copy, health)
        if copy.path.exists():
            now = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%S%f")
            damaged = self.folder / SET_ASIDE / f"{now}-replaced"
            damaged.mkdir(parents=True)
            copy.path.rename(damaged / name)
        aside.rename(copy.path)
        self.say(f"fetched {name} from {self.remote.where}")
        return True

    def _refuse(self, copy: SaveInfo, health: Health) -> bool:
        why = "; ".join(health.reasons)
        self.say(f"the copy of {copy.path.name} is not taken: {why}")
        shutil.rmtree(self.folder / FETCHING / copy.path.name, ignore_errors=True)
        if copy.manifest is not None:
            # The verdict is for who looks next; without it the copy is only tried again.
            with contextlib.suppress(StoreError):
                judge(self.remote, copy.path.name, copy.manifest, health)
        return False

    # While it trains

    def offer(self, save: str) -> None:
        """Copy the save of this name in the background; the one before first, if it is on its way,
        and none in between."""
        if not self._settings.upload:
            return
        if self._sender is None or self._sender.poll() is not None:
            self._end()
            self._start()
        sender = self._sender
        if sender is not None and sender.stdin is not None:
            self._offered = save
            with contextlib.suppress(OSError):
                sender.stdin.write(f"{save}\n")
                sender.stdin.flush()

    def _start(self) -> None:
        root = str(Path(__file__).parents[1])
        path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
        try:
            self._sender = subprocess.Popen(
                [sys.executable, "-m", "llm_assets.save_sending"],
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        except OSError as error:
            self._told.append(f"saves are not copied: {error}")
            return
        order = {
            "url": self.store.url,
            "identity": str(self.identity),
            "folder": str(self.folder),
            "course": len(self.rollbacks),
            "settings": self._settings.model_dump(mode="json"),
        }
        if self._sender.stdin is not None:
            with contextlib.suppress(OSError):
                self._sender.stdin.write(json.dumps(order) + "\n")
        self._listener = threading.Thread(target=self._listen, args=(self._sender,), daemon=True)
        self._listener.start()

    def _listen(self, sender: subprocess.Popen[str]) -> None:
        for line in sender.stdout or ():
            answer = json.loads(line)
            self._told.append(answer["text"])
            with self._idle:
                self._answered = answer["save"]
                self._idle.notify_all()
        with self._idle:
            self._answered = self._offered
            self._idle.notify_all()

    def hurry(self) -> None:
        """Somebody waits for the copy on its way."""
        if self._sender is not None:
            hurry(self._sender.pid)

    def told(self) -> list[str]:
        """What became of copies since the last call."""
        found = []
        while self._told:
            found.append(self._told.popleft())
        return found

    def finish(self, wait_s: float) -> None:
        """End the copying: after the newest save of this machine was copied, or `wait_s` seconds;
        at once with 0."""
        if wait_s > 0 and self._settings.upload:
            newest = next(iter(list_saves(self.folder, "full")), None)
            if newest is not None and newest.verdict in ("healthy", "unjudged"):
                if newest.path.name != self._offered:
                    self.offer(newest.path.name)
                self.hurry()
                with self._idle:
                    self._idle.wait_for(lambda: self._answered == self._offered, wait_s)
        self._end()
        for text in self.told():
            self.say(text)

    def _end(self) -> None:
        if self._sender is None:
            return
        self._sender.kill()
        self._sender.wait()
        if self._listener is not None:
            self._listener.join()
        for pipe in (self._sender.stdin, self._sender.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._sender = self._listener = None

    def clear(self) -> None:
        """The training ended well: nothing will go on from these."""
        try:
            self.remote.clear()
        except StoreError as error:
            self.say(f"copies of saves stay until `store gc`: {str(error).splitlines()[0]}")


def copies_for(
    store: Store, identity: Identity, folder: Path, say: Callable[[str], None]
) -> SaveCopies | None:
    """Follow recorded rollbacks in `folder`; the copies, where the store has a place for them."""
    rollbacks = follow_rollbacks(store, identity, folder)
    remote = store.remote_saves(identity)
    return None if remote is None else SaveCopies(store, remote, identity, folder, say, rollbacks)


def _damage(why: str) -> dict[str, Any]:
    return {
        "verdict": "corrupt",
        "checks": {"copy": why},
        "reasons": (f"copy: {why}",),
        "manifest_sha256": "",
    }
