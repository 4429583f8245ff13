"""What `ls`, `show` and `gc` say about a store."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from llm_assets.store.digest import ArtifactHash
from llm_assets.store.directory import DirectoryStore
from llm_assets.store.gc import Plan
from llm_assets.store.protocol import Record
from llm_assets.store.retention import Catalog
from llm_assets.store.s3 import S3Store
from llm_assets.store.showing import columns, size


@dataclass(frozen=True, kw_only=True)
class Row:
    """One artifact of a listing. `type` is "damaged" when the tree can't be read."""

    artifact: ArtifactHash
    type: str
    stages: tuple[str, ...]
    refs: tuple[str, ...]
    num_files: int
    size_bytes: int
    age_s: float

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)


def list_rows(store: DirectoryStore | S3Store) -> list[Row]:
    """All artifacts, the newest first."""
    catalog = Catalog.read(store)
    refs: dict[ArtifactHash, list[str]] = defaultdict(list)
    for name, artifact in store.refs().items():
        refs[artifact].append(name)
    now = store.backend.now()
    rows = []
    for artifact, tree in catalog.trees.items():
        rows.append(
            Row(
                artifact=artifact,
                type=tree.type if tree else "damaged",
                stages=tuple(sorted({r.stage for r in catalog.by_output.get(artifact, ())})),
                refs=tuple(refs[artifact]),
                num_files=len(tree.files) if tree else 0,
                size_bytes=tree.size_bytes if tree else 0,
                age_s=now - catalog.modified[artifact],
            )
        )
    return sorted(rows, key=lambda row: (row.age_s, row.artifact))


def describe(store: DirectoryStore | S3Store, artifact: ArtifactHash) -> dict[str, Any]:
    """Everything that the store knows about an artifact, as JSON."""
    tree = store.tree(artifact)
    records = [record for record in store.all_records() if record.output == artifact]
    return {
        "artifact": str(artifact),
        "type": tree.type,
        "size_bytes": tree.size_bytes,
        "metadata": dict(tree.metadata),
        "files": [
            {"path": entry.path, "size_bytes": entry.size_bytes, "blob": str(entry.blob)}
            for entry in tree.files
        ],
        "refs": [name for name, found in store.refs().items() if found == artifact],
        "records": [_record(record) for record in records],
    }


def _record(record: Record) -> dict[str, Any]:
    return {
        "identity": str(record.identity),
        "stage": record.stage,
        "pipeline": record.pipeline,
        "created_at": record.created_at,
        "cost_usd": record.cost_usd,
        "wall_s": record.wall_s,
        "inputs": dict(record.inputs),
        "metrics": {name: dict(metric) for name, metric in record.metrics.items()},
    }


def describe_lines(found: Mapping[str, Any]) -> Iterator[str]:
    """`describe` for people."""
    yield f"artifact  {found['artifact']}"
    yield f"type      {found['type']}"
    yield f"size      {size(found['size_bytes'])} in {len(found['files'])} files"
    yield from (f"ref       {name}" for name in found["refs"])
    yield from (f"metadata  {key}: {value}" for key, value in sorted(found["metadata"].items()))
    for record in found["records"]:
        yield (
            f"record    {record['stage']} of {record['pipeline']}, {record['created_at']}, "
            f"{record['wall_s']:.0f} s, ${record['cost_usd']:.2f}, "
            f"identity {record['identity'][:12]}"
        )
        for name, metric in sorted(record["metrics"].items()):
            yield f"          {name}: {metric['value']:g}"
        for name, artifact in sorted(record["inputs"].items()):
            yield f"          from {name}: {artifact}"
    rows = [(e["path"], size(e["size_bytes"]), e["blob"][:12]) for e in found["files"]]
    yield from (f"file      {line}" for line in columns(rows, right=(1,)))


def plan_lines(plan: Plan) -> Iterator[str]:
    """What a collection would delete, for people."""
    if plan.is_empty:
        yield f"nothing to delete; {len(plan.kept)} artifacts are kept"
        return
    rows = [
        (entry.artifact[:12], entry.type, ", ".join(entry.stages) or "-", size(entry.size_bytes))
        for entry in plan.artifacts
    ]
    yield from (f"delete artifact  {line}" for line in columns(rows, right=(3,)))
    for what, count in (
        ("expired records", len(plan.records)),
        ("objects that nothing reaches", len(plan.blobs)),
        ("unfinished uploads", len(plan.uploads)),
        ("linked folders", len(plan.local.checkouts)),
        ("cached or partial files", len(plan.local.files)),
        ("folders of in-training saves", len(plan.local.checkpoints)),
        ("objects of in-training saves", len(plan.saves)),
        ("dead writers' temporary files", len(plan.local.dead)),
    ):
        if count:
            yield f"delete {count} {what}"
    local = f", and {size(plan.local.size_bytes)} beside it" if plan.local.size_bytes else ""
    yield f"frees {size(plan.size_bytes)} of the store{local}; {len(plan.kept)} artifacts are kept"
