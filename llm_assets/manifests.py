"""Manifests: found by hash, path, ref or pipeline; shown; compared field by field."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llm_assets.errors import NotFoundError, UserError
from llm_assets.identity import changed_keys, digest_of
from llm_assets.recipe import Recipe
from llm_assets.store.digest import ArtifactHash
from llm_assets.store.protocol import Store

FILE = "manifest.json"
_SHORTEST_PREFIX = 6
_ONE = {"modules": "module", "libraries": "library"}


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The record of one pipeline state. `name`: its artifact hash, or the path of a file."""

    name: str
    body: Mapping[str, Any]

    @property
    def pipeline(self) -> str:
        """The pipeline that it records."""
        return str(self.body["pipeline"])

    @property
    def stages(self) -> Mapping[str, Mapping[str, Any]]:
        """Stage to artifact, identity, source hash, recipe part, inputs, metrics and cost."""
        found: Mapping[str, Mapping[str, Any]] = self.body["stages"]
        return found

    @property
    def short(self) -> str:
        """For people."""
        return self.name[:12] if len(self.name) == 64 else self.name

    @property
    def key(self) -> str:
        """64 digits that stand for this manifest, also where it is only a file."""
        return self.name if len(self.name) == 64 else digest_of(self.body)


def find_manifest(store: Store, text: str) -> Manifest:
    """The manifest that `text` names: a release artifact's hash or a prefix of it, a manifest file,
    a ref, or a pipeline (its newest release). NotFoundError or UserError otherwise."""
    path = Path(text)
    if path.is_dir() and (path / FILE).is_file():
        path = path / FILE
    if path.is_file():
        return _parse(str(path), path.read_bytes())
    artifact = store.ref(text) if "/" in text else _of_hash(store, text)
    if artifact is None:
        artifact = _newest_release(store, text)
    if artifact is None:
        raise NotFoundError(
            f"{text}: the store has no such manifest\n"
            "  rule: a manifest is named by the hash of its release (6 digits do), a file, a ref, "
            "or its pipeline\n"
            "  next: `llm-assets store ls --type release` lists them"
        )
    return load_manifest(store, artifact)


def load_manifest(store: Store, artifact: ArtifactHash) -> Manifest:
    """The manifest of a release artifact."""
    tree = store.tree(artifact)
    if tree.type != "release":
        raise UserError(
            where=str(artifact),
            found=f"an artifact of type {tree.type}",
            rule="a manifest stands in a release",
            remedy="give the hash of a release",
        )
    return _parse(artifact, (store.fetch(artifact) / FILE).read_bytes())


def _parse(name: str, content: bytes) -> Manifest:
    try:
        body = json.loads(content)
        if isinstance(body, dict) and {"pipeline", "stages", "recipe"} <= set(body):
            return Manifest(name=name, body=body)
    except ValueError:
        pass  # said below, with what else may be wrong
    raise UserError(
        where=name,
        found="no manifest",
        rule="a manifest is JSON with pipeline, recipe and stages",
        remedy=f"give a {FILE} that the release stage wrote",
    )


def _of_hash(store: Store, text: str) -> ArtifactHash | None:
    if len(text) < _SHORTEST_PREFIX or set(text) - set("0123456789abcdef"):
        return None
    if len(text) == 64:
        return ArtifactHash.parse(text)
    found = [artifact for artifact in store.artifacts() if artifact.startswith(text)]
    if len(found) > 1:
        raise UserError(
            where=text,
            found=f"{len(found)} artifacts begin so",
            rule="a prefix names one artifact",
            remedy="give more digits",
        )
    return found[0] if found else None


def _newest_release(store: Store, pipeline: str) -> ArtifactHash | None:
    from llm_assets.history import History

    record = History(store, pipeline).newest("release")
    return None if record is None else record.output


def recipe_of(manifest: Manifest, folder: Path) -> Recipe:
    """The recipe that a manifest holds; its relative paths start at `folder`. RecipeError when it
    is not valid here any more."""
    from pydantic import ValidationError

    from llm_assets.recipe_rules import check_rules

    document = {**manifest.body["recipe"], "path": str(folder / f"manifest {manifest.short}")}
    try:
        recipe = Recipe.model_validate_json(json.dumps(document))
    except ValidationError as error:
        raise UserError(
            where=f"manifest {manifest.short}: recipe",
            found=str(error.errors(include_url=False)[0]["msg"]),
            rule="a manifest is replayed by a version that reads its recipe",
            remedy="check out the code that wrote it",
        ) from error
    check_rules(recipe)
    return recipe


def differences(one: Manifest, other: Manifest) -> Iterator[tuple[str, str, Any, Any]]:
    """Where two manifests differ: (stage, what, in one, in the other). Stage "" for the whole."""
    for key, before, after in changed_keys(one.body["recipe"], other.body["recipe"]):
        yield "", f"recipe {key}", before, after
    for name in dict.fromkeys([*one.stages, *other.stages]):
        yield from _stage_differences(name, one.stages.get(name), other.stages.get(name))
    yield from (
        ("", key, one.body.get(key), other.body.get(key))
        for key in ("decision", "seed", "cost_usd")
        if one.body.get(key) != other.body.get(key)
    )


def _stage_differences(
    name: str, one: Mapping[str, Any] | None, other: Mapping[str, Any] | None
) -> Iterator[tuple[str, str, Any, Any]]:
    if one is None or other is None:
        yield name, "stage", _presence(one), _presence(other)
        return
    if one.get("artifact") != other.get("artifact"):
        yield name, "artifact", one.get("artifact"), other.get("artifact")
    for part in ("modules", "libraries"):
        before, after = one.get(part) or {}, other.get(part) or {}
        for key in sorted({*before, *after}):
            if before.get(key) != after.get(key):
                yield name, f"{_ONE[part]} {key}", before.get(key), after.get(key)
    before, after = one.get("inputs") or {}, other.get("inputs") or {}
    for key in sorted({*before, *after}):
        if before.get(key) != after.get(key):
            yield name, f"input {key}", before.get(key), after.get(key)
    before, after = one.get("metrics") or {}, other.get("metrics") or {}
    for key in sorted({*before, *after}):
        left, right = before.get(key, {}).get("value"), after.get(key, {}).get("value")
        if left != right:
            yield name, f"metric {key}", left, right


def _presence(stage: Mapping[str, Any] | None) -> str:
    return "absent" if stage is None else "present"
