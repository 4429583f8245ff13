"""What a store in a directory promises beyond the conformance suite."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from llm_assets.errors import DamagedError, NotFoundError, RefusedError, StoreFullError
from llm_assets.store import open_store
from llm_assets.store.digest import BlobHash
from llm_assets.store.direct_io import DIRECT_FROM, Writer, buffer
from llm_assets.store.hashing import PART_BYTES, hash_part
from llm_assets.store.ingest import ingest
from llm_assets.store.parallel import in_parallel
from llm_assets.store.scanning import scan
from llm_assets.store.sessions import Session, reap
from tests.store.conformance import contents
from tests.store.samples import folder_of, put, write
from tests.store.worlds import DirectoryWorld, blob_of, flip

ROOT = Path(__file__).resolve().parents[2]


# Opening


def test_urls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store: Any = open_store(f"file://{tmp_path}/a%20store")
    assert store.url == f"{tmp_path}/a store"
    monkeypatch.chdir(tmp_path)
    assert open_store("a store", create=False).url == store.url
    for url in ("file://host/x", "file:"):
        with pytest.raises(RefusedError):
            open_store(url)


def test_a_store_stands_alone(tmp_path: Path) -> None:
    write(tmp_path / "photo.jpg", "x")
    with pytest.raises(RefusedError, match="other things"):
        open_store(str(tmp_path))
    with pytest.raises(RefusedError, match="no directory"):
        open_store(str(tmp_path / "photo.jpg"))
    with pytest.raises(NotFoundError, match="store init"):
        open_store(str(tmp_path / "none"), create=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["photo.jpg"]


def test_many_open_a_new_store_at_once(tmp_path: Path) -> None:
    stores = in_parallel(lambda _: open_store(str(tmp_path / "store")), range(16), 16)
    assert len(stores) == 16
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["format.json"]


def test_a_format_document_of_something_else(tmp_path: Path) -> None:
    write(tmp_path / "format.json", b'{"format":1,"what":"an album"}')
    with pytest.raises(DamagedError):
        open_store(str(tmp_path))


# Links, notes and caches


def test_files_are_linked_not_copied(directory_world: DirectoryWorld, source: Path) -> None:
    store = directory_world.open()
    artifact = put(store, folder_of(source))
    fetched = store.fetch(artifact) / "documents.jsonl"
    blob = directory_world.root / blob_of(store, artifact, "documents.jsonl")
    assert fetched.samefile(blob)


def test_what_was_put_is_not_read_again(
    directory_world: DirectoryWorld, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = directory_world.open()
    folder_of(source, a_txt="x" * 100)
    artifact = put(store, source)
    calls: list[str] = []
    monkeypatch.setattr(
        "llm_assets.store.local_objects._hash_stored", lambda *a: calls.append("hash")
    )
    store.fetch(artifact)
    assert calls == []


def test_an_unchanged_folder_is_not_read_again(
    directory_world: DirectoryWorld, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = directory_world.open()
    folder_of(source, a_txt="x" * 100)
    read: list[int] = []

    def counted(files: Any, copy_to: Any) -> Any:
        read.append(len(files))
        return ingest(files, copy_to)

    monkeypatch.setattr("llm_assets.store.directory.ingest", counted)
    artifact = put(store, source)
    # Just written: a change within the clock's grain would not show.
    assert put(store, source) == artifact
    time.sleep(2.1)
    assert put(store, source) == artifact
    assert put(store, source) == artifact
    assert read == [2, 2, 2, 0]
    # Same size and modification time, other bytes.
    before = os.stat(source / "a.txt")
    (source / "a.txt").write_text("y" * 100)
    os.utime(source / "a.txt", ns=(before.st_atime_ns, before.st_mtime_ns))
    changed = put(store, source)
    assert changed != artifact
    assert (store.fetch(changed) / "a.txt").read_text() == "y" * 100
    assert read[4:] == [1]


def test_the_stat_cache_does_not_hide_a_lost_blob(
    directory_world: DirectoryWorld, source: Path
) -> None:
    store = directory_world.open()
    artifact = put(store, folder_of(source, a_txt="x" * 100))
    time.sleep(2.1)
    put(store, source)
    for spoil in (directory_world.remove, lambda key: flip(directory_world, key)):
        spoil(blob_of(store, artifact, "a.txt"))
        assert put(store, source) == artifact
        assert store.verify(artifact) == []


def test_verify_trusts_no_note(directory_world: DirectoryWorld, source: Path) -> None:
    store = directory_world.open()
    artifact = put(store, folder_of(source, a_txt="x" * 100))
    path = directory_world.root / blob_of(store, artifact, "a.txt")
    before = path.stat()
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.write(b"y")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert store.has(artifact)
    assert [damage.path for damage in store.verify(artifact)] == ["a.txt"]
    # And what verify found is known from then on.
    with pytest.raises(DamagedError, match=r"a\.txt"):
        store.fetch(artifact)


def test_a_large_file_that_looks_stored_is_not_copied(
    directory_world: DirectoryWorld, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = directory_world.open()
    content = os.urandom(9 * 2**20)
    put(store, folder_of(source, weights_raw=content))
    copies: list[bool] = []

    def counted(files: Any, copy_to: Any) -> Any:
        found = ingest(files, copy_to)
        copies.extend(x.copy is not None for x in found if x.file.path == "weights.raw")
        return found

    monkeypatch.setattr("llm_assets.store.directory.ingest", counted)
    # Rewritten with the same bytes: found by hash.
    write(source / "weights.raw", content)
    put(store, source)
    # Other bytes in the places that are compared, and other bytes in no such place.
    write(source / "weights.raw", b"x" + content[1:])
    put(store, source)
    middle = 5 * 2**20 + 12_345
    spoiled = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    write(source / "weights.raw", spoiled)
    artifact = put(store, source)
    assert copies == [False, True, False, True]
    assert (store.fetch(artifact) / "weights.raw").read_bytes() == spoiled
    assert store.verify(artifact) == []


def test_fetches_at_the_same_time(directory_world: DirectoryWorld, source: Path) -> None:
    artifact = put(directory_world.open(), folder_of(source, a_txt="x", sub__b_txt="y"))
    folders = in_parallel(lambda _: directory_world.open().fetch(artifact), range(12), 12)
    assert set(folders) == {folders[0]}
    assert contents(folders[0]) == contents(source)


# Changing sources


@pytest.mark.parametrize("copied", [True, False])
@pytest.mark.parametrize("change", ["other bytes", "longer", "shorter", "replaced", "gone"])
def test_a_source_that_changes_is_refused(
    source: Path, tmp_path: Path, change: str, copied: bool
) -> None:
    folder_of(source, a_txt="a" * 10_000)
    files = scan(source)
    path = source / "a.txt"
    if change == "other bytes":
        time.sleep(0.02)
        path.write_text("b" * 10_000)
    elif change in ("longer", "shorter"):
        os.truncate(path, 20_000 if change == "longer" else 100)
    else:
        path.unlink()
        if change == "replaced":
            path.symlink_to("/etc/hostname")
    with pytest.raises(RefusedError, match=r"a\.txt"):
        ingest(files, lambda file: tmp_path / file.path if copied else None)


def test_a_source_that_changes_while_it_is_read(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the first byte and the last: a part that was read already gets other bytes."""
    path = source / "weights.raw"
    with path.open("wb") as file:
        file.truncate(PART_BYTES + 10)
    files = scan(source)

    def read_then_change(*arguments: Any) -> bytes:
        digest = hash_part(*arguments)
        time.sleep(0.02)
        with path.open("r+b") as file:
            file.write(b"other")
        return digest

    monkeypatch.setattr("llm_assets.store.ingest.hash_part", read_then_change)
    with pytest.raises(RefusedError, match="changed while"):
        ingest(files, lambda file: None)


def test_an_unreadable_source(source: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root reads everything")
    folder_of(source, a_txt="x")
    (source / "a.txt").chmod(0)
    with pytest.raises(RefusedError, match="unreadable"):
        ingest(scan(source), lambda file: None)


# Sessions


def test_a_live_session_is_not_reaped(tmp_path: Path) -> None:
    session = Session(tmp_path)
    write(session.temporary("blob"), "x")
    assert reap(tmp_path) == 0
    other = Session(tmp_path)
    assert session.folder.exists()
    other.close()
    assert session.folder.exists()
    session.close()
    assert list((tmp_path / "tmp").iterdir()) == []


def test_a_forked_child_has_its_own_session(directory_world: DirectoryWorld, source: Path) -> None:
    store = directory_world.open()
    put(store, folder_of(source))
    mine = store.sessions.current().name
    child = os.fork()
    if child == 0:
        os._exit(0 if store.sessions.current().name != mine else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert store.sessions.current().folder.exists()


# Direct writes


@pytest.mark.parametrize("size", [DIRECT_FROM, DIRECT_FROM + 1, DIRECT_FROM + 4096, 5000])
def test_direct_writes_leave_the_same_bytes(tmp_path: Path, size: int) -> None:
    content = os.urandom(size)
    writer = Writer(tmp_path / "file", size, os.O_EXCL, 0o600)
    chunk = buffer()
    for start in range(0, size, len(chunk)):
        piece = content[start : start + len(chunk)]
        chunk[: len(piece)] = piece
        writer.write(chunk[: len(piece)], start)
    writer.close()
    writer.close()
    assert (tmp_path / "file").read_bytes() == content


# A full disk, for real: a small tmpfs in a mount namespace of its own


def _in_small_disk(tmp_path: Path, mib: int, code: str) -> str:
    disk = tmp_path / "disk"
    disk.mkdir()
    script = f"mount -t tmpfs -o size={mib}m tmpfs {disk} && exec {sys.executable} -c '{code}'"
    probe = ["unshare", "-rm", "mount", "-t", "tmpfs", "tmpfs", str(disk)]
    if shutil.which("unshare") is None or subprocess.run(probe, capture_output=True).returncode:
        pytest.skip("no user namespaces here, so no small disk")
    run = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script, str(disk)],
        capture_output=True, text=True, cwd=ROOT,
        env={**os.environ, "DISK": str(disk), "SOURCE": str(tmp_path / "source")},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    return run.stdout


_FULL = """
import os, pathlib
from llm_assets.errors import StoreFullError
from llm_assets.store import open_store
from tests.store.samples import folder_of, put
disk, source = pathlib.Path(os.environ["DISK"]), pathlib.Path(os.environ["SOURCE"])
store = open_store(str(disk / "store"))
small = put(store, folder_of(source, a_txt="x" * 1000))
folder_of(source, big_raw=os.urandom(SIZE))
try:
    put(store, source)
    raise SystemExit("it fitted")
except StoreFullError as error:
    print(error)
assert store.verify(small) == [] and list(store.artifacts()) == [small]
assert not any(path.name.endswith("blob") for path in (disk / "store").rglob("*"))
(source / "big.raw").write_bytes(os.urandom(2**20))
again = put(store, source)
assert store.verify(again) == []
"""


@pytest.mark.parametrize("mib", [5, 30])
def test_a_full_disk(tmp_path: Path, mib: int) -> None:
    """Small files fail while they are written; of large ones the space is taken first."""
    code = textwrap.dedent(_FULL).replace("SIZE", str(mib * 2**20))
    output = _in_small_disk(tmp_path, mib - 1, code)
    assert "no space left" in output
    missing = int(output.split(" bytes missing")[0].rpartition(" ")[2])
    assert 0 < missing < (mib + 1) * 2**20
    assert str(tmp_path / "disk" / "store") in output


_FULL_CACHE = """
import os, pathlib
from llm_assets.errors import StoreFullError
from llm_assets.store.opening_s3 import open_s3
from tests.store.samples import folder_of, put
from tests.store.weed import s3_client
disk, source = pathlib.Path(os.environ["DISK"]), pathlib.Path(os.environ["SOURCE"])
client = s3_client("ENDPOINT")
store = open_s3(f"URL&cache={disk}/cache", client_factory=lambda: client)
folder_of(source, a_txt="x")
small = put(store, source)
folder_of(source, big_raw=os.urandom(6 * 2**20))
big = put(store, source)
try:
    store.fetch(big)
    raise SystemExit("it fitted")
except StoreFullError as error:
    print(error)
assert not (disk / "cache" / "checkouts" / big).exists()
for path in (disk / "cache" / "partial").iterdir():
    path.unlink()
assert (store.fetch(small) / "a.txt").read_text() == "x"
assert store.verify(big) == []
"""


def test_a_full_cache(tmp_path: Path, s3_server: Any) -> None:
    url = f"s3://store-tests/full-cache?endpoint={s3_server.endpoint}"
    code = _FULL_CACHE.replace("ENDPOINT", s3_server.endpoint).replace("URL", url)
    output = _in_small_disk(tmp_path, 5, textwrap.dedent(code))
    assert "bytes missing" in output


def test_full_is_a_store_error() -> None:
    from llm_assets.store.directory_backend import disk_errors

    with pytest.raises(StoreFullError, match="bytes missing"), disk_errors(Path("/x/y"), 10**18):
        raise OSError(28, "No space left on device")
    assert BlobHash("a" * 64).short == "a" * 12
