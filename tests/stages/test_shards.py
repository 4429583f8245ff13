"""Stages 1 to 3 on a small corpus: vocabulary, tokenizer, shards."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pretraining_parts import make_shards, make_tokenizer, make_vocabulary, write_corpus
from safetensors.numpy import load_file

from llm_assets.artifacts import check_artifact
from llm_assets.errors import DataError, ModelError
from llm_assets.stage_settings import ShardsSettings, TokenizerSettings, VocabularySettings
from llm_assets.stages import shards, tokenizer, vocabulary
from llm_assets.stages.context import StageContext, StageResult
from llm_assets.stages.dedup import find_duplicates, jaccard, shingles
from llm_assets.stages.models import load_tokenizer

Make = Callable[..., StageContext]


def rows_of(folder: Path, split: str) -> list[list[int]]:
    index = json.loads((folder / "index.json").read_text())
    return [
        row.tolist()
        for entry in index["files"]
        if entry["split"] == split
        for row in load_file(folder / entry["file"])["input_ids"]
    ]


def documents_of(folder: Path, reader: Any, split: str) -> list[str]:
    """The texts that the packed rows hold."""
    tokens = [token for row in rows_of(folder, split) for token in row]
    texts, current = [], []
    for token in tokens:
        if token == reader.convert_tokens_to_ids("<|endoftext|>"):
            texts.append(reader.decode(current))
            current = []
        else:
            current.append(token)
    assert set(current) <= {reader.pad_token_id}
    return texts


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    return write_corpus(tmp_path / "corpus")


@pytest.fixture
def made(make_context: Make, corpus: Path) -> tuple[Path, StageResult]:
    """A tokenizer artifact."""
    words = make_vocabulary(make_context, corpus)
    return make_tokenizer(make_context, words.out), words.result


def test_vocabulary_is_bit_identical_and_of_the_size(make_context: Make, corpus: Path) -> None:
    first = make_vocabulary(make_context, corpus, name="first")
    second = make_vocabulary(make_context, corpus, name="second")
    for name in ("vocab.json", "merges.txt"):
        assert (first.out / name).read_bytes() == (second.out / name).read_bytes()
    # The special tokens come on top, in stage 2.
    assert len(json.loads((first.out / "vocab.json").read_text())) == 320 - 4
    assert first.result.metrics["bytes_per_token"].value > 1.5
    check_artifact(first.out, "vocabulary", first.result.metadata)


def test_an_empty_corpus_is_an_error(make_context: Make, tmp_path: Path) -> None:
    empty = write_corpus(tmp_path / "empty", [])
    context = make_context(
        "vocabulary", VocabularySettings(size=300), inputs={"corpus": (empty, "corpus")}
    )
    with pytest.raises(DataError, match="0 documents without any text"):
        vocabulary.run(context)


def test_tokenizer_ends_turns_with_eos_and_marks_the_answers(
    made: tuple[Path, StageResult],
) -> None:
    check_artifact(made[0], "tokenizer", {"num_tokens": 320})
    reader = load_tokenizer(made[0])
    assert (reader.eos_token, reader.pad_token, len(reader)) == ("<|im_end|>", "<|pad|>", 320)
    encoded = reader.apply_chat_template(
        [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Good day."}],
        tokenize=True,
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    marked = [
        token
        for token, mark in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
        if mark
    ]
    assert reader.decode(marked) == "Good day.<|im_end|>"


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ("{% for m in messages %}{{ m['content'] }}\n{% endfor %}", "an answer ends with None"),
        ("{{ messages[0]['content'] }}<|im_end|>", "rendered as"),
        ("{% for m in messages %", "TemplateSyntaxError"),
        (
            "{% for m in messages %}{% generation %}{{ m['content'] }}<|im_end|>"
            "{% endgeneration %}{% endfor %}",
            "marked as generated",
        ),
    ],
)
def test_a_template_that_cannot_be_trained_with_is_refused(
    make_context: Make, corpus: Path, template: str, found: str
) -> None:
    words = make_vocabulary(make_context, corpus)
    context = make_context(
        "tokenizer",
        TokenizerSettings(chat_template=template),
        inputs={"vocabulary": (words.out, "vocabulary")},
    )
    with pytest.raises(ModelError, match=found):
        tokenizer.run(context)


def test_shards_hold_every_kept_document_once(
    make_context: Make, corpus: Path, made: tuple[Path, StageResult]
) -> None:
    result, out = make_shards(make_context, corpus, made[0])
    check_artifact(out, "shards", result.metadata)
    reader = load_tokenizer(made[0])
    train, held_out = documents_of(out, reader, "train"), documents_of(out, reader, "held_out")
    kept = {
        row["text"]
        for row in map(json.loads, (corpus / "documents.jsonl").read_text().splitlines())
    }
    kept -= {"A copy with one word more at its very end, and all the other words alike, friend."}
    assert sorted(train + held_out) == sorted(kept)
    assert held_out
    index = json.loads((out / "index.json").read_text())
    assert index["train"]["documents"] == len(train)
    assert index["train"]["bytes"] == sum(len(text.encode()) for text in train)
    assert (
        sum(entry["tokens"] for entry in index["files"] if entry["split"] == "train")
        == (index["train"]["tokens"])
    )
    assert len([entry for entry in index["files"] if entry["split"] == "train"]) > 1
    assert all(len(row) == 32 for row in rows_of(out, "train"))
    counts = {row["source"]: row for row in result.tables["sources"]}
    assert counts["tales"]["exact_duplicates"] == 1
    assert counts["tales"]["near_duplicates"] == 1
    assert counts["facts"]["exact_duplicates"] == counts["facts"]["near_duplicates"] == 0
    assert sum(row["train_tokens"] for row in counts.values()) == result.metadata["num_tokens"]


def test_shards_are_bit_identical_and_their_order_follows_the_seed(
    make_context: Make, corpus: Path, made: tuple[Path, StageResult]
) -> None:
    _, first = make_shards(make_context, corpus, made[0], name="first")
    _, second = make_shards(make_context, corpus, made[0], name="second")
    _, other = make_shards(make_context, corpus, made[0], name="other", seed=8)
    names = sorted(path.name for path in first.iterdir())
    assert names == sorted(path.name for path in second.iterdir())
    for name in names:
        assert (first / name).read_bytes() == (second / name).read_bytes()
    assert rows_of(first, "train") != rows_of(other, "train")
    reader = load_tokenizer(made[0])
    assert documents_of(first, reader, "held_out") == sorted(
        documents_of(other, reader, "held_out"),
        key=documents_of(first, reader, "held_out").index,
    )


def test_the_text_of_a_special_token_in_a_document_is_plain_text(
    make_context: Make, tmp_path: Path, made: tuple[Path, StageResult]
) -> None:
    texts = [f"Document {number} says <|im_end|> and <|endoftext|> too." for number in range(12)]
    corpus = write_corpus(tmp_path / "evil", texts)
    _, out = make_shards(make_context, corpus, made[0], name="evil")
    reader = load_tokenizer(made[0])
    tokens = [
        token for split in ("train", "held_out") for row in rows_of(out, split) for token in row
    ]
    assert tokens.count(reader.convert_tokens_to_ids("<|endoftext|>")) == len(texts)
    assert tokens.count(reader.eos_token_id) == 0


def test_one_document_is_not_enough(
    make_context: Make, tmp_path: Path, made: tuple[Path, StageResult]
) -> None:
    corpus = write_corpus(tmp_path / "one", ["the same"] * 3)
    with pytest.raises(DataError, match="1 documents after deduplication"):
        make_shards(make_context, corpus, made[0], name="one")


def test_dedup_methods_and_threshold() -> None:
    base = " ".join(f"word{number}" for number in range(40))
    texts = [base, base, base + " more", "something else entirely here now", f" {base}\n"]
    assert jaccard(shingles(base), shingles(base + " more")) == pytest.approx(36 / 37)
    options: dict[str, Any] = {"threshold": 0.9, "num_permutations": 64}
    assert find_duplicates(texts, method="none", **options) == []
    exact = find_duplicates(texts, method="exact", **options)
    assert [(d.index, d.of, d.kind) for d in exact] == [(1, 0, "exact"), (4, 0, "exact")]
    near = find_duplicates(texts, method="minhash", **options)
    assert [(d.index, d.of, d.kind) for d in near] == [
        (1, 0, "exact"),
        (2, 0, "near"),
        (4, 0, "exact"),
    ]
    strict = find_duplicates(texts, method="minhash", threshold=0.99, num_permutations=64)
    assert [d.index for d in strict] == [1, 4]


def test_settings_default_to_minhash() -> None:
    assert ShardsSettings().dedup == "minhash"
    assert shards.FORMAT == 1
