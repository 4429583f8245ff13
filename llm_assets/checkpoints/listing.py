"""The saves of one identity: what is there, and the newest that may be gone on from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from llm_assets.checkpoints.health import Health, read_health
from llm_assets.checkpoints.manifest import Kind, Manifest, parse_name, read_manifest


@dataclass(frozen=True, kw_only=True)
class SaveInfo:
    """One published save. `manifest` is None when it cannot be trusted (`problem` says why);
    `health` is None before the validation. `places`: `machine`, in the folder `path`; `store`, a
    copy in S3, which `path` has room for."""

    path: Path
    kind: Kind
    step: int
    manifest: Manifest | None
    health: Health | None
    problem: str = ""
    places: tuple[str, ...] = ("machine",)

    @property
    def verdict(self) -> str:
        """healthy, light, review, corrupt, or unjudged."""
        if self.manifest is None:
            return "corrupt"
        return "unjudged" if self.health is None else self.health.verdict


def read_save(path: Path) -> SaveInfo | None:
    """One save by its folder; None for a folder that is no save."""
    named = parse_name(path.name)
    if named is None or not path.is_dir():
        return None
    kind, step = named
    manifest = read_manifest(path)
    if isinstance(manifest, str):
        return SaveInfo(
            path=path, kind=kind, step=step, manifest=None, health=None, problem=manifest
        )
    health = read_health(path, manifest)
    return SaveInfo(path=path, kind=kind, step=step, manifest=manifest, health=health)


def list_saves(folder: Path, kind: Kind | None = None) -> list[SaveInfo]:
    """Published saves of a folder, newest first, a full one before the light one of its step."""
    if not folder.is_dir():
        return []
    found = [save for path in folder.iterdir() if (save := read_save(path)) is not None]
    found = [save for save in found if kind is None or save.kind == kind]
    return sorted(found, key=lambda save: (-save.step, save.kind == "light"))


def newest_healthy(folder: Path) -> SaveInfo | None:
    """The newest full save whose recorded verdict is healthy. Its files are not read again."""
    for save in list_saves(folder, "full"):
        if save.verdict == "healthy":
            return save
    return None
