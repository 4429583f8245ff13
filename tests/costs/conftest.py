"""A real directory store and a clock that moves by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from hand_clock import HandClock

from llm_assets.store import Store, open_store


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "store"))
