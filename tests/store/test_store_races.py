"""Eight processes at once, and a collection that runs all the time without a grace time."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest

from llm_assets.store.gc import Settings, collect
from tests.store import victims
from tests.store.worlds import DirectoryWorld, S3World

PROCESSES = 8


@pytest.mark.parametrize(("kind", "rounds"), [("directory", 12), ("s3", 2)])
def test_nothing_that_is_reached_is_ever_lost(
    request: pytest.FixtureRequest, tmp_path: Path, kind: str, rounds: int
) -> None:
    world: DirectoryWorld | S3World = request.getfixturevalue(f"{kind}_world")
    if isinstance(world, S3World):
        url, endpoint = world.url("shared"), world.server.endpoint
    else:
        url, endpoint = str(world.root), ""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.store.victims", "llm_assets.store.opening_s3"])
    folder = tmp_path / "race"
    folder.mkdir()
    stop = folder / "stop"
    collector = context.Process(
        target=victims.collect_until, args=(url, endpoint, str(stop)), daemon=True
    )
    collector.start()
    racers = [
        context.Process(
            target=victims.race, args=(url, endpoint, str(folder), n, rounds), daemon=True
        )
        for n in range(PROCESSES)
    ]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join(300)
    stop.touch()
    collector.join(60)
    assert [racer.exitcode for racer in racers] == [0] * PROCESSES
    assert collector.exitcode == 0
    store = world.open()
    records = list(store.all_records())
    committed = (folder / "records").read_text().splitlines()
    assert len(committed) >= PROCESSES * rounds
    assert sorted(record.run_id for record in records) == sorted(committed)
    outputs = sorted({record.output for record in records})
    assert len(outputs) == 4
    assert not any(store.verify_many(outputs, deep=True).values())
    # Every move that succeeded is in the log, once, and starts where the one before it ended.
    log = store.ref_log("race/staging")
    moves = (folder / "moves").read_text().splitlines()
    assert sorted(f"{move.who} {move.why} {move.artifact}" for move in log) == sorted(moves)
    previous = None
    for move in log:
        assert move.previous == previous
        previous = move.artifact
    assert len((folder / "leases").read_text().splitlines()) >= 1
    assert len((folder / "collections").read_text().splitlines()) >= 2
    collect(store, Settings(grace_s=0))
    store.close()
    assert len(world.keys("objects/blobs/")) == 6
    assert len(world.keys("objects/trees/")) == 4
    assert world.keys("tmp/") == world.keys("gc/") == []
