"""The documentation says what is true: commands, links, keys of a recipe."""

import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from llm_assets.cli import _COMMANDS, app, main
from llm_assets.stage_settings import StageBlocks

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_every_command_is_in_the_docs() -> None:
    text = (ROOT / "docs" / "commands.md").read_text()
    for name in _COMMANDS:
        assert f"`llm-assets {name}" in text, f"docs/commands.md says nothing of {name}"


def test_every_command_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    context = click.Context(app)
    for name in app.list_commands(context):
        assert main([name, "--help"]) == 0
        assert "Usage:" in capsys.readouterr().out


def test_every_command_in_the_docs_exists() -> None:
    for page in PAGES:
        for name in re.findall(r"llm-assets ([a-z][a-z-]+)\b", page.read_text()):
            assert name in _COMMANDS, f"{page.name}: llm-assets {name}"


def test_every_link_leads_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_every_setting_of_a_stage_is_in_the_docs() -> None:
    text = (ROOT / "docs" / "recipes.md").read_text()
    for name, field in StageBlocks.model_fields.items():
        block = field.annotation
        assert f"| {name} |" in text, name
        for setting, entry in block.model_fields.items():  # type: ignore[union-attr]
            key = entry.alias or setting
            assert f"`{key}" in text, f"docs/recipes.md says nothing of {name}.{key}"


def test_make_targets_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for page in PAGES:
        for target in re.findall(r"(?:`|^)make ([a-z0-9]+)", page.read_text(), re.M):
            assert re.search(rf"^{target}:", makefile, re.M), f"{page.name}: make {target}"


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (["plan", "-r", "no-such"], 2, "packaged recipes"),
        (["plan", "--failed", "nothing"], 2, "unknown stage"),
        (["plan", "--failed", "quantized_weights"], 0, "inference_server"),
        (["frobnicate"], 2, "No such command"),
        (["run", "--no-such-option"], 2, "No such option"),
    ],
)
def test_exit_codes(arguments: list[str], code: int, text: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "llm_assets.cli", *arguments], capture_output=True, text=True
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert text in done.stdout + done.stderr
