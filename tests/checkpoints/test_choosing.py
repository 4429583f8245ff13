"""Which save is gone on from, the best one, the interval: without torch."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from llm_assets.checkpoints import Manifest, best, choose, list_saves, newest_healthy
from llm_assets.checkpoints.choosing import read_choice, settle
from llm_assets.checkpoints.health import Health, write_health
from llm_assets.checkpoints.interval import automatic_interval_s, daly_interval_s
from llm_assets.errors import DamagedError


def put_save(folder: Path, step: int, verdict: str = "healthy", **metrics: float) -> Path:
    """A published save without files."""
    path = folder / f"save-{step:08d}"
    path.mkdir(parents=True)
    manifest = Manifest(
        kind="full",
        step=step,
        identity="",
        stage="base_checkpoint",
        pipeline="test",
        created_at="2026-01-01T00:00:00+00:00",
        world_size=1,
        environment={},
        counters={},
        metrics=metrics,
        data={},
        architecture={},
        lineage={},
        write_s=1.0,
        stall_s=0.1,
        files={},
    ).sealed()
    (path / "manifest.json").write_text(json.dumps(manifest))
    write_health(path, Health(verdict=verdict, checks={}, manifest_sha256=manifest["sha256"]))  # type: ignore[arg-type]
    return path


def steps(folder: Path) -> list[int]:
    return [save.step for save in list_saves(folder)]


def test_a_choice_sets_newer_saves_aside_and_keeps_who_and_why(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        put_save(tmp_path, step)
    choice = choose(tmp_path, 2, "mary", "the loss rose")
    assert steps(tmp_path) == [2, 1]
    assert (tmp_path / choice.set_aside / "save-00000003").is_dir()
    choose(tmp_path, 1, "joe", "further back")
    again = read_choice(tmp_path)
    assert again is not None
    assert (again.step, again.who) == (1, "joe")
    assert [(entry["step"], entry["who"]) for entry in again.earlier] == [(2, "mary")]
    choose(tmp_path, 0, "mary", "from the start")
    assert steps(tmp_path) == []


def test_a_choice_that_was_cut_off_is_settled_by_the_next_run(tmp_path: Path) -> None:
    for step in (1, 2):
        put_save(tmp_path, step)
    choose(tmp_path, 1, "mary", "the loss rose")
    put_save(tmp_path, 3)
    document = json.loads((tmp_path / "chosen.json").read_text())
    (tmp_path / "chosen.json").write_text(json.dumps({**document, "settled": False}))
    settle(tmp_path)
    assert steps(tmp_path) == [1]
    put_save(tmp_path, 4)
    settle(tmp_path)
    assert steps(tmp_path) == [4, 1]


def test_a_damaged_choice_is_an_error(tmp_path: Path) -> None:
    put_save(tmp_path, 1)
    (tmp_path / "chosen.json").write_text('{"step": ')
    with pytest.raises(DamagedError, match=r"chosen\.json"):
        read_choice(tmp_path)


def test_the_best_is_so_by_the_mean_rank(tmp_path: Path) -> None:
    put_save(tmp_path, 1, loss=1.0, accuracy=0.5)
    put_save(tmp_path, 2, loss=1.1, accuracy=0.9)
    put_save(tmp_path, 3, loss=1.2, accuracy=0.8)
    put_save(tmp_path, 4, verdict="corrupt", loss=0.1, accuracy=1.0)
    put_save(tmp_path, 5, loss=0.5)
    saves = list_saves(tmp_path)
    by_loss = best(saves, {"loss": "min"})
    by_both = best(saves, {"loss": "min", "accuracy": "max"})
    assert by_loss is not None
    assert by_both is not None
    assert (by_loss.step, by_both.step) == (5, 2)
    assert best(saves, {"unknown": "min"}) is None


def test_the_newest_healthy_is_so_by_verdict(tmp_path: Path) -> None:
    put_save(tmp_path, 1)
    put_save(tmp_path, 2, verdict="review")
    put_save(tmp_path, 3, verdict="corrupt")
    healthy = newest_healthy(tmp_path)
    assert healthy is not None
    assert healthy.step == 1


def test_the_interval_is_dalys() -> None:
    # Young's first term dominates for cheap saves.
    assert daly_interval_s(0.5, 86_400) == pytest.approx(math.sqrt(86_400), rel=0.01)
    # Daly 2006: 20 min of saving, MTBF 24 h.
    exact = math.sqrt(2 * 1200 * 86_400)
    ratio = 1200 / (2 * 86_400)
    assert daly_interval_s(1200, 86_400) == pytest.approx(
        exact * (1 + math.sqrt(ratio) / 3 + ratio / 9) - 1200
    )
    assert daly_interval_s(10, 4) == 4
    assert automatic_interval_s(0.001, 30.0, 3600) == 30.0


def test_the_package_imports_no_torch() -> None:
    script = "import sys, llm_assets.checkpoints; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True)
