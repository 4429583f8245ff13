"""In-training saves: every damage is detected, the save before is taken, nothing half is visible."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from toy import Printer, toy_settings, train_toy

from llm_assets.stages.saves import list_saves, newest_healthy, problems, read_loop, remove_old

FILES = (
    "model.safetensors",
    "optimizer.safetensors",
    "rng.safetensors",
    "loop.json",
    "trainer_state.json",
    "manifest.json",
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training folder with the saves of steps 3 and 6."""
    root = tmp_path_factory.mktemp("saves")
    train_toy(root, Printer(), settings=toy_settings(max_steps=7))
    return root


@pytest.fixture
def saves(trained: Path, tmp_path: Path) -> Path:
    """A copy of them that a test may damage."""
    return Path(shutil.copytree(trained / "checkpoints", tmp_path / "checkpoints"))


def damage(path: Path, how: str, other: Path) -> None:
    if how == "truncated":
        path.write_bytes(path.read_bytes()[:-5])
    elif how == "emptied":
        path.write_bytes(b"")
    elif how == "flipped":
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(bytes(content))
    elif how == "removed":
        path.unlink()
    else:
        path.write_bytes(other.read_bytes())


@pytest.mark.parametrize("how", ["truncated", "emptied", "flipped", "removed", "swapped"])
@pytest.mark.parametrize("name", FILES)
def test_damage_is_found_and_the_save_before_is_taken(saves: Path, name: str, how: str) -> None:
    newest, older = list_saves(saves)
    assert problems(newest) == []
    damage(newest / name, how, older / name)
    said: list[str] = []
    taken = newest_healthy(saves, said.append)
    assert taken == older
    assert len(said) == 1
    assert newest.name in said[0]
    # A damaged manifest may name any file; a damaged file names itself.
    assert name == "manifest.json" or name in said[0]


def test_a_save_under_another_step_is_refused(saves: Path) -> None:
    newest, older = list_saves(saves)
    shutil.rmtree(newest)
    shutil.copytree(older, newest)
    assert problems(newest) == ["manifest.json: is of step 3"]


def test_an_unknown_format_is_refused(saves: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    newest = list_saves(saves)[0]
    monkeypatch.setattr("llm_assets.stages.saves.FORMAT", 2)
    assert problems(newest) == ["format 1; this version reads 2"]


def test_what_an_interrupted_save_left_is_no_save_and_is_removed(saves: Path) -> None:
    newest = list_saves(saves)[0]
    shutil.copytree(newest, saves / ".writing-1-9")
    assert newest_healthy(saves, print) == newest
    remove_old(saves, keep=1)
    assert [path.name for path in saves.iterdir()] == [newest.name]


def test_a_save_holds_the_whole_loop_without_pickle(saves: Path) -> None:
    newest = list_saves(saves)[0]
    assert sorted(path.name for path in newest.iterdir()) == sorted(FILES)
    loop = read_loop(newest)
    assert loop.counters["step"] == 6
    assert loop.counters["tokens"] == 6 * 64
    moments = loop.optimizer["state"]
    parameters = sum(len(group["params"]) for group in loop.optimizer["param_groups"])
    assert len(moments) == parameters
    assert {tuple(sorted(entry)) for entry in moments.values()} == {
        ("exp_avg", "exp_avg_sq", "step")
    }
    history = json.loads((newest / "trainer_state.json").read_text())["log_history"]
    assert [entry["step"] for entry in history] == [1, 2, 3, 4, 5, 6]
