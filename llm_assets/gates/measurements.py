"""Numbers that a stage does not give itself: which there are, and where they stand.

A measurement reads one artifact, or compares two. It is cached under an identity of its own, the
hash of the measuring code and of the artifacts, never of a threshold, as a write-once document of
the store. A gate on one of its metrics finds it there; nothing is measured twice.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

from llm_assets.errors import WorkerError
from llm_assets.gates import measurer
from llm_assets.identity import Source, digest_of, source_of
from llm_assets.store.digest import ArtifactHash
from llm_assets.store.protocol import Store

KIND = "measurements"
Against = Literal["", "evals", "production"]
_TRAINING = ("corpus", "instructions", "preferences")
_ROWS = (
    "schema_error_rate",
    "empty_rate",
    "length_median",
    "length_max",
    "duplicate_rate",
    "charset_error_rate",
    "other_language_rate",
    "pii_rate",
)
_TURNS = (*_ROWS, "role_error_rate", "split_overlap_rate")


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One kind of measurement: `module` has `measure(inputs) -> Measured`. `stages` maps the data
    sets that it can measure to its metrics. `against`: what else it reads."""

    name: str
    module: str
    stages: Mapping[str, Sequence[str]]
    libraries: tuple[str, ...] = ()
    against: Against = ""


MEASUREMENTS = (
    Measurement(
        name="quality",
        module="llm_assets.gates.suites",
        libraries=("great-expectations",),
        stages={
            "corpus": _ROWS,
            "instructions": _TURNS,
            "preferences": _TURNS,
            "evals": _ROWS,
        },
    ),
    Measurement(
        name="labels",
        module="llm_assets.gates.labels",
        stages={
            "preferences": (
                "provenance_rate",
                "votes_per_pair",
                "against_votes_rate",
                "agreement",
                "agreement_worst",
                "longer_chosen_rate",
                "vendor_length_gap",
            )
        },
    ),
    Measurement(
        name="contamination",
        module="llm_assets.gates.contamination",
        stages={name: ("contamination", "contaminated_rows") for name in _TRAINING},
        against="evals",
    ),
    Measurement(
        name="drift",
        module="llm_assets.gates.drift",
        stages={
            name: ("length_drift", "length_ks", "vocabulary_drift", "source_drift")
            for name in _TRAINING
        },
        against="production",
    ),
)
BY_NAME = {entry.name: entry for entry in MEASUREMENTS}


@dataclass(frozen=True, kw_only=True)
class Task:
    """One measurement of given artifacts, by input name."""

    measurement: Measurement
    inputs: Mapping[str, str]
    metrics: tuple[str, ...] = field(default=(), compare=False)

    @property
    def source(self) -> Source:
        """The code that measures, as it was when this process first asked."""
        return _source(self.measurement.module, self.measurement.libraries)

    @property
    def identity(self) -> str:
        """Hash of the measuring code and the artifacts."""
        return digest_of(
            {
                "format": "measurement-1",
                "source": self.source.hash,
                "inputs": dict(self.inputs),
            }
        )


@cache
def _source(module: str, libraries: tuple[str, ...]) -> Source:
    return source_of(module, libraries)


def gated(stage: str, metrics: Iterable[str]) -> list[Measurement]:
    """The measurements that give at least one of these metrics of a stage."""
    names = set(metrics)
    return [entry for entry in MEASUREMENTS if names.intersection(entry.stages.get(stage, ()))]


def find(store: Store, task: Task) -> dict[str, Any] | None:
    """What the measurement gave: {"metrics", "tables", …}; None when it was not made yet."""
    for _, body in store.entries(KIND, f"{task.identity}/"):
        return body
    return None


_lock = threading.Lock()
_waiting: list[tuple[Store, Task]] = []


def make(store: Store, tasks: Iterable[Task]) -> None:
    """Make the measurements that the store lacks, in a process of their own (see `measurer`).

    Threads of a process that come while one of them measures wait, and all that they brought is
    measured together. WorkerError when the process ends without a result.
    """
    wanted = [task for task in tasks if find(store, task) is None]
    if not wanted:
        return
    _waiting.extend((store, task) for task in wanted)
    with _lock:
        batch = [task for other, task in _waiting if other.url == store.url]
        _waiting[:] = [entry for entry in _waiting if entry[0].url != store.url]
        todo = {task.identity: task for task in batch if find(store, task) is None}
        if todo:
            _run(store, list(todo.values()))
    for task in wanted:
        if find(store, task) is None:
            raise WorkerError(
                f"the measurement {task.measurement.name} of {task.inputs['data']} gave no result"
            )


def _run(store: Store, tasks: Sequence[Task]) -> None:
    job = {
        "store_url": store.url,
        "tasks": [
            {
                "measurement": task.measurement.name,
                "inputs": dict(task.inputs),
                "identity": task.identity,
            }
            for task in tasks
        ],
    }
    said = measurer.ask(job)
    if said:
        names = ", ".join(dict.fromkeys(task.measurement.name for task in tasks))
        lines = said.strip().splitlines()
        raise WorkerError(f"measuring {names} failed: {lines[-1]}\n" + "\n".join(lines[-30:]))


def drift_of(store: Store, artifact: ArtifactHash, reference: ArtifactHash) -> Mapping[str, Any]:
    """The drift of one data set against another of its type: {metric: {"value", "n"}}.

    Measured when it was not yet. Also for whoever goes back to an older checkpoint: the data that
    it was trained on against those of today.
    """
    task = Task(
        measurement=BY_NAME["drift"], inputs={"data": str(artifact), "reference": str(reference)}
    )
    make(store, [task])
    found = find(store, task)
    metrics: Mapping[str, Any] = found["metrics"] if found else {}
    return metrics
