"""Copies of saves that outlive the machine that trains: what is said of one, which of them count.

A copy belongs to a course: the number of rollbacks of its identity that were recorded when its run
began. One that a later rollback went back behind does not count any more, whenever it arrived.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm_assets.checkpoints.choosing import Choice
from llm_assets.checkpoints.health import Health, health_document, parse_health
from llm_assets.checkpoints.listing import SaveInfo, read_save
from llm_assets.checkpoints.manifest import MANIFEST, Manifest, parse_manifest, parse_name
from llm_assets.errors import DamagedError, NotFoundError

if TYPE_CHECKING:
    from llm_assets.store.digest import Identity
    from llm_assets.store.protocol import RemoteSaves, Store

ROLLBACKS = "rollbacks"
"""The store's entries that record them, `<identity>/<number>`."""


def rollbacks_of(store: Store, identity: Identity) -> list[Choice]:
    """The rollbacks of an identity that are recorded, oldest first."""
    return [
        Choice(step=body["step"], who=body["who"], why=body["why"], at=body["at"])
        for _, body in store.entries(ROLLBACKS, f"{identity}/")
    ]


def about_save(save: Path, course: int) -> dict[str, Any]:
    """What is kept beside a copy, so that it is known without a download. The manifest is kept as
    it was written: it is bound to its own hash."""
    found = read_save(save)
    return {
        "course": course,
        "manifest": (save / MANIFEST).read_text(encoding="utf-8"),
        "health": json.dumps(health_document(found.health)) if found and found.health else "",
    }


def judge(remote: RemoteSaves, name: str, manifest: Manifest, health: Health) -> None:
    """Keep a verdict with the copy that it is about."""
    bound = Health(
        verdict=health.verdict,
        checks=health.checks,
        reasons=health.reasons,
        manifest_sha256=manifest.sha256,
    )
    remote.restate(name, {**remote.about(name), "health": json.dumps(health_document(bound))})


def prove_copy(remote: RemoteSaves, save: SaveInfo) -> dict[str, Any]:
    """The verdict on a copy: the one that it came with while its files are whole, which the server
    is asked for. `name`, `verdict`, `reasons`."""
    row: dict[str, Any] = {"name": save.path.name, "verdict": save.verdict}
    if save.manifest is None:
        return {**row, "reasons": [save.problem]}
    damage = remote.damage(save.path.name)
    if damage:
        reasons = tuple(f"{name}: {what}" for name, what in damage.items())
        health = Health(verdict="corrupt", checks=damage, reasons=reasons, manifest_sha256="")
        judge(remote, save.path.name, save.manifest, health)
        return {**row, "verdict": "corrupt", "reasons": list(reasons)}
    return {**row, "reasons": list(save.health.reasons) if save.health else []}


def list_copies(remote: RemoteSaves, folder: Path, rollbacks: Sequence[Choice]) -> list[SaveInfo]:
    """The copies that count, newest first; `folder` is where they would be on this machine."""
    found = []
    for name in remote.names():
        named = parse_name(name)
        if named is None:
            continue
        kind, step = named
        try:
            about = remote.about(name)
        except NotFoundError:
            continue
        except DamagedError as error:
            problem = str(error)
            manifest: Manifest | str = problem
            course, health = len(rollbacks), None
        else:
            manifest = parse_manifest(str(about.get("manifest", "")), name)
            course = int(about.get("course", 0))
            health = None
            if isinstance(manifest, Manifest) and about.get("health"):
                health = parse_health(json.loads(str(about["health"])), manifest)
        if any(step > choice.step for choice in rollbacks[course:]):
            continue
        found.append(
            SaveInfo(
                path=folder / name,
                kind=kind,
                step=step,
                manifest=manifest if isinstance(manifest, Manifest) else None,
                health=health,
                problem="" if isinstance(manifest, Manifest) else manifest,
                places=("store",),
            )
        )
    return sorted(found, key=lambda save: -save.step)


def with_copies(saves: Sequence[SaveInfo], copies: Sequence[SaveInfo]) -> list[SaveInfo]:
    """The saves of a folder and the copies in one list, newest first. One that is in both places
    stands there once, unless it is damaged on this machine."""
    there = {copy.path.name: copy for copy in copies}
    merged = []
    for save in saves:
        copy = there.get(save.path.name)
        if copy is not None and save.verdict != "corrupt" and _is_same(save, copy):
            save = dataclasses.replace(save, places=("machine", "store"))
            del there[save.path.name]
        merged.append(save)
    merged += there.values()
    return sorted(merged, key=lambda save: (-save.step, save.kind == "light"))


def _is_same(save: SaveInfo, copy: SaveInfo) -> bool:
    return None not in (save.manifest, copy.manifest) and save.manifest == copy.manifest
