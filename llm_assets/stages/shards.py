"""Stage 3: the corpus deduplicated, tokenized and packed into safetensors.

Documents end with `<|endoftext|>` and follow one another; a row of `sequence_length` tokens may
hold several and a document may go on in the next row. Only the last row of a split is filled up
with padding. Held out are whole documents, chosen by the hash of their text after deduplication.
The same inputs give the same bytes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file

from llm_assets.errors import DataError
from llm_assets.stage_settings import ShardsSettings
from llm_assets.stages.bpe import END_OF_TEXT
from llm_assets.stages.context import Metric, StageContext, StageResult
from llm_assets.stages.dedup import Duplicate, find_duplicates
from llm_assets.stages.documents import Document, read_documents
from llm_assets.stages.models import load_tokenizer

FORMAT = 1
_BATCH = 1000
_SAMPLES = 5
_ROUND_TRIPS = 20_000


@dataclass(kw_only=True)
class Split:
    """Packed rows of one split, and what went into them."""

    name: str
    rows: npt.NDArray[np.int32]
    origin: npt.NDArray[np.int16]
    num_tokens: int
    num_documents: int
    num_bytes: int
    files: list[dict[str, Any]] = field(default_factory=list)

    def counts(self) -> dict[str, int]:
        """Rows, tokens (padding not counted), documents, bytes."""
        return {
            "rows": len(self.rows),
            "tokens": self.num_tokens,
            "documents": self.num_documents,
            "bytes": self.num_bytes,
        }


def run(context: StageContext) -> StageResult:
    """Deduplicate, split, tokenize, pack, write."""
    settings: ShardsSettings = context.config
    corpus = context.inputs["corpus"].path
    tokenizer = load_tokenizer(context.inputs["tokenizer"].path, chat=False)
    documents = list(read_documents(corpus))
    context.progress.say(f"looking for duplicates among {len(documents)} documents")
    duplicates = find_duplicates(
        [document.text for document in documents],
        method=settings.dedup,
        threshold=settings.minhash_threshold,
        num_permutations=settings.minhash_permutations,
    )
    left_out = {duplicate.index for duplicate in duplicates}
    kept = [document for index, document in enumerate(documents) if index not in left_out]
    chosen = _held_out(kept, settings.held_out, where=str(corpus))
    names = sorted({document.source for document in documents})
    context.progress.say(f"tokenizing {len(kept)} documents")
    train, held_out = (
        pack(
            _shuffled([d for i, d in enumerate(kept) if (i in chosen) == is_held_out], context),
            tokenizer,
            sequence_length=settings.sequence_length,
            sources=names,
            name=name,
        )
        for name, is_held_out in (("train", False), ("held_out", True))
    )
    for split in (train, held_out):
        write_split(split, context.out, settings.shard_tokens, names)
    changed, num_looked_at = _changed_by_tokens(kept, tokenizer)
    sources = _source_rows(documents, duplicates, kept, chosen, (train, held_out), names)
    index = {
        "format": FORMAT,
        "sequence_length": settings.sequence_length,
        "num_vocabulary": len(tokenizer),
        "end_of_text": tokenizer.convert_tokens_to_ids(END_OF_TEXT),
        "pad": tokenizer.pad_token_id,
        "train": train.counts(),
        "held_out": held_out.counts(),
        "sources": sources,
        "files": [*train.files, *held_out.files],
    }
    text = json.dumps(index, indent=1, sort_keys=True, ensure_ascii=False)
    (context.out / "index.json").write_text(text + "\n", encoding="utf-8")
    result = _result(settings, documents, duplicates, (train, held_out), sources)
    share = 1 - len(changed) / num_looked_at
    return dataclasses.replace(
        result,
        metrics={**result.metrics, "round_trip": Metric(value=share, n=num_looked_at)},
        tables={**result.tables, "round_trip": changed[:_SAMPLES]},
    )


def pack(
    documents: Sequence[Document],
    tokenizer: Any,
    *,
    sequence_length: int,
    sources: Sequence[str],
    name: str,
) -> Split:
    """Tokenize and pack. `rows` and `origin` (index of the source) are [rows, sequence_length]."""
    backend = tokenizer.backend_tokenizer
    # A document that contains the text of a special token must not end a turn by it.
    backend.encode_special_tokens = True
    end = tokenizer.convert_tokens_to_ids(END_OF_TEXT)
    pieces: list[npt.NDArray[np.int32]] = []
    lengths: list[int] = []
    for start in range(0, len(documents), _BATCH):
        batch = [document.text for document in documents[start : start + _BATCH]]
        for encoding in backend.encode_batch(batch, add_special_tokens=False):
            pieces.append(np.array([*encoding.ids, end], dtype=np.int32))
            lengths.append(len(pieces[-1]))
    backend.encode_special_tokens = False
    numbers = {source: number for number, source in enumerate(sources)}
    tokens = np.concatenate(pieces)
    origin = np.repeat(
        np.array([numbers[document.source] for document in documents], dtype=np.int16), lengths
    )
    fill = -len(tokens) % sequence_length
    return Split(
        name=name,
        rows=np.pad(tokens, (0, fill), constant_values=tokenizer.pad_token_id).reshape(
            -1, sequence_length
        ),
        origin=np.pad(origin, (0, fill), constant_values=-1).reshape(-1, sequence_length),
        num_tokens=len(tokens),
        num_documents=len(documents),
        num_bytes=sum(len(document.text.encode()) for document in documents),
    )


def _changed_by_tokens(
    documents: Sequence[Document], tokenizer: Any
) -> tuple[list[dict[str, str]], int]:
    """Documents that do not come back from their tokens as they were, and how many were tried:
    all, or an even sample of a large corpus."""
    backend = tokenizer.backend_tokenizer
    backend.encode_special_tokens = True
    texts = [document.text for document in documents[:: 1 + len(documents) // _ROUND_TRIPS]]
    changed = []
    for start in range(0, len(texts), _BATCH):
        batch = texts[start : start + _BATCH]
        ids = [e.ids for e in backend.encode_batch(batch, add_special_tokens=False)]
        back = backend.decode_batch(ids, skip_special_tokens=False)
        pairs = zip(batch, back, strict=True)
        changed += [{"text": a, "comes_back_as": b} for a, b in pairs if a != b]
    backend.encode_special_tokens = False
    return changed, len(texts)


def write_split(split: Split, out: Path, shard_tokens: int, sources: Sequence[str]) -> None:
    """Write NAME-NNNNN.safetensors, tensor `input_ids` [rows, sequence_length] int32."""
    per_file = max(1, shard_tokens // split.rows.shape[1])
    starts = range(0, len(split.rows), per_file)
    for number, start in enumerate(starts):
        rows = split.rows[start : start + per_file]
        origin = split.origin[start : start + per_file].ravel()
        counted = np.bincount(origin[origin >= 0], minlength=len(sources))
        file = f"{split.name}-{number:05d}.safetensors"
        save_file({"input_ids": np.ascontiguousarray(rows)}, out / file)
        split.files.append(
            {
                "file": file,
                "split": split.name,
                "rows": len(rows),
                "tokens": int(counted.sum()),
                "sources": {
                    source: int(count)
                    for source, count in zip(sources, counted, strict=True)
                    if count
                },
            }
        )


def _held_out(documents: Sequence[Document], share: float, *, where: str) -> set[int]:
    """Indices of the held-out documents: those whose hash falls under `share`, at least one."""
    if len(documents) < 2:
        raise DataError(
            where=where,
            found=f"{len(documents)} documents after deduplication",
            rule="at least one document is trained on and one is held out",
            remedy="add documents, or raise stages.shards.minhash_threshold",
        )
    places = [_place(document.text) for document in documents]
    chosen = {index for index, place in enumerate(places) if place < share}
    order = sorted(range(len(places)), key=places.__getitem__)
    if not chosen:
        return {order[0]}
    if len(chosen) == len(documents):
        return chosen - {order[-1]}
    return chosen


def _place(text: str) -> float:
    """A number in [0, 1) that depends on the text alone."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:6], "big") / 2**48


def _shuffled(documents: Sequence[Document], context: StageContext) -> list[Document]:
    """Sources mixed through one another, in an order that depends on the seed and the texts."""
    salt = str(context.seed).encode()
    return sorted(
        documents, key=lambda document: hashlib.sha256(salt + document.text.encode()).digest()
    )


def _source_rows(
    documents: Sequence[Document],
    duplicates: Sequence[Duplicate],
    kept: Sequence[Document],
    chosen: set[int],
    splits: tuple[Split, Split],
    names: Sequence[str],
) -> list[dict[str, Any]]:
    """One row a source: documents, duplicates, held out, tokens of both splits."""
    total = Counter(document.source for document in documents)
    exact = Counter(documents[d.index].source for d in duplicates if d.kind == "exact")
    near = Counter(documents[d.index].source for d in duplicates if d.kind == "near")
    held = Counter(document.source for index, document in enumerate(kept) if index in chosen)
    tokens = [
        np.bincount(split.origin[split.origin >= 0], minlength=len(names)) for split in splits
    ]
    return [
        {
            "source": name,
            "documents": total[name],
            "exact_duplicates": exact[name],
            "near_duplicates": near[name],
            "held_out_documents": held[name],
            "train_tokens": int(tokens[0][number]),
            "held_out_tokens": int(tokens[1][number]),
        }
        for number, name in enumerate(names)
    ]


def _result(
    settings: ShardsSettings,
    documents: Sequence[Document],
    duplicates: Sequence[Duplicate],
    splits: tuple[Split, Split],
    sources: list[dict[str, Any]],
) -> StageResult:
    train, held_out = splits
    kinds = Counter(duplicate.kind for duplicate in duplicates)
    all_bytes = train.num_bytes + held_out.num_bytes
    all_tokens = train.num_tokens + held_out.num_tokens
    return StageResult(
        metrics={
            "num_tokens": Metric(value=train.num_tokens),
            "num_documents": Metric(value=train.num_documents),
            "held_out_tokens": Metric(value=held_out.num_tokens),
            "exact_duplicate_rate": Metric(value=kinds["exact"] / len(documents), n=len(documents)),
            "near_duplicate_rate": Metric(value=kinds["near"] / len(documents), n=len(documents)),
            "bytes_per_token": Metric(value=all_bytes / all_tokens),
        },
        metadata={
            "num_tokens": train.num_tokens,
            "num_rows": len(train.rows),
            "sequence_length": settings.sequence_length,
        },
        samples=[
            {
                "duplicate": documents[duplicate.index].text,
                "of": documents[duplicate.of].text,
                "similarity": round(duplicate.similarity, 3),
            }
            for duplicate in [d for d in duplicates if d.kind == "near"][:_SAMPLES]
        ],
        tables={
            "shards": [
                {**entry, "sources": json.dumps(entry["sources"])}
                for entry in (*train.files, *held_out.files)
            ],
            "sources": sources,
        },
        tokens=all_tokens,
    )
