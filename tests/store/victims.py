"""Processes that are killed: what they do, and how they count their steps.

Imported by a fork server, so that a victim starts with everything imported.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llm_assets.store.opening
from llm_assets.errors import ConflictError
from llm_assets.store.s3_client import S3Client
from tests.store.samples import folder_of, put, record_of
from tests.store.weed import s3_client
from tests.store.worlds import FAST

STEPS = (
    "open",
    "link",
    "fsync",
    "replace",
    "rename",
    "unlink",
    "mkdir",
    "pwrite",
    "utime",
    "close",
)
"""The system calls that change a directory store."""


def die() -> None:
    """As the kernel or the scheduler does it: no clean-up of any kind."""
    os.kill(os.getpid(), signal.SIGKILL)


def dying(step: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Wraps functions so that the process dies around one of their calls: before call number
    step / 2 when `step` is even, after it when it is odd."""
    counter = itertools.count()

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            number = next(counter)
            if 2 * number == step:
                die()
            try:
                return function(*arguments, **named)
            finally:
                if 2 * number + 1 == step:
                    die()

        return call

    return wrap


def put_in_directory(root: str, source: str, done: str, step: int | None) -> None:
    """Put, and say so in the file `done`; die at a step, if one is given."""
    store = llm_assets.store.opening.open_directory(Path(root))
    if step is not None:
        wrap = dying(step)
        for name in STEPS:
            setattr(os, name, wrap(getattr(os, name)))
    artifact = put(store, Path(source), number=2)
    os.write(os.open(done, os.O_CREAT | os.O_WRONLY), artifact.encode())
    die()


def commit_in_directory(root: str, artifact: str, done: str, step: int | None) -> None:
    """Take a lease, commit a record, move a ref; die at a step."""
    store: Any = llm_assets.store.opening.open_directory(Path(root))
    if step is not None:
        wrap = dying(step)
        for name in STEPS:
            setattr(os, name, wrap(getattr(os, name)))
    lease = store.acquire("stage/x", owner="victim", ttl_s=0.05)
    store.add_record(record_of(artifact), lease=lease)
    os.write(os.open(done, os.O_CREAT | os.O_WRONLY), b"committed")
    store.move_ref("tiny/staging", artifact, expected=None, who="victim", why="x")
    os.write(os.open(done, os.O_APPEND | os.O_WRONLY), b" moved")
    die()


def put_in_s3(url: str, endpoint: str, source: str, done: str, step: int | None) -> None:
    """Put; die around a request."""
    from llm_assets.store.opening_s3 import open_s3

    store: Any = open_s3(url, client_factory=lambda: s3_client(endpoint), retry=FAST)
    if step is not None:
        S3Client.request = dying(step)(S3Client.request)  # type: ignore[method-assign]
    artifact = put(store, Path(source), number=2)
    os.write(os.open(done, os.O_CREAT | os.O_WRONLY), artifact.encode())
    die()


def race(url: str, endpoint: str, folder: str, number: int, rounds: int) -> None:
    """Put folders that others put too, commit, move one ref, take one lease, read what is there.

    At least so many rounds, and on until two collections have run beside them. Whatever is wrong ends the process with a traceback and an exit code.
    """
    from llm_assets.errors import NotFoundError

    store = open_any(url, endpoint)
    turns = itertools.count()
    while (turn := next(turns)) < rounds or not collected(folder, 2):
        which = (number + turn) % 4
        source = folder_of(
            Path(folder) / f"{number}-{turn}", shared_txt="shared", own_txt=f"content {which}" * 500
        )
        while True:
            artifact = put(store, source, number=which)
            try:
                store.add_record(record_of(artifact, str(which), run_id=f"{number}-{turn}"))
                log(folder, "records", f"{number}-{turn}")
                break
            except NotFoundError:
                continue  # Collected between put and record: there is no grace time here.
        expected = store.ref("race/staging")
        try:
            store.move_ref(
                "race/staging", artifact, expected=expected, who=str(number), why=f"{turn}"
            )
            log(folder, "moves", f"{number} {turn} {artifact}")
        except ConflictError:
            pass
        read = store.fetch(artifact)
        if (read / "own.txt").read_text() != f"content {which}" * 500:
            raise SystemExit("wrong bytes")
        lease = store.acquire("race", owner=str(number), ttl_s=60)
        if lease is not None:
            alone = Path(folder) / "alone"
            alone.touch(exist_ok=False)
            lease.check()
            alone.unlink()
            lease.release()
            log(folder, "leases", f"{number} {turn}")


def collect_until(url: str, endpoint: str, stop: str) -> None:
    """Collect garbage again and again, without a grace time."""
    from llm_assets.store.gc import Settings, collect

    store = open_any(url, endpoint)
    while not Path(stop).exists():
        collect(store, Settings(grace_s=0))
        log(str(Path(stop).parent), "collections", "1")


def collected(folder: str, times: int) -> bool:
    """Whether so many collections have ended."""
    path = Path(folder) / "collections"
    return path.exists() and len(path.read_text().splitlines()) >= times


def open_any(url: str, endpoint: str) -> Any:
    """A store of either kind."""
    if not endpoint:
        return llm_assets.store.opening.open_directory(Path(url))
    from llm_assets.store.opening_s3 import open_s3

    return open_s3(url, client_factory=lambda: s3_client(endpoint))


def log(folder: str, name: str, line: str) -> None:
    """Append a line; one write call."""
    handle = os.open(Path(folder) / name, os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    os.write(handle, line.encode() + b"\n")
    os.close(handle)
