"""Writers killed with SIGKILL: at random moments, and at every step on purpose."""

from __future__ import annotations

import multiprocessing
import random
import signal
import time
from collections.abc import Callable
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import pytest

from llm_assets.store.gc import Settings, collect
from tests.store import victims
from tests.store.conformance import contents
from tests.store.samples import folder_of, identity_of, put, record_of
from tests.store.worlds import DirectoryWorld, S3World, World

NOW = Settings(grace_s=0, local_grace_s=0)
RANDOM_KILLS = 200


@pytest.fixture(scope="module")
def processes() -> ForkServerContext:
    """Starts victims with everything imported."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.store.victims", "boto3", "llm_assets.store.opening_s3"])
    return context


class Scene:
    """A store with one committed artifact, and a folder that a victim puts."""

    def __init__(self, world: World, folder: Path, processes: ForkServerContext) -> None:
        self.world, self.processes = world, processes
        self.source = folder_of(
            folder / "new", shared_txt="shared" * 1000, deep__x_txt="x" * 300_000, y_txt="y"
        )
        store = world.open()
        self.committed = put(store, folder_of(folder / "old", shared_txt="shared" * 1000), number=1)
        self.record = record_of(self.committed, "committed")
        store.add_record(self.record)
        store.move_ref("tiny/production", self.committed, expected=None, who="x", why="y")
        self.artifact = put(store, self.source, number=2)
        collect(store, NOW)
        store.close()
        self.done = folder / "done"

    def run(
        self, victim: Callable[..., None], *arguments: Any, after_s: float | None = None
    ) -> bool:
        """Run a victim, kill it after some seconds or let it die; whether its call returned."""
        self.done.unlink(missing_ok=True)
        process = self.processes.Process(target=victim, args=arguments)
        process.start()
        if after_s is not None:
            time.sleep(after_s)
            process.kill()
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
        process.close()
        return self.done.exists()

    def check(self, returned: bool, *, whole: bool = True) -> None:
        """Nothing half is visible, nothing committed is lost, nothing is left after a collection,
        and the next put succeeds. `whole` reads everything."""
        store = self.world.open()
        found = set(store.artifacts())
        assert self.committed in found
        assert found <= {self.committed, self.artifact}
        assert all(store.has(artifact) for artifact in found)
        if whole:
            damage = store.verify_many(sorted(found), deep=True)
            assert not any(damage.values()), damage
        assert self.artifact in found or not returned
        assert store.records(identity_of("committed")) == [self.record]
        assert store.ref("tiny/production") == self.committed
        collect(store, NOW)
        store.close()
        assert [key for key in self.world.keys("tmp/")] == []
        assert len(self.world.keys("objects/")) == 3
        if whole:
            again = self.world.open()
            assert put(again, self.source, number=2) == self.artifact
            assert again.verify(self.artifact, deep=True) == []
            assert contents(again.fetch(self.artifact)) == contents(self.source)
            collect(again, NOW)
            again.close()
            assert len(self.world.keys("objects/")) == 3


def until_it_survives(run: Callable[[int], bool]) -> int:
    """Die at step 0, 1, 2, ... until the victim gets to its end; the number of steps."""
    for step in range(2000):
        if run(step):
            return step
    raise AssertionError("the victim never got to its end")


def test_a_put_killed_at_every_step(
    directory_world: DirectoryWorld, tmp_path: Path, processes: ForkServerContext
) -> None:
    scene = Scene(directory_world, tmp_path, processes)

    def run(step: int) -> bool:
        arguments = (str(directory_world.root), str(scene.source), str(scene.done), step)
        returned = scene.run(victims.put_in_directory, *arguments)
        scene.check(returned, whole=step % 8 == 0 or returned)
        return returned

    assert until_it_survives(run) > 60


def test_a_put_killed_at_random_moments(
    directory_world: DirectoryWorld, tmp_path: Path, processes: ForkServerContext
) -> None:
    scene = Scene(directory_world, tmp_path, processes)
    arguments = (str(directory_world.root), str(scene.source), str(scene.done), None)
    started = time.monotonic()
    assert scene.run(victims.put_in_directory, *arguments)
    longest = 1.1 * (time.monotonic() - started)
    scene.check(True)
    moments = random.Random(3)
    outcomes = []
    for number in range(RANDOM_KILLS):
        returned = scene.run(
            victims.put_in_directory, *arguments, after_s=moments.uniform(0, longest)
        )
        scene.check(returned, whole=number % 10 == 0)
        outcomes.append(returned)
    assert True in outcomes and False in outcomes


def test_a_commit_killed_at_every_step(
    directory_world: DirectoryWorld, tmp_path: Path, processes: ForkServerContext
) -> None:
    """Lease, record, ref: after a take-over the commit is there whole or not at all."""
    folder = folder_of(tmp_path / "new")
    artifact = put(directory_world.open(), folder)
    done = tmp_path / "done"
    record = record_of(artifact)
    published_late = 0

    def run(step: int) -> bool:
        nonlocal published_late
        world = DirectoryWorld(tmp_path / f"store-{step}")
        assert put(world.open(), folder) == artifact
        done.unlink(missing_ok=True)
        process = processes.Process(
            target=victims.commit_in_directory,
            args=(str(world.root), artifact, str(done), step),
        )
        process.start()
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
        said = done.read_text() if done.exists() else ""
        store = world.open()
        before = store.records(record.identity)
        while (lease := store.acquire("stage/x", owner="next", ttl_s=60)) is None:
            time.sleep(0.01)
        after = store.records(record.identity)
        published_late += len(after) - len(before)
        assert after in ([], [record])
        assert after == [record] or "committed" not in said
        log = store.ref_log("tiny/staging")
        assert [move.artifact for move in log] in ([], [artifact])
        assert store.ref("tiny/staging") == (artifact if log else None)
        assert log or "moved" not in said
        store.add_record(record, lease=lease)
        assert store.records(record.identity) == [record]
        return said == "committed moved"

    # Every third step: before one call, after the next.
    assert until_it_survives(lambda number: run(3 * number)) > 30
    # Some died between the commit and its publishing, and the next owner published it.
    assert published_late > 0


def test_a_put_to_s3_killed_at_every_request(
    s3_world: S3World, tmp_path: Path, processes: ForkServerContext
) -> None:
    scene = Scene(s3_world, tmp_path, processes)
    cache = s3_world.url("victims")

    def run(step: int) -> bool:
        arguments = (cache, s3_world.server.endpoint, str(scene.source), str(scene.done), step)
        returned = scene.run(victims.put_in_s3, *arguments)
        # The victim's cache is on this machine: its claims are known to be dead.
        s3_world.cache = "victims"
        scene.check(returned, whole=step % 6 == 0 or returned)
        return returned

    assert until_it_survives(run) > 15


def test_an_upload_in_parts_killed_at_every_request(
    s3_world: S3World, tmp_path: Path, processes: ForkServerContext
) -> None:
    """Unfinished uploads are found and aborted."""
    source = folder_of(tmp_path / "large")
    with (source / "weights.raw").open("wb") as file:
        file.write(b"begin")
        file.truncate(64 * 2**20 + 1)
    url, done = s3_world.url("victims"), tmp_path / "done"
    s3_world.cache = "victims"
    unfinished = 0

    def run(step: int) -> bool:
        nonlocal unfinished
        done.unlink(missing_ok=True)
        arguments = (url, s3_world.server.endpoint, str(source), str(done), step)
        process = processes.Process(target=victims.put_in_s3, args=arguments)
        process.start()
        process.join(60)
        assert process.exitcode == -signal.SIGKILL
        store = s3_world.open()
        assert all(store.has(artifact) for artifact in store.artifacts())
        uploads = list(store.open_uploads())
        unfinished += len(uploads)
        if done.exists():
            assert store.verify(done.read_text(), deep=True) == []
        collect(store, NOW)
        store.close()
        assert list(store.open_uploads()) == []
        assert s3_world.keys("objects/") == s3_world.keys("tmp/") == []
        return done.exists()

    # Two steps at a time: before and after a request are one moment for the server here.
    assert until_it_survives(lambda step: run(2 * step + 1)) > 8
    assert unfinished > 0
