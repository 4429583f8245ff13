"""Small real parts for the alignment stages: village rows, a BPE tokenizer, a two-layer Llama."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from llm_assets.data_settings import VillageSettings
from llm_assets.village import instruction_rows, preference_rows

TEMPLATE = (
    "{%- for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}"
    "{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
PLAIN_TEMPLATE = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
VILLAGE = VillageSettings(instructions=400, preferences=240, villagers=8)


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """JSONL."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_village(folder: Path) -> dict[str, Path]:
    """`instructions` and `preferences` as the data stages write them."""
    paths = {}
    for name, rows in (
        ("instructions", list(instruction_rows(VILLAGE))),
        ("preferences", list(preference_rows(VILLAGE))),
    ):
        for split in ("train", "held_out"):
            kept = [{**row, "source": "village"} for row in rows if row["split"] == split]
            write_rows(folder / name / f"{split}.jsonl", kept)
        paths[name] = folder / name
    return paths


def small_tokenizer(texts: Iterable[str]) -> Any:
    """Byte-level BPE of at most 512 tokens with ChatML."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=512,
            special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        model_max_length=128,
    )
    fast.chat_template = TEMPLATE
    return fast


def small_model(tokenizer: Any) -> Any:
    """Two layers, 32 wide, 128 tokens of context."""
    torch.manual_seed(5)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=512,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=128,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=tokenizer.bos_token_id,
        )
    )
