"""`llm-assets run` that is told to end while a stage trains, with real processes throughout."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from base_run import base_run, make_parts

from llm_assets.checkpoints import list_saves
from llm_assets.jobs import RESUMED

STEPS = {"max_steps": 1200, "checkpoint": {"every_minutes": None, "every_steps": None}}


@pytest.mark.slow
@pytest.mark.parametrize("told", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_it_saves_ends_and_the_next_run_goes_on(tmp_path: Path, told: signal.Signals) -> None:
    run = base_run(tmp_path / "run", make_parts(tmp_path / "parts"), **STEPS)
    command = [sys.executable, "-m", "llm_assets.cli", "run", "-r", str(run.recipe_path)]
    process = subprocess.Popen(
        command,
        env={**run.environment, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    said: list[str] = []
    for line in process.stdout:
        said.append(line)
        if "base_checkpoint · step " in line:
            process.send_signal(told)
            break
    rest, _ = process.communicate(timeout=200)
    text = "".join(said) + rest
    assert process.returncode == 130, text
    assert "interrupted; the next `llm-assets run` goes on from here" in text
    logs = "".join(log.read_text() for log in (run.folder / "home" / "logs").rglob("*.log"))
    saves = list_saves(run.saves)
    assert len(saves) == 1, text + logs
    save = saves[0]
    assert save.verdict == "healthy"
    assert 0 < save.step < 1200
    assert run.store.lease_owner(f"stage/{run.identity}") is None
    assert run.records == []

    again = subprocess.run(
        command, env=run.environment, capture_output=True, text=True, timeout=600
    )
    # The gate of the base lets nothing pass, so the run ends there.
    assert again.returncode == 1, again.stdout
    assert f"goes on from {save.path.name}" in again.stdout
    (record,) = run.records
    assert int(record.environment[RESUMED]) > 0
