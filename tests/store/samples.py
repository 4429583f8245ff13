"""Small artifacts and records."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

from llm_assets.store.digest import ArtifactHash, Identity
from llm_assets.store.protocol import Record

METADATA = {"num_rows": 1}


def folder_of(folder: Path, **files: bytes | str) -> Path:
    """A folder with documents.jsonl and the given files; `__` in a name stands for `/`, and the
    last `_` for the dot."""
    write(folder / "documents.jsonl", '{"text": "a village", "source": "test"}\n')
    for name, content in files.items():
        stem, _, suffix = name.replace("__", "/").rpartition("_")
        write(folder / f"{stem}.{suffix}", content)
    return folder


def write(path: Path, content: bytes | str) -> None:
    """Write, with the folders above."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def put(store: Any, folder: Path, **metadata: Any) -> ArtifactHash:
    """Put a folder of folder_of."""
    artifact: ArtifactHash = store.put(folder, type="corpus", metadata={**METADATA, **metadata})
    return artifact


def identity_of(text: str) -> Identity:
    """An identity."""
    return Identity(hashlib.sha256(text.encode()).hexdigest())


def record_of(output: ArtifactHash, identity: str = "one", **changes: Any) -> Record:
    """A record with every field filled."""
    record = Record(
        identity=identity_of(identity),
        stage="corpus",
        pipeline="tiny",
        output=output,
        type="corpus",
        source_hash="0" * 64,
        recipe={"size": 3, "names": ["a", "b"], "rate": 1e-4, "none": None, "flag": True},
        seed=17,
        inputs={},
        metrics={"rows": {"value": 3.0, "n": None}, "share": {"value": 0.25, "n": 4}},
        cost_usd=0.125,
        wall_s=2.5,
        created_at="2026-01-01T00:00:00.000000+00:00",
        run_id="run",
        tokens=12,
        flops=1e12,
        device="cpu",
        modules={"llm_assets.stages.corpus": "1" * 64},
        libraries={"torch": "2.13.0"},
        environment={"python": "3.11"},
        series={"loss": [[1, 2.5], [2, 2.25]]},
        samples=({"prompt": "who?", "answer": "the baker"},),
        tables={"shards": [{"name": "train-00000", "rows": 3}]},
    )
    return dataclasses.replace(record, **changes)
