"""The process that measures: `python -m llm_assets.gates.measuring STARTED_AT`.

Each line of stdin is a job as JSON; each is answered by a line {"error": ""}, or with what was
wrong. It fetches the artifacts, measures, and puts each result into the store as one write-once
document. See measurer.py.
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


def measure(store: Store, document: Mapping[str, Any], *, startup_s: float) -> None:
    """Make one measurement. LlmAssetsError when the code on disk is not what was asked for.

    `startup_s`: what starting this process took, where it was started for this one.
    """
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
        "wall_s": startup_s + time.monotonic() - started,
        "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    try:
        store.add_entry(KIND, f"{task.identity}/result", body)
    except ConflictError:
        return  # another process measured the same; the first stays the answer


def _answer(job: Mapping[str, Any], startup_s: float) -> str:
    """Do a job; "" or what was wrong."""
    try:
        store = open_store(job["store_url"])
        for document in job["tasks"]:
            measure(store, document, startup_s=startup_s)
            startup_s = 0.0
    except LlmAssetsError as error:
        return str(error)
    return ""


def main() -> int:
    """Entry point of the process. Ends with its stdin."""
    startup_s = max(0.0, time.time() - float(sys.argv[1]))
    # What a library prints must not come between the answers.
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        print(json.dumps({"error": _answer(json.loads(line), startup_s)}), file=answers, flush=True)
        startup_s = 0.0
    return 0


if __name__ == "__main__":
    sys.exit(main())
