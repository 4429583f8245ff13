"""Which files a source names, the fingerprint of their content, and the hub without a network."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from llm_assets.data_settings import DataSettings, FileSource, HubSource
from llm_assets.errors import DataError
from llm_assets.reading import fingerprint
from llm_assets.reading.fingerprint import HashCache, expand, resolve_files, source_hash_of
from llm_assets.reading.rows import load_hub
from llm_assets.stages.data import run_instructions
from tests.reading.reading_parts import chats, context, files, write_jsonl


def source(pattern: str | list[str], **more: Any) -> FileSource:
    return FileSource.model_validate(files(pattern, **more))


def labels(pattern: str | list[str], folder: Path) -> list[str]:
    return [file.label for file in resolve_files(source(pattern), folder)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b.jsonl", "a.jsonl", "deep/c.jsonl", "deep/er/d.jsonl", "deep/er/e.csv"):
        path = tmp_path / "data" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(path, chats(2))
    return tmp_path


def test_paths_and_globs(folder: Path) -> None:
    assert labels("data/a.jsonl", folder) == ["a.jsonl"]
    assert labels("data/*.jsonl", folder) == ["a.jsonl", "b.jsonl"]
    assert labels("data/**/*.jsonl", folder) == [
        "a.jsonl",
        "b.jsonl",
        "deep/c.jsonl",
        "deep/er/d.jsonl",
    ]
    assert labels("../data/d*/*.jsonl", folder / "data") == ["deep/c.jsonl"]
    assert labels(str(folder / "data" / "*.jsonl"), Path("/")) == ["a.jsonl", "b.jsonl"]
    assert labels(["data/b.jsonl", "data/*.jsonl"], folder) == ["a.jsonl", "b.jsonl"]


def test_a_folder_with_brackets_in_its_name(folder: Path) -> None:
    odd = folder / "run [1]"
    (folder / "data").rename(odd)
    assert labels("*.jsonl", odd) == ["a.jsonl", "b.jsonl"]
    assert labels("run [1]/a.jsonl", folder) == ["a.jsonl"]


def test_names_are_the_same_in_both_unicode_forms(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "re\u0301sume\u0301.jsonl", chats(1))
    assert labels("*.jsonl", tmp_path) == ["r\xe9sum\xe9.jsonl"]


def test_a_name_that_is_no_utf_8(tmp_path: Path) -> None:
    path = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9.jsonl"))
    try:
        write_jsonl(path, chats(1))
    except OSError:
        pytest.skip("this file system takes UTF-8 names only")
    assert labels("*.jsonl", tmp_path) == ["caf\ufffd.jsonl"]


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("data/*.parquet", "nothing matches"),
        ("data/d*", "only directories match"),
        ("data", "a directory"),
        ("data/x.jsonl", "no such file"),
        ("nowhere/*/x.jsonl", "nothing matches"),
        ([], "no path"),
    ],
)
def test_what_names_no_file(folder: Path, pattern: str | list[str], found: str) -> None:
    with pytest.raises(DataError) as caught:
        resolve_files(source(pattern), folder)
    assert caught.value.found == found
    assert caught.value.remedy


def test_a_glob_that_matches_nothing_says_what_is_there(folder: Path) -> None:
    with pytest.raises(DataError, match=r"data holds a\.jsonl, b\.jsonl, deep"):
        resolve_files(source("data/*.parquet"), folder)


def test_variables(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DATA_HOME", raising=False)
    assert labels("${DATA_HOME:-data}/a.jsonl", folder) == ["a.jsonl"]
    monkeypatch.setenv("DATA_HOME", str(folder / "data" / "deep"))
    assert labels("${DATA_HOME:-data}/*.jsonl", folder) == ["c.jsonl"]
    assert labels("${DATA_HOME}/c.jsonl", folder) == ["c.jsonl"]
    monkeypatch.setenv("DATA_HOME", "")
    assert expand("${DATA_HOME:-}x", where="here") == "x"
    with pytest.raises(DataError, match="export DATA_HOME"):
        expand("${DATA_HOME}/x", where="here")


def settings(*sources: dict[str, Any]) -> DataSettings:
    return DataSettings.model_validate({"sources": list(sources)})


def test_the_fingerprint_is_that_of_names_and_content(folder: Path, tmp_path: Path) -> None:
    config = settings(files("data/*.jsonl"))
    first = source_hash_of(config, folder)
    moved = tmp_path / "elsewhere"
    shutil.copytree(folder / "data", moved / "data")
    assert source_hash_of(config, moved) == first
    os.utime(moved / "data" / "a.jsonl", (1, 1))
    assert source_hash_of(config, moved) == first
    (moved / "data" / "a.jsonl").rename(moved / "data" / "z.jsonl")
    assert source_hash_of(config, moved) != first
    write_jsonl(folder / "data" / "a.jsonl", chats(3))
    assert source_hash_of(config, folder) != first


def test_the_fingerprint_of_village_and_hub() -> None:
    village = {"from": "village"}
    one = DataSettings.model_validate({"sources": [village], "village": {"seed": 1}})
    two = DataSettings.model_validate({"sources": [village], "village": {"seed": 2}})
    assert source_hash_of(one, Path("/")) != source_hash_of(two, Path("/"))
    hub = {"from": "hub", "name": "a/b", "revision": "0" * 40}
    other = {**hub, "revision": "1" * 40}
    assert source_hash_of(settings(hub), Path("/")) != source_hash_of(settings(other), Path("/"))


def old(path: Path) -> Path:
    """Its times lie in the past: a file that was just written is not remembered."""
    os.utime(path, (1_000_000_000, 1_000_000_000))
    return path


def test_unchanged_files_are_not_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fingerprint, "_SETTLED_NS", -(10**12))
    path = old(write_jsonl(tmp_path / "a.jsonl", chats(2)))
    cache = HashCache(tmp_path / "cache" / "hashes.json")
    first = cache.sha256(path)
    cache.save()
    document = json.loads((tmp_path / "cache" / "hashes.json").read_text())
    (entry,) = document["files"].values()
    entry[4] = "f" * 64
    (tmp_path / "cache" / "hashes.json").write_text(json.dumps(document))
    again = HashCache(tmp_path / "cache" / "hashes.json")
    assert again.sha256(path) == "f" * 64
    # The same size and the same mtime: the inode's own time still differs.
    content = path.read_bytes()
    path.write_bytes(content.replace(b"What", b"That"))
    old(path)
    assert len(content) == path.stat().st_size
    assert again.sha256(path) not in ("f" * 64, first)


def test_a_file_that_was_just_written_is_not_remembered(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", chats(2))
    cache = HashCache(tmp_path / "hashes.json")
    cache.sha256(path)
    cache.save()
    assert not (tmp_path / "hashes.json").exists()


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": 9}', '{"version":1,"files":[]}'])
def test_a_damaged_cache_is_an_empty_one(tmp_path: Path, content: str) -> None:
    (tmp_path / "hashes.json").write_text(content)
    path = write_jsonl(tmp_path / "a.jsonl", chats(2))
    assert HashCache(tmp_path / "hashes.json").sha256(path) == HashCache(None).sha256(path)


def test_a_cache_folder_that_takes_no_files(tmp_path: Path) -> None:
    (tmp_path / "blocked").write_text("a file")
    write_jsonl(tmp_path / "a.jsonl", chats(2))
    config = settings(files("a.jsonl"))
    cached = source_hash_of(config, tmp_path, tmp_path / "blocked" / "hashes.json")
    assert cached == source_hash_of(config, tmp_path)


def test_a_hub_revision_is_a_commit() -> None:
    hub = {"from": "hub", "name": "a/b", "revision": "main"}
    with pytest.raises(DataError, match="40 hex digits"):
        source_hash_of(settings(hub), Path("/"))


def test_the_hub_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = HubSource.model_validate({"from": "hub", "name": "nobody/nothing", "revision": "0" * 40})
    with pytest.raises(DataError) as caught:
        load_hub(hub)
    assert "nobody/nothing" in caught.value.where
    assert "HF_HUB_OFFLINE" in caught.value.remedy


def test_a_hub_data_set_from_a_local_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` takes a folder for a name: the same road as a data set in its cache."""
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "copy"
    folder.mkdir()
    write_jsonl(folder / "train.jsonl", [*chats(30), {"messages": None}])
    hub = {"from": "hub", "name": str(folder), "revision": "0" * 40, "limit": 10}
    made = context(tmp_path, "instructions", sources=[hub], max_dropped=0.05)
    result = run_instructions(made)
    assert result.metadata["num_rows"] == 10
    (row,) = result.tables["dropped"]
    assert (row["reason"], row["first_lines"]) == ("none_content", "31")
