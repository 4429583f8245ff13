"""The process that measures: `python -m llm_assets.gates.measuring`, its job as JSON on stdin.

It fetches the artifacts, measures, and puts each result into the store as one write-once document.
"""

from __future__ import annotations

import datetime
import importlib
import json
import sys
import time
from collections.abc import Mapping
from typing import Any

from llm_assets.errors import ConflictError, LlmAssetsError
from llm_assets.gates.artifact_rows import Input
from llm_assets.gates.measurements import BY_NAME, KIND, Task
from llm_assets.store import open_store
from llm_assets.store.digest import ArtifactHash
from llm_assets.store.protocol import Store


def measure(store: Store, document: Mapping[str, Any]) -> None:
    """Make one measurement. LlmAssetsError when the code on disk is not what was asked for."""
    measurement = BY_NAME[document["measurement"]]
    task = Task(measurement=measurement, inputs=document["inputs"])
    if task.identity != document["identity"]:
        raise LlmAssetsError(
            f"measurement {measurement.name}: the code on disk is not the code that was planned\n"
            "  next: reload the definitions and start the run again"
        )
    started = time.monotonic()
    inputs = {}
    for name, text in task.inputs.items():
        artifact = ArtifactHash.parse(text)
        inputs[name] = Input(path=store.fetch(artifact), type=store.tree(artifact).type)
    found = importlib.import_module(measurement.module).measure(inputs)
    body = {
        "measurement": measurement.name,
        "inputs": dict(task.inputs),
        "source_hash": task.source.hash,
        "metrics": {name: dict(metric) for name, metric in found.metrics.items()},
        "tables": {name: [dict(row) for row in rows] for name, rows in found.tables.items()},
        "wall_s": time.monotonic() - started,
        "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    try:
        store.add_entry(KIND, f"{task.identity}/result", body)
    except ConflictError:
        return  # another process measured the same; the first stays the answer


def main() -> int:
    """Entry point of the process."""
    job = json.load(sys.stdin)
    store = open_store(job["store_url"])
    try:
        for document in job["tasks"]:
            measure(store, document)
    except LlmAssetsError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
