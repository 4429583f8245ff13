"""Training runs whose papers say what they took. Each number is the paper's own.

`tolerance` is how far the estimate may be off, as a share of the published number, and `note` why.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class PublishedFlops:
    """A run whose paper gives its operations."""

    name: str
    config: Mapping[str, Any]
    tokens: float
    flops: float
    tolerance: float
    source: str
    attention_length: int | None = None


@dataclass(frozen=True, kw_only=True)
class PublishedHours:
    """A run whose paper gives its device hours; `utilization` None: the default of 0.40."""

    name: str
    config: Mapping[str, Any]
    tokens: float
    device: str
    hours: float
    tolerance: float
    source: str
    note: str
    utilization: float | None = None
    recompute: bool = False


def gpt(layers: int, hidden: int, heads: int) -> dict[str, Any]:
    """The shape of a GPT-3 model: learned positions, tied embeddings."""
    return {
        "model_type": "gpt2",
        "n_layer": layers,
        "n_embd": hidden,
        "n_head": heads,
        "n_positions": 2048,
        "vocab_size": 50257,
    }


def llama(
    hidden: int, inner: int, layers: int, heads: int, key_values: int, vocabulary: int
) -> dict[str, Any]:
    """The shape of a Llama model."""
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_values,
        "vocab_size": vocabulary,
    }


LLAMA_2 = {
    "7B": llama(4096, 11008, 32, 32, 32, 32000),
    "13B": llama(5120, 13824, 40, 40, 40, 32000),
    "70B": llama(8192, 28672, 80, 64, 8, 32000),
}
LLAMA_3 = {
    "8B": llama(4096, 14336, 32, 32, 8, 128256),
    "70B": llama(8192, 28672, 80, 64, 8, 128256),
    "405B": llama(16384, 53248, 126, 128, 8, 128256),
}
DEEPSEEK_V3: dict[str, Any] = {
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

_GPT_3 = "Brown et al. 2020, arXiv:2005.14165, table D.1"
_LLAMA_2 = "Touvron et al. 2023, arXiv:2307.09288, table 2"
_LLAMA_3 = "Grattafiori et al. 2024, arXiv:2407.21783"
_CARD_3 = "model card of Llama 3, 2024-04-18"
_CARD_31 = "model card of Llama 3.1, 2024-07-23"
_DEEPSEEK = "DeepSeek-AI 2024, arXiv:2412.19437, table 1"

FLOPS = (
    PublishedFlops(
        name="GPT-3 Small",
        config=gpt(12, 768, 12),
        tokens=300e9,
        flops=2.25e20,
        tolerance=0.01,
        source=_GPT_3,
    ),
    PublishedFlops(
        name="GPT-3 Medium",
        config=gpt(24, 1024, 16),
        tokens=300e9,
        flops=6.41e20,
        tolerance=0.01,
        source=_GPT_3,
    ),
    PublishedFlops(
        name="GPT-3 Large",
        config=gpt(24, 1536, 16),
        tokens=300e9,
        flops=1.37e21,
        tolerance=0.01,
        source=_GPT_3,
    ),
    PublishedFlops(
        name="GPT-3 2.7B",
        config=gpt(32, 2560, 32),
        tokens=300e9,
        flops=4.77e21,
        tolerance=0.01,
        source=_GPT_3,
    ),
    PublishedFlops(
        name="GPT-3 6.7B",
        config=gpt(32, 4096, 32),
        tokens=300e9,
        flops=1.20e22,
        tolerance=0.01,
        source=_GPT_3,
    ),
    PublishedFlops(
        name="GPT-3 13B",
        config=gpt(40, 5120, 40),  # table 2.1 prints 5140, D.1 counts 5120
        tokens=300e9,
        flops=2.31e22,
        tolerance=0.01,
        source=_GPT_3,
    ),
    PublishedFlops(
        name="GPT-3 175B",
        config=gpt(96, 12288, 96),
        tokens=300e9,
        flops=3.14e23,
        tolerance=0.01,
        source=_GPT_3,
    ),
    PublishedFlops(
        name="Llama 3 405B",
        config=LLAMA_3["405B"],
        tokens=15.6e12,
        flops=3.8e25,
        tolerance=0.01,
        source=f"{_LLAMA_3}, section 3.2",
    ),
)

HOURS = (
    PublishedHours(
        name="Llama 2 7B",
        config=LLAMA_2["7B"],
        tokens=2e12,
        device="A100",
        hours=184_320,
        tolerance=0.05,
        source=_LLAMA_2,
        note="default utilization",
    ),
    PublishedHours(
        name="Llama 2 13B",
        config=LLAMA_2["13B"],
        tokens=2e12,
        device="A100",
        hours=368_640,
        tolerance=0.10,
        source=_LLAMA_2,
        note="default utilization",
    ),
    PublishedHours(
        name="Llama 2 70B",
        config=LLAMA_2["70B"],
        tokens=2e12,
        device="A100",
        hours=1_720_320,
        tolerance=0.10,
        source=_LLAMA_2,
        note="default utilization",
    ),
    PublishedHours(
        name="GPT-3 175B on A100",
        config=gpt(96, 12288, 96),
        tokens=300e9,
        device="A100",
        hours=34 * 24 * 1024,
        tolerance=0.015,
        utilization=140 / 312,
        recompute=True,
        source="Narayanan et al. 2021, arXiv:2104.04473, section 5.1: 1024 A100, 34 days",
        note="the paper's own estimate at its measured 140 TFLOP/s; 8 N T with recomputation",
    ),
    PublishedHours(
        name="DeepSeek-V3",
        config=DEEPSEEK_V3,
        tokens=14.8e12,
        device="H800",
        hours=2_664_000,
        tolerance=0.20,
        source=_DEEPSEEK,
        note="37B of 671B active; trained in fp8, against a bf16 peak; the multi-token prediction "
        "module is not counted",
    ),
    PublishedHours(
        name="Llama 3.1 405B",
        config=LLAMA_3["405B"],
        tokens=15.6e12,
        device="H100",
        hours=30_840_000,
        tolerance=0.20,
        source=_CARD_31,
        note="the card counts more than pre-training: long context, annealing, restarts",
    ),
    PublishedHours(
        name="Llama 3 70B",
        config=LLAMA_3["70B"],
        tokens=15e12,
        device="H100",
        hours=6_400_000,
        tolerance=0.35,
        source=_CARD_3,
        note="'15T+' tokens; utilization is not stated, and was about 0.28",
    ),
    PublishedHours(
        name="Llama 3 8B",
        config=LLAMA_3["8B"],
        tokens=15e12,
        device="H100",
        hours=1_300_000,
        tolerance=0.65,
        source=_CARD_3,
        note="'15T+' tokens; the card's hours mean a utilization of 0.16: the default is far too "
        "hopeful for this run, and only a measurement would have told",
    ),
)
