"""Settings, checkpoints and rows that stages 6 to 9 refuse before they train."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from alignment_parts import STEPS, Shop, refine_settings, write_rows

from llm_assets.errors import DataError, ModelError, RecipeError
from llm_assets.stage_settings import SftSettings
from llm_assets.stages import refined_policy, sft_checkpoint
from llm_assets.stages.context import StageContext


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Shop:
    return Shop(tmp_path_factory.mktemp("refusals"))


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"num_generations": 3}, "refined_policy.num_generations"),
        ({"method": "constitutional"}, "refined_policy.constitution"),
        ({"method": "rloo", "scale_rewards": "none"}, "refined_policy.scale_rewards"),
        ({"sync_ref_model": True}, "refined_policy.sync_ref_model"),
        ({"lora": {"quantize_base": "nf4"}}, "refined_policy.lora.quantize_base"),
    ],
)
def test_settings_that_cannot_work(
    make_context: Callable[..., StageContext], changes: dict[str, Any], place: str
) -> None:
    context = make_context("refined_policy", refine_settings(**changes))
    with pytest.raises(RecipeError) as caught:
        refined_policy.run(context)
    assert caught.value.where == place


@pytest.mark.parametrize(
    ("file", "change", "text"),
    [
        ("tokenizer_config.json", {"pad_token": "<|im_end|>"}, "pad token equal to eos"),
        ("tokenizer_config.json", {"eos_token": "<|im_start|>"}, "no answer is trained to end"),
        ("chat_template.jinja", None, "without chat template"),
        ("config.json", {"vocab_size": 300}, "of another shape"),
        ("pytorch_model.bin", {}, "pickle"),
    ],
)
def test_a_checkpoint_that_cannot_be_trained(
    shop: Shop,
    make_context: Callable[..., StageContext],
    tmp_path: Path,
    file: str,
    change: dict[str, Any] | None,
    text: str,
) -> None:
    context = make_context(
        "sft_checkpoint",
        SftSettings(learning_rate=5e-3, **STEPS),
        inputs={
            "midtrained_checkpoint": (tmp_path / "broken", "checkpoint"),
            "instructions": (shop.paths["instructions"], "instructions"),
        },
    )
    folder = context.inputs["midtrained_checkpoint"].path
    shutil.copytree(shop.paths["base"], folder)
    if change is None:
        (folder / file).unlink()
    else:
        old = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
        (folder / file).write_text(json.dumps({**old, **change}))
    with pytest.raises(ModelError, match=text):
        sft_checkpoint.run(context)
    assert not list(context.out.iterdir())


@pytest.mark.parametrize(
    ("turns", "text"),
    [
        ([("user", "Who?")], "row 1: no supervised token"),
        ([("user", "Who?"), ("assistant", "I am here. " * 80)], "no row is left"),
    ],
)
def test_rows_that_cannot_be_trained_on(
    shop: Shop,
    make_context: Callable[..., StageContext],
    tmp_path: Path,
    turns: list[tuple[str, str]],
    text: str,
) -> None:
    messages = [{"role": role, "content": content} for role, content in turns]
    for split in ("train", "held_out"):
        write_rows(tmp_path / "rows" / f"{split}.jsonl", [{"messages": messages}])
    context = make_context(
        "sft_checkpoint",
        SftSettings(learning_rate=5e-3, **STEPS),
        inputs={
            "midtrained_checkpoint": (shop.paths["base"], "checkpoint"),
            "instructions": (tmp_path / "rows", "instructions"),
        },
    )
    with pytest.raises(DataError, match=text):
        sft_checkpoint.run(context)
