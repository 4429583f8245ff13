"""Garbage collection and retention, on a directory and on S3."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from llm_assets.errors import ConflictError, DamagedError, RefusedError
from llm_assets.store import gc
from llm_assets.store.digest import ArtifactHash
from llm_assets.store.document_store import blob_key, tree_key
from llm_assets.store.gc import Settings, collect, make_plan
from llm_assets.store.retention import BestBy, Retention
from llm_assets.store.sweep import FOLDER, LEASE, WAITED, announce, relying_on
from tests.store.conformance import contents
from tests.store.samples import folder_of, identity_of, put, record_of
from tests.store.worlds import DirectoryWorld, S3World, World, blob_of, flip

NOW = Settings(grace_s=0, local_grace_s=0)
"""Collects at once, also what is young."""


def policy(**rules: Any) -> Settings:
    """Retention rules without a grace time."""
    return Settings(retention=Retention(**rules), grace_s=0, local_grace_s=0)


def left(world: World) -> set[str]:
    """The artifacts that are there, all of them whole."""
    store = world.open()
    found = list(store.artifacts())
    assert all(store.has(artifact) for artifact in found)
    return set(found)


@pytest.fixture
def several(world: World, source: Path) -> list[ArtifactHash]:
    """Five artifacts that share a file and have one of their own each."""
    store = world.open()
    folder_of(source, shared_txt="shared")
    found = []
    for number in range(5):
        folder_of(source, own_txt=f"own {number}")
        found.append(put(store, source, number=number))
    return found


def test_what_nothing_reaches_goes(world: World, several: list[ArtifactHash]) -> None:
    store = world.open()
    store.add_record(record_of(several[0]))
    store.move_ref("tiny/staging", several[1], expected=None, who="x", why="y")
    store.add_entry("pins", "tiny/sft", {"artifact": several[2]})
    plan = make_plan(store, NOW)
    assert {entry.artifact for entry in plan.artifacts} == set(several[3:])
    assert plan.kept == {
        several[0]: "record of corpus",
        several[1]: "ref tiny/staging",
        several[2]: "pin tiny/sft",
    }
    assert left(world) == set(several)
    before = sum(len(world.read(key)) for key in world.keys("objects/"))
    deleted = collect(store, NOW, plan)
    after = sum(len(world.read(key)) for key in world.keys("objects/"))
    assert left(world) == set(several[:3])
    assert deleted.size_bytes == before - after > 0
    assert len(world.keys("objects/blobs/")) == 5
    assert make_plan(store, NOW).is_empty
    assert world.keys(FOLDER) == []


def test_what_is_young_stays(world: World, several: list[ArtifactHash]) -> None:
    assert make_plan(world.open(), Settings()).is_empty
    collect(world.open(), Settings())
    assert left(world) == set(several)


def test_putting_again_makes_it_young(
    world: World, several: list[ArtifactHash], source: Path
) -> None:
    time.sleep(world.dead_s + 2)
    assert put(world.open(), source, number=4) == several[4]
    collect(world.open(), Settings(grace_s=max(1.5, world.dead_s - 0.2)))
    assert left(world) == {several[4]}


def test_lineage_stays(world: World, several: list[ArtifactHash]) -> None:
    """Inputs of the record of what stays, theirs, and what its metadata names."""
    store = world.open()
    store.add_record(record_of(several[0], "base"))
    store.add_record(record_of(several[1], "sft", inputs={"base": several[0]}))
    store.add_record(record_of(several[2], "release", inputs={"sft": several[1]}))
    store.add_record(record_of(several[3], "other"))
    store.move_ref("tiny/staging", several[2], expected=None, who="x", why="y")
    collect(store, policy(newest=0))
    assert left(world) == set(several[:3])
    assert {record.output for record in store.all_records()} == set(several[:3])


def test_metadata_names_an_artifact(
    world: World, several: list[ArtifactHash], source: Path
) -> None:
    store = world.open()
    server = put(store, source, weights={"hash": several[0]})
    store.move_ref("tiny/staging", server, expected=None, who="x", why="y")
    collect(store, NOW)
    assert left(world) == {server, several[0]}


def test_all_that_was_in_production_stays(world: World, several: list[ArtifactHash]) -> None:
    store = world.open()
    for name in ("tiny/staging", "tiny/production"):
        expected = None
        for artifact in several[:3] if name == "tiny/production" else several[3:]:
            store.move_ref(name, artifact, expected=expected, who="x", why="y")
            expected = artifact
    collect(store, NOW)
    assert left(world) == {*several[:3], several[4]}


def test_newest_of_each_stage(world: World, several: list[ArtifactHash]) -> None:
    store = world.open()
    for number, artifact in enumerate(several[:4]):
        stage = "sft" if number < 3 else "dpo"
        store.add_record(
            record_of(artifact, str(number), stage=stage, created_at=f"2026-01-0{9 - number}")
        )
    plan = collect(store, policy(newest=2))
    assert left(world) == {several[0], several[1], several[3]}
    assert plan.kept[several[0]] == "newest of sft"
    assert len(plan.records) == 1
    assert store.records(identity_of("2")) == []


def test_best_by_a_metric(world: World, several: list[ArtifactHash]) -> None:
    store = world.open()
    for number, artifact in enumerate(several[:4]):
        metrics = {"loss": {"value": abs(number - 1.0)}, "facts": {"value": float(number)}}
        store.add_record(record_of(artifact, str(number), metrics=metrics))
    plan = collect(store, policy(best=(BestBy.parse("loss:min"), BestBy.parse("facts"))))
    assert left(world) == {several[1], several[3]}
    assert plan.kept[several[1]] == "best loss of corpus (0)"
    with pytest.raises(RefusedError, match="facts, loss"):
        make_plan(store, policy(best=(BestBy.parse("accuracy"),)))
    for text in ("", "loss:best"):
        with pytest.raises(RefusedError, match="METRIC"):
            BestBy.parse(text)


def test_younger_than_some_days(world: World, several: list[ArtifactHash]) -> None:
    store = world.open()
    for number, artifact in enumerate(several[:2]):
        store.add_record(record_of(artifact, str(number)))
    time.sleep(world.dead_s)
    assert not make_plan(store, policy(days=0.1 / 86_400)).is_empty
    collect(store, policy(days=1))
    assert left(world) == set(several)


def test_a_live_lease_keeps_what_it_reaches(world: World, several: list[ArtifactHash]) -> None:
    store = world.open()
    store.add_record(record_of(several[0], "running"))
    store.add_record(record_of(several[1], "stopped"))
    running = store.acquire(
        f"stage/{identity_of('running')}", owner="x", ttl_s=60, reaches=[several[2]]
    )
    store.acquire(f"stage/{identity_of('stopped')}", owner="x", ttl_s=60).release()
    saves = store.checkpoints(identity_of("running"))
    (saves / "step-1").write_text("x")
    collect(store, policy(newest=0))
    assert left(world) == {several[0], several[2]}
    assert (saves / "step-1").exists()
    running.release()
    collect(store, policy(newest=0))
    assert left(world) == set()


def test_asked_for(world: World, several: list[ArtifactHash]) -> None:
    collect(world.open(), Settings(grace_s=0, also=(several[2],)))
    assert left(world) == {several[2]}


def test_in_training_saves_go_with_the_commit(world: World, several: list[ArtifactHash]) -> None:
    store = world.open()
    store.add_record(record_of(several[0], "done"))
    done, open_ = store.checkpoints(identity_of("done")), store.checkpoints(identity_of("open"))
    (done / "save").write_text("x")
    (open_ / "save").write_text("x")
    collect(store, Settings())
    assert done.exists()
    collect(store, NOW)
    assert not done.exists()
    assert open_.exists()
    old = time.time() - 31 * 86_400
    for path in (open_ / "save", open_):
        os.utime(path, (old, old))
    collect(store, NOW)
    assert not open_.exists()


def test_a_claim_protects(world: World, several: list[ArtifactHash]) -> None:
    """A writer that counts on objects which a plan already names."""
    store, writer = world.open(), world.open()
    plan = make_plan(store, NOW)
    tree = writer.tree(several[0])
    keys = [tree_key(several[0]), *(blob_key(entry.blob) for entry in tree.files)]
    with relying_on(writer.backend, keys):
        collect(store, NOW, plan)
        assert writer.has(several[0])
    assert left(world) == {several[0]}


def test_what_is_reached_after_the_plan_stays(world: World, several: list[ArtifactHash]) -> None:
    store, writer = world.open(), world.open()
    plan = make_plan(store, NOW)
    writer.add_record(record_of(several[0]))
    writer.move_ref("tiny/staging", several[1], expected=None, who="x", why="y")
    collect(store, NOW, plan)
    assert left(world) == set(several[:2])


def test_a_writer_waits_for_the_sweep_of_its_objects(
    world: World, several: list[ArtifactHash], source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, writer = world.open(), world.open()
    keys = [blob_of(store, several[0], "shared.txt")]
    lease = store.leases.acquire(LEASE, owner="gc", ttl_s=60)
    mark = announce(store.backend, lease, keys)
    monkeypatch.setattr("llm_assets.store.sweep.WAIT_S", 0.2)
    with pytest.raises(ConflictError, match="garbage collection is deleting"):
        put(writer, source, number=9)
    # Writers of other objects do not wait.
    writer.add_entry("ledger", "a", {"usd": 1})
    put(writer, folder_of(source.parent / "elsewhere"))
    store.backend.delete(mark)
    assert writer.has(put(writer, source, number=9))


def test_a_dead_sweep_holds_up_nobody(
    world: World, several: list[ArtifactHash], source: Path
) -> None:
    store, writer = world.open(), world.open()
    lease = store.leases.acquire(LEASE, owner="gc", ttl_s=world.ttl_s)
    announce(store.backend, lease, [blob_of(store, several[0], "shared.txt")])
    time.sleep(world.dead_s)
    assert writer.has(put(writer, source, number=9))
    assert world.keys(FOLDER) == []
    # It slept only: it notices that it was given up, and deletes nothing more.
    with pytest.raises(ConflictError):
        lease.renew()


def test_one_collection_at_a_time(world: World, several: list[ArtifactHash]) -> None:
    lease = world.open().leases.acquire(LEASE, owner="gc on another machine", ttl_s=60)
    with pytest.raises(ConflictError, match="another machine"):
        collect(world.open(), NOW)
    assert left(world) == set(several)
    lease.release()
    collect(world.open(), NOW)
    assert left(world) == set()


def test_a_sweep_that_lost_its_lease_stops(
    world: World, several: list[ArtifactHash], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = world.open()
    monkeypatch.setattr(gc, "_RENEW_S", -1.0)
    monkeypatch.setattr(gc, "TTL_S", world.ttl_s)
    original = store.delete_object

    def slow(item: Any) -> None:
        original(item)
        time.sleep(world.dead_s)
        other = world.open().leases.acquire(LEASE, owner="other", ttl_s=60)
        assert other is not None

    monkeypatch.setattr(store, "delete_object", slow)
    with pytest.raises(ConflictError, match="other"):
        collect(store, NOW)
    assert len(left(world)) == 4


def test_nothing_is_deleted_when_it_is_unknown_what_is_needed(
    world: World, several: list[ArtifactHash]
) -> None:
    store = world.open()
    store.add_record(record_of(several[0]))
    before = world.keys("objects/")
    flip(world, tree_key(several[0]))
    with pytest.raises(DamagedError, match=several[0]):
        collect(world.open(), NOW)
    [record] = world.keys("records/")
    flip(world, record)
    with pytest.raises(DamagedError):
        collect(world.open(), NOW)
    assert world.keys("objects/") == before


def test_a_damaged_tree_that_nothing_reaches_goes(
    world: World, several: list[ArtifactHash]
) -> None:
    flip(world, tree_key(several[0]))
    collect(world.open(), NOW)
    assert world.keys("objects/") == []


def test_checkouts_go_with_their_artifact(directory_world: DirectoryWorld, source: Path) -> None:
    store = directory_world.open()
    keep, drop = put(store, folder_of(source), n=1), put(store, source, n=2)
    store.add_record(record_of(keep))
    folders = [store.fetch(keep), store.fetch(drop)]
    collect(store, NOW)
    assert [folder.exists() for folder in folders] == [True, False]
    assert contents(store.fetch(keep)) == contents(source)


def test_what_is_read_stays_for_a_while(world: World, source: Path) -> None:
    store = world.open()
    folder = store.fetch(put(store, folder_of(source)))
    collect(store, Settings(grace_s=0))
    assert left(world) == set()
    assert contents(folder) == contents(source)


def test_a_writer_that_ends_a_dead_sweep_is_no_collection(
    world: World, several: list[ArtifactHash]
) -> None:
    """It holds the lease for a moment, and a collection that begins then waits."""
    store = world.open()
    lease = store.leases.acquire(LEASE, owner=WAITED, ttl_s=60)
    threading.Timer(0.3, lease.release).start()
    collect(world.open(), NOW)
    assert left(world) == set()


def test_the_cache_goes_with_the_artifact(s3_world: S3World, source: Path) -> None:
    store = s3_world.open()
    keep = put(store, folder_of(source, a_txt="keep"))
    drop = put(store, folder_of(source, a_txt="drop"))
    store.add_record(record_of(keep))
    folders = [store.fetch(keep), store.fetch(drop)]
    plan = collect(store, NOW)
    assert plan.local.size_bytes > 0
    assert [folder.exists() for folder in folders] == [True, False]
    assert len(list((store.cache / "objects" / "blobs").rglob("*/*"))) == 2


def test_unfinished_uploads_go_unless_claimed(s3_world: S3World, source: Path) -> None:
    store = s3_world.open()
    keys = [blob_key(letter * 64) for letter in "ab"]
    for key in keys:
        store.s3.call("create_multipart_upload", Key=store.s3.key(key))
    with relying_on(s3_world.open().backend, keys[:1]):
        collect(store, NOW)
        assert [key for key, _ in store.open_uploads()] == keys[:1]
    collect(store, NOW)
    assert list(store.open_uploads()) == []


def test_part_lists_go_with_their_blob(s3_world: S3World, source: Path) -> None:
    store = s3_world.open()
    folder_of(source)
    with (source / "weights.raw").open("wb") as file:
        file.truncate(64 * 2**20 + 1)
    artifact = put(store, source)
    store.add_record(record_of(artifact))
    collect(store, NOW)
    assert len(s3_world.keys("objects/parts/")) == 1
    collect(store, policy(newest=0))
    assert s3_world.keys("objects/") == []
