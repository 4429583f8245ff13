"""`llm-assets store`, as a user calls it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from llm_assets.errors import DamagedError, NotFoundError, RefusedError
from llm_assets.store.commands import store as command
from tests.store.conformance import contents
from tests.store.samples import folder_of, put, record_of
from tests.store.weed import SeaweedServer
from tests.store.worlds import DirectoryWorld, S3World, World, blob_of, flip

DOCS = Path(__file__).resolve().parents[2] / "docs" / "store.md"

Run = Callable[..., Result]


@pytest.fixture
def run(world: World, s3_server: SeaweedServer, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Calls a command on the world's store."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_server.key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_server.secret)
    monkeypatch.setenv("LLM_ASSETS_STORE", world.open().url)

    def call(*arguments: str) -> Result:
        return CliRunner().invoke(command, arguments)

    return call


def good(result: Result) -> str:
    """The output of a call that worked."""
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def test_put_look_and_get(run: Run, world: World, source: Path, tmp_path: Path) -> None:
    folder_of(source, sub__a_txt="x" * 2000)
    artifact = good(run("put", str(source), "--type", "corpus", "--metadata", '{"num_rows": 7}'))
    artifact = artifact.strip()
    store = world.open()
    store.add_record(record_of(artifact))
    store.move_ref("tiny/staging", artifact, expected=None, who="x", why="y")
    listed = good(run("ls"))
    assert re.search(rf"{artifact[:12]} +corpus +corpus +2 +2\.0 KiB .*tiny/staging", listed)
    [row] = json.loads(good(run("ls", "--json", "--type", "corpus", "--stage", "corpus")))
    assert (row["artifact"], row["num_files"], row["refs"]) == (artifact, 2, ["tiny/staging"])
    assert good(run("ls", "--type", "checkpoint")) == "no artifacts\n"
    shown = good(run("show", artifact[:8]))
    for text in (artifact, "num_rows: 7", "sub/a.txt", "record    corpus of tiny", "rows: 3"):
        assert text in shown
    assert json.loads(good(run("show", "tiny/staging", "--json")))["metadata"] == {"num_rows": 7}
    folder = Path(good(run("get", artifact)).strip())
    assert contents(folder) == contents(source)
    target = tmp_path / "copy"
    good(run("get", "tiny/staging", str(target)))
    assert contents(target) == contents(source)
    (target / "sub" / "a.txt").write_text("a copy of one's own")
    assert contents(folder) == contents(source)
    assert isinstance(run("get", artifact, str(target)).exception, RefusedError)


def test_names_that_are_none(run: Run, world: World, source: Path) -> None:
    put(world.open(), folder_of(source))
    for name, error in (("abc", RefusedError), ("no/ref", NotFoundError), ("f" * 8, NotFoundError)):
        assert isinstance(run("show", name).exception, error)
    assert isinstance(run("get", "f" * 64).exception, NotFoundError)


def test_metadata_from_a_file(run: Run, source: Path, tmp_path: Path) -> None:
    folder_of(source)
    (tmp_path / "metadata.json").write_text('{"num_rows": 3}')
    options = ("--type", "corpus", "--metadata")
    good(run("put", str(source), *options, f"@{tmp_path / 'metadata.json'}"))
    for wrong in ("{", "[]", "@nowhere"):
        assert run("put", str(source), *options, wrong).exit_code == 2


def test_verify_names_what_is_damaged(run: Run, world: World, source: Path) -> None:
    store = world.open()
    artifact = put(store, folder_of(source, a_txt="x" * 100))
    store.add_record(record_of(artifact, stage="corpus_stage"))
    assert good(run("verify")) == "1 artifacts, 2 files: all whole\n"
    good(run("verify", "--deep", artifact))
    flip(world, blob_of(store, artifact, "a.txt"))
    result = run("verify")
    assert result.exit_code == 1
    assert f"artifact {artifact}, file a.txt, stage corpus_stage" in result.output
    report = json.loads(run("verify", "--json", artifact).output)
    assert [problem["path"] for problem in report["problems"]] == ["a.txt"]


def test_verify_finds_lost_artifacts_and_spoiled_documents(
    run: Run, world: World, source: Path
) -> None:
    store = world.open()
    lost, kept = put(store, folder_of(source), n=1), put(store, source, n=2)
    store.add_record(record_of(lost, stage="sft"))
    store.move_ref("tiny/production", lost, expected=None, who="x", why="y")
    store.add_record(record_of(kept, "two"))
    tree = f"objects/trees/{lost[:2]}/{lost}"
    world.remove(tree)
    result = run("verify")
    assert result.exit_code == 1
    assert f"artifact {lost}, stage sft: missing" in result.output
    assert "the ref tiny/production stands on it" in result.output
    flip(world, world.keys("records/")[0])
    flip(world, world.keys("refs/")[0])
    output = run("verify").output
    assert "file records/" in output
    assert "file refs" in output


def test_stats_count_before_and_after_deduplication(run: Run, world: World, source: Path) -> None:
    store = world.open()
    for number in range(3):
        put(store, folder_of(source, same_txt="s" * 10_000), number=number)
    found = json.loads(good(run("stats", "--json")))
    assert found["root"] == run_url(world, found["root"])
    stored = world.keys("objects/")
    assert found["objects"] == len(stored) == 5
    assert found["size_bytes"] == sum(len(world.read(key)) for key in stored)
    assert found["logical_bytes"] == 3 * sum(len(c) for c in contents(source).values())
    assert "deduplication saves 6" in good(run("stats"))


def run_url(world: World, url: str) -> str:
    """The URL of the world's store, as `stats` tells it."""
    assert url.startswith(str(world.root) if isinstance(world, DirectoryWorld) else "s3://")
    return url


def test_gc_says_before_it_deletes(run: Run, world: World, source: Path) -> None:
    store = world.open()
    kept, gone = put(store, folder_of(source), n=1), put(store, source, n=2)
    store.add_record(record_of(kept))
    assert "nothing to delete" in good(run("gc", "--dry-run"))
    everything = ("gc", "--grace-hours", "0")
    assert f"delete artifact  {gone[:12]}" in good(run(*everything, "--dry-run"))
    assert set(store.artifacts()) == {kept, gone}
    # Nobody is there to be asked.
    result = run(*everything)
    assert result.exit_code == 2 and "--yes" in result.output
    assert set(store.artifacts()) == {kept, gone}
    assert "deleted: 1 artifacts" in good(run(*everything, "--yes"))
    assert set(world.open().artifacts()) == {kept}
    planned = json.loads(good(run(*everything, "--json", "--dry-run", "--keep-newest", "1")))
    assert planned["kept"] == {kept: "newest of corpus"}
    assert isinstance(run(*everything, "--keep-best", "nothing").exception, RefusedError)
    good(run(*everything, "--yes", "--keep-days", "0"))
    assert list(world.open().artifacts()) == []


def test_gc_keeps_what_it_is_told(run: Run, world: World, source: Path) -> None:
    store = world.open()
    kept = put(store, folder_of(source), n=1)
    put(store, source, n=2)
    good(run("gc", "--grace-hours", "0", "--yes", "--keep", kept[:10]))
    assert list(world.open().artifacts()) == [kept]


def test_damage_is_an_error(run: Run, world: World, source: Path) -> None:
    store = world.open()
    artifact = put(store, folder_of(source, a_txt="x" * 100))
    flip(world, blob_of(store, artifact, "a.txt"))
    assert isinstance(run("get", artifact).exception, DamagedError)


def test_init(tmp_path: Path, s3_world: S3World, monkeypatch: pytest.MonkeyPatch) -> None:
    call = CliRunner().invoke
    folder = tmp_path / "new"
    missing = call(command, ["ls", "--store", str(folder)])
    assert isinstance(missing.exception, NotFoundError)
    for _ in range(2):
        assert good(call(command, ["init", "--store", str(folder)])) == f"store: {folder}\n"
    assert good(call(command, ["ls", "--store", str(folder)])) == "no artifacts\n"
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_world.server.key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_world.server.secret)
    lines = good(call(command, ["init", "--keep-bucket", "--store", s3_world.url()])).splitlines()
    assert lines[0] == "a new object is written once"
    assert lines[-1] == f"store: s3://{s3_world.bucket}/{s3_world.prefix}"


def test_every_command_and_option_is_documented() -> None:
    text = DOCS.read_text()
    for name, found in command.commands.items():
        assert f"llm-assets store {name}" in text, name
        for parameter in found.params:
            long = [option for option in parameter.opts if option.startswith("--")]
            if long and long[0] not in ("--json", "--store"):
                assert long[0] in text, f"{name} {long[0]}"
