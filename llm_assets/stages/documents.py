"""Reads the corpus artifact."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Document:
    """One document and the source that it came from."""

    text: str
    source: str


def read_documents(corpus: Path) -> Iterator[Document]:
    """The documents of a corpus artifact, in its order."""
    with (corpus / "documents.jsonl").open(encoding="utf-8") as lines:
        for line in lines:
            row = json.loads(line)
            yield Document(text=row["text"], source=row.get("source", ""))
