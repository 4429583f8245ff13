"""Stored checkpoints proved again: their bytes, and their number on the fixed batch.

The worker writes the number of a fresh checkpoint into the store (kind `probes`); a checkpoint that
has none gets it the first time. Later the number must come out again: bytes may be whole while the
libraries, the CPU or a conversion give another model.
"""

from __future__ import annotations

import datetime
import json
import math
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from llm_assets.compatibility import MODEL_TYPES
from llm_assets.damage import note_damage
from llm_assets.errors import ConflictError, LlmAssetsError, NotFoundError
from llm_assets.store.digest import ArtifactHash
from llm_assets.store.protocol import Record, Store

PROBES = "probes"
CHECKS = "probe_checks"
TOLERANCE = 1e-3
"""Of the number, relative; float32 differs by less between machines."""


@dataclass(frozen=True, kw_only=True)
class Reverified:
    """One checkpoint. `verdict`: same, first (its number stands from now on), drift, damaged or
    unreadable."""

    pipeline: str
    stage: str
    artifact: str
    verdict: str
    recorded: float | None = None
    value: float | None = None
    said: str = ""

    @property
    def alarming(self) -> bool:
        """Somebody must look."""
        return self.verdict not in ("same", "first")

    def text(self) -> str:
        """For people."""
        numbers = f": {self.value:.6f}, recorded {self.recorded:.6f}" if self.drifted else ""
        said = f": {self.said}" if self.said else ""
        return f"{self.pipeline}/{self.stage} {self.artifact[:12]} {self.verdict}{numbers}{said}"

    @property
    def drifted(self) -> bool:
        """Both numbers are known, and differ."""
        return self.verdict == "drift"

    def as_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return asdict(self)


def record_probe(store: Store, artifact: ArtifactHash, number: Mapping[str, Any]) -> None:
    """Keep the number of a fresh checkpoint; the first one stands."""
    body = {**number, "artifact": artifact, "at": _now()}
    if probe_of(store, artifact) is None:
        try:
            store.add_entry(PROBES, artifact, body)
        except ConflictError:
            return  # another process was first


def probe_of(store: Store, artifact: str) -> Mapping[str, Any] | None:
    """The recorded number; None when there is none yet."""
    return next((body for _, body in store.entries(PROBES, artifact)), None)


def sample(store: Store, pipelines: Sequence[str] | None, count: int) -> list[Record]:
    """`count` stored checkpoints: those not looked at for the longest time, the newest of them
    first. One record for each artifact."""
    looked: dict[str, str] = {}
    for _, body in store.entries(CHECKS):
        looked[str(body["artifact"])] = max(looked.get(str(body["artifact"]), ""), str(body["at"]))
    records: dict[str, Record] = {}
    for record in store.all_records():
        mine = pipelines is None or record.pipeline in pipelines
        if mine and record.type in MODEL_TYPES and store.has(record.output):
            known = records.get(record.output)
            if known is None or record.created_at > known.created_at:
                records[record.output] = record
    newest = sorted(records.values(), key=lambda record: record.created_at, reverse=True)
    return sorted(newest, key=lambda record: looked.get(record.output, ""))[:count]


def reverify(
    store: Store,
    *,
    pipelines: Sequence[str] | None = None,
    count: int = 4,
    say: Callable[[str], Any],
) -> list[Reverified]:
    """Prove a sample again; each result is written into the store (kind `probe_checks`)."""
    found = []
    for record in sample(store, pipelines, count):
        result = _one(store, record)
        found.append(result)
        say(result.text())
        key = f"{record.output}/{datetime.datetime.now(datetime.UTC):%Y%m%dT%H%M%S%f}"
        store.add_entry(CHECKS, key, {**result.as_json(), "at": _now()})
    return found


def _one(store: Store, record: Record) -> Reverified:
    def result(verdict: str, **fields: Any) -> Reverified:
        return Reverified(
            pipeline=record.pipeline,
            stage=record.stage,
            artifact=record.output,
            verdict=verdict,
            **fields,
        )

    damage = store.verify(record.output)
    if damage:
        note_damage(store, damage, run_id="reverification")
        what = "; ".join(f"{entry.path or 'its tree'}: {entry.what}" for entry in damage)
        return result("damaged", said=what)
    try:
        number = probe_apart(store, record.output)
    except LlmAssetsError as error:
        return result("unreadable", said=str(error))
    recorded = probe_of(store, record.output)
    if recorded is None or recorded["batch"] != number["batch"]:
        record_probe(store, record.output, number)
        return result("first", value=number["value"])
    same = math.isclose(
        number["value"], float(recorded["value"]), rel_tol=TOLERANCE, abs_tol=TOLERANCE
    )
    return result(
        "same" if same else "drift", value=number["value"], recorded=float(recorded["value"])
    )


def probe_apart(store: Store, artifact: ArtifactHash) -> dict[str, Any]:
    """The number of a stored checkpoint, by a process of its own. NotFoundError without one."""
    folder = store.fetch(artifact)
    done = subprocess.run(
        [sys.executable, "-m", "llm_assets.stages.probing", str(folder)],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    lines = done.stdout.splitlines()
    if done.returncode != 0 or not lines:
        raise NotFoundError(f"{folder}: no number on the fixed batch\n{done.stderr[-1500:]}")
    number: dict[str, Any] = json.loads(lines[-1])
    return number


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
