"""Recipes that must not run: no eval gate, an unbounded KL, evals among the training data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from llm_assets.data_settings import FileSource, HubSource
from llm_assets.errors import RecipeError
from llm_assets.graph import Node
from llm_assets.reading.fingerprint import resolve_files
from llm_assets.recipe import Recipe

_POLICIES = ("dpo_policy", "refined_policy")
_TRAINING = ("corpus", "instructions", "preferences")


def check_safety(recipe: Recipe, nodes: Mapping[str, Node]) -> None:
    """RecipeError for a recipe whose release nobody could trust."""
    _check_eval_gate(recipe, nodes)
    _check_kl(recipe, nodes)
    _check_evals_apart(recipe, nodes)


def _check_eval_gate(recipe: Recipe, nodes: Mapping[str, Node]) -> None:
    if "release" in nodes and not recipe.gates.get("eval_report"):
        raise RecipeError(
            where=f"{recipe.path}: gates.eval_report",
            found="no gate",
            rule="a release is decided by at least one eval gate",
            remedy="add one, such as `capability_delta: {min: -0.05}`",
        )


def _check_kl(recipe: Recipe, nodes: Mapping[str, Node]) -> None:
    """Each policy that trains here has a bound on its KL, or the eval report has one for all."""
    bounded = {
        stage
        for stage, gates in recipe.gates.items()
        if any(name.startswith("kl") and gate.max is not None for name, gate in gates.items())
    }
    for name in _POLICIES:
        node = nodes.get(name)
        trains = node is not None and node.pin is None and not node.imported
        if trains and not bounded.intersection({name, "eval_report"}):
            raise RecipeError(
                where=f"{recipe.path}: gates.{name}",
                found="no bound on the KL to the reference",
                rule="a policy that trains has a KL budget: without one, nothing tells an aligned "
                "model from one that left its language behind",
                remedy="add `kl_per_token: {max: 0.5}` there",
            )


def _check_evals_apart(recipe: Recipe, nodes: Mapping[str, Node]) -> None:
    """No file and no split of a hub data set is both trained on and evaluated with. The village
    makes items of its own for each."""
    evals = {key: place for key, place, _ in _origins(recipe, "evals")}
    for name in _TRAINING:
        if name not in nodes:
            continue
        for key, place, found in _origins(recipe, name):
            if key in evals:
                raise RecipeError(
                    where=f"{recipe.path}: {place}",
                    found=f"{found}, which {evals[key]} has too",
                    rule="what a model is evaluated with is in no training set",
                    remedy="take it out of one of them, or split the file",
                )


def _origins(recipe: Recipe, name: str) -> Iterator[tuple[Any, str, str]]:
    """(what is compared, place in the recipe, what it is for people) of a data set's sources."""
    for position, source in enumerate(getattr(recipe.data, name).sources):
        place = f"data.{name}.sources.{position}"
        if isinstance(source, FileSource):
            for file in resolve_files(source, recipe.folder):
                yield Path(file.path).resolve(), place, file.path.name
        elif isinstance(source, HubSource):
            what = f"{source.name}, split {source.split}"
            yield (source.name, source.config, source.split), place, what
