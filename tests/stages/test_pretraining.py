"""Stages 4 and 5 on a small corpus."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pretraining_parts import (
    base_settings,
    make_base,
    make_shards,
    make_tokenizer,
    make_vocabulary,
    write_corpus,
)
from safetensors.torch import load_file

from llm_assets.artifacts import check_artifact
from llm_assets.errors import ModelError
from llm_assets.stage_settings import BaseSettings, MidtrainSettings
from llm_assets.stages import base_checkpoint, midtrained_checkpoint
from llm_assets.stages.context import StageContext
from llm_assets.stages.pretraining import IGNORED, PackedRows, measure_held_out
from llm_assets.stages.training import load_model, load_tokenizer, num_parameters

Make = Callable[..., StageContext]


@pytest.fixture
def packed(make_context: Make, tmp_path: Path) -> tuple[Path, Path]:
    """Shards and tokenizer."""
    corpus = write_corpus(tmp_path / "corpus")
    reader = make_tokenizer(make_context, make_vocabulary(make_context, corpus).out)
    return make_shards(make_context, corpus, reader)[1], reader


def test_base_learns_and_is_whole(make_context: Make, packed: tuple[Path, Path]) -> None:
    made = make_base(make_context, *packed)
    check_artifact(made.out, "checkpoint", made.result.metadata)
    metrics = {name: metric.value for name, metric in made.result.metrics.items()}
    assert metrics["held_out_loss_before"] == pytest.approx(math.log(320), rel=0.05)
    assert metrics["held_out_loss"] < metrics["held_out_loss_before"] - 1.5
    assert metrics["held_out_perplexity"] == pytest.approx(math.exp(metrics["held_out_loss"]))
    assert metrics["tokens_per_s"] > 0
    rows = len(PackedRows(packed[0], "train"))
    per_epoch = [8] * (rows // 8) + ([rows % 8] if rows % 8 else [])
    expected = sum((per_epoch * 25)[:25]) * 32
    assert made.result.tokens == expected
    model = load_model(made.out)
    assert made.result.flops == 6 * num_parameters(model) * expected
    assert [step for step, _ in made.result.series["loss"]] == list(range(1, 26))
    assert {tuple(sample) for sample in made.result.samples} == {("prompt", "before", "after")}
    generation = json.loads((made.out / "generation_config.json").read_text())
    reader = load_tokenizer(made.out)
    assert generation["eos_token_id"] == reader.eos_token_id
    assert generation["pad_token_id"] == reader.pad_token_id
    assert model.config.vocab_size == len(reader)


def test_the_same_seed_gives_the_same_weights(
    make_context: Make, packed: tuple[Path, Path]
) -> None:
    first = make_base(make_context, *packed, name="first", max_steps=4)
    second = make_base(make_context, *packed, name="second", max_steps=4)
    other = make_base(make_context, *packed, name="other", max_steps=4, seed=8)
    assert first.result.series == second.result.series
    assert first.result.series != other.result.series
    weights = [load_file(made.out / "model.safetensors") for made in (first, second)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (first.out / name).read_bytes() == (second.out / name).read_bytes()


def test_midtraining_goes_on_from_the_base(make_context: Make, packed: tuple[Path, Path]) -> None:
    base = make_base(make_context, *packed)
    context = make_context(
        "midtrained_checkpoint",
        MidtrainSettings(learning_rate=3e-3, max_steps=10, per_device_train_batch_size=8),
        inputs={"base_checkpoint": (base.out, "checkpoint"), "shards": (packed[0], "shards")},
    )
    result = midtrained_checkpoint.run(context)
    check_artifact(context.out, "checkpoint", result.metadata)
    before = result.metrics["held_out_loss_before"].value
    assert before == pytest.approx(base.result.metrics["held_out_loss"].value, rel=1e-6)
    assert result.metrics["held_out_loss"].value < before
    rates = [value for _, value in result.series["learning_rate"]]
    assert rates[-1] < rates[2] < 3.1e-3


def test_held_out_loss_is_the_mean_over_tokens_that_count(
    make_context: Make, packed: tuple[Path, Path]
) -> None:
    rows = PackedRows(packed[0], "held_out")
    made = make_base(make_context, *packed, max_steps=1)
    model = load_model(made.out)
    measured = measure_held_out(model, rows)
    losses = []
    for number in range(len(rows)):
        item = rows[number]
        logits = model(input_ids=item["input_ids"][None]).logits[0, :-1].log_softmax(-1)
        for place, label in enumerate(item["labels"][1:].tolist()):
            if label != IGNORED:
                losses.append(-logits[place, label].item())
    assert measured.num_tokens == len(losses) <= len(rows) * 31
    assert measured.loss == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    bits = measured.loss / math.log(2) * rows.num_tokens / rows.num_bytes
    assert measured.bits_per_byte == pytest.approx(bits)


def test_padding_is_no_label_and_rows_come_from_all_files(packed: tuple[Path, Path]) -> None:
    rows = PackedRows(packed[0], "train")
    files = sorted(packed[0].glob("train-*.safetensors"))
    assert len(files) > 1
    stored = torch.cat([load_file(file)["input_ids"] for file in files])
    assert len(rows) == len(stored)
    for number in (0, len(load_file(files[0])["input_ids"]), len(rows) - 1):
        assert torch.equal(rows[number]["input_ids"], stored[number].long())
    pad = json.loads((packed[0] / "index.json").read_text())["pad"]
    last = rows[len(rows) - 1]
    assert (last["input_ids"] == pad).any()
    assert torch.equal(last["labels"] == IGNORED, last["input_ids"] == pad)
    counted = sum(int((rows[n]["labels"] != IGNORED).sum()) for n in range(len(rows)))
    assert counted == rows.num_tokens


def test_a_base_that_cannot_be_built_is_refused(
    make_context: Make, packed: tuple[Path, Path]
) -> None:
    reader = load_tokenizer(packed[1])
    model = base_settings().model
    assert model is not None
    odd = model.model_copy(update={"num_attention_heads": 3})
    with pytest.raises(ModelError, match="hidden_size 32, num_attention_heads 3"):
        base_checkpoint.build_model(odd, reader, seed=0)
    uneven = model.model_copy(update={"num_attention_heads": 4, "num_key_value_heads": 3})
    with pytest.raises(ModelError, match="num_key_value_heads 3"):
        base_checkpoint.build_model(uneven, reader, seed=0)
    context = make_context("base_checkpoint", BaseSettings())
    with pytest.raises(ModelError, match="neither `model` nor `import`"):
        base_checkpoint.run(context)


def test_rows_longer_than_the_context_are_refused(
    make_context: Make, packed: tuple[Path, Path]
) -> None:
    index = json.loads((packed[0] / "index.json").read_text())
    (packed[0] / "index.json").write_text(json.dumps({**index, "sequence_length": 65}))
    with pytest.raises(ModelError, match="rows of 65 tokens, a model of 64 positions"):
        make_base(make_context, *packed)
    (packed[0] / "index.json").write_text(json.dumps({**index, "num_vocabulary": 7}))
    with pytest.raises(ModelError, match="shards of 7 tokens, a tokenizer of 320"):
        make_base(make_context, *packed)
