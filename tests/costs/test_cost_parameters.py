from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llm_assets.costs.parameters import (
    from_config,
    from_folder,
    from_settings,
    gguf_parameters,
    lora_parameters,
)
from llm_assets.errors import ModelError
from llm_assets.stage_settings import ModelSettings

LLAMA_2_7B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "intermediate_size": 11008,
    "vocab_size": 32000,
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
_SMALL = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 300}
SHAPES: dict[str, dict[str, Any]] = {
    "llama 2 7b": LLAMA_2_7B,
    "llama, tied, grouped queries, biases": {
        **_SMALL,
        "model_type": "llama",
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "mistral": {**_SMALL, "model_type": "mistral", "intermediate_size": 96, "head_dim": 32},
    "qwen2": {
        **_SMALL,
        "model_type": "qwen2",
        "num_key_value_heads": 2,
        "intermediate_size": 96,
    },
    "qwen3": {**_SMALL, "model_type": "qwen3", "num_key_value_heads": 2, "intermediate_size": 96},
    "smollm3": {
        **_SMALL,
        "model_type": "smollm3",
        "intermediate_size": 96,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "gpt2": {
        "model_type": "gpt2",
        "n_embd": 768,
        "n_layer": 12,
        "n_head": 12,
        "n_positions": 1024,
        "vocab_size": 50257,
    },
    "mixtral": {
        **_SMALL,
        "model_type": "mixtral",
        "intermediate_size": 96,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    },
    "deepseek v3": DEEPSEEK_V3,
    "deepseek v2, plain queries": {
        **DEEPSEEK_V3,
        "model_type": "deepseek_v2",
        "hidden_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "first_k_dense_replace": 1,
        "vocab_size": 500,
    },
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.filterwarnings(
    "ignore"
)  # transformers talks about token ids outside tiny vocabularies
def test_counts_equal_those_of_transformers(name: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = SHAPES[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape))
    counted = from_config(shape)
    assert counted.total == sum(entry.numel() for entry in model.parameters())
    assert counted.embedding == model.get_input_embeddings().weight.numel()


def test_the_published_sizes() -> None:
    assert from_config(LLAMA_2_7B).total == 6_738_415_616
    assert from_config(SHAPES["gpt2"]).total == 124_439_808
    deepseek = from_config(DEEPSEEK_V3)
    assert deepseek.total == pytest.approx(671e9, rel=0.001)
    assert deepseek.active == pytest.approx(37e9, rel=0.02)


def test_with_and_without_embeddings() -> None:
    untied = from_config(LLAMA_2_7B)
    table = 32000 * 4096
    assert untied.total - untied.non_embedding == 2 * table
    assert untied.total - untied.compute == table
    assert untied.compute - untied.compute_without_head == table
    tied = from_config({**LLAMA_2_7B, "tie_word_embeddings": True})
    assert tied.total == untied.total - table
    assert tied.compute == untied.compute
    assert tied.non_embedding == untied.non_embedding
    assert tied.active == tied.total


def test_the_recipe_s_own_model() -> None:
    model = ModelSettings(
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=384,
    )
    layer = 128 * 128 * 2 + 128 * 64 * 2 + 3 * 128 * 384 + 2 * 128
    assert from_settings(model, 2048).total == 4 * layer + 128 + 2048 * 128


@pytest.mark.parametrize(
    "targets", ["all-linear", ["q_proj", "v_proj"], ["down_proj"], r".*self_attn\.(q|k)_proj"]
)
def test_lora_weights_equal_those_of_peft(targets: str | list[str]) -> None:
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {**SHAPES["llama, tied, grouped queries, biases"], "attention_bias": False}
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape))
        tuned = get_peft_model(
            model, LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM")
        )
    expected = sum(entry.numel() for entry in tuned.parameters() if entry.requires_grad)
    assert lora_parameters(from_config(shape), r=4, target_modules=targets) == expected > 0


def test_a_config_that_can_t_be_counted(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="mamba"):
        from_config({"model_type": "mamba"})
    with pytest.raises(ModelError, match="no intermediate_size"):
        from_config({**_SMALL, "model_type": "llama"})
    with pytest.raises(ModelError, match=r"config\.json"):
        from_folder(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ModelError, match="a list"):
        from_folder(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_2_7B))
    assert from_folder(tmp_path) == from_folder(tmp_path / "config.json")


def test_weights_of_a_gguf_file(tmp_path: Path) -> None:
    import numpy as np
    from gguf import GGUFWriter

    path = tmp_path / "model.gguf"
    writer = GGUFWriter(str(path), "llama")
    writer.add_tensor("token_embd.weight", np.zeros((30, 8), dtype=np.float32))
    writer.add_tensor("output_norm.weight", np.zeros(8, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert gguf_parameters(path) == 248
    path.write_bytes(b"not a model")
    with pytest.raises(ModelError, match="GGUF header"):
        gguf_parameters(path)
