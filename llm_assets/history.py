"""The records of a store as the plan asks for them: read once, and only when something is stale."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from llm_assets.identity import changed_keys
from llm_assets.store.protocol import Record, Store


class History:
    """What ran before: of one pipeline for its reasons, of all of them for estimates."""

    def __init__(self, store: Store, pipeline: str) -> None:
        self._store = store
        self._pipeline = pipeline

    @cached_property
    def all(self) -> list[Record]:
        """Every record of the store, oldest first."""
        return sorted(self._store.all_records(), key=lambda record: record.created_at)

    @cached_property
    def _own(self) -> dict[str, list[Record]]:
        """Stage to its records in this pipeline, oldest first."""
        found: dict[str, list[Record]] = {}
        for record in self.all:
            if record.pipeline == self._pipeline:
                found.setdefault(record.stage, []).append(record)
        return found

    def newest(self, stage: str) -> Record | None:
        """The newest record of a stage; None when it never ran."""
        records = self._own.get(stage)
        return records[-1] if records else None

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
        for record in reversed(self._own.get(stage, [])):
            if (
                record.seed == seed
                and record.inputs == inputs
                and not any(changed_keys(record.recipe, part))
                and is_there(record)
            ):
                return record
        return None
