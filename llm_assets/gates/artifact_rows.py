"""Rows and words of data artifacts, as the measurements read them. No torch, no pandas."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
TRAINED = {
    "corpus": ("documents.jsonl",),
    "instructions": ("train.jsonl",),
    "preferences": ("train.jsonl",),
}
"""Files of each data set that a stage trains on."""
ALL_FILES = {
    "corpus": ("documents.jsonl",),
    "instructions": ("train.jsonl", "held_out.jsonl"),
    "preferences": ("train.jsonl", "held_out.jsonl"),
}
# A letter of a script without spaces between words is a word of its own.
_SPACELESS = "\u0e00-\u0eff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af"
_WORDS = re.compile(rf"[{_SPACELESS}]|[^\W{_SPACELESS}]+")


@dataclass(frozen=True, kw_only=True)
class Input:
    """One artifact that is measured: its folder and its type."""

    path: Path
    type: str


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a measurement gives: metrics {name: {"value", "n"}}, and for some of them the rows that
    a person reads beside the number."""

    metrics: Mapping[str, Mapping[str, Any]]
    tables: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)


def read_rows(path: Path) -> Iterator[Row]:
    """The rows of a JSONL file, one at a time."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            if line.strip():
                yield json.loads(line)


def trained_rows(data: Input) -> Iterator[Row]:
    """The rows of a data set that a stage trains on, in file order."""
    for name in TRAINED[data.type]:
        yield from read_rows(data.path / name)


def turns_of(row: Row) -> list[Mapping[str, Any]]:
    """All turns of a row, in order: of a pair the prompt, then both answers. A corpus has none."""
    if "messages" in row:
        return list(row["messages"])
    return [*row.get("prompt", ()), *row.get("chosen", ()), *row.get("rejected", ())]


def texts_of(row: Row) -> list[str]:
    """The texts of a row: its turns, or the document."""
    if "text" in row:
        return [row["text"]]
    return [turn["content"] for turn in turns_of(row)]


def words(text: str) -> list[str]:
    """Words in lower case, punctuation left out; each letter of a script without spaces is one."""
    return _WORDS.findall(text.lower())


def eval_items(evals: Input) -> Iterator[tuple[str, str, str, str]]:
    """(task, item id, prompt, prompt and right answer) of every item of every task."""
    for task in json.loads((evals.path / "tasks.json").read_text(encoding="utf-8")):
        for number, row in enumerate(read_rows(evals.path / f"{task['name']}.jsonl")):
            prompt, target = str(row["prompt"]), row.get("target", "")
            choices = row.get("choices")
            if choices and isinstance(target, int):
                target = choices[target]
            name = str(row.get("id", f"{task['name']}-{number:04d}"))
            yield task["name"], name, prompt, f"{prompt} {target}"
