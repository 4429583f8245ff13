"""The tasks of an `evals` artifact: what is there, and their first prompts."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from itertools import chain, islice, zip_longest
from pathlib import Path
from typing import Any

from llm_assets.errors import DataError
from llm_assets.stages.encoding import read_rows


def read_tasks(folder: Path) -> list[dict[str, Any]]:
    """The tasks of an `evals` artifact: rows {name, role, num_items}. DataError if it is odd."""
    path = folder / "tasks.json"
    try:
        tasks = json.loads(path.read_text(encoding="utf-8"))
        rows = [
            {"name": str(task["name"]), "role": str(task["role"]), "num_items": task["num_items"]}
            for task in tasks
        ]
        lost = [row["name"] for row in rows if not (folder / f"{row['name']}.yaml").is_file()]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _odd(path, f"{type(error).__name__}: {error}") from error
    if lost or not rows:
        raise _odd(path, f"no {', '.join(lost)}.yaml" if lost else "no task")
    return rows


def first_prompts(folder: Path, tasks: Sequence[Mapping[str, Any]], count: int) -> list[str]:
    """`count` different prompts: the first of each task, then the second of each, and so on."""
    columns = [
        [str(row["prompt"]) for row in read_rows(folder / f"{task['name']}.jsonl")[:count]]
        for task in tasks
    ]
    distinct = dict.fromkeys(chain.from_iterable(zip_longest(*columns)))
    return list(islice((prompt for prompt in distinct if prompt is not None), count))


def _odd(path: Path, found: str) -> DataError:
    return DataError(
        where=str(path),
        found=found,
        rule="tasks.json lists {name, role, num_items}, and NAME.yaml and NAME.jsonl lie beside it",
        remedy="materialize evals again",
    )
