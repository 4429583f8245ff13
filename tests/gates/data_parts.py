"""Small data sets with planted faults, as artifacts of the four types."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from llm_assets import village
from llm_assets.data_settings import VillageSettings
from llm_assets.gates.artifact_rows import Input
from llm_assets.gates.thresholds import GateResult, evaluate

Rows = Iterable[Mapping[str, Any]]
SMALL = {"villagers": 8, "corpus_documents": 200, "instructions": 300, "preferences": 300}


def settings(seed: int = 11, **more: Any) -> VillageSettings:
    """A small village."""
    return VillageSettings.model_validate({**SMALL, "seed": seed, "eval_items": 30, **more})


def data(folder: Path, kind: str, train: Rows, held_out: Rows = ()) -> Input:
    """An artifact of these rows."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = (
        {"documents.jsonl": train}
        if kind == "corpus"
        else {"train.jsonl": train, "held_out.jsonl": held_out}
    )
    for name, rows in parts.items():
        (folder / name).write_text(
            "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
        )
    return Input(path=folder, type=kind)


def of_village(folder: Path, kind: str, world: VillageSettings) -> tuple[list[Any], list[Any]]:
    """Rows of the village: to train on, and held out."""
    rows_of = {
        "corpus": village.corpus_documents,
        "instructions": village.instruction_rows,
        "preferences": village.preference_rows,
    }[kind]
    rows = list(rows_of(world))
    held_out = [row for row in rows if row.get("split") == "held_out"]
    return [row for row in rows if row.get("split") != "held_out"], held_out


def evals(folder: Path, world: VillageSettings) -> Input:
    """The village's eval tasks."""
    tasks = village.write_eval_tasks(world, folder)
    (folder / "tasks.json").write_text(json.dumps(tasks))
    return Input(path=folder, type="evals")


def own_evals(folder: Path, items: list[dict[str, Any]], name: str = "quiz") -> Input:
    """One eval task of these items."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tasks.json").write_text(
        json.dumps([{"name": name, "role": "capability", "num_items": len(items)}])
    )
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    return Input(path=folder, type="evals")


def failed(metrics: Mapping[str, Any], gates: Mapping[str, Any]) -> set[str]:
    """Names of the gates that the metrics do not pass."""
    return {result.name for result in evaluate(metrics, gates) if result.blocks}


def one(metrics: Mapping[str, Any], name: str, **gate: Any) -> GateResult:
    """The verdict of one gate."""
    (result,) = evaluate(metrics, {name: gate})
    return result
