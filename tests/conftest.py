"""Every test has a home, a cache and a Dagster home of its own, and no hub."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["DAGSTER_DISABLE_TELEMETRY"] = "1"

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from llm_assets.store import open_store
from llm_assets.store.protocol import Store

if TYPE_CHECKING:
    from dagster import DagsterInstance


@pytest.fixture(autouse=True)
def own_places(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test reads or writes the places of the person who runs it."""
    home = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("LLM_ASSETS_HOME", str(home / "llm-assets"))
    monkeypatch.setenv("DAGSTER_HOME", str(home / "dagster"))
    monkeypatch.delenv("LLM_ASSETS_STORE", raising=False)
    monkeypatch.delenv("LLM_ASSETS_RECIPES", raising=False)
    return home


@pytest.fixture(scope="session", autouse=True)
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One cache of parsed sources for the whole session."""
    folder = tmp_path_factory.mktemp("cache")
    os.environ["LLM_ASSETS_CACHE"] = str(folder)
    yield folder
    del os.environ["LLM_ASSETS_CACHE"]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A new store, which is also the one of commands and assets."""
    monkeypatch.setenv("LLM_ASSETS_STORE", str(tmp_path / "store"))
    return open_store(str(tmp_path / "store"))


@pytest.fixture
def instance() -> "Iterator[DagsterInstance]":
    """A Dagster instance in memory."""
    from dagster import DagsterInstance

    with DagsterInstance.ephemeral() as made:
        yield made
