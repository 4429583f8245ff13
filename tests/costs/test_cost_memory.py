from __future__ import annotations

from typing import Any

import pytest

from llm_assets.costs.devices import find_device
from llm_assets.costs.memory import activation_bytes, check_memory, stage_memory
from llm_assets.costs.parameters import from_config
from llm_assets.costs.work import InputsInfo
from llm_assets.errors import RecipeError
from llm_assets.stage_settings import (
    BaseSettings,
    CheckpointSettings,
    DpoSettings,
    EvalSettings,
    LoraSettings,
    RefineSettings,
    RewardSettings,
    SftSettings,
    TokenizerSettings,
)

SHAPE: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 384,
    "vocab_size": 1000,
    "tie_word_embeddings": True,
}
LLAMA_7B = from_config(
    {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "intermediate_size": 11008,
        "vocab_size": 32000,
    }
)
SEVEN = InputsInfo(architecture=LLAMA_7B, rows=1000, sequence_length=2048)


def _kept_bytes(shape: dict[str, Any], rows: int, length: int, *, bfloat16: bool) -> int:
    """What PyTorch really keeps for the backward pass, weights and their copies left out."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape, use_cache=False))
    weights = {entry.untyped_storage().data_ptr() for entry in model.parameters()}
    sizes = {tuple(entry.shape) for entry in model.parameters()}
    kept: dict[int, Any] = {}

    def keep(tensor: Any) -> Any:
        shape_ = tuple(tensor.shape)
        if shape_ not in sizes and shape_[::-1] not in sizes:
            kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    ids = torch.randint(3, shape["vocab_size"], (rows, length))
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=bfloat16),
    ):
        model(input_ids=ids, labels=ids)
    return sum(t.untyped_storage().nbytes() for at, t in kept.items() if at not in weights)


@pytest.mark.parametrize("bfloat16", [False, True])
@pytest.mark.parametrize(
    "changes",
    [{}, {"num_hidden_layers": 8}, {"intermediate_size": 1024}, {"num_key_value_heads": 4}],
)
def test_activations_are_what_pytorch_keeps(changes: dict[str, int], bfloat16: bool) -> None:
    shape, tokens = {**SHAPE, **changes}, 6 * 128
    kept = _kept_bytes(shape, 6, 128, bfloat16=bfloat16)
    counted = activation_bytes(from_config(shape), tokens, bfloat16=bfloat16, logits=False)
    # Of the logits only the log-softmax is kept; their gradient comes later.
    assert counted + 4 * 1000 * tokens == pytest.approx(kept, rel=0.08)


def test_a_7b_model_does_not_train_on_one_80_gib_device() -> None:
    settings = BaseSettings(max_steps=10, per_device_train_batch_size=1)
    need = stage_memory("base_checkpoint", settings, SEVEN)
    assert need is not None
    assert need.weights == pytest.approx(4 * 6.738e9, rel=0.001)
    assert need.gradients + need.optimizer == pytest.approx(12 * 6.738e9, rel=0.001)
    with pytest.raises(RecipeError) as caught:
        check_memory("base_checkpoint", need, find_device("H100"))
    assert "stages.base_checkpoint" in str(caught.value)
    assert "optimizer 50.2" in str(caught.value)
    assert "lora, shard over more devices" in str(caught.value)
    sharded = stage_memory("base_checkpoint", settings, SEVEN, shards=8)
    check_memory("base_checkpoint", sharded, find_device("H100"))


def test_a_batch_that_is_too_large_says_how_large_it_may_be() -> None:
    large = SftSettings(max_steps=10, per_device_train_batch_size=64, max_length=2048)
    lora = large.model_copy(update={"lora": LoraSettings(r=16, alpha=32)})
    need = stage_memory("sft_checkpoint", lora, SEVEN)
    assert need is not None
    assert need.gradients < 0.01 * need.weights
    with pytest.raises(RecipeError, match=r"per_device_train_batch_size to [0-9]+ %"):
        check_memory("sft_checkpoint", need, find_device("H100"))
    small = lora.model_copy(update={"per_device_train_batch_size": 1, "precision": "bfloat16"})
    check_memory(
        "sft_checkpoint", stage_memory("sft_checkpoint", small, SEVEN), find_device("H100")
    )


def test_what_stands_beside_the_trained_model() -> None:
    weights = 4.0 * LLAMA_7B.total
    lora = LoraSettings(r=8, alpha=16)
    expected = {
        "dpo": (DpoSettings(max_steps=1), weights),
        "dpo with lora": (DpoSettings(max_steps=1, lora=lora), 0.0),
        "reward": (RewardSettings(max_steps=1), 0.0),
        "grpo": (RefineSettings(max_steps=1), 2 * weights),
        "eval": (EvalSettings(), weights),
    }
    for name, (settings, others) in expected.items():
        need = stage_memory(name, settings, SEVEN)
        assert need is not None
        assert need.others == pytest.approx(others), name


def test_a_pair_is_two_rows_and_a_reward_model_has_no_logits() -> None:
    info = InputsInfo(architecture=from_config(SHAPE))
    one, both, scored = (
        stage_memory("s", kind(max_steps=1, max_length=128), info)
        for kind in (SftSettings, DpoSettings, RewardSettings)
    )
    assert one is not None and both is not None and scored is not None
    assert both.activations == pytest.approx(2 * one.activations)
    assert scored.activations < both.activations


def test_checkpointing_and_small_optimizers_save_memory() -> None:
    plain = SftSettings(max_steps=1, max_length=2048)
    thrifty = SftSettings.model_validate(
        {"max_steps": 1, "max_length": 2048, "gradient_checkpointing": True, "optim": "adamw_8bit"}
    )
    before, after = (stage_memory("s", settings, SEVEN) for settings in (plain, thrifty))
    assert before is not None and after is not None
    assert after.activations < before.activations / 4
    assert after.optimizer == before.optimizer / 4
    qlora = plain.model_copy(update={"lora": LoraSettings(r=8, alpha=16, quantize_base="nf4")})
    small = stage_memory("s", qlora, SEVEN)
    assert small is not None
    assert small.weights < before.weights / 6


def test_what_can_t_be_known_fits() -> None:
    assert stage_memory("tokenizer", TokenizerSettings(), SEVEN) is None
    assert stage_memory("s", SftSettings(max_steps=1), InputsInfo()) is None
    bound = stage_memory("s", SftSettings(max_steps=1), InputsInfo(num_parameters=10**12))
    assert bound is not None and bound.activations == 0
    check_memory("s", bound, find_device("cpu"))
    with pytest.raises(RecipeError):
        check_memory("s", bound, find_device("cpu", memory_gib=8.0))
    assert CheckpointSettings().keep  # a block without a model needs nothing
    assert stage_memory("s", CheckpointSettings(), SEVEN) is None
