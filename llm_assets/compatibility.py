"""Whether a checkpoint can feed a stage, or stand in for another one: compared without torch.

profile_of(folder)          what a model folder or a save holds
differences(found, wanted)  aspect by aspect, each with the migration that it needs
check_inputs(...)           before a stage starts: ModelError for inputs that do not fit
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llm_assets.errors import ModelError
from llm_assets.stages.context import StageInput
from llm_assets.stages.save_tensors import read_header

MODEL_TYPES = ("checkpoint", "sft_checkpoint", "policy", "reward_model")
_PREFIXES = ("module.", "_orig_mod.", "base_model.model.", "model.")
_SHAPE_KEYS = (
    "model_type",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)
_SPECIAL = ("eos_token", "pad_token", "bos_token")
# Of a parameter group: what a moment means. The learning rate moves with the schedule.
_OPTIMIZER_KEYS = ("betas", "eps", "weight_decay", "amsgrad", "momentum", "nesterov")


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What a checkpoint is, as far as others depend on it. `tensors`: name to type and shape.
    `tokenizer`: hash of vocabulary, merges and added tokens; "" without one. `optimizer`: of each
    parameter group, for a save."""

    where: str
    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    config: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: str = ""
    num_tokens: int = 0
    special: Mapping[str, str] = field(default_factory=dict)
    chat_template: str = ""
    optimizer: Sequence[Mapping[str, Any]] = ()

    @property
    def num_parameters(self) -> int:
        """Values of all stored tensors; tied ones stand once."""
        total = 0
        for _, shape in self.tensors.values():
            size = 1
            for length in shape:
                size *= length
            total += size
        return total


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One way in which a checkpoint is not what is expected, and what would make it so."""

    aspect: str
    found: str
    expected: str
    migration: str

    def text(self) -> str:
        """For people."""
        return f"{self.aspect}: {self.found}, expected {self.expected}; migration: {self.migration}"


def profile_of(folder: Path) -> Profile:
    """The profile of a model folder or of an in-training save. ModelError for unreadable files."""
    try:
        tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
        for path in sorted(folder.glob("model*.safetensors")):
            entries, _ = read_header(path)
            tensors |= {name: (entry.dtype, entry.shape) for name, entry in entries.items()}
        config = _json(folder / "config.json")
        tokenizer = _json(folder / "tokenizer.json")
        settings = _json(folder / "tokenizer_config.json")
        loop = _json(folder / "loop.json")
        template = folder / "chat_template.jinja"
        return Profile(
            where=str(folder),
            tensors=tensors,
            config={key: config[key] for key in _SHAPE_KEYS if key in config},
            tokenizer=_tokenizer_hash(tokenizer),
            num_tokens=_num_tokens(tokenizer),
            special={name: _token(settings.get(name)) for name in _SPECIAL if settings.get(name)},
            chat_template=template.read_text()
            if template.is_file()
            else str(settings.get("chat_template") or ""),
            optimizer=[
                {key: group[key] for key in _OPTIMIZER_KEYS if key in group}
                for group in loop.get("param_groups", [])
            ],
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            where=str(folder),
            found=f"{type(error).__name__}: {error}",
            rule="a checkpoint is readable safetensors and JSON",
            remedy="verify it (`llm-assets store verify`, `llm-assets checkpoints verify`)",
        ) from error


def _json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    document = json.loads(path.read_bytes())
    if not isinstance(document, dict):
        raise ValueError(f"{path.name}: no object")
    return document


def _tokenizer_hash(document: Mapping[str, Any]) -> str:
    if not document:
        return ""
    parts = {key: document.get(key) for key in ("model", "added_tokens", "normalizer")}
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _num_tokens(document: Mapping[str, Any]) -> int:
    """The largest token id and one: what the embedding must have rows for."""
    if not document:
        return 0
    vocabulary = (document.get("model") or {}).get("vocab") or {}
    ids = [*vocabulary.values()] if isinstance(vocabulary, dict) else [len(vocabulary) - 1]
    ids += [entry["id"] for entry in document.get("added_tokens") or []]
    return max((int(number) for number in ids), default=-1) + 1


def _token(value: Any) -> str:
    return str(value.get("content")) if isinstance(value, dict) else str(value)


def differences(found: Profile, wanted: Profile) -> list[Difference]:
    """Where `found` is not `wanted`: parameters, layers, tokenizer, chat template, optimizer. What
    `wanted` does not say (no tokenizer, no optimizer) is not compared."""
    result = _layers(found, wanted)
    if wanted.tokenizer and found.tokenizer != wanted.tokenizer:
        result.append(_tokenizers(found, wanted))
    for name, token in wanted.special.items():
        if found.tokenizer and found.special.get(name) != token:
            result.append(
                Difference(
                    aspect=name,
                    found=found.special.get(name, "none"),
                    expected=token,
                    migration=f"set {name} in tokenizer_config.json of a copy, and put that",
                )
            )
    if wanted.chat_template and found.chat_template != wanted.chat_template:
        result.append(
            Difference(
                aspect="chat template",
                found=_short(found.chat_template),
                expected=_short(wanted.chat_template),
                migration="fine-tune it again on conversations in the expected template, or set "
                "stages.tokenizer.chat_template to its own and run the alignment again",
            )
        )
    if wanted.optimizer and found.optimizer and list(found.optimizer) != list(wanted.optimizer):
        result.append(
            Difference(
                aspect="optimizer configuration",
                found=json.dumps(list(found.optimizer)),
                expected=json.dumps(list(wanted.optimizer)),
                migration="take its weights and start the moments anew (roll back with "
                "checkpoint.partial: restore after removing them), or bring its settings back",
            )
        )
    return result


def _layers(found: Profile, wanted: Profile) -> list[Difference]:
    if not wanted.tensors or dict(found.tensors) == dict(wanted.tensors):
        return []
    result = []
    if found.num_parameters != wanted.num_parameters:
        result.append(
            Difference(
                aspect="parameter count",
                found=f"{found.num_parameters:,}",
                expected=f"{wanted.num_parameters:,}",
                migration=_shape_migration(found, wanted),
            )
        )
    missing, extra = (
        wanted.tensors.keys() - found.tensors.keys(),
        found.tensors.keys() - (wanted.tensors.keys()),
    )
    if missing or extra:
        result.append(
            Difference(
                aspect="layer names",
                found=f"{len(extra)} others ({_first(extra)})",
                expected=f"{len(missing)} that are missing ({_first(missing)})",
                migration=_name_migration(found, wanted),
            )
        )
    odd = sorted(
        name
        for name in found.tensors.keys() & wanted.tensors.keys()
        if found.tensors[name] != wanted.tensors[name]
    )
    if odd:
        same_shape = all(found.tensors[name][1] == wanted.tensors[name][1] for name in odd)
        result.append(
            Difference(
                aspect="types" if same_shape else "shapes",
                found=f"{odd[0]} {found.tensors[odd[0]]}",
                expected=f"{wanted.tensors[odd[0]]} ({len(odd)} differ)",
                migration="cast the weights in a copy, and put that"
                if same_shape
                else _shape_migration(found, wanted),
            )
        )
    return result


def _shape_migration(found: Profile, wanted: Profile) -> str:
    changed = [k for k in _SHAPE_KEYS if found.config.get(k) != wanted.config.get(k)]
    if changed == ["vocab_size"]:
        return "resize the embeddings of a copy to the expected vocabulary and train them"
    if changed:
        named = ", ".join(f"{k} {found.config.get(k)} for {wanted.config.get(k)}" for k in changed)
        return f"none: another architecture ({named}); change the recipe's model, or train it"
    return "none: another architecture; change the recipe's model, or train it"


def _name_migration(found: Profile, wanted: Profile) -> str:
    for prefix in _PREFIXES:
        if {name.removeprefix(prefix) for name in found.tensors} == set(wanted.tensors):
            return f"rename the layers in a copy: take the prefix {prefix!r} away"
        if {prefix + name for name in found.tensors} == set(wanted.tensors):
            return f"rename the layers in a copy: put the prefix {prefix!r} before them"
    if any("lora_" in name for name in found.tensors):
        return "merge the adapters into the weights of a copy"
    return _shape_migration(found, wanted)


def _tokenizers(found: Profile, wanted: Profile) -> Difference:
    if not found.tokenizer:
        migration = "put the tokenizer that it was trained with beside the weights of a copy"
    elif found.num_tokens != wanted.num_tokens:
        migration = (
            "resize the embeddings of a copy and train them on the expected tokenizer; or import "
            "it with its own tokenizer, and run the alignment again"
        )
    else:
        migration = (
            "none: the same ids mean other tokens; import it with its own tokenizer, and make "
            "shards and alignment again"
        )
    return Difference(
        aspect="tokenizer",
        found=f"{found.num_tokens} tokens, {found.tokenizer[:12] or 'none'}",
        expected=f"{wanted.num_tokens} tokens, {wanted.tokenizer[:12]}",
        migration=migration,
    )


def check_inputs(where: str, inputs: Mapping[str, StageInput]) -> None:
    """ModelError unless the checkpoints among a stage's inputs are whole and belong together.

    Each: weights as its config says (embedding rows, number of layers), a tokenizer whose tokens
    have embeddings. Among each other: one tokenizer, one chat template.
    """
    models = {name: entry for name, entry in inputs.items() if entry.type in MODEL_TYPES}
    profiles = {name: profile_of(entry.path) for name, entry in models.items()}
    for name, profile in profiles.items():
        for problem in _own_problems(profile):
            raise _refusal(where, name, [problem])
    reference = None
    for name, profile in profiles.items():
        if not profile.tokenizer:
            continue
        if reference is None:
            reference = profile
            continue
        shared = Profile(
            where=reference.where,
            tensors={},
            tokenizer=reference.tokenizer,
            num_tokens=reference.num_tokens,
            chat_template=reference.chat_template,
        )
        wrong = differences(profile, shared)
        if wrong:
            raise _refusal(where, name, wrong)


def _own_problems(profile: Profile) -> list[Difference]:
    result = []
    rows = max(
        (shape[0] for name, (_, shape) in profile.tensors.items() if "embed_tokens" in name),
        default=0,
    )
    told = int(profile.config.get("vocab_size", rows) or rows)
    if rows and rows != told:
        result.append(
            Difference(
                aspect="embedding rows",
                found=str(rows),
                expected=f"{told}, as config.json says",
                migration="take the config.json that belongs to these weights",
            )
        )
    if rows and profile.num_tokens > rows:
        result.append(
            Difference(
                aspect="tokenizer",
                found=f"{profile.num_tokens} tokens",
                expected=f"at most {rows}, the rows of the embedding",
                migration="resize the embeddings of a copy and train them, or take the tokenizer "
                "that belongs to the weights",
            )
        )
    layers = {
        int(name.partition("layers.")[2].partition(".")[0])
        for name in profile.tensors
        if ".layers." in name and name.partition("layers.")[2].partition(".")[0].isdigit()
    }
    told_layers = profile.config.get("num_hidden_layers")
    if layers and told_layers is not None and len(layers) != told_layers:
        result.append(
            Difference(
                aspect="layers",
                found=str(len(layers)),
                expected=f"{told_layers}, as config.json says",
                migration="take the config.json that belongs to these weights",
            )
        )
    return result


def _refusal(where: str, name: str, wrong: Sequence[Difference]) -> ModelError:
    return ModelError(
        where=f"{where}: input {name}",
        found="; ".join(f"{d.aspect}: {d.found}, expected {d.expected}" for d in wrong),
        rule="checkpoints that feed a stage fit their own configuration and each other",
        remedy="; ".join(dict.fromkeys(d.migration for d in wrong)),
    )


def _short(text: str) -> str:
    return f"{hashlib.sha256(text.encode()).hexdigest()[:12]} ({len(text)} characters)"


def _first(names: Any) -> str:
    return min(names, default="none")
