"""Drills: the command, the limits that stand for a full disk, a crash; slowly, the others."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llm_assets.cli import main
from llm_assets.costs.ledger import ledger_entries
from llm_assets.drill_command import NAMES
from llm_assets.drills import disruptions, scratch
from llm_assets.drills.disruptions import DRILLS, DrillResult, run_drill
from llm_assets.drills.scratch import Place, Scratch
from llm_assets.errors import WorkerError
from llm_assets.recipe import load_recipe


def result(name: str, recovered: bool) -> DrillResult:
    return DrillResult(
        name=name, detected=True, recovered=recovered, steps_lost=3, recovery_s=1.5, said="it said"
    )


@pytest.mark.parametrize("recovered", [True, False])
def test_the_command_reports_and_fails(
    recovered: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen = {name: lambda _, name=name: result(name, recovered) for name in NAMES}
    monkeypatch.setattr(disruptions, "DRILLS", chosen)
    assert main(["drill", "--all", "--json"]) == (0 if recovered else 1)
    rows = json.loads(capsys.readouterr().out)["drills"]
    assert [row["name"] for row in rows] == list(NAMES)
    wanted = {"name", "detected", "recovered", "steps_lost", "recovery_s"}
    assert all(wanted <= row.keys() for row in rows)
    assert main(["drill", "crash", "--keep", str(tmp_path)]) == (0 if recovered else 1)
    assert "crash" in capsys.readouterr().out


def test_every_drill_is_there() -> None:
    assert tuple(DRILLS) == NAMES
    assert main(["drill"]) == 2
    assert main(["drill", "earthquake"]) == 2


def test_a_drill_that_cannot_be_carried_out_has_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: Scratch) -> DrillResult:
        raise WorkerError("no worker")

    monkeypatch.setattr(disruptions, "DRILLS", {"crash": broken})
    assert not run_drill("crash", Scratch(tmp_path)).passed


def test_without_a_scratch_pipeline_no_drill_is_carried_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "recipe.yaml"
    broken.write_text(scratch.RECIPE.read_text() + "colour: blue\n")
    monkeypatch.setattr(scratch, "RECIPE", broken)
    folder = tmp_path / "drills"
    assert main(["drill", "--all", "--keep", str(folder)]) == 1
    said = capsys.readouterr()
    assert said.out == "" and "colour" in said.err and "course.log" in said.err
    assert main(["drill", "crash", "--keep", str(folder)]) == 1
    assert "an earlier drill is there" in capsys.readouterr().err


def test_a_drill_has_nothing_of_the_users_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLM_ASSETS_STORE", "s3://mine/store")
    monkeypatch.setenv("LLM_ASSETS_WEBHOOK", "https://example.com/hook")
    environment = Place(tmp_path).environment
    assert "LLM_ASSETS_STORE" not in environment and "LLM_ASSETS_WEBHOOK" not in environment
    assert environment["LLM_ASSETS_HOME"].startswith(str(tmp_path))
    assert environment["DAGSTER_HOME"].startswith(str(tmp_path))


def test_files_of_a_process_can_be_limited(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "for line in sys.stdin:\n"
        "    try: open(sys.argv[1], 'wb').write(b'x' * 100_000); print('wrote', flush=True)\n"
        "    except OSError as error: print(error, flush=True)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "file")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    said = []
    for size in (50_000, -1):
        disruptions._limit_files(process.pid, size)
        process.stdin.write("again\n")
        process.stdin.flush()
        said.append(process.stdout.readline())
    process.communicate()
    assert "File too large" in said[0]
    assert said[1] == "wrote\n"


def test_a_small_file_system_is_seen_by_the_run_only(tmp_path: Path) -> None:
    prefix = disruptions._limited_mount(tmp_path, 65536)
    if not prefix:
        pytest.skip("this machine allows no mount of its own")
    script = "import sys; open(sys.argv[1], 'wb').write(b'x' * 100_000)"
    command = [*prefix, sys.executable, "-c", script, str(tmp_path / "file")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert "No space left on device" in done.stderr
    assert os.listdir(tmp_path) == []


def test_a_killed_worker_is_tried_again_from_its_save_and_both_are_paid(tmp_path: Path) -> None:
    found = run_drill("crash", Scratch(tmp_path))
    assert found.passed, found
    assert found.steps_lost is not None and found.steps_lost <= 40
    place = Place(tmp_path / "drill-1")
    entries = [
        entry
        for entry in ledger_entries(place.store(), load_recipe(place.recipe).campaign)
        if entry.info.stage == "base_checkpoint"
    ]
    assert sorted(entry.status for entry in entries) == ["done", "killed"]
    assert len({entry.info.identity for entry in entries}) == 1
    assert all(entry.usage.cost_usd > 0 for entry in entries)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES[1:])
def test_a_drill_passes(name: str, tmp_path: Path) -> None:
    found = run_drill(name, Scratch(tmp_path))
    assert found.passed, found
