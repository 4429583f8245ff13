"""Copies of in-training saves in S3: whole or not seen, damage found, cut off and gone on."""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from llm_assets.errors import DamagedError, NotFoundError, StoreUnreachableError
from llm_assets.store.gc import Settings, collect, make_plan
from llm_assets.store.s3_client import RetryPolicy
from tests.store.conformance import SAVED, contents, save_in
from tests.store.samples import folder_of, identity_of, put, record_of
from tests.store.test_store_s3 import Faulty, at_random
from tests.store.worlds import S3World, flip

ONE = identity_of("one")
FOLDER = f"checkpoints/{ONE}"
PART = 64 * 2**20


def saves_of(world: S3World) -> Any:
    return world.open().remote_saves(ONE)


@pytest.fixture
def faulty(s3_world: S3World) -> Any:
    with ExitStack() as stack:
        yield Faulty(s3_world, stack)


def test_damage_is_found_with_and_without_a_download(s3_world: S3World, tmp_path: Path) -> None:
    saves = saves_of(s3_world)
    saves.put(save_in(tmp_path), {})
    keys = {len(s3_world.read(key)): key for key in s3_world.keys(f"{FOLDER}/save-1/")}
    key = keys[len(SAVED["model.raw"])]
    flip(s3_world, key)
    assert "checksum" in saves.damage("save-1")["model.raw"]
    with pytest.raises(DamagedError, match=r"save-1, model\.raw"):
        saves.fetch("save-1", tmp_path / "flipped")
    s3_world.write(key, b"short")
    assert "5 bytes" in saves.damage("save-1")["model.raw"]
    with pytest.raises(DamagedError):
        saves.fetch("save-1", tmp_path / "short")
    s3_world.remove(key)
    assert saves.damage("save-1") == {"model.raw": "missing"}
    with pytest.raises(DamagedError, match="missing"):
        saves.fetch("save-1", tmp_path / "missing")
    # The next put of the same save makes it whole.
    saves.put(tmp_path / "save-1", {})
    assert saves.damage("save-1") == {}


def test_a_damaged_document_is_no_save(s3_world: S3World, tmp_path: Path) -> None:
    saves = saves_of(s3_world)
    saves.put(save_in(tmp_path), {})
    flip(s3_world, f"{FOLDER}/save-1.json")
    for ask in (saves.about, saves.damage, lambda name: saves.fetch(name, tmp_path / "x")):
        with pytest.raises(DamagedError):
            ask("save-1")
    with pytest.raises(NotFoundError):
        saves.about("save-2")
    # Of another identity, put in this one's place.
    other = s3_world.open().remote_saves(identity_of("two"))
    other.put(tmp_path / "save-1", {})
    s3_world.write(
        f"{FOLDER}/save-1.json", s3_world.read(f"checkpoints/{other.identity}/save-1.json")
    )
    with pytest.raises(DamagedError, match="it is of"):
        saves.about("save-1")


def test_an_upload_that_is_cut_off_is_never_seen(faulty: Faulty, tmp_path: Path) -> None:
    """Every request after the n-th fails, for every n: the old save stands until the new one is
    whole, and the next try goes on."""
    saves = saves_of(faulty.world)
    saves.put(save_in(tmp_path / "old", files={"a": b"old"}), {"of": "old"})
    new = save_in(tmp_path / "new")
    left = [50]

    def choose(_: object) -> str:
        left[0] -= 1
        return "drop" if left[0] < 0 else ""

    cut = faulty.open(choose, RetryPolicy(attempts=1)).remote_saves(ONE)
    for allowed in range(50):
        left[0] = allowed
        try:
            cut.put(new, {"of": "new"})
        except StoreUnreachableError:
            assert saves.about("save-1") == {"of": "old"}
            saves.fetch("save-1", tmp_path / "got")
            assert contents(tmp_path / "got") == {"a": b"old"}
        else:
            break
    assert allowed > 3
    assert saves.about("save-1") == {"of": "new"}
    saves.fetch("save-1", tmp_path / "got")
    assert contents(tmp_path / "got") == SAVED
    saves.tidy()
    assert len(faulty.world.keys(f"{FOLDER}/save-1/")) == len(SAVED)


def test_nothing_wrong_goes_through_a_bad_network(faulty: Faulty, tmp_path: Path) -> None:
    every = ("drop", "lost", "reset", "cut", "flip", "flip-up", "503", "500")
    store = faulty.open(at_random(3, 0.3, *every), RetryPolicy(attempts=16, base_s=0.01))
    store.remote_saves(ONE).put(save_in(tmp_path), {"n": 1})
    store.remote_saves(ONE).fetch("save-1", tmp_path / "got")
    assert contents(tmp_path / "got") == SAVED
    assert faulty.faults


def test_a_large_file_is_sent_and_fetched_in_parts_and_gone_on_with(
    faulty: Faulty, tmp_path: Path
) -> None:
    content = os.urandom(1000) + bytes(PART) + os.urandom(1000)
    save = save_in(tmp_path, files={"model.raw": content})
    saves_of(faulty.world).put(save, {})
    ((key,), target) = faulty.world.keys(f"{FOLDER}/save-1/"), tmp_path / "got"
    assert key.endswith("-2")
    cut = faulty.open(lambda request: "drop" if "range" in request.headers and "bytes=0-" in
                      request.headers["range"] else "", RetryPolicy(attempts=1))  # fmt: skip
    with pytest.raises(StoreUnreachableError):
        cut.remote_saves(ONE).fetch("save-1", target)
    on = faulty.open(lambda request: "")
    on.remote_saves(ONE).fetch("save-1", target)
    assert contents(target) == {"model.raw": content}
    ranges = [path for method, path, _ in faulty.proxy.requests if key in path]
    assert len(ranges) <= 2
    assert saves_of(faulty.world).damage("save-1") == {}


def test_drop_tidy_and_clear(s3_world: S3World, tmp_path: Path) -> None:
    saves = saves_of(s3_world)
    for number in (1, 2):
        saves.put(save_in(tmp_path, f"save-{number}"), {})
    s3_world.write(f"{FOLDER}/save-3/{'a' * 64}", b"left over")
    saves.tidy()
    assert s3_world.keys(f"{FOLDER}/save-3/") == []
    saves.drop("save-1")
    assert saves.names() == ["save-2"]
    assert s3_world.keys(f"{FOLDER}/save-1") == []
    saves.fetch("save-2", tmp_path / "got")
    saves.clear()
    assert s3_world.keys("checkpoints/") == []


def test_gc_removes_what_a_training_that_ended_left(
    s3_world: S3World, tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = s3_world.open()
    saves_of(s3_world).put(save_in(tmp_path), {})
    key = f"{s3_world.prefix}/{FOLDER}/save-2/{'a' * 64}"
    s3_world.client.create_multipart_upload(Bucket=s3_world.bucket, Key=key)
    now = Settings(grace_s=0, local_grace_s=0)
    # Neither committed nor old.
    assert make_plan(store, now).saves == ()
    lease = store.acquire(f"stage/{ONE}", owner="ann", ttl_s=60)
    store.add_record(record_of(put(store, folder_of(source))))
    plan = make_plan(store, now)
    assert (plan.saves, plan.uploads) == ((), ())
    lease.release()
    plan = make_plan(store, now)
    assert len(plan.saves) == len(SAVED) + 1 and len(plan.uploads) == 1
    assert str(ONE) in plan.as_dict()["checkpoints"]
    collect(store, now)
    assert s3_world.keys("checkpoints/") == [] and list(store.open_uploads()) == []
    # Of nobody, for 30 days.
    two = identity_of("two")
    store.remote_saves(two).put(tmp_path / "save-1", {})
    assert make_plan(store, now).saves == ()
    later = time.time() + 31 * 86_400
    monkeypatch.setattr(type(store.backend), "now", lambda self: later)
    assert len(make_plan(store, now).saves) == len(SAVED) + 1
