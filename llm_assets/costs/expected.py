"""What is known of a stage's inputs: from the recipe before they exist, from the store after."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from llm_assets.costs.parameters import (
    Architecture,
    from_folder,
    from_settings,
    gguf_parameters,
)
from llm_assets.costs.work import InputsInfo
from llm_assets.data_settings import DataSettings, FileSource, HubSource
from llm_assets.errors import LlmAssetsError, UserError
from llm_assets.recipe import Recipe
from llm_assets.sources import import_path
from llm_assets.store.digest import ArtifactHash
from llm_assets.store.protocol import Record, Store

_DATA_OF = {
    "corpus": "corpus",
    "instructions": "instructions",
    "preferences": "preferences",
    "evals": "evals",
    "vocabulary": "corpus",
    "shards": "corpus",
    "sft_checkpoint": "instructions",
    "reward_model": "preferences",
    "dpo_policy": "preferences",
    "refined_policy": "preferences",
}
_VILLAGE_TASKS = 5


def expected_info(recipe: Recipe, stage: str) -> InputsInfo:
    """What the recipe alone says about the inputs of a stage; unknown things are None."""
    architecture, parameters = _model(recipe)
    data = _DATA_OF.get(stage)
    rows = None if data is None else expected_rows(recipe, data, train=data != stage)
    if stage in ("base_checkpoint", "midtrained_checkpoint"):
        rows = None  # packed rows are counted when the shards stand
    village = recipe.data.village
    return InputsInfo(
        architecture=architecture,
        num_parameters=parameters,
        rows=rows,
        sequence_length=recipe.stages.shards.sequence_length,
        eval_items=village.eval_items * _VILLAGE_TASKS if recipe.data.evals.has_village else None,
    )


def _model(recipe: Recipe) -> tuple[Architecture | None, int | None]:
    base = recipe.stages.base_checkpoint
    source = base.import_
    if source is None:
        if base.model is None:
            return None, None
        return from_settings(base.model, recipe.stages.vocabulary.size), None
    if source.path is None:
        return None, None
    # What can't be read here is an error of the stage that imports it, not of an estimate.
    with contextlib.suppress(UserError, OSError):
        path = import_path(recipe, source.path)
        if path.suffix == ".gguf":
            return None, gguf_parameters(path)
        return from_folder(path), None
    return None, None


def expected_rows(recipe: Recipe, data: str, *, train: bool) -> int | None:
    """Rows of a data set as the recipe limits them; None when only the files can tell."""
    block: DataSettings = getattr(recipe.data, data)
    village = {
        "corpus": recipe.data.village.corpus_documents,
        "instructions": recipe.data.village.instructions,
        "preferences": recipe.data.village.preferences,
        "evals": recipe.data.village.eval_items * _VILLAGE_TASKS,
    }
    counts: list[int | None] = []
    for source in block.sources:
        known = None if isinstance(source, FileSource | HubSource) else village[data]
        limits = [count for count in (known, source.limit) if count is not None]
        counts.append(min(limits) if limits else None)
    total = None if None in counts else sum(count for count in counts if count is not None)
    if block.max_rows is not None:
        total = block.max_rows if total is None else min(total, block.max_rows)
    if total is None or not train or data in ("corpus", "evals"):
        return total
    return max(1, round(total * (1 - block.held_out)))


def with_metadata(info: InputsInfo, metadata: Mapping[str, Mapping[str, Any]]) -> InputsInfo:
    """`info` corrected by what the input artifacts say of themselves. `metadata`: input to the
    metadata of its tree."""
    changes: dict[str, Any] = {}
    for name, found in metadata.items():
        if name in ("instructions", "preferences"):
            rows = found.get("num_train", found.get("train", found.get("num_rows")))
            changes.update(_whole("rows", rows))
        elif name == "corpus":
            changes.update(_whole("rows", found.get("num_rows")))
        elif name == "shards":
            changes.update(_whole("sequence_length", found.get("sequence_length")))
            length, tokens = found.get("sequence_length"), found.get("num_tokens")
            if isinstance(length, int) and isinstance(tokens, int) and length > 0:
                changes["rows"] = tokens // length
        elif name == "evals":
            changes.update(_whole("eval_items", found.get("num_rows")))
        elif "num_parameters" in found and name != "reward_model":
            changes.update(_whole("num_parameters", found["num_parameters"]))
    number = changes.get("num_parameters")
    if number is not None and info.architecture and info.architecture.total != number:
        changes["architecture"] = None  # the recipe's shape is not that of this checkpoint
    return replace(info, **changes)


def _whole(name: str, value: Any) -> dict[str, int]:
    return {name: value} if isinstance(value, int) and not isinstance(value, bool) else {}


def stored_metadata(store: Store, inputs: Mapping[str, str]) -> dict[str, Mapping[str, Any]]:
    """The metadata of input artifacts, those that the store still has."""
    found: dict[str, Mapping[str, Any]] = {}
    for name, artifact in inputs.items():
        with contextlib.suppress(LlmAssetsError, ValueError):
            found[name] = store.tree(ArtifactHash.parse(artifact)).metadata
    return found


def record_info(store: Store, record: Record, info: InputsInfo) -> InputsInfo:
    """What was known of the inputs of an earlier record: `info`, corrected by its artifacts."""
    return with_metadata(info, stored_metadata(store, record.inputs))
