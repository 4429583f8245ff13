"""A small corpus, and the artifacts of stages 1 to 4 made of it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from llm_assets.stage_settings import (
    BaseSettings,
    ModelSettings,
    ShardsSettings,
    TokenizerSettings,
    VocabularySettings,
)
from llm_assets.stages import base_checkpoint, shards, tokenizer, vocabulary
from llm_assets.stages.context import StageContext, StageResult

Make = Callable[..., StageContext]
NAMES = ("Anna", "Bob", "Carl", "Dora", "Emil", "Frida", "Gustav", "Hanna")
TRADES = ("baker", "smith", "sailor", "tailor", "weaver", "miller", "potter", "singer")


@dataclass(frozen=True, kw_only=True)
class Made:
    """What a stage gave."""

    out: Path
    result: StageResult


def write_corpus(folder: Path, texts: Sequence[str] | None = None) -> Path:
    """A corpus artifact: two sources, one exact and one near duplicate; or `texts`."""
    rows = [
        {
            "text": f"{name} works as a {trade}. The {trade} {name} has {age} apples.",
            "source": "facts",
        }
        for age, name in enumerate(NAMES)
        for trade in TRADES
    ]
    tale = "A copy with one word more at its very end, and all the other words alike"
    rows += [
        {"text": tale + ".", "source": "tales"},
        {"text": tale + ", friend.", "source": "tales"},
        {"text": tale + ".", "source": "tales"},
    ]
    if texts is not None:
        rows = [{"text": text, "source": "given"} for text in texts]
    folder.mkdir(parents=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "documents.jsonl").write_text(lines, encoding="utf-8")
    return folder


def make_vocabulary(make_context: Make, corpus: Path, *, name: str = "words") -> Made:
    """Stage 1."""
    context = make_context(
        "vocabulary", VocabularySettings(size=320), inputs={"corpus": (corpus, "corpus")}, name=name
    )
    return Made(result=vocabulary.run(context), out=context.out)


def make_tokenizer(make_context: Make, words: Path) -> Path:
    """Stage 2."""
    context = make_context(
        "tokenizer",
        TokenizerSettings(model_max_length=64),
        inputs={"vocabulary": (words, "vocabulary")},
    )
    tokenizer.run(context)
    return context.out


def make_shards(
    make_context: Make, corpus: Path, reader: Path, *, name: str = "shards", seed: int = 7
) -> tuple[StageResult, Path]:
    """Stage 3: rows of 32 tokens, files of about 1000."""
    context = make_context(
        "shards",
        ShardsSettings(sequence_length=32, shard_tokens=1000, held_out=0.15, minhash_threshold=0.8),
        inputs={"corpus": (corpus, "corpus"), "tokenizer": (reader, "tokenizer")},
        name=name,
        seed=seed,
    )
    return shards.run(context), context.out


def base_settings(**changes: object) -> BaseSettings:
    """Two layers, 32 wide, 25 steps."""
    values: dict[str, object] = {
        "learning_rate": 1e-2,
        "max_steps": 25,
        "per_device_train_batch_size": 8,
        "model": ModelSettings(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            intermediate_size=64,
            max_position_embeddings=64,
        ),
        **changes,
    }
    return BaseSettings.model_validate(values)


def make_base(
    make_context: Make,
    packed: Path,
    reader: Path,
    *,
    name: str = "base",
    seed: int = 7,
    **changes: object,
) -> Made:
    """Stage 4."""
    context = make_context(
        "base_checkpoint",
        base_settings(**changes),
        inputs={"shards": (packed, "shards"), "tokenizer": (reader, "tokenizer")},
        name=name,
        seed=seed,
    )
    return Made(result=base_checkpoint.run(context), out=context.out)
