"""The artifact types and what each must contain. Checked before put and after fetch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llm_assets.errors import ModelError

_MODEL_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


@dataclass(frozen=True, kw_only=True)
class ArtifactType:
    """Files that must be there (`required`) and metadata keys that must be there, by JSON type."""

    name: str
    required: tuple[str, ...]
    metadata: Mapping[str, type | tuple[type, ...]]
    description: str


_TYPES = (
    ArtifactType(
        name="corpus",
        required=("documents.jsonl",),
        metadata={"num_rows": int},
        description="Rows {text, source}.",
    ),
    ArtifactType(
        name="instructions",
        required=("train.jsonl", "held_out.jsonl"),
        metadata={"num_rows": int},
        description="Rows {messages: [{role, content}], source, kind}.",
    ),
    ArtifactType(
        name="preferences",
        required=("train.jsonl", "held_out.jsonl"),
        metadata={"num_rows": int},
        description="Rows {prompt: [messages], chosen: [messages], rejected: [messages], source, "
        "rubric, vendor, votes: [{annotator, choice}]}.",
    ),
    ArtifactType(
        name="evals",
        required=("tasks.json",),
        metadata={"num_rows": int},
        description="lm-eval task folder: tasks.json lists {name, role, num_items}; NAME.yaml and "
        "NAME.jsonl each.",
    ),
    ArtifactType(
        name="vocabulary",
        required=("vocab.json", "merges.txt"),
        metadata={"num_tokens": int},
        description="Byte-level BPE vocabulary and merges.",
    ),
    ArtifactType(
        name="tokenizer",
        required=("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
        metadata={"num_tokens": int},
        description="A transformers fast tokenizer with special tokens and a chat template.",
    ),
    ArtifactType(
        name="shards",
        required=("index.json",),
        metadata={"num_tokens": int, "sequence_length": int},
        description="train-NNNNN.safetensors and held_out-NNNNN.safetensors, tensor `input_ids` "
        "[rows, sequence_length] int32; index.json holds counts.",
    ),
    ArtifactType(
        name="checkpoint",
        required=_MODEL_FILES,
        metadata={"num_parameters": int},
        description="A pre-trained causal language model with its tokenizer.",
    ),
    ArtifactType(
        name="sft_checkpoint",
        required=_MODEL_FILES,
        metadata={"num_parameters": int},
        description="A fine-tuned causal language model with its tokenizer.",
    ),
    ArtifactType(
        name="reward_model",
        required=_MODEL_FILES,
        metadata={"num_parameters": int},
        description="A sequence classifier with one label, and its tokenizer.",
    ),
    ArtifactType(
        name="policy",
        required=_MODEL_FILES,
        metadata={"num_parameters": int},
        description="An aligned causal language model with its tokenizer.",
    ),
    ArtifactType(
        name="eval_report",
        required=("report.json", "report.html"),
        metadata={},
        description="Metrics of policy and reference, item by item.",
    ),
    ArtifactType(
        name="quantized_weights",
        required=_MODEL_FILES,
        metadata={"bits": int},
        description="GPTQ weights in compressed-tensors form, with their tokenizer.",
    ),
    ArtifactType(
        name="server_spec",
        required=("server.json",),
        metadata={"weights": str},
        description="How to start the server, and what its smoke test answered.",
    ),
    ArtifactType(
        name="release",
        required=("manifest.json",),
        metadata={"decision": str},
        description="The ship decision and the manifest.",
    ),
)

ARTIFACT_TYPES: Mapping[str, ArtifactType] = {entry.name: entry for entry in _TYPES}

_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")


def check_artifact(folder: Path, type: str, metadata: Mapping[str, Any]) -> None:
    """ModelError unless `folder` is a whole artifact of `type` with the metadata that it needs."""
    expected = ARTIFACT_TYPES[type]
    for name in expected.required:
        path = folder / name
        if not path.is_file() and not (name == "model.safetensors" and _is_sharded(folder)):
            raise ModelError(
                where=str(path),
                found="missing",
                rule=f"an artifact of type {type} holds {', '.join(expected.required)}",
                remedy="write the file before the stage ends",
            )
        if path.is_file() and path.stat().st_size == 0:
            raise ModelError(
                where=str(path),
                found="an empty file",
                rule=f"no required file of a {type} is empty",
                remedy="look at the stage's log for what stopped it from writing",
            )
    for path in sorted(folder.rglob("*")):
        if path.suffix in _PICKLES:
            raise ModelError(
                where=str(path),
                found="a pickle file",
                rule="weights are safetensors; pickle is never stored or loaded",
                remedy="save with save_pretrained(safe_serialization=True), or convert the file",
            )
    for key, kind in expected.metadata.items():
        if not isinstance(metadata.get(key), kind):
            raise ModelError(
                where=f"metadata of {folder.name}: {key}",
                found=repr(metadata.get(key)),
                rule=f"a {type} says {key}",
                remedy="set it in the stage's result",
            )


def _is_sharded(folder: Path) -> bool:
    return (folder / "model.safetensors.index.json").is_file()
