"""The records as the plan reads them: from the cache when they are the same documents."""

import os
from pathlib import Path

import pytest

from llm_assets import history
from llm_assets.caching import cache_folder
from llm_assets.history import History
from llm_assets.planning import make_plan
from llm_assets.recipe import load_recipe
from llm_assets.store import open_store
from llm_assets.store.protocol import Record, Store
from tests.simulation import add_record, put_output, simulate


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "store"))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Keys of the records that were parsed whole."""
    found: list[str] = []
    real = history._slim

    def slim(record: Record) -> dict[str, object]:
        found.append(record.stage)
        return real(record)

    monkeypatch.setattr(history, "_slim", slim)
    return found


def test_a_record_is_read_once(store: Store, reads: list[str]) -> None:
    recipe = load_recipe("tiny")
    simulate(recipe, store, stop_before="vocabulary", series={"loss": [[1, 2.0]]})
    reads.clear()
    newest = History(store, "tiny").newest("corpus")
    assert newest is not None
    assert newest.series == {}
    assert newest.inputs
    before = len(reads)
    assert History(store, "tiny").newest("evals") is not None
    assert len(reads) == before


def test_another_document_under_the_same_key_is_read_again(store: Store, reads: list[str]) -> None:
    recipe = load_recipe("tiny")
    plan = make_plan(recipe, store)
    first = add_record(plan, "corpus", store, output=put_output(store, "one"), at="2026-01-01")
    assert History(store, "tiny").newest("corpus").output == first.output  # type: ignore[union-attr]
    (path,) = Path(store.url, "records").rglob("*.json")
    other = put_output(store, "two")
    path.unlink()
    second = add_record(plan, "corpus", store, output=other, at="2026-01-02")
    os.utime(path, ns=(1, 1))
    assert History(store, "tiny").newest("corpus").output == second.output  # type: ignore[union-attr]
    path.unlink()
    assert History(store, "tiny").newest("corpus") is None


@pytest.mark.parametrize("content", [b"", b"{", b'{"format": 0}', b'{"format": 1, "url": "x"}'])
def test_a_broken_cache_is_no_error(store: Store, content: bytes) -> None:
    simulate(load_recipe("tiny"), store, stop_before="vocabulary")
    assert History(store, "tiny").newest("corpus") is not None
    for path in (cache_folder() / "records").glob("*.json"):
        path.write_bytes(content)
    assert History(store, "tiny").newest("corpus") is not None


def test_a_damaged_record_explains_nothing(store: Store) -> None:
    simulate(load_recipe("tiny"), store, stop_before="vocabulary")
    for path in Path(store.url, "records").rglob("*.json"):
        if b'"corpus"' in path.read_bytes() and b'"stage":"corpus"' in path.read_bytes():
            path.chmod(0o644)
            path.write_bytes(b"{}")
    assert History(store, "tiny").newest("corpus") is None
    assert History(store, "tiny").newest("evals") is not None


def test_estimates_take_other_pipelines_only_without_own_records(
    store: Store, tmp_path: Path
) -> None:
    tiny = load_recipe("tiny")
    (tmp_path / "other.yaml").write_text(
        tiny.path.read_text()
        .replace("pipeline: tiny", "pipeline: other")
        .replace("seed: 7", "seed: 8")
    )
    other = load_recipe(tmp_path / "other.yaml")
    simulate(tiny, store, stop_before="vocabulary")
    assert {r.pipeline for r in History(store, "other").estimating(["corpus"])} == {"tiny"}
    simulate(other, store, stop_before="vocabulary")
    assert {r.pipeline for r in History(store, "other").estimating(["corpus"])} == {"other"}
