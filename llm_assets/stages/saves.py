"""In-training saves: written aside, hashed, renamed; verified before they are used.

A save is a folder `save-NNNNNNNN` (its optimizer step) of safetensors and JSON, no pickle:

    model.safetensors       trained parameters and persistent buffers, by name
    optimizer.safetensors   optimizer moments, `<parameter index>.<name>`
    rng.safetensors         torch's generators: `cpu`, `cuda.<i>`
    loop.json               optimizer groups, scheduler, python and numpy generators, counters
    trainer_state.json      transformers' TrainerState (step, epoch, log history)
    manifest.json           format, step, and size and SHA-256 of every other file

`model.safetensors` and `trainer_state.json` are what Trainer.train(resume_from_checkpoint=...)
reads; the rest is put back by callbacks (training.py).
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

FORMAT = 1
_PREFIX = "save-"
_FILES = (
    "model.safetensors",
    "optimizer.safetensors",
    "rng.safetensors",
    "loop.json",
    "trainer_state.json",
)


@dataclass(frozen=True, kw_only=True)
class LoopState:
    """What goes on from a save beside weights and TrainerState."""

    optimizer: Mapping[str, Any]
    scheduler: Mapping[str, Any]
    rng: Mapping[str, Any]
    counters: Mapping[str, float]


def trained_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters that are trained and persistent buffers, tied ones once, by name."""
    names = {name for name, p in model.named_parameters() if not p.requires_grad}
    aliases = {name for name, _ in model.named_parameters(remove_duplicate=False)} - {
        name for name, _ in model.named_parameters()
    }
    state = model.state_dict()
    return {
        name: tensor.detach().contiguous()
        for name, tensor in state.items()
        if name not in names and name not in aliases and isinstance(tensor, torch.Tensor)
    }


def write_save(
    folder: Path,
    *,
    step: int,
    model: torch.nn.Module,
    optimizer: Any,
    scheduler: Any,
    write_trainer_state: Callable[[str], None],
    counters: Mapping[str, float],
) -> Path:
    """Write the save of `step` under `folder` and publish it by rename. Gives its path."""
    folder.mkdir(parents=True, exist_ok=True)
    aside = folder / f".writing-{os.getpid()}-{step}"
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir()
    optimizer_state = optimizer.state_dict()
    save_file(trained_tensors(model), aside / "model.safetensors")
    save_file(_flat_moments(optimizer_state), aside / "optimizer.safetensors")
    save_file(_torch_rng(), aside / "rng.safetensors")
    loop = {
        "param_groups": optimizer_state["param_groups"],
        "scheduler": scheduler.state_dict(),
        "rng": _other_rng(),
        "counters": dict(counters),
    }
    (aside / "loop.json").write_text(json.dumps(loop))
    write_trainer_state(str(aside / "trainer_state.json"))
    return _publish(aside, folder / f"{_PREFIX}{step:08d}", step)


def _publish(aside: Path, target: Path, step: int) -> Path:
    """Hash, write the manifest, flush to the device, rename."""
    files = {name: _file_entry(aside / name) for name in _FILES}
    body = {"format": FORMAT, "step": step, "files": files}
    manifest = {**body, "sha256": _body_hash(body)}
    (aside / "manifest.json").write_text(json.dumps(manifest, indent=1, sort_keys=True))
    for path in aside.iterdir():
        _flush(path)
    _flush(aside)
    shutil.rmtree(target, ignore_errors=True)
    aside.rename(target)
    _flush(target.parent)
    return target


def problems(save: Path) -> list[str]:
    """What is wrong with a published save; empty when it is whole."""
    try:
        manifest = json.loads((save / "manifest.json").read_text())
        body = {key: manifest[key] for key in ("format", "step", "files")}
        recorded = manifest["sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [f"manifest.json: {type(error).__name__}: {error}"]
    if recorded != _body_hash(body):
        return ["manifest.json: does not have its own hash"]
    if body["format"] != FORMAT:
        return [f"format {body['format']}; this version reads {FORMAT}"]
    if save.name != f"{_PREFIX}{body['step']:08d}":
        return [f"manifest.json: is of step {body['step']}"]
    found = []
    for name in _FILES:
        entry = body["files"].get(name)
        path = save / name
        if entry is None or not path.is_file():
            found.append(f"{name}: missing")
        elif path.stat().st_size != entry["size_bytes"]:
            found.append(f"{name}: {path.stat().st_size} bytes, expected {entry['size_bytes']}")
        elif _file_entry(path) != entry:
            found.append(f"{name}: does not have its hash")
    return found


def list_saves(folder: Path) -> list[Path]:
    """Published saves, newest first."""
    if not folder.is_dir():
        return []
    return sorted((p for p in folder.iterdir() if p.name.startswith(_PREFIX)), reverse=True)


def newest_healthy(folder: Path, say: Callable[[str], None]) -> Path | None:
    """The newest save that verifies; those that do not are named through `say`."""
    for save in list_saves(folder):
        wrong = problems(save)
        if not wrong:
            return save
        say(f"{save.name} is not resumed from: {'; '.join(wrong)}")
    return None


def remove_old(folder: Path, *, keep: int) -> None:
    """Remove all but the newest `keep` saves, and what an interrupted save left."""
    for save in list_saves(folder)[keep:]:
        shutil.rmtree(save, ignore_errors=True)
    for aside in folder.glob(".writing-*"):
        shutil.rmtree(aside, ignore_errors=True)


def read_loop(save: Path) -> LoopState:
    """The loop state of a verified save."""
    loop = json.loads((save / "loop.json").read_text())
    state: dict[int, dict[str, torch.Tensor]] = {}
    for name, tensor in load_file(save / "optimizer.safetensors").items():
        index, key = name.split(".", 1)
        state.setdefault(int(index), {})[key] = tensor
    groups = [
        {**group, "betas": tuple(group["betas"])} if "betas" in group else group
        for group in loop["param_groups"]
    ]
    return LoopState(
        optimizer={"state": state, "param_groups": groups},
        scheduler=loop["scheduler"],
        rng={**loop["rng"], "torch": load_file(save / "rng.safetensors")},
        counters=loop["counters"],
    )


def restore_rng(rng: Mapping[str, Any]) -> None:
    """Put all generators back."""
    version, internal, gauss = rng["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = rng["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(rng["torch"]["cpu"])
    if torch.cuda.is_available():
        for name, state in rng["torch"].items():
            if name.startswith("cuda."):
                torch.cuda.set_rng_state(state, int(name.removeprefix("cuda.")))


def _torch_rng() -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        for index, state in enumerate(torch.cuda.get_rng_state_all()):
            states[f"cuda.{index}"] = state
    return states


def _other_rng() -> dict[str, Any]:
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": [kind, [int(key) for key in keys], int(position), int(has_gauss), float(gauss)],
    }


def _flat_moments(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {
        f"{index}.{name}": value.detach().contiguous()
        for index, moments in state["state"].items()
        for name, value in moments.items()
        if isinstance(value, torch.Tensor)
    }


def _file_entry(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return {"size_bytes": path.stat().st_size, "sha256": digest}


def _body_hash(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
