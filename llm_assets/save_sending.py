"""The process that copies saves into the store: `python -m llm_assets.save_sending`.

It reads an order and then names of saves from stdin, a line each, and answers with a line for each
save that it tried. It has the lowest priority, shares no lock with the training, and ends with it:
when stdin is closed, whatever it is doing.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from llm_assets.checkpoints import read_manifest
from llm_assets.checkpoints.health import HEALTH
from llm_assets.checkpoints.remote import about_save, list_copies, rollbacks_of
from llm_assets.checkpoints.retention import dropped
from llm_assets.errors import StoreError
from llm_assets.save_copies import SENDING
from llm_assets.stage_settings import CheckpointSettings
from llm_assets.stages.save_process import lowest_priority
from llm_assets.store import open_store
from llm_assets.store.digest import Identity
from llm_assets.store.protocol import RemoteSaves, Store


def send(
    store: Store,
    remote: RemoteSaves,
    identity: Identity,
    save: Path,
    course: int,
    settings: CheckpointSettings,
) -> str:
    """Copy a save, then remove the copies that are not kept; what was done."""
    began = time.monotonic()
    held = _hold(save)
    try:
        size = remote.put(held, about_save(save if save.is_dir() else held, course))
    finally:
        shutil.rmtree(held.parent, ignore_errors=True)
    took = time.monotonic() - began
    copies = list_copies(remote, save.parent, rollbacks_of(store, identity))
    for old in dropped(copies, settings):
        remote.drop(old.path.name)
    remote.tidy()
    return f"{save.name} is in the store too ({size / 1e6:,.1f} MB in {took:.1f} s)"


def _hold(save: Path) -> Path:
    """Links to a save's files: they last while retention removes the save."""
    held = save.parent / SENDING / save.name
    shutil.rmtree(held, ignore_errors=True)
    held.mkdir(parents=True)
    for file in save.iterdir():
        if file.is_file() and not file.name.startswith(".") and file.name != HEALTH:
            os.link(file, held / file.name)
    manifest = read_manifest(held)
    if isinstance(manifest, str):
        raise StoreError(manifest)
    return held


def _try(store: Store | None, order: dict[str, Any], name: str) -> tuple[Store | None, str]:
    try:
        store = store or open_store(order["url"], create=False)
        identity = Identity.parse(order["identity"])
        remote = store.remote_saves(identity)
        if remote is None:
            return store, f"{name} was not copied: the store is this machine's own folder"
        settings = CheckpointSettings.model_validate_json(json.dumps(order["settings"]))
        save = Path(order["folder"]) / name
        return store, send(store, remote, identity, save, int(order["course"]), settings)
    except (StoreError, OSError) as error:
        why = " ".join(line.strip() for line in str(error).splitlines()[:2])
        return store, (
            f"{name} was not copied into the store: {why}; the training goes on, the next save is "
            "tried"
        )


def _read(names: queue.Queue[str]) -> None:
    for line in sys.stdin:
        names.put(line.strip())
    # The training has ended, or was killed: what was not copied whole is no copy.
    os._exit(0)


def main() -> int:
    """Until stdin is closed."""
    # A signal to the process group is for the training: it may want its last save copied.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    lowest_priority()
    order = json.loads(sys.stdin.readline() or "null")
    if order is None:
        return 0
    names: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_read, args=(names,), daemon=True).start()
    store: Store | None = None
    while True:
        name = names.get()
        while not names.empty():
            name = names.get()
        store, text = _try(store, order, name)
        print(json.dumps({"save": name, "text": text}), flush=True)


if __name__ == "__main__":
    sys.exit(main())
