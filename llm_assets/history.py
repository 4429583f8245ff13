"""The records of a store as the plan asks for them: read once, and only when something is stale.

A record keeps its curves and samples, which a plan does not need and which take long to parse. What
the plan needs of each record is kept in the cache of this machine; a record that is there is read
once, ever. Records are write-once, and an entry is used only while the store's key, size and time
of the document are the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any

from llm_assets.caching import cache_folder, write_atomically
from llm_assets.errors import DamagedError, NotFoundError
from llm_assets.identity import changed_keys
from llm_assets.jobs import RESUMED
from llm_assets.store.documents import parse_record, record_body
from llm_assets.store.protocol import Record, Store

_FORMAT = 3
_NEWEST = 60
"""Records of a stage that an estimate may look at; learning.py takes the newest twelve that fit."""


def _slim(record: Record) -> dict[str, Any]:
    """What a plan and an estimate need of a record."""
    kept = {
        key: record.environment[key] for key in ("replay", RESUMED) if key in record.environment
    }
    small = dataclasses.replace(
        record, metrics={}, environment=kept, series={}, samples=(), tables={}
    )
    return record_body(small)


def _read_index(store: Store) -> list[dict[str, Any]]:
    """The slim bodies of all records, oldest first."""
    name = hashlib.sha256(store.url.encode()).hexdigest()
    path = cache_folder() / "records" / f"{name}.json"
    known: dict[str, Any] = {}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        document = json.loads(path.read_bytes())
        if document["format"] == _FORMAT and document["url"] == store.url:
            known = dict(document["records"])
    stamps = store.record_stamps()
    entries = {
        key: known[key] for key, stamp in stamps.items() if known.get(key, ("",))[0] == stamp
    }
    for key in stamps.keys() - entries.keys():
        # A record that was deleted meanwhile, or can't be read, explains nothing; whether a stage
        # is a hit is asked of the store itself.
        with contextlib.suppress(NotFoundError, DamagedError):
            entries[key] = [stamps[key], _slim(store.record_at(key))]
    if entries.keys() != known.keys():
        document = {"format": _FORMAT, "url": store.url, "records": entries}
        with contextlib.suppress(OSError):
            write_atomically(path, json.dumps(document).encode())
    return sorted((entry[1] for entry in entries.values()), key=lambda body: body["created_at"])


class History:
    """What ran before: of one pipeline for the reasons, of all of them for the estimates. The
    records have no metrics, curves, samples and tables, and of the environment only the replay and
    where it resumed."""

    def __init__(self, store: Store, pipeline: str) -> None:
        self._store = store
        self._pipeline = pipeline

    @cached_property
    def _by_stage(self) -> dict[str, list[dict[str, Any]]]:
        found: dict[str, list[dict[str, Any]]] = {}
        for body in _read_index(self._store):
            found.setdefault(body["stage"], []).append(body)
        return found

    @cached_property
    def _by_output(self) -> dict[str, list[dict[str, Any]]]:
        found: dict[str, list[dict[str, Any]]] = {}
        for bodies in self._by_stage.values():
            for body in bodies:
                found.setdefault(body["output"], []).append(body)
        return found

    def _own(self, stage: str) -> list[dict[str, Any]]:
        return [b for b in self._by_stage.get(stage, []) if b["pipeline"] == self._pipeline]

    def newest(self, stage: str) -> Record | None:
        """The newest record of a stage in this pipeline, replays left out; None when it never
        ran."""
        own = [body for body in self._own(stage) if "replay" not in body["environment"]]
        return _record(own[-1]) if own else None

    def all_of(self, stage: str) -> list[Record]:
        """The records of a stage in this pipeline, oldest first, replays left out."""
        return [_record(body) for body in self._own(stage) if not body["environment"]]

    def givers(self, artifact: str) -> list[Record]:
        """The records, of any pipeline, whose output is this artifact, oldest first."""
        return [_record(body) for body in self._by_output.get(artifact, [])]

    def estimating(self, stages: Iterable[str]) -> list[Record]:
        """Records to estimate stages from: of this pipeline, or of all where it has none."""
        found = []
        for stage in stages:
            bodies = self._own(stage) or self._by_stage.get(stage, [])
            found += [_record(body) for body in bodies[-_NEWEST:]]
        return found

    def twin(
        self,
        stage: str,
        *,
        part: Mapping[str, Any],
        seed: int,
        inputs: Mapping[str, str],
        is_there: Callable[[Record], bool],
    ) -> Record | None:
        """The newest record of a stage with this recipe part, seed and inputs whose artifact is
        there: it differs in code or libraries only."""
        for body in reversed(self._own(stage)):
            if (
                body["seed"] == seed
                and body["inputs"] == inputs
                and not any(changed_keys(body["recipe"], part))
            ):
                record = _record(body)
                if is_there(record):
                    return record
        return None


def _record(body: Mapping[str, Any]) -> Record:
    return parse_record(body, "cached record")
