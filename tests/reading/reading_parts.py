"""Small files and a stage context for the tests of reading."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from llm_assets.data_settings import DataSettings
from llm_assets.reading.problems import FileRef, FileReport
from llm_assets.reading.rows import read_file
from llm_assets.stages.context import StageContext

SHARED = Path(
    os.environ.get("LLM_ASSETS_SHARED_DATA", Path(__file__).parents[2].parent / "shared" / "data")
)
needs_shared = pytest.mark.skipif(
    not (SHARED / "README.md").is_file(), reason="the shared data are not on this machine"
)


class Quiet:
    """A progress that keeps what it was told."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def step(self, step: int, total: int, **metrics: Any) -> None:
        self.said.append(f"{step}/{total}")

    def say(self, text: str) -> None:
        self.said.append(text)


def chat(question: str, answer: str) -> dict[str, Any]:
    """A row of the form messages."""
    return {
        "messages": [
            {"role": "user", "content": question},
            {"role": "assistant", "content": answer},
        ]
    }


def chats(count: int) -> list[dict[str, Any]]:
    """Rows with different prompts."""
    return [chat(f"What is {n} and {n}?", f"It is {2 * n}.") for n in range(count)]


def pairs(count: int) -> list[dict[str, Any]]:
    """Explicit preference pairs with different prompts."""
    return [
        {"prompt": f"Say {n}.", "chosen": f"Gladly: {n}.", "rejected": f"No, not {n}!"}
        for n in range(count)
    ]


def write_jsonl(path: Path, rows: Sequence[Any]) -> Path:
    """One JSON line a row."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def files(pattern: str | list[str], **more: Any) -> dict[str, Any]:
    """A files source as a recipe has it."""
    return {"from": "files", "files": pattern, **more}


def read(path: Path, purpose: str, **more: Any) -> tuple[list[dict[str, Any]], FileReport]:
    """Usable rows of a file, and its report."""
    report = FileReport(file=FileRef(path=path, label=path.name))
    rows = [row for row, _ in read_file(report, purpose, **more)]
    return rows, report


def context(folder: Path, purpose: str, **settings: Any) -> StageContext:
    """A context whose recipe lies in `folder`; the stage writes into a folder beside."""
    place = folder / f"run-{len(list(folder.glob('run-*')))}"
    (place / "out").mkdir(parents=True)
    (place / "scratch").mkdir()
    return StageContext(
        stage=purpose,
        pipeline="test",
        config=DataSettings.model_validate(settings),
        seed=0,
        inputs={},
        out=place / "out",
        scratch=place / "scratch",
        checkpoints=place,
        progress=Quiet(),
        lineage={"recipe_folder": str(folder)},
    )


def lines(path: Path) -> list[Mapping[str, Any]]:
    """Rows of a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
