"""Checkpoints made elsewhere, and what is refused of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Recorder
from safetensors.torch import load_file, save_file
from tiny_chat import save_chat_model
from tiny_gguf import write_gguf
from transformers import AutoModelForSequenceClassification, LlamaConfig

from llm_assets.artifacts import check_artifact
from llm_assets.errors import ModelError
from llm_assets.stage_settings import BaseSettings, RewardSettings
from llm_assets.stages import importing
from llm_assets.stages.chat_template import CHATML
from llm_assets.stages.context import StageContext, StageResult
from llm_assets.stages.models import (
    check_pair,
    load_model,
    load_tokenizer,
    num_parameters,
    save_model,
)

Make = Callable[..., StageContext]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A healthy checkpoint folder."""
    return save_chat_model(tmp_path / "source")


def import_from(
    make_context: Make, path: Path | str, *, stage: str = "base_checkpoint"
) -> tuple[StageResult, StageContext]:
    settings = RewardSettings if stage == "reward_model" else BaseSettings
    context = make_context(stage, settings.model_validate({"import": {"path": str(path)}}))
    return importing.run(context), context


def edit(path: Path, **changes: Any) -> None:
    document = json.loads(path.read_text())
    for name, value in changes.items():
        if value is None:
            document.pop(name, None)
        else:
            document[name] = value
    path.write_text(json.dumps(document))


def test_a_safetensors_folder_keeps_its_weights(make_context: Make, source: Path) -> None:
    result, context = import_from(make_context, source)
    check_artifact(context.out, "checkpoint", result.metadata)
    one, other = (load_file(folder / "model.safetensors") for folder in (source, context.out))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert result.tables["changes"] == []
    assert result.metadata["num_parameters"] == num_parameters(load_model(context.out))
    assert 0 <= result.metrics["stop_rate"].value <= 1
    assert len(result.samples) == 3


def test_a_relative_path_and_a_variable_start_at_the_recipe(
    make_context: Make, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINY_MODEL", source.name)
    settings = BaseSettings.model_validate({"import": {"path": "${TINY_MODEL}"}})
    context = make_context("base_checkpoint", settings)
    importing.run(replace(context, lineage={"recipe_folder": str(source.parent)}))
    assert (context.out / "model.safetensors").is_file()


def test_eos_and_pad_are_set_right(make_context: Make, source: Path) -> None:
    edit(source / "tokenizer_config.json", eos_token="<|im_start|>", pad_token="<|im_end|>")
    result, context = import_from(make_context, source)
    tokenizer = load_tokenizer(context.out)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|pad|>")
    assert len(result.tables["changes"]) == 2
    generation = json.loads((context.out / "generation_config.json").read_text())
    assert generation["eos_token_id"] == tokenizer.convert_tokens_to_ids("<|im_end|>")


def test_a_pad_token_is_added_when_none_is_free(make_context: Make, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    model, tokenizer = importing.load_gguf(path)
    before = num_parameters(model)
    tokenizer.pad_token = None
    for name in importing._PADS:
        if name in tokenizer.get_vocab():
            tokenizer.bos_token = name
    changes = importing.repair_tokenizer(model, tokenizer, where="here")
    assert "pad None -> <|pad|>, added" in changes
    assert num_parameters(model) == before + 32
    check_pair(model, tokenizer, where="here")


def test_a_gguf_file_becomes_a_plain_model(make_context: Make, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    result, context = import_from(make_context, path)
    check_artifact(context.out, "checkpoint", result.metadata)
    config = json.loads((context.out / "config.json").read_text())
    assert "quantization_config" not in config
    tokenizer = load_tokenizer(context.out)
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert tokenizer.model_max_length == 64
    assert tokenizer.decode(tokenizer("the thief, 12").input_ids) == "the thief, 12"
    loaded, _ = importing.load_gguf(path)
    stored = load_model(context.out)
    ids = torch.tensor([[5, 9, 30]])
    assert torch.equal(loaded(input_ids=ids).logits, stored(input_ids=ids).logits)


def test_a_gguf_file_without_template_gets_chatml(make_context: Make, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", chat_template=None)
    _, context = import_from(make_context, path)
    assert load_tokenizer(context.out).chat_template == CHATML


def test_a_damaged_gguf_file_is_an_error(make_context: Make, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(ModelError, match=r"tiny\.gguf"):
        import_from(make_context, path)
    path.write_bytes(b"")
    with pytest.raises(ModelError, match=r"tiny\.gguf"):
        import_from(make_context, path)


def test_a_reward_model_is_imported_as_one(make_context: Make, source: Path) -> None:
    tokenizer = load_tokenizer(source)
    with pytest.raises(ModelError, match="a reward model is a sequence classifier"):
        import_from(make_context, source, stage="reward_model")
    config = LlamaConfig.from_pretrained(source, num_labels=1)
    folder = source.parent / "reward"
    save_model(AutoModelForSequenceClassification.from_config(config), tokenizer, folder)
    result, context = import_from(make_context, folder, stage="reward_model")
    check_artifact(context.out, "reward_model", result.metadata)


def test_pickles_are_refused_and_not_loaded(make_context: Make, source: Path) -> None:
    (source / "pytorch_model.bin").write_bytes(b"not even a pickle")
    with pytest.raises(ModelError, match=r"pickle files: pytorch_model\.bin"):
        import_from(make_context, source)
    (source / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="pickle files"):
        import_from(make_context, source)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "BertForMaskedLM"),
        ({"model_type": "t5"}, "model_type t5"),
        ({"model_type": "unheard_of"}, "unheard_of"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"hidden_size": 64}, "of another shape: model.embed_tokens.weight"),
        ({"num_hidden_layers": 3}, r"missing: model\.layers\.2"),
    ],
)
def test_another_architecture_is_refused(
    make_context: Make, source: Path, change: dict[str, Any], found: str
) -> None:
    edit(source / "config.json", **change)
    with pytest.raises(ModelError, match=found):
        import_from(make_context, source)


def test_a_vocabulary_smaller_than_the_tokenizer_is_refused(
    make_context: Make, source: Path
) -> None:
    weights = load_file(source / "model.safetensors")
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][:300].clone()
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    edit(source / "config.json", vocab_size=300)
    with pytest.raises(ModelError, match="vocabulary of 300 tokens, tokenizer of 3"):
        import_from(make_context, source)


def test_a_tokenizer_without_template_or_chat_tokens_is_refused(
    make_context: Make, source: Path
) -> None:
    (source / "chat_template.jinja").unlink()
    _, context = import_from(make_context, source)
    assert load_tokenizer(context.out).chat_template == CHATML
    document = (source / "tokenizer.json").read_text()
    (source / "tokenizer.json").write_text(document.replace("<|im_start|>", "<|other|>"))
    with pytest.raises(ModelError, match="a tokenizer without chat template"):
        import_from(make_context, source)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer_config.json"])
def test_a_missing_file_is_named(make_context: Make, source: Path, name: str) -> None:
    (source / name).unlink()
    with pytest.raises(ModelError):
        import_from(make_context, source)


def test_a_truncated_weights_file_is_an_error(make_context: Make, source: Path) -> None:
    path = source / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match="source"):
        import_from(make_context, source)


def test_a_missing_path_is_an_error(make_context: Make, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no such folder"):
        import_from(make_context, tmp_path / "nowhere")
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"a \.bin file"):
        import_from(make_context, tmp_path / "weights.bin")


def test_the_hub_offline_is_a_clear_error(
    make_context: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    settings = BaseSettings.model_validate(
        {"import": {"hub": "someone/some-model", "revision": "0" * 40}}
    )
    context = make_context("base_checkpoint", settings)
    with pytest.raises(ModelError, match=r"someone/some-model.*\n.*\n.*unset HF_HUB_OFFLINE"):
        importing.run(context)


def test_what_stages_need_of_a_tokenizer(source: Path) -> None:
    edit(source / "tokenizer_config.json", pad_token="<|im_end|>")
    with pytest.raises(ModelError, match="pad token equal to eos token"):
        load_tokenizer(source)
    edit(source / "tokenizer_config.json", pad_token=None)
    edit(source / "tokenizer.json", padding=None)
    with pytest.raises(ModelError, match="without pad token"):
        load_tokenizer(source)
    edit(source / "tokenizer_config.json", pad_token="<|pad|>")
    (source / "chat_template.jinja").unlink()
    with pytest.raises(ModelError, match="without chat template"):
        load_tokenizer(source)
    assert load_tokenizer(source, chat=False).pad_token == "<|pad|>"


def test_saved_twice_is_the_same_bytes(source: Path, tmp_path: Path) -> None:
    tokenizer, model = load_tokenizer(source), load_model(source)
    tokenizer(["long", "longer text"], padding=True, truncation=True, max_length=2)
    save_model(model, tokenizer, tmp_path / "one")
    save_model(load_model(tmp_path / "one"), load_tokenizer(tmp_path / "one"), tmp_path / "two")
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert names == sorted(path.name for path in (tmp_path / "two").iterdir())
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    document = json.loads((tmp_path / "one" / "tokenizer.json").read_text())
    assert document["padding"] is document["truncation"] is None


def test_changes_are_said(make_context: Make, source: Path) -> None:
    edit(source / "tokenizer_config.json", eos_token="<|im_start|>")
    _, context = import_from(make_context, source)
    progress = context.progress
    assert isinstance(progress, Recorder)
    assert any(line.startswith("eos <|im_start|> -> <|im_end|>") for line in progress.lines)
