"""Saves of older formats, written anew in today's. A save is never patched, and never read as if.

Format 1 (0.1 before its release) had neither the position in the data nor the names that the
moments belong to, and its generators in another form. Its weights, moments and TrainerState are
taken over; a training goes on from it with `checkpoint.partial: restore`, which starts the rest
anew and says what that means.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llm_assets.checkpoints.choosing import SET_ASIDE
from llm_assets.checkpoints.manifest import (
    FORMAT,
    MANIFEST,
    Manifest,
    file_hash,
    flush_folder,
    parse_name,
    write_json,
)
from llm_assets.stages.save_tensors import count, layout_hash, read_header

_TAKEN = ("model.safetensors", "optimizer.safetensors", "trainer_state.json")


def migrate_folder(
    folder: Path, *, identity: str, stage: str = "", step: int | None = None
) -> list[dict[str, Any]]:
    """Migrate the saves of one identity (or that of a `step`); a row for each."""
    rows = []
    for save in sorted(folder.iterdir()) if folder.is_dir() else ():
        named = parse_name(save.name)
        if named is None or (step is not None and named[1] != step):
            continue
        old = _old_manifest(save)
        if old is None:
            continue
        old_format = int(old["format"])
        _migrate(save, old, identity=identity, stage=stage)
        rows.append(
            {
                "path": str(save),
                "from": old_format,
                "to": FORMAT,
                "kept": "weights, moments, curves; go on with checkpoint.partial: restore",
            }
        )
    return rows


def _old_manifest(save: Path) -> dict[str, Any] | None:
    """The manifest of a whole save of an older format that is known; None for anything else."""
    try:
        document = json.loads((save / MANIFEST).read_bytes())
        if document["format"] != 1:
            return None
        body = {key: document[key] for key in ("format", "step", "files")}
        text = json.dumps(body, sort_keys=True, separators=(",", ":"))
        if document["sha256"] != hashlib.sha256(text.encode()).hexdigest():
            return None
        for name in _TAKEN:
            if file_hash(save / name) != document["files"][name]["sha256"]:
                return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return dict(document)


def _migrate(save: Path, old: Mapping[str, Any], *, identity: str, stage: str) -> None:
    """Write the new save aside, move the old one to `set-aside/format-1`, publish by rename."""
    fresh = save.parent / f".writing-migration-{save.name}"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    files = {}
    for name in _TAKEN:
        shutil.copyfile(save / name, fresh / name)
        size = (fresh / name).stat().st_size
        files[name] = {"size_bytes": size, "sha256": file_hash(fresh / name)}
    loop = json.loads((save / "loop.json").read_bytes())
    entries, _ = read_header(fresh / "model.safetensors")
    num_values = sum(count(entry.shape) for entry in entries.values())
    manifest = Manifest(
        kind="full",
        step=int(old["step"]),
        identity=identity,
        stage=stage or "unknown",
        pipeline="unknown",
        created_at=_made_at(save),
        world_size=1,
        environment={},
        counters=dict(loop["counters"]),
        metrics={},
        data={},
        architecture={
            "class": "unknown",
            "num_tensors": len(entries),
            "num_elements": num_values,
            "num_parameters": num_values,
            "sha256": layout_hash({n: (e.dtype, e.shape) for n, e in entries.items()}),
        },
        lineage={"resumed_from": 0, "migrated_from_format": int(old["format"])},
        write_s=0.0,
        stall_s=0.0,
        files=files,
    )
    write_json(fresh / MANIFEST, manifest.sealed())
    flush_folder(fresh)
    aside = save.parent / SET_ASIDE / "format-1"
    aside.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(aside / save.name, ignore_errors=True)
    save.rename(aside / save.name)
    fresh.rename(save)
    flush_folder(save.parent)


def _made_at(save: Path) -> str:
    made = datetime.datetime.fromtimestamp((save / MANIFEST).stat().st_mtime, datetime.UTC)
    return made.isoformat(timespec="milliseconds")
