"""Stage 4: a Llama built from the recipe and pre-trained on the shards.

Takes `shards` and `tokenizer`; gives a `checkpoint`. An imported base goes through importing.py.
"""

from __future__ import annotations

from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM, set_seed

from llm_assets.errors import ModelError
from llm_assets.stage_settings import BaseSettings, ModelSettings
from llm_assets.stages.context import StageContext, StageResult
from llm_assets.stages.pretraining import pretrain
from llm_assets.stages.training import load_tokenizer


def run(context: StageContext) -> StageResult:
    """Build the model from the seed and train it."""
    settings: BaseSettings = context.config
    if settings.model is None:
        raise ModelError(
            where="stages.base_checkpoint",
            found="neither `model` nor `import`",
            rule="a base is trained from an architecture or imported",
            remedy="add `model:` with its sizes, or `import: {path: ...}`",
        )
    tokenizer = load_tokenizer(context.inputs["tokenizer"].path)
    model = build_model(settings.model, tokenizer, seed=context.seed)
    return pretrain(context, model, tokenizer, data_seed=context.seed)


def build_model(settings: ModelSettings, tokenizer: Any, *, seed: int) -> Any:
    """A Llama with random weights, the same for the same seed; one embedding a token."""
    if settings.hidden_size % settings.num_attention_heads:
        raise ModelError(
            where="stages.base_checkpoint.model",
            found=f"hidden_size {settings.hidden_size}, "
            f"num_attention_heads {settings.num_attention_heads}",
            rule="the heads share the hidden size evenly",
            remedy="take a hidden_size that is a multiple of num_attention_heads",
        )
    if settings.num_attention_heads % settings.num_key_value_heads:
        raise ModelError(
            where="stages.base_checkpoint.model",
            found=f"num_attention_heads {settings.num_attention_heads}, "
            f"num_key_value_heads {settings.num_key_value_heads}",
            rule="query heads share the key and value heads evenly (Ainslie et al. 2023)",
            remedy="take num_attention_heads that is a multiple of num_key_value_heads",
        )
    set_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.num_hidden_layers,
        num_attention_heads=settings.num_attention_heads,
        num_key_value_heads=settings.num_key_value_heads,
        max_position_embeddings=settings.max_position_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": settings.rope_theta},
        tie_word_embeddings=settings.tie_word_embeddings,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )
    return LlamaForCausalLM(config)
