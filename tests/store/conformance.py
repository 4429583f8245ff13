"""What docs/store.md promises, as tests that every kind of store runs (see test_conformance.py).

`world` is an empty store that can be opened again and spoiled from outside (worlds.py).
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from llm_assets.errors import (
    ConflictError,
    DamagedError,
    ModelError,
    NotFoundError,
    RefusedError,
    StoreError,
)
from llm_assets.store.canonical import seal
from llm_assets.store.digest import ArtifactHash
from llm_assets.store.document_store import blob_key, tree_key
from llm_assets.store.documents import record_body
from llm_assets.store.protocol import Store
from tests.store.samples import METADATA, folder_of, identity_of, put, record_of, write
from tests.store.worlds import World, blob_of, flip

PART = 64 * 2**20
NOWHERE = ArtifactHash("f" * 64)
EMPTY = hashlib.sha256(b"").hexdigest()


class Artifacts:
    """Put, has, tree, fetch, list."""

    def test_what_is_put_is_fetched(self, world: World, source: Path) -> None:
        files = {"a_txt": b"one", "deep__er__b_raw": os.urandom(5000), "empty_txt": b""}
        folder_of(source, **files)
        write(source / "größe 值.txt", "ü")
        artifact = put(world.open(), source, lines=["a", 1, 2.5, None, True, {"k": []}])
        store = world.open()
        assert store.has(artifact)
        assert list(store.artifacts()) == [artifact]
        tree = store.tree(artifact)
        assert tree.type == "corpus"
        assert tree.metadata == {**METADATA, "lines": ["a", 1, 2.5, None, True, {"k": []}]}
        names = ["a.txt", "deep/er/b.raw", "documents.jsonl", "empty.txt", "größe 值.txt"]
        assert [entry.path for entry in tree.files] == names
        fetched = store.fetch(artifact)
        assert contents(fetched) == contents(source)
        assert tree.size_bytes == sum(len(content) for content in contents(source).values())

    def test_the_name_is_the_hash_of_the_tree(self, world: World, source: Path) -> None:
        artifact = put(world.open(), folder_of(source))
        content = world.read(tree_key(artifact))
        assert hashlib.sha256(content).hexdigest() == artifact
        assert json.dumps(json.loads(content), sort_keys=True, separators=(",", ":")).encode() == (
            content
        )

    def test_a_large_file_is_hashed_as_s3_hashes_parts(self, world: World, source: Path) -> None:
        folder_of(source)
        with (source / "weights.raw").open("wb") as file:
            file.write(b"first")
            file.seek(PART)
            file.write(b"second")
        store = world.open()
        artifact = put(store, source)
        parts = [b"first" + bytes(PART - 5), b"second"]
        digests = b"".join(hashlib.sha256(part).digest() for part in parts)
        expected = f"{hashlib.sha256(digests).hexdigest()}-2"
        assert store.tree(artifact).files[1].blob == expected
        assert store.verify(artifact) == []
        fetched = world.open().fetch(artifact)
        assert (fetched / "weights.raw").read_bytes() == b"".join(parts)

    def test_the_same_folder_is_the_same_artifact(
        self, world: World, source: Path, tmp_path: Path
    ) -> None:
        folder_of(source, a_txt="x")
        folder_of(tmp_path / "other", a_txt="x")
        os.utime(tmp_path / "other" / "a.txt", (1, 1))
        first = put(world.open(), source)
        before = world.keys("objects/")
        assert put(world.open(), tmp_path / "other") == first
        assert world.keys("objects/") == before
        assert put(world.open(), source, more=1) != first

    def test_equal_files_are_stored_once(self, world: World, source: Path) -> None:
        folder_of(source, a_txt="same", b_txt="same", deep__c_txt="same")
        put(world.open(), source)
        assert len(world.keys("objects/blobs/")) == 2

    def test_a_changed_file_is_a_new_artifact(self, world: World, source: Path) -> None:
        store = world.open()
        first = put(store, folder_of(source, a_txt="one"))
        again = put(store, source)
        write(source / "a.txt", "two")
        second = put(store, source)
        assert first == again != second
        assert (store.fetch(first) / "a.txt").read_text() == "one"
        assert (store.fetch(second) / "a.txt").read_text() == "two"

    def test_a_fetched_folder_is_read_only_and_reused(self, world: World, source: Path) -> None:
        store = world.open()
        artifact = put(store, folder_of(source))
        folder = store.fetch(artifact)
        assert (folder / "documents.jsonl").stat().st_mode & 0o222 == 0
        assert store.fetch(artifact) == folder

    def test_a_spoiled_checkout_is_never_handed_out(self, world: World, source: Path) -> None:
        store = world.open()
        artifact = put(store, folder_of(source, a_txt="right"))
        folder = store.fetch(artifact)
        write(folder / "extra.txt", "not part of it")
        assert contents(store.fetch(artifact)) == contents(source)
        (store.fetch(artifact) / "a.txt").unlink()
        assert contents(store.fetch(artifact)) == contents(source)
        spoiled = store.fetch(artifact) / "a.txt"
        spoiled.chmod(0o644)
        spoiled.write_text("wrong")
        # A checkout of a directory store is linked to the blob, which is wrong now as well.
        try:
            assert contents(store.fetch(artifact)) == contents(source)
        except DamagedError as error:
            assert "a.txt" in str(error)
        put(store, source)
        assert contents(store.fetch(artifact)) == contents(source)

    def test_what_is_not_there_is_said_to_be_missing(self, world: World) -> None:
        store = world.open()
        assert not store.has(NOWHERE)
        for ask in (store.tree, store.fetch, store.verify):
            with pytest.raises(NotFoundError, match="f" * 12):
                ask(NOWHERE)

    def test_a_link_inside_the_folder_counts_as_its_file(self, world: World, source: Path) -> None:
        folder_of(source, a_txt="here")
        (source / "b.txt").symlink_to("a.txt")
        store = world.open()
        folder = store.fetch(put(store, source))
        assert (folder / "b.txt").read_text() == "here"
        assert not (folder / "b.txt").is_symlink()

    def test_empty_folders_are_no_part_of_it(self, world: World, source: Path) -> None:
        store = world.open()
        first = put(store, folder_of(source))
        (source / "empty").mkdir()
        assert put(store, source) == first

    def test_checkpoints_have_one_folder_for_an_identity(self, world: World) -> None:
        store = world.open()
        folder = store.checkpoints(identity_of("x"))
        assert folder.is_dir()
        assert store.checkpoints(identity_of("x")) == folder
        assert store.checkpoints(identity_of("y")) != folder

    def test_it_is_a_store(self, world: World) -> None:
        store: Store = world.open()
        assert store.url

    def test_another_format_is_refused(self, world: World) -> None:
        world.write("format.json", b'{"format":2,"what":"llm-assets store"}')
        with pytest.raises(RefusedError, match="format 2"):
            world.open()


class Refusals:
    """What a store does not take; and nothing of it is visible after."""

    @pytest.fixture(autouse=True)
    def nothing_is_left(self, world: World) -> Any:
        """After every refusal the store is as empty as before."""
        yield
        assert world.keys("objects/") == []
        assert world.keys("tmp/claims") == []
        assert [key for key in world.keys("tmp/") if not key.endswith(".lock")] == []

    @pytest.mark.parametrize(
        "target", ["../outside", "/etc/hostname", "nowhere", "sub", "../source"]
    )
    def test_a_link_that_leaves_the_folder(self, world: World, source: Path, target: str) -> None:
        folder_of(source, sub__a_txt="x")
        write(source.parent / "outside", "secret")
        (source / "link").symlink_to(target)
        with pytest.raises(RefusedError, match="symbolic link"):
            put(world.open(), source)

    def test_a_linked_folder(self, world: World, source: Path, tmp_path: Path) -> None:
        folder_of(tmp_path / "elsewhere")
        folder_of(source)
        (source / "sub").symlink_to(tmp_path / "elsewhere")
        with pytest.raises(RefusedError, match="symbolic link"):
            put(world.open(), source)

    def test_a_pipe(self, world: World, source: Path) -> None:
        os.mkfifo(folder_of(source) / "pipe")
        with pytest.raises(RefusedError, match="device, socket or pipe"):
            put(world.open(), source)

    @pytest.mark.parametrize(
        ("one", "other"),
        [
            ("README", "readme"),
            ("caf\u00e9.txt", "cafe\u0301.txt"),
            ("A/x.txt", "a/y.txt"),
            ("stra\u00dfe", "STRASSE"),
        ],
    )
    def test_names_that_look_the_same(
        self, world: World, source: Path, one: str, other: str
    ) -> None:
        folder_of(source)
        write(source / one, "1")
        write(source / other, "2")
        with pytest.raises(RefusedError, match="case or Unicode normalization"):
            put(world.open(), source)

    @pytest.mark.parametrize("name", ["a\nb", "a\\b", "a\x7fb", b"\xff.txt"])
    def test_names_that_no_other_system_takes(
        self, world: World, source: Path, name: str | bytes
    ) -> None:
        folder_of(source)
        (source / os.fsdecode(name)).write_text("x")
        with pytest.raises(RefusedError):
            put(world.open(), source)

    def test_no_folder(self, world: World, source: Path) -> None:
        with pytest.raises(RefusedError, match="folder"):
            put(world.open(), source / "missing")
        write(source / "file", "x")
        with pytest.raises(RefusedError, match="folder"):
            put(world.open(), source / "file")

    def test_an_empty_folder(self, world: World, source: Path) -> None:
        (source / "sub").mkdir()
        with pytest.raises(RefusedError, match="no file"):
            put(world.open(), source)

    def test_an_unknown_type(self, world: World, source: Path) -> None:
        with pytest.raises(RefusedError, match="'model'"):
            world.open().put(folder_of(source), type="model", metadata={})

    def test_an_artifact_that_is_not_what_its_type_says(self, world: World, source: Path) -> None:
        store = world.open()
        write(source / "other.txt", "x")
        with pytest.raises(ModelError, match=r"documents\.jsonl"):
            put(store, source)
        folder_of(source)
        with pytest.raises(ModelError, match="num_rows"):
            store.put(source, type="corpus", metadata={})
        write(source / "weights.bin", b"\x80\x04")
        with pytest.raises(ModelError, match="pickle"):
            put(store, source)

    @pytest.mark.parametrize(
        "value", [float("nan"), float("inf"), b"bytes", {1: 2}, {"a": {3}}, "\ud800", 2**64, Path()]
    )
    def test_metadata_that_is_no_json(self, world: World, source: Path, value: Any) -> None:
        with pytest.raises(RefusedError, match="metadata"):
            put(world.open(), folder_of(source), value=value)

    def test_metadata_without_end(self, world: World, source: Path) -> None:
        nested: dict[str, Any] = {}
        nested["again"] = nested
        with pytest.raises(RefusedError, match="nested"):
            put(world.open(), folder_of(source), value=nested)


class Damage:
    """Bytes that went wrong behind the store's back."""

    @pytest.fixture
    def artifact(self, world: World, source: Path) -> ArtifactHash:
        """An artifact of three files."""
        return put(world.open(), folder_of(source, a_txt="a" * 1000, sub__b_txt="b"))

    def test_whole(self, world: World, artifact: ArtifactHash) -> None:
        assert world.open().verify(artifact) == []
        assert world.open().verify(artifact, deep=True) == []

    def test_a_flipped_byte(self, world: World, artifact: ArtifactHash, source: Path) -> None:
        flip(world, blob_of(world.open(), artifact, "a.txt"))
        for deep in (False, True):
            [damage] = world.open().verify(artifact, deep=deep)
            assert (damage.artifact, damage.path) == (artifact, "a.txt")
        with pytest.raises(DamagedError, match=r"a\.txt|blob"):
            world.open().fetch(artifact)
        assert put(world.open(), source) == artifact
        assert world.open().verify(artifact, deep=True) == []
        assert contents(world.open().fetch(artifact)) == contents(source)

    def test_a_cut_file(self, world: World, artifact: ArtifactHash, source: Path) -> None:
        key = blob_of(world.open(), artifact, "a.txt")
        world.write(key, world.read(key)[:-1])
        store = world.open()
        assert not store.has(artifact)
        assert [damage.path for damage in store.verify(artifact)] == ["a.txt"]
        with pytest.raises(DamagedError):
            store.fetch(artifact)
        assert put(world.open(), source) == artifact
        assert world.open().verify(artifact, deep=True) == []

    def test_a_missing_blob(self, world: World, artifact: ArtifactHash, source: Path) -> None:
        world.remove(blob_of(world.open(), artifact, "sub/b.txt"))
        store = world.open()
        assert not store.has(artifact)
        [damage] = store.verify(artifact)
        assert (damage.path, damage.what) == ("sub/b.txt", "missing")
        with pytest.raises(DamagedError, match="missing"):
            store.fetch(artifact)
        assert put(store, source) == artifact
        assert store.has(artifact)

    def test_a_damaged_tree(self, world: World, artifact: ArtifactHash, source: Path) -> None:
        flip(world, tree_key(artifact))
        store = world.open()
        assert not store.has(artifact)
        with pytest.raises(DamagedError, match=artifact.short):
            store.tree(artifact)
        assert [damage.path for damage in store.verify(artifact)] == [""]
        with pytest.raises(DamagedError):
            store.fetch(artifact)
        assert put(store, source) == artifact
        assert store.verify(artifact) == []

    @pytest.mark.parametrize(
        "paths",
        [
            ["../escape"],
            ["/tmp/escape"],
            ["a/../../b"],
            ["README", "readme"],
            ["cafe\u0301.txt", "caf\u00e9.txt"],
            ["a", "a/b"],
            ["a\\b"],
            ["a\u0000b"],
        ],
    )
    def test_a_tree_that_no_put_would_make(
        self, world: World, source: Path, paths: list[str]
    ) -> None:
        put(world.open(), folder_of(source))
        document = {
            "files": [{"blob": EMPTY, "path": path, "size_bytes": 0} for path in paths],
            "format": 1,
            "metadata": {},
            "type": "corpus",
        }
        content = json.dumps(
            document, sort_keys=True, separators=(",", ":"), ensure_ascii=False
        ).encode()
        artifact = ArtifactHash(hashlib.sha256(content).hexdigest())
        world.write(tree_key(artifact), content)
        world.write(blob_key(EMPTY), b"")
        store = world.open()
        with pytest.raises(RefusedError, match=r"path|differ|backslash"):
            store.fetch(artifact)
        assert not (store.local_root / "checkouts" / artifact).exists()


class Records:
    """The commits of stages."""

    @pytest.fixture
    def artifact(self, world: World, source: Path) -> ArtifactHash:
        """An artifact."""
        return put(world.open(), folder_of(source))

    def test_a_record_comes_back_as_it_was(self, world: World, artifact: ArtifactHash) -> None:
        record = record_of(artifact)
        world.open().add_record(record)
        assert world.open().records(record.identity) == [record]
        assert list(world.open().all_records()) == [record]
        assert world.open().records(identity_of("none")) == []

    def test_records_stay_in_order(self, world: World, artifact: ArtifactHash) -> None:
        store = world.open()
        # The time that a record tells may come from a machine with a wrong clock.
        records = [record_of(artifact, run_id=str(n), created_at=f"{2030 - n}") for n in range(12)]
        for record in records:
            store.add_record(record)
        assert world.open().records(records[0].identity) == records
        other = record_of(artifact, "two")
        store.add_record(other)
        assert len(list(store.all_records())) == 13
        assert store.records(other.identity) == [other]

    def test_the_same_record_is_one_commit(self, world: World, artifact: ArtifactHash) -> None:
        for _ in range(2):
            world.open().add_record(record_of(artifact))
        assert len(world.open().records(identity_of("one"))) == 1

    def test_the_output_must_be_there(self, world: World) -> None:
        with pytest.raises(NotFoundError, match="put the artifact before"):
            world.open().add_record(record_of(NOWHERE))
        assert world.open().records(identity_of("one")) == []

    @pytest.mark.parametrize(
        "change",
        [
            {"metrics": {"loss": {"value": float("nan")}}},
            {"metrics": {"loss": 1.0}},
            {"seed": "seventeen"},
            {"inputs": {"base": 3}},
            {"recipe": {"a": object()}},
            {"samples": ["text"]},
        ],
    )
    def test_a_value_that_is_none(
        self, world: World, artifact: ArtifactHash, change: dict[str, Any]
    ) -> None:
        with pytest.raises(RefusedError):
            world.open().add_record(record_of(artifact, **change))
        assert world.open().records(identity_of("one")) == []

    def test_damage_and_other_formats(self, world: World, artifact: ArtifactHash) -> None:
        world.open().add_record(record_of(artifact))
        [key] = world.keys("records/")
        content = world.read(key)
        world.write(key, content.replace(b'"format":1', b'"format":7'))
        with pytest.raises(RefusedError, match="format 7"):
            world.open().records(identity_of("one"))
        world.write(key, content.replace(b'"seed":17', b'"seed":18'))
        with pytest.raises(DamagedError, match="digest"):
            world.open().records(identity_of("one"))
        world.write(key, content[:-1])
        with pytest.raises(DamagedError):
            list(world.open().all_records())

    def test_a_record_under_another_identity(self, world: World, artifact: ArtifactHash) -> None:
        world.open().add_record(record_of(artifact))
        [key] = world.keys("records/")
        other = identity_of("two")
        world.write(f"records/{other[:2]}/{other}/{key.rpartition('/')[2]}", world.read(key))
        with pytest.raises(DamagedError, match="record of"):
            world.open().records(other)


class Refs:
    """The only mutable names."""

    @pytest.fixture
    def artifacts(self, world: World, source: Path) -> list[ArtifactHash]:
        """Three artifacts."""
        store = world.open()
        folder_of(source)
        return [put(store, source, number=number) for number in range(3)]

    def test_moves_are_compared_and_logged(
        self, world: World, artifacts: list[ArtifactHash]
    ) -> None:
        store, other = world.open(), world.open()
        name = "tiny/production"
        assert store.ref(name) is None
        store.move_ref(name, artifacts[0], expected=None, who="ann", why="first")
        other.move_ref(name, artifacts[1], expected=artifacts[0], who="bob", why="better")
        with pytest.raises(ConflictError, match="tiny/production"):
            store.move_ref(name, artifacts[2], expected=artifacts[0], who="ann", why="late")
        with pytest.raises(ConflictError):
            store.move_ref(name, artifacts[2], expected=None, who="ann", why="late")
        assert store.ref(name) == artifacts[1]
        store.move_ref(name, artifacts[0], expected=artifacts[1], who="ann", why="back")
        log = other.ref_log(name)
        assert [(move.artifact, move.previous, move.who, move.why) for move in log] == [
            (artifacts[0], None, "ann", "first"),
            (artifacts[1], artifacts[0], "bob", "better"),
            (artifacts[0], artifacts[1], "ann", "back"),
        ]
        assert [move.at for move in log] == sorted(move.at for move in log)

    def test_many_moves(self, world: World, artifacts: list[ArtifactHash]) -> None:
        store = world.open()
        for number in range(11):
            expected = artifacts[(number - 1) % 3] if number else None
            store.move_ref(
                "a/b", artifacts[number % 3], expected=expected, who="x", why=str(number)
            )
        assert store.ref("a/b") == artifacts[10 % 3]
        assert [move.why for move in store.ref_log("a/b")] == [str(n) for n in range(11)]

    def test_names_do_not_meet(self, world: World, artifacts: list[ArtifactHash]) -> None:
        store = world.open()
        names = ["tiny", "tiny/staging", "tiny/staging/000000000001.json", "Tiny 2/größe%", "a/.b"]
        for number, name in enumerate(names):
            store.move_ref(name, artifacts[number % 3], expected=None, who="x", why=name)
        assert store.refs() == {name: artifacts[n % 3] for n, name in enumerate(names)}
        assert list(store.refs()) == sorted(names)
        for name in names:
            assert [move.why for move in store.ref_log(name)] == [name]
        for name in ("", "a//b", "/a", "a/", "x" * 2000):
            with pytest.raises(RefusedError):
                store.ref(name)

    def test_a_ref_stands_on_an_artifact(self, world: World) -> None:
        with pytest.raises(NotFoundError):
            world.open().move_ref("a/b", NOWHERE, expected=None, who="x", why="y")
        assert world.open().refs() == {}
        assert world.open().ref_log("a/b") == []


class Entries:
    """Write-once documents."""

    def test_written_once(self, world: World) -> None:
        store = world.open()
        store.add_entry("ledger", "tiny/1", {"usd": 1.5, "stage": "sft"})
        world.open().add_entry("ledger", "tiny/1", {"stage": "sft", "usd": 1.5})
        with pytest.raises(ConflictError, match="tiny/1"):
            store.add_entry("ledger", "tiny/1", {"usd": 2.5, "stage": "sft"})
        assert list(store.entries("ledger")) == [("tiny/1", {"usd": 1.5, "stage": "sft"})]
        assert list(store.entries("approvals")) == []

    def test_prefix_and_order(self, world: World) -> None:
        store = world.open()
        keys = ["b", "a/2", "a/10", "a", "a.json/x", "a.json", "ab", "2026-01-01T00:00:00+00:00/é"]
        for key in keys:
            store.add_entry("approvals", key, {"key": key})
        found = list(world.open().entries("approvals"))
        assert [key for key, _ in found] == sorted(keys)
        assert all(body == {"key": key} for key, body in found)
        assert [key for key, _ in store.entries("approvals", "a/")] == ["a/10", "a/2"]
        assert [key for key, _ in store.entries("approvals", "a")] == [
            "a", "a.json", "a.json/x", "a/10", "a/2", "ab",
        ]  # fmt: skip

    @pytest.mark.parametrize("kind", ["objects", "refs", "tmp", "gc", "../x", "", "Ledger", "a b"])
    def test_kinds_that_are_not_given(self, world: World, kind: str) -> None:
        with pytest.raises(RefusedError, match="kind"):
            world.open().add_entry(kind, "key", {})

    def test_bodies_are_json(self, world: World) -> None:
        with pytest.raises(RefusedError):
            world.open().add_entry("ledger", "key", {"usd": float("inf")})
        with pytest.raises(RefusedError):
            world.open().add_entry("ledger", "../../key//x", {"usd": 1})
        assert list(world.open().entries("ledger")) == []

    def test_dots_stay_inside(self, world: World) -> None:
        store = world.open()
        store.add_entry("ledger", "../../key", {"usd": 1})
        assert [key for key, _ in store.entries("ledger")] == ["../../key"]
        assert world.keys("ledger/") == ["ledger/%2E./%2E./key.json"]

    def test_an_entry_under_another_key(self, world: World) -> None:
        store = world.open()
        store.add_entry("ledger", "a", {"usd": 1})
        world.write("ledger/b.json", world.read("ledger/a.json"))
        with pytest.raises(DamagedError, match="ledger"):
            list(store.entries("ledger"))


class Leases:
    """One owner at a time, and the old one can't commit."""

    @pytest.fixture
    def artifact(self, world: World, source: Path) -> ArtifactHash:
        """An artifact."""
        return put(world.open(), folder_of(source))

    def test_one_owner(self, world: World) -> None:
        store, other = world.open(), world.open()
        lease = store.acquire("stage/x", owner="ann", ttl_s=60)
        assert lease.name == "stage/x" and lease.owner == "ann"
        assert other.acquire("stage/x", owner="bob", ttl_s=60) is None
        assert other.acquire("stage/y", owner="bob", ttl_s=60) is not None
        assert other.lease_owner("stage/x") == "ann"
        lease.check()
        lease.renew()
        lease.release()
        assert other.lease_owner("stage/x") is None
        with pytest.raises(ConflictError):
            lease.check()
        with pytest.raises(ConflictError):
            lease.renew()
        taken = other.acquire("stage/x", owner="bob", ttl_s=60)
        lease.release()
        assert store.lease_owner("stage/x") == "bob"
        taken.check()

    def test_a_heartbeat_keeps_it(self, world: World) -> None:
        store = world.open()
        lease = store.acquire("a", owner="ann", ttl_s=2 * world.ttl_s)
        began = time.monotonic()
        while time.monotonic() - began < 2 * world.ttl_s + world.dead_s:
            time.sleep(world.ttl_s / 2)
            lease.renew()
        assert world.open().acquire("a", owner="bob", ttl_s=60) is None

    def test_taken_over_when_the_heartbeat_is_old(
        self, world: World, artifact: ArtifactHash
    ) -> None:
        store = world.open()
        old = store.acquire("a", owner="ann", ttl_s=world.ttl_s)
        time.sleep(world.dead_s)
        assert store.lease_owner("a") is None
        new = world.open().acquire("a", owner="bob", ttl_s=60)
        assert new is not None
        for lost in (
            old.check,
            old.renew,
            lambda: store.add_record(record_of(artifact), lease=old),
        ):
            with pytest.raises(ConflictError, match="bob"):
                lost()
        assert store.records(identity_of("one")) == []
        old.release()
        assert store.lease_owner("a") == "bob"
        world.open().add_record(record_of(artifact), lease=new)
        assert len(store.records(identity_of("one"))) == 1

    def test_old_but_not_taken_may_go_on(self, world: World, artifact: ArtifactHash) -> None:
        store = world.open()
        lease = store.acquire("a", owner="ann", ttl_s=world.ttl_s)
        time.sleep(world.dead_s)
        lease.renew()
        assert store.lease_owner("a") == "ann"
        store.add_record(record_of(artifact), lease=lease)
        assert len(world.open().records(identity_of("one"))) == 1

    def test_a_commit_keeps_the_lease(self, world: World, artifact: ArtifactHash) -> None:
        store = world.open()
        lease = store.acquire("a", owner="ann", ttl_s=60)
        store.add_record(record_of(artifact), lease=lease)
        store.add_record(record_of(artifact, run_id="second"), lease=lease)
        lease.renew()
        lease.check()
        assert world.open().lease_owner("a") == "ann"
        lease.release()
        assert world.open().lease_owner("a") is None
        assert len(store.records(identity_of("one"))) == 2

    def test_a_released_lease_can_not_commit(self, world: World, artifact: ArtifactHash) -> None:
        store = world.open()
        lease = store.acquire("a", owner="ann", ttl_s=60)
        lease.release()
        with pytest.raises(ConflictError):
            store.add_record(record_of(artifact), lease=lease)
        assert store.records(identity_of("one")) == []

    def test_a_commit_whose_owner_died_is_published_by_the_next(
        self, world: World, artifact: ArtifactHash
    ) -> None:
        store = world.open()
        lease = store.acquire("a", owner="ann", ttl_s=world.ttl_s)
        lease.commit(record_body(record_of(artifact)))
        assert store.records(identity_of("one")) == []
        time.sleep(world.dead_s)
        taken = world.open().acquire("a", owner="bob", ttl_s=60)
        assert taken is not None
        assert world.open().records(identity_of("one")) == [record_of(artifact)]

    def test_a_sleeper_whose_number_is_free_again_can_not_commit(
        self, world: World, artifact: ArtifactHash
    ) -> None:
        store = world.open()
        sleeper = store.acquire("a", owner="ann", ttl_s=world.ttl_s)
        time.sleep(world.dead_s)
        # Others come and go, and their old documents are pruned: also the sleeper's next number.
        for number in range(3):
            world.open().acquire("a", owner=str(number), ttl_s=60).release()
        last = world.open().acquire("a", owner="last", ttl_s=60)
        assert "leases/a/000000000002.json" not in world.keys("leases/")
        with pytest.raises(ConflictError, match="last"):
            store.add_record(record_of(artifact), lease=sleeper)
        assert store.records(identity_of("one")) == []
        last.check()

    def test_a_sleeper_that_takes_a_number_of_the_past_has_nothing(
        self, world: World, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store = world.open()
        store.acquire("a", owner="ann", ttl_s=60).release()
        seen = store.leases.top("a")
        for number in range(3):
            world.open().acquire("a", owner=str(number), ttl_s=60).release()
        last = world.open().acquire("a", owner="last", ttl_s=60)
        look, first = store.leases.top, iter([seen])
        monkeypatch.setattr(store.leases, "top", lambda name: next(first, None) or look(name))
        assert store.acquire("a", owner="sleeper", ttl_s=60) is None
        last.check()
        assert store.lease_owner("a") == "last"

    def test_the_lease_of_a_dead_owner_is_ended(self, world: World) -> None:
        store = world.open()
        lease = store.acquire("a", owner="ann", ttl_s=60)
        world.open().end_lease("a", "bob")
        lease.check()
        world.open().end_lease("a", "ann")
        assert store.lease_owner("a") is None
        with pytest.raises(ConflictError):
            lease.renew()
        taken = world.open().acquire("a", owner="bob", ttl_s=60)
        assert taken is not None
        world.open().end_lease("a", "ann")
        taken.check()
        world.open().end_lease("never taken", "ann")

    def test_a_commit_of_a_dead_owner_is_published_when_its_lease_is_ended(
        self, world: World, artifact: ArtifactHash
    ) -> None:
        lease = world.open().acquire("a", owner="ann", ttl_s=60)
        lease.commit(record_body(record_of(artifact)))
        assert world.open().records(identity_of("one")) == []
        world.open().end_lease("a", "ann")
        assert world.open().records(identity_of("one")) == [record_of(artifact)]

    def test_a_time_to_live_is_positive(self, world: World) -> None:
        for ttl_s in (0, -1, float("nan")):
            with pytest.raises(RefusedError, match="time to live"):
                world.open().acquire("a", owner="ann", ttl_s=ttl_s)

    def test_a_damaged_lease_is_no_free_lease(self, world: World) -> None:
        store = world.open()
        store.acquire("a", owner="ann", ttl_s=60)
        [key] = world.keys("leases/")
        body = {"name": "other", "number": 1}
        for content in (world.read(key)[:-1], seal(body, "lease")):
            world.write(key, content)
            with pytest.raises(StoreError):
                store.acquire("a", owner="bob", ttl_s=60)


SAVED = {"model.raw": os.urandom(5000), "empty": b"", "manifest.json": b"{}"}


def save_in(folder: Path, name: str = "save-1", files: dict[str, bytes] = SAVED) -> Path:
    """A save's folder."""
    (folder / name).mkdir(parents=True)
    for file, content in files.items():
        (folder / name / file).write_bytes(content)
    return folder / name


class Saves:
    """In-training saves: a folder on this machine, and what outlives it."""

    def test_a_folder_for_each_identity(self, world: World) -> None:
        store = world.open()
        assert store.checkpoint_folders() == {}
        one, two = identity_of("one"), identity_of("two")
        folders = {one: store.checkpoints(one), two: store.checkpoints(two)}
        assert store.checkpoint_folders() == folders
        assert store.checkpoints(one) == folders[one] and folders[one].is_dir()
        (folders[one].parent / "not an identity").mkdir()
        assert store.checkpoint_folders() == folders
        assert list(store.artifacts()) == []

    def test_a_save_is_found_from_another_machine(self, world: World, tmp_path: Path) -> None:
        """In the folder, where that is the store's own; else as a copy."""
        store, one = world.open(), identity_of("one")
        save = save_in(store.checkpoints(one))
        remote = store.remote_saves(one)
        if remote is None:
            assert contents(world.open().checkpoints(one) / "save-1") == SAVED
            assert world.open().remote_identities() == []
            return
        assert world.open().remote_identities() == remote.names() == []
        assert remote.put(save, {"step": 1}) == sum(map(len, SAVED.values()))
        other = world.open()
        assert other.remote_identities() == [one]
        assert other.checkpoint_folders() == {}
        found = other.remote_saves(one)
        assert (found.names(), found.about("save-1")) == (["save-1"], {"step": 1})
        found.fetch("save-1", tmp_path / "got")
        assert contents(tmp_path / "got") == SAVED
        assert found.damage("save-1") == {}
        assert list(other.artifacts()) == []


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
