"""Replays: a manifest run again from its sources, into second records.

A replay is a plan in which only its own records count: `environment["replay"]` of a record says
which replay it belongs to. So everything above a stage is the replay's own too, a replay that was
interrupted goes on, and the first record of an identity stays the answer for ordinary runs.
"""

from __future__ import annotations

from collections.abc import Mapping

from llm_assets.manifests import Manifest
from llm_assets.planning import make_plan, node_source
from llm_assets.recipe import Recipe
from llm_assets.store.digest import ArtifactHash
from llm_assets.store.protocol import Store

KIND = "replays"


def replays_of(store: Store, manifest: Manifest) -> dict[str, ArtifactHash | None]:
    """The replays of a manifest, oldest first: name to the release that it ended in, None for one
    that has not ended."""
    found: dict[str, ArtifactHash | None] = {}
    ended = dict(store.entries(KIND, f"ended/{manifest.key}/"))
    for key, _ in store.entries(KIND, f"begun/{manifest.key}/"):
        name = key.rpartition("/")[2]
        end = ended.get(f"ended/{manifest.key}/{name}")
        found[name] = None if end is None else ArtifactHash.parse(str(end["release"]))
    return found


def begin_replay(store: Store, manifest: Manifest) -> str:
    """The name of the replay to go on with: the newest that has not ended, or a new one."""
    known = replays_of(store, manifest)
    if known:
        newest = list(known)[-1]
        if known[newest] is None:
            return newest
    name = f"{manifest.key[:12]}-{len(known) + 1:04d}"
    body = {"manifest": manifest.key, "replay": name}
    store.add_entry(KIND, f"begun/{manifest.key}/{name}", body)
    return name


def end_replay(store: Store, manifest: Manifest, name: str, release: ArtifactHash) -> None:
    """Note the release in which a replay ended."""
    body = {"manifest": manifest.key, "replay": name, "release": release}
    store.add_entry(KIND, f"ended/{manifest.key}/{name}", body)


def other_code(recipe: Recipe, manifest: Manifest, store: Store) -> Mapping[str, list[str]]:
    """Stages whose code or libraries are not those of the manifest: stage to what changed."""
    changed: dict[str, list[str]] = {}
    nodes = make_plan(recipe, store).nodes
    for name, entry in manifest.stages.items():
        if name not in nodes or not entry.get("source_hash"):
            continue
        source = node_source(nodes[name])
        if source.hash == entry["source_hash"]:
            continue
        before = {**(entry.get("modules") or {}), **(entry.get("libraries") or {})}
        now = {**source.modules, **source.libraries}
        found = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
        changed[name] = found
    return changed
