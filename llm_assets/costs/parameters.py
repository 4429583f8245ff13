"""Exact parameter counts of an architecture, from the recipe, a config.json or a GGUF file.

`Architecture` lists the matrices of a decoder, so that totals, active parameters of a mixture of
experts, LoRA adapters and the multiplications of one token all come from one list. Supported
`model_type`s: llama, mistral, qwen2, qwen3, smollm3, gpt2, mixtral, deepseek_v2, deepseek_v3. The
counts equal those of transformers' own models (tests/costs/test_parameters.py compares them).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llm_assets.caching import cached_json
from llm_assets.errors import ModelError
from llm_assets.stage_settings import ModelSettings


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """`count` equal linear maps [outputs, inputs] of the model, all multiplied for every token but
    `count - active` of them. `layers` are the layer numbers that hold it. `expert`: routed."""

    name: str
    inputs: int
    outputs: int
    count: int
    active: int
    bias: bool = False
    expert: bool = False

    @property
    def parameters(self) -> int:
        """Of one of them, the bias included."""
        return self.inputs * self.outputs + (self.outputs if self.bias else 0)


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A decoder-only transformer.

    `vectors`: parameters that are not matrices (norms and the like). `position_embeddings`: rows of
    a learned table, zero with rotary positions. `key_value_size`: values that the cache keeps for a
    token in one layer.
    """

    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    head_size: int
    value_head_size: int
    key_value_size: int
    vocabulary_size: int
    tied: bool
    matrices: tuple[Matrix, ...]
    vectors: int
    position_embeddings: int = 0

    @property
    def embedding(self) -> int:
        """The table from tokens to vectors."""
        return self.vocabulary_size * self.hidden_size

    @property
    def head(self) -> int:
        """The output matrix, when it is not the embedding again."""
        return 0 if self.tied else self.embedding

    @property
    def positions(self) -> int:
        """The table of learned positions."""
        return self.position_embeddings * self.hidden_size

    @property
    def total(self) -> int:
        """All parameters, a tied embedding once."""
        inner = sum(entry.parameters * entry.count for entry in self.matrices)
        return inner + self.vectors + self.embedding + self.head + self.positions

    @property
    def non_embedding(self) -> int:
        """All parameters but embedding, positions and output matrix (Kaplan et al. 2020)."""
        return self.total - self.embedding - self.head - self.positions

    @property
    def active(self) -> int:
        """Parameters that one token uses: all of a dense model, the chosen experts of a mixture."""
        idle = sum(entry.parameters * (entry.count - entry.active) for entry in self.matrices)
        return self.total - idle

    @property
    def compute(self) -> int:
        """Parameters that multiply one token: active ones without tables that are only looked up.

        The output matrix multiplies, so a tied embedding counts once and an untied one not at all.
        """
        return self.active - self.positions - (0 if self.tied else self.embedding)

    @property
    def compute_without_head(self) -> int:
        """`compute` of the body alone, as a reward model has it."""
        return self.compute - self.embedding


def from_settings(model: ModelSettings, vocabulary_size: int) -> Architecture:
    """The architecture that the recipe's `stages.base_checkpoint.model` builds."""
    config = {
        "model_type": "llama",
        "vocab_size": vocabulary_size,
        **model.model_dump(mode="json"),
    }
    return from_config(config, where="stages.base_checkpoint.model")


def from_config(config: Mapping[str, Any], *, where: str = "config.json") -> Architecture:
    """The architecture that a transformers config describes. ModelError when it can't be told."""
    model_type = str(config.get("model_type", ""))
    try:
        if model_type == "gpt2":
            return _gpt2(config)
        if model_type in ("deepseek_v2", "deepseek_v3"):
            return _deepseek(config)
        if model_type in _LLAMA_LIKE:
            return _llama(config)
    except KeyError as error:
        raise ModelError(
            where=where,
            found=f"no {error.args[0]}",
            rule=f"a config of type {model_type} says {error.args[0]}",
            remedy="take the config.json that came with the weights",
        ) from error
    raise ModelError(
        where=where,
        found=f"model_type {model_type!r}",
        rule=f"parameters are counted for {', '.join((*_LLAMA_LIKE, 'gpt2'))} and deepseek_v2/3",
        remedy="give the number of parameters by hand",
    )


def from_folder(folder: Path) -> Architecture:
    """The architecture of a model folder, from its config.json."""
    path = folder / "config.json" if folder.is_dir() else folder
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(
            where=str(path),
            found=str(error),
            rule="a model folder holds a readable config.json",
            remedy="check the path, or save the model with save_pretrained",
        ) from error
    if not isinstance(config, dict):
        raise ModelError(
            where=str(path),
            found=f"a {type(config).__name__}",
            rule="config.json is an object",
            remedy="take the config.json that came with the weights",
        )
    return from_config(config, where=str(path))


def gguf_parameters(path: Path) -> int:
    """The number of weights in a GGUF file, from its header; nothing is dequantized.

    Remembered by place, size and time: reading a header with a large vocabulary takes seconds.
    """
    try:
        status = path.stat()
    except OSError as error:
        raise _no_gguf(path, error) from error
    key = ["gguf-parameters-1", str(path.resolve()), status.st_size, status.st_mtime_ns]
    return int(cached_json(json.dumps(key), lambda: _read_gguf(path)))


def _no_gguf(path: Path, error: Exception) -> ModelError:
    return ModelError(
        where=str(path),
        found=str(error),
        rule="a .gguf file starts with a GGUF header",
        remedy="download the file again",
    )


def _read_gguf(path: Path) -> int:
    from gguf import GGUFReader

    try:
        reader = GGUFReader(str(path))
    except (OSError, ValueError, IndexError) as error:
        raise _no_gguf(path, error) from error
    return sum(int(tensor.n_elements) for tensor in reader.tensors)


# What transformers assumes where a config.json is silent.
_LLAMA_LIKE: Mapping[str, Mapping[str, Any]] = {
    "llama": {},
    "mistral": {"num_key_value_heads": 8},
    "qwen2": {"num_key_value_heads": 32},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
    "smollm3": {"num_key_value_heads": 4, "tie_word_embeddings": True},
    "mixtral": {"num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
}


def _llama(config: Mapping[str, Any]) -> Architecture:
    """Llama and its relatives: grouped-query attention and a gated feed-forward network."""
    kind = str(config["model_type"])
    config = {**_LLAMA_LIKE[kind], **config}
    hidden = int(config["hidden_size"])
    layers = int(config["num_hidden_layers"])
    heads = int(config["num_attention_heads"])
    key_value_heads = int(config.get("num_key_value_heads") or heads)
    head_size = int(config.get("head_dim") or hidden // heads)
    inner = int(config["intermediate_size"])
    query_bias = kind == "qwen2" or bool(config.get("attention_bias", False))
    output_bias = kind != "qwen2" and bool(config.get("attention_bias", False))
    mlp_bias = bool(config.get("mlp_bias", False))

    def matrix(name: str, inputs: int, outputs: int, bias: bool = False) -> Matrix:
        return Matrix(
            name=name, inputs=inputs, outputs=outputs, count=layers, active=layers, bias=bias
        )

    key_value = key_value_heads * head_size
    matrices = [
        matrix("self_attn.q_proj", hidden, heads * head_size, query_bias),
        matrix("self_attn.k_proj", hidden, key_value, query_bias),
        matrix("self_attn.v_proj", hidden, key_value, query_bias),
        matrix("self_attn.o_proj", heads * head_size, hidden, output_bias),
    ]
    if kind == "mixtral":
        experts = int(config["num_local_experts"])
        chosen = int(config["num_experts_per_tok"])
        matrices.append(matrix("mlp.gate", hidden, experts))
        matrices.extend(_experts("mlp.experts", hidden, inner, layers * experts, layers * chosen))
    else:
        matrices.extend(
            (
                matrix("mlp.gate_proj", hidden, inner, mlp_bias),
                matrix("mlp.up_proj", hidden, inner, mlp_bias),
                matrix("mlp.down_proj", inner, hidden, mlp_bias),
            )
        )
    vectors = 2 * hidden * layers + hidden
    if kind == "qwen3":
        vectors += 2 * head_size * layers
    return Architecture(
        model_type=kind,
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=inner,
        num_heads=heads,
        head_size=head_size,
        value_head_size=head_size,
        key_value_size=2 * key_value,
        vocabulary_size=int(config["vocab_size"]),
        tied=bool(config.get("tie_word_embeddings", False)),
        matrices=tuple(matrices),
        vectors=vectors,
    )


def _experts(name: str, hidden: int, inner: int, count: int, active: int) -> list[Matrix]:
    return [
        Matrix(
            name=f"{name}.{part}",
            inputs=inputs,
            outputs=outputs,
            count=count,
            active=active,
            expert=True,
        )
        for part, inputs, outputs in (
            ("gate_proj", hidden, inner),
            ("up_proj", hidden, inner),
            ("down_proj", inner, hidden),
        )
    ]


def _gpt2(config: Mapping[str, Any]) -> Architecture:
    """GPT-2 and GPT-3: learned positions, biases, no gate in the feed-forward network."""
    hidden = int(config["n_embd"])
    layers = int(config["n_layer"])
    heads = int(config["n_head"])
    inner = int(config.get("n_inner") or 4 * hidden)
    shapes = (
        ("attn.c_attn", hidden, 3 * hidden),
        ("attn.c_proj", hidden, hidden),
        ("mlp.c_fc", hidden, inner),
        ("mlp.c_proj", inner, hidden),
    )
    return Architecture(
        model_type="gpt2",
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=inner,
        num_heads=heads,
        head_size=hidden // heads,
        value_head_size=hidden // heads,
        key_value_size=2 * hidden,
        vocabulary_size=int(config["vocab_size"]),
        tied=bool(config.get("tie_word_embeddings", True)),
        matrices=tuple(
            Matrix(name=name, inputs=a, outputs=b, count=layers, active=layers, bias=True)
            for name, a, b in shapes
        ),
        vectors=4 * hidden * layers + 2 * hidden,
        position_embeddings=int(config["n_positions"]),
    )


def _deepseek(config: Mapping[str, Any]) -> Architecture:
    """DeepSeek-V2 and V3: low-rank attention (MLA), shared and routed experts.

    Without the multi-token prediction module, which the main model does not use.
    """
    kind = str(config["model_type"])
    hidden = int(config["hidden_size"])
    layers = int(config["num_hidden_layers"])
    heads = int(config["num_attention_heads"])
    latent, rope = int(config["kv_lora_rank"]), int(config["qk_rope_head_dim"])
    value, plain = int(config["v_head_dim"]), int(config["qk_nope_head_dim"])
    query_rank = config.get("q_lora_rank")
    dense = int(config.get("first_k_dense_replace", 0))
    sparse = layers - dense
    bias = bool(config.get("attention_bias", False))
    inner, inner_expert = int(config["intermediate_size"]), int(config["moe_intermediate_size"])
    experts, chosen = int(config["n_routed_experts"]), int(config["num_experts_per_tok"])
    shared = int(config.get("n_shared_experts") or 0)

    def matrix(name: str, inputs: int, outputs: int, count: int, bias: bool = False) -> Matrix:
        return Matrix(
            name=name, inputs=inputs, outputs=outputs, count=count, active=count, bias=bias
        )

    vectors = (2 * hidden + latent) * layers + hidden
    if query_rank:
        rank = int(query_rank)
        vectors += rank * layers
        matrices = [
            matrix("self_attn.q_a_proj", hidden, rank, layers, bias),
            matrix("self_attn.q_b_proj", rank, heads * (plain + rope), layers),
        ]
    else:
        matrices = [matrix("self_attn.q_proj", hidden, heads * (plain + rope), layers)]
    matrices += [
        matrix("self_attn.kv_a_proj_with_mqa", hidden, latent + rope, layers, bias),
        matrix("self_attn.kv_b_proj", latent, heads * (plain + value), layers),
        matrix("self_attn.o_proj", heads * value, hidden, layers, bias),
        matrix("mlp.gate_proj", hidden, inner, dense),
        matrix("mlp.up_proj", hidden, inner, dense),
        matrix("mlp.down_proj", inner, hidden, dense),
        matrix("mlp.gate", hidden, experts, sparse),
        matrix("mlp.shared_experts.gate_proj", hidden, shared * inner_expert, sparse),
        matrix("mlp.shared_experts.up_proj", hidden, shared * inner_expert, sparse),
        matrix("mlp.shared_experts.down_proj", shared * inner_expert, hidden, sparse),
        *_experts("mlp.experts", hidden, inner_expert, sparse * experts, sparse * chosen),
    ]
    return Architecture(
        model_type=kind,
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=inner,
        num_heads=heads,
        head_size=plain + rope,
        value_head_size=value,
        key_value_size=latent + rope,
        vocabulary_size=int(config["vocab_size"]),
        tied=bool(config.get("tie_word_embeddings", False)),
        matrices=tuple(matrices),
        vectors=vectors,
    )


def lora_parameters(
    architecture: Architecture, *, r: int, target_modules: str | Sequence[str] = "all-linear"
) -> int:
    """Weights of the LoRA adapters: r (inputs + outputs) for each target matrix (Hu et al. 2021).

    `target_modules` as in peft.LoraConfig: `all-linear` (all but the output matrix), a list of
    name endings, or a regular expression over the whole module name. Routed experts are one fused
    tensor in transformers 5 and no target; neither is a mixture's router.
    """
    names = target_modules
    return sum(
        r * (entry.inputs + entry.outputs) * entry.count
        for entry in architecture.matrices
        if not entry.expert and entry.name != "mlp.gate" and _is_target(entry.name, names)
    )


def _is_target(name: str, targets: str | Sequence[str]) -> bool:
    if targets == "all-linear":
        return True
    if isinstance(targets, str):
        return re.fullmatch(targets, f"model.layers.0.{name}") is not None
    full = f"model.layers.0.{name}"
    return any(full == entry or full.endswith(f".{entry}") for entry in targets)
