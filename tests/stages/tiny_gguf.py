"""A two-layer Llama as a GGUF file, with the traps of real ones: eos is wrong, pad is missing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np

TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_gguf(path: Path, *, chat_template: str | None = TEMPLATE) -> Path:
    """Byte-level BPE with two merges; 32 wide, 2 heads; weights from a fixed seed."""
    from tokenizers.pre_tokenizers import ByteLevel

    tokens = [
        "<|endoftext|>",
        "<|im_start|>",
        "<|im_end|>",
        *sorted(ByteLevel.alphabet()),
        "th",
        "the",
    ]
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(64)
    writer.add_head_count(2)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(16)
    writer.add_rope_freq_base(10_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([control] * 3 + [normal] * (len(tokens) - 3))
    writer.add_token_merges(["t h", "th e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(1)
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    for name, shape in _shapes(len(tokens)).items():
        values = np.random.default_rng(len(name)).normal(0, 0.02, shape).astype(np.float32)
        writer.add_tensor(name, values + 1 if len(shape) == 1 else values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _shapes(num_tokens: int) -> dict[str, tuple[Any, ...]]:
    shapes: dict[str, tuple[Any, ...]] = {
        "token_embd.weight": (num_tokens, 32),
        "output_norm.weight": (32,),
    }
    for layer in range(2):
        for name in ("attn_q", "attn_k", "attn_v", "attn_output"):
            shapes[f"blk.{layer}.{name}.weight"] = (32, 32)
        shapes[f"blk.{layer}.ffn_gate.weight"] = (64, 32)
        shapes[f"blk.{layer}.ffn_up.weight"] = (64, 32)
        shapes[f"blk.{layer}.ffn_down.weight"] = (32, 64)
        shapes[f"blk.{layer}.attn_norm.weight"] = (32,)
        shapes[f"blk.{layer}.ffn_norm.weight"] = (32,)
    return shapes
