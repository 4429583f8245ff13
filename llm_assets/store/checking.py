"""`llm-assets store verify`: every artifact, record and ref."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llm_assets.errors import DamagedError, StoreError
from llm_assets.store.digest import ArtifactHash
from llm_assets.store.directory import DirectoryStore
from llm_assets.store.documents import unseal_record
from llm_assets.store.s3 import S3Store


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that is wrong. `path`: the file, "" for the tree or a document of the store."""

    artifact: str
    path: str
    stages: tuple[str, ...]
    what: str

    @property
    def line(self) -> str:
        """For people."""
        file = f", file {self.path}" if self.path else ""
        stage = f", stage {', '.join(self.stages)}" if self.stages else ""
        subject = f"artifact {self.artifact}" if self.artifact else "store"
        return f"damaged: {subject}{file}{stage}: {self.what}"


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a check found."""

    num_artifacts: int
    num_files: int
    size_bytes: int
    problems: tuple[Problem, ...]

    @property
    def summary(self) -> str:
        """One line for people."""
        result = f"{len(self.problems)} problems" if self.problems else "all whole"
        return f"{self.num_artifacts} artifacts, {self.num_files} files: {result}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)


def check(
    store: DirectoryStore | S3Store, artifacts: Sequence[ArtifactHash] | None, *, deep: bool
) -> Report:
    """Check these artifacts; with None all of them, and every record, ref and entry of pins."""
    problems: list[Problem] = []
    stages = _stages(store, problems)
    chosen = list(store.artifacts()) if artifacts is None else list(artifacts)
    damage = store.verify_many(chosen, deep=deep)
    files = size = 0
    for artifact, found in damage.items():
        problems += [
            Problem(artifact=artifact, path=d.path, stages=stages[artifact], what=d.what)
            for d in found
        ]
        if not any(d.path == "" for d in found):
            tree = store.tree(artifact)
            files, size = files + len(tree.files), size + tree.size_bytes
    if artifacts is None:
        problems += _lost(store, set(chosen), stages)
    return Report(
        num_artifacts=len(chosen), num_files=files, size_bytes=size, problems=tuple(problems)
    )


def _stages(
    store: DirectoryStore | S3Store, problems: list[Problem]
) -> defaultdict[str, tuple[str, ...]]:
    """The stages that gave each artifact; records that can't be read become problems."""
    stages: defaultdict[str, tuple[str, ...]] = defaultdict(tuple)
    for item in store.backend.items("records"):
        try:
            record = unseal_record(store.backend.read(item.key), item.key)
        except StoreError as error:
            problems.append(_document(item.key, error))
            continue
        stages[record.output] = tuple(sorted({*stages[record.output], record.stage}))
    return stages


def _lost(
    store: DirectoryStore | S3Store,
    present: set[ArtifactHash],
    stages: defaultdict[str, tuple[str, ...]],
) -> list[Problem]:
    """Records and refs whose artifact is not there, and refs that can't be read."""
    problems = [
        Problem(artifact=artifact, path="", stages=names, what="missing, but it has a record")
        for artifact, names in sorted(stages.items())
        if artifact not in present
    ]
    try:
        for name, artifact in store.refs().items():
            if artifact not in present:
                what = f"missing, but the ref {name} stands on it"
                problems.append(Problem(artifact=artifact, path="", stages=(), what=what))
    except DamagedError as error:
        problems.append(_document("refs", error))
    return problems


def _document(key: str, error: Exception) -> Problem:
    return Problem(artifact="", path=key, stages=(), what=str(error).splitlines()[0])
