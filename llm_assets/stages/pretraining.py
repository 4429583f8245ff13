"""What stages 4 and 5 share: training on packed shards with transformers' Trainer, and measuring.

Held-out measures are taken on the weights as they are stored, in float32.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from llm_assets.errors import DataError, ModelError
from llm_assets.gates.statistics import Interval, difference, ratio_interval
from llm_assets.stages.context import Metric, StageContext, StageResult, with_ends
from llm_assets.stages.training import (
    TrainingLog,
    num_parameters,
    run_training,
    sample,
    save_model,
    training_arguments,
)

IGNORED = -100
"""The label that torch's cross entropy leaves out."""
_FORMAT = 1
_NUM_SAMPLES = 4
_PROMPT_TOKENS = 8
_SAMPLE_TOKENS = 32
# Logits of one batch of the held-out measure, at most: 256 MiB of float32.
_LOGITS = 64 * 1024 * 1024


class PackedRows(Dataset[dict[str, torch.Tensor]]):
    """The rows of one split of a shards artifact.

    An item is {input_ids, labels}, both [sequence_length] int64; padding is not a label. The files
    stay mapped: a row is read when it is asked for.
    """

    def __init__(self, shards: Path, split: str) -> None:
        index = read_index(shards)
        self.sequence_length = int(index["sequence_length"])
        self.num_tokens = int(index[split]["tokens"])
        self.num_bytes = int(index[split]["bytes"])
        self.end_of_text = int(index["end_of_text"])
        self._pad = int(index["pad"])
        self._shards = [
            load_file(shards / entry["file"])["input_ids"]
            for entry in index["files"]
            if entry["split"] == split
        ]
        self._ends: list[int] = []
        for shard in self._shards:
            self._ends.append((self._ends[-1] if self._ends else 0) + len(shard))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        number = bisect_right(self._ends, row)
        start = self._ends[number - 1] if number else 0
        ids = self._shards[number][row - start].long()
        return {"input_ids": ids, "labels": ids.masked_fill(ids == self._pad, IGNORED)}


def read_index(shards: Path) -> dict[str, Any]:
    """index.json of a shards artifact. DataError for a format that this version does not know."""
    index: dict[str, Any] = json.loads((shards / "index.json").read_text(encoding="utf-8"))
    if index.get("format") != _FORMAT:
        raise DataError(
            where=str(shards / "index.json"),
            found=f"format {index.get('format')}",
            rule=f"this version reads shards of format {_FORMAT}",
            remedy="build the shards again with this version",
        )
    return index


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Held-out measures. `loss`: nats a token. `bits_per_byte`: all tokens of the text at the mean
    loss, over its bytes in UTF-8; it compares models with different vocabularies. `interval`: of
    the loss; rows are what was drawn."""

    loss: float
    bits_per_byte: float
    num_tokens: int
    interval: Interval

    def metrics(self) -> dict[str, Metric]:
        """The loss, its bits per byte and perplexity, with the ends of their intervals."""
        scale = self.bits_per_byte / self.loss if self.loss else 0.0
        bits = Interval(self.interval.low * scale, self.interval.high * scale)
        return {
            **with_ends("held_out_loss", self.loss, self.interval, self.num_tokens),
            **with_ends("held_out_bits_per_byte", self.bits_per_byte, bits, None),
            "held_out_perplexity": Metric(value=math.exp(self.loss)),
        }


@torch.inference_mode()
def measure_held_out(model: Any, rows: PackedRows, *, limit: int | None = None) -> HeldOut:
    """Mean cross entropy on all rows of a split, or on `limit` of them, evenly spread."""
    was_training = model.training
    model.eval()
    batch = max(1, _LOGITS // (rows.sequence_length * model.config.vocab_size))
    step = 1 if limit is None else max(1, len(rows) // limit)
    chosen = list(range(0, len(rows), step))[:limit]
    nats: list[float] = []
    counts: list[float] = []
    for start in range(0, len(chosen), batch):
        items = [rows[row] for row in chosen[start : start + batch]]
        ids = torch.stack([item["input_ids"] for item in items]).to(model.device)
        labels = torch.stack([item["labels"] for item in items]).to(model.device)[:, 1:]
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
        losses = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none"
        )
        nats += losses.view(labels.shape).sum(1).tolist()
        counts += (labels != IGNORED).sum(1).tolist()
    model.train(was_training)
    count = int(sum(counts))
    loss = math.fsum(nats) / count
    bits = loss * rows.num_tokens / math.log(2)
    interval = Interval(math.nan, math.nan)
    if math.isfinite(loss):
        interval = ratio_interval(nats, counts)
    return HeldOut(
        loss=loss,
        bits_per_byte=bits / rows.num_bytes,
        num_tokens=count,
        interval=interval,
    )


def pretrain(context: StageContext, model: Any, tokenizer: Any, *, data_seed: int) -> StageResult:
    """Train `model` on the shards of the context, store it, and measure it before and after.

    `data_seed` decides the order of the rows.
    """
    shards = context.inputs["shards"].path
    check_fit(model, tokenizer, shards)
    train, held_out = PackedRows(shards, "train"), PackedRows(shards, "held_out")
    prompts = _prompts(held_out, tokenizer)
    context.progress.say(f"measuring on {len(held_out)} held-out rows before the training")
    before = measure_held_out(model, held_out)
    texts_before = _continue(model, tokenizer, prompts)
    context.progress.say(f"training {num_parameters(model):,} parameters on {len(train):,} rows")
    arguments = training_arguments(
        TrainingArguments,
        context,
        data_seed=data_seed,
        include_num_input_tokens_seen="all",
        remove_unused_columns=False,
    )
    log = run_training(context, Trainer(model=model, args=arguments, train_dataset=train))
    save_model(model, tokenizer, context.out)
    context.progress.say("measuring after the training")
    after = measure_held_out(model, held_out)
    seen = measure_held_out(model, train, limit=len(held_out))
    samples = [
        {"prompt": prompt, "before": old, "after": new}
        for prompt, old, new in zip(
            prompts, texts_before, _continue(model, tokenizer, prompts), strict=True
        )
    ]
    return _result(model, log, (before, after, seen), samples)


def check_fit(model: Any, tokenizer: Any, shards: Path) -> None:
    """ModelError unless model, tokenizer and shards belong together."""
    index = read_index(shards)
    positions = model.config.max_position_embeddings
    if index["sequence_length"] > positions:
        raise ModelError(
            where="stages.shards.sequence_length",
            found=f"rows of {index['sequence_length']} tokens, a model of {positions} positions",
            rule="a row fits into the model's context",
            remedy="raise model.max_position_embeddings or lower shards.sequence_length",
        )
    rows = model.get_input_embeddings().weight.shape[0]
    if index["num_vocabulary"] != len(tokenizer) or rows < len(tokenizer):
        raise ModelError(
            where=str(shards / "index.json"),
            found=f"shards of {index['num_vocabulary']} tokens, a tokenizer of {len(tokenizer)}, "
            f"a model of {rows}",
            rule="shards are tokenized with the tokenizer of the model",
            remedy="build the shards with the tokenizer that the model was trained with",
        )


def _prompts(rows: PackedRows, tokenizer: Any) -> list[str]:
    """The first words of held-out documents."""
    found: list[str] = []
    for row in range(len(rows)):
        ids = rows[row]["input_ids"].tolist()
        for place, token in enumerate(ids[: -_PROMPT_TOKENS - 1]):
            if token == rows.end_of_text:
                start = ids[place + 1 : place + 1 + _PROMPT_TOKENS]
                if rows.end_of_text not in start:
                    found.append(tokenizer.decode(start))
                break
        if len(found) == _NUM_SAMPLES:
            break
    return found


def _continue(model: Any, tokenizer: Any, prompts: Sequence[str]) -> list[str]:
    return sample(model, tokenizer, prompts, max_new_tokens=_SAMPLE_TOKENS)


def _result(
    model: Any,
    log: TrainingLog,
    measured: tuple[HeldOut, HeldOut, HeldOut],
    samples: list[dict[str, Any]],
) -> StageResult:
    """`measured`: held-out rows before and after, and as many rows of the training after."""
    parameters = num_parameters(model)
    before, after, seen = measured
    gap = difference(after.loss, after.interval, seen.loss, seen.interval)
    return StageResult(
        metrics={
            **after.metrics(),
            "held_out_loss_before": Metric(value=before.loss, n=before.num_tokens),
            "train_loss": Metric(value=log.last("loss")),
            **with_ends("train_held_out_gap", after.loss - seen.loss, gap, after.num_tokens),
            "tokens_per_s": Metric(value=log.tokens_per_s),
        },
        metadata={"num_parameters": parameters},
        series=log.series,
        tables=log.tables,
        samples=samples,
        tokens=log.tokens,
        # Forward and backward: 6 a parameter and token (Kaplan et al. 2020, Hoffmann et al. 2022).
        flops=6.0 * parameters * log.tokens,
    )
