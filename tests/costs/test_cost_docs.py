"""docs/costs.md says what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from published_runs import HOURS

from llm_assets.cli import main
from llm_assets.costs.devices import DEVICES

TEXT = (Path(__file__).parents[2] / "docs" / "costs.md").read_text(encoding="utf-8")


def test_the_example_gives_what_it_shows(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```\n(.*?)```", TEXT, flags=re.S)
    command, shown = blocks[0].strip(), blocks[1]
    assert main(command.removeprefix("llm-assets ").split()) == 0
    assert capsys.readouterr().out == shown


def test_every_device_stands_in_the_table() -> None:
    for name, device in DEVICES.items():
        row = next(
            line for line in TEXT.splitlines() if re.search(rf"\| {name}(?: \(.*?\))? \|", line)
        )
        assert f"| {device.peak_tflops:g} |" in row


def test_every_published_run_stands_in_the_table() -> None:
    rows = [line for line in TEXT.splitlines() if line.count("|") == 6]
    for run in HOURS:
        tolerance = f"| {run.tolerance * 100:g} % |"
        name = run.name.split(" on ")[0]
        assert any(line.startswith(f"| {name},") and tolerance in line for line in rows), run.name
