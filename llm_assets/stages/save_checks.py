"""The proof of a published save: `python -m llm_assets.stages.save_checks FOLDER`.

    validate(save)     all checks, a verdict, written to health.json

Neither torch nor transformers is imported: it costs a tenth of a second to start, and what it
compares was computed by other code than that of the training. Exit code: 0 healthy or light, 3 for
review, 4 corrupt.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from llm_assets.checkpoints import Health, Manifest, list_saves, read_manifest, write_health
from llm_assets.checkpoints.manifest import FULL_FILES, file_problems
from llm_assets.stages.save_schedule import order_hash, order_of, schedule_factor
from llm_assets.stages.save_tensors import (
    Entry,
    count,
    layout_hash,
    not_finite,
    read_header,
    read_values,
)

EXIT_CODES = {"healthy": 0, "light": 0, "review": 3, "corrupt": 4}
PARTS = ("model", "optimizer", "generators", "schedule", "data", "state")
"""Checks that concern one part of a save; `files` says which of the files are damaged."""
_MOMENTS = ("exp_avg", "exp_avg_sq", "momentum_buffer", "max_exp_avg_sq")
# A save this much slower than the median of the others is looked at, not gone on from.
_SLOW_FACTOR, _SLOW_S, _SLOW_OTHERS = 10.0, 60.0, 4
# A loss this many robust deviations above the running median, and half of it, is a spike.
_SPIKE_DEVIATIONS, _SPIKE_WINDOW, _SPIKE_LAST, _SPIKE_LEAST = 10.0, 50, 5, 20

_OK = "ok"


def validate(save: Path, *, write: bool = True) -> Health:
    """Check a save and give the verdict; `write`: into its health.json too, if its manifest is
    whole. Never raises for what is wrong with the save."""
    manifest = read_manifest(save)
    if isinstance(manifest, str):
        return Health(
            verdict="corrupt",
            checks={"manifest": manifest},
            reasons=(manifest,),
            manifest_sha256="",
        )
    checks: dict[str, str] = {"manifest": _OK}
    damaged = file_problems(save, manifest)
    checks |= {f"file {name}": why for name, why in damaged.items()}
    checks.setdefault("files", _OK if not damaged else ", ".join(sorted(damaged)))
    for name, needs, check in _CHECKS:
        if manifest.kind == "light" and needs != ("model.safetensors",):
            continue
        if not damaged.keys() & set(needs):
            checks[name] = _run(check, save, manifest)
    reasons = [f"{name}: {why}" for name, why in checks.items() if why != _OK and name != "files"]
    verdict: Any = "corrupt" if reasons else "healthy" if manifest.kind == "full" else "light"
    if not reasons:
        doubts = {"write time": _slow(save, manifest), "metrics": _odd_metrics(save, manifest)}
        checks |= {name: why or _OK for name, why in doubts.items()}
        reasons = [f"{name}: {why}" for name, why in doubts.items() if why]
        if reasons:
            verdict = "review"
    health = Health(
        verdict=verdict,
        checks=checks,
        reasons=tuple(reasons),
        manifest_sha256=manifest.sha256,
    )
    if write:
        # A verdict that cannot be written is no reason to fail: an unjudged save is judged again.
        with suppress(OSError):
            write_health(save, health)
    return health


def _run(check: Callable[[Path, Manifest], str], save: Path, manifest: Manifest) -> str:
    try:
        return check(save, manifest) or _OK
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"


def _model(save: Path, manifest: Manifest) -> str:
    """Names, types, shapes and number of parameters against the architecture; finite values."""
    entries, _ = read_header(save / "model.safetensors")
    expected = manifest.architecture
    if len(entries) != expected["num_tensors"]:
        return f"{len(entries)} tensors, the architecture has {expected['num_tensors']}"
    found = sum(count(entry.shape) for entry in entries.values())
    if found != expected["num_elements"]:
        return f"{found} values, the architecture has {expected['num_elements']}"
    if layout_hash({n: (e.dtype, e.shape) for n, e in entries.items()}) != expected["sha256"]:
        return "names, types or shapes are not those of the architecture"
    bad = not_finite(save / "model.safetensors")
    return f"{bad} holds NaN or infinity" if bad else ""


def _optimizer(save: Path, manifest: Manifest) -> str:
    """Moments belong to parameters, in shape; all have the same; finite; one step count."""
    loop = _json(save / "loop.json")
    moments, _ = read_header(save / "optimizer.safetensors")
    weights, _ = read_header(save / "model.safetensors")
    of: dict[int, dict[str, Entry]] = {}
    for name, moment in moments.items():
        number, key = name.split(".", 1)
        of.setdefault(int(number), {})[key] = moment
    names = loop["parameters"]
    indices = [index for group in loop["param_groups"] for index in group["params"]]
    if sorted(indices) != list(range(len(names))) or sorted(of) != loop["with_moments"]:
        return f"moments of {len(of)} parameters, expected {len(loop['with_moments'])}"
    if len({tuple(sorted(entry)) for entry in of.values()}) > 1:
        return "parameters have different moments"
    for index, entry in of.items():
        shape = weights[names[index]].shape
        wrong = [key for key in _MOMENTS if key in entry and entry[key].shape != shape]
        if wrong:
            return f"{wrong[0]} of {names[index]} is {entry[wrong[0]].shape}, not {shape}"
    bad = not_finite(save / "optimizer.safetensors")
    if bad:
        return f"{bad} holds NaN or infinity"
    counters = [f"{index}.step" for index, entry in of.items() if "step" in entry]
    values = read_values(save / "optimizer.safetensors", counters).values()
    steps = {float(value.reshape(-1)[0]) for value in values}
    if len(steps) > 1 or any(step > manifest.step for step in steps):
        return f"moments of steps {sorted(steps)} in a save of step {manifest.step}"
    return ""


def _generators(save: Path, manifest: Manifest) -> str:
    """Every process has all of its generators."""
    entries, _ = read_header(save / "rng.safetensors")
    needed = [
        f"{process}.{name}"
        for process in range(manifest.world_size)
        for name in ("torch", "python", "numpy")
    ]
    missing = [name for name in needed if name not in entries]
    return f"no generator {missing[0]}" if missing else ""


def _schedule(save: Path, manifest: Manifest) -> str:
    """The learning rate of the next step is what the schedule says."""
    loop = _json(save / "loop.json")
    schedule, scheduler = loop["schedule"], loop["scheduler"]
    if scheduler["last_epoch"] != manifest.step:
        return f"the schedule stands at {scheduler['last_epoch']}, the save at {manifest.step}"
    factor = schedule_factor(schedule, manifest.step)
    rates = [group["lr"] for group in loop["param_groups"]]
    told = schedule["expected"]
    if factor is not None:
        told = [base * factor for base in schedule["base"]]
    if told is None:
        return ""
    for rate, expected in zip(rates, told, strict=True):
        if not math.isclose(rate, expected, rel_tol=1e-6, abs_tol=1e-15):
            return f"the next step has learning rate {rate:g}, the schedule says {expected:g}"
    return ""


def _data(save: Path, manifest: Manifest) -> str:
    """Position and order belong to the step; the next rows are what the sampler gives."""
    data = _json(save / "data.json")
    summary = {key: data[key] for key in manifest.data}
    if summary != dict(manifest.data):
        return "is not what the manifest says of it"
    if data["epoch"] * data["steps_per_epoch"] + data["steps"] != manifest.step:
        return f"epoch {data['epoch']}, step {data['steps']} of it, is not step {manifest.step}"
    drawn = order_of(data["sampler"], data["epoch"], data["num_rows"], data["drawn"])
    if drawn is None:
        return ""
    if order_hash(drawn) != data["order_sha256"]:
        return "the order of the rows is not that of the sampler"
    ahead = len(data["next_rows"])
    if drawn[len(drawn) - ahead :] != data["next_rows"]:
        return "the next rows are not those that the training would see"
    return ""


def _state(save: Path, manifest: Manifest) -> str:
    state = _json(save / "trainer_state.json")
    if state["global_step"] != manifest.step:
        return f"is of step {state['global_step']}"
    late = [entry["step"] for entry in state["log_history"] if entry["step"] > manifest.step]
    return f"has logs of step {late[0]}" if late else ""


_CHECKS: tuple[tuple[str, tuple[str, ...], Callable[[Path, Manifest], str]], ...] = (
    ("model", ("model.safetensors",), _model),
    ("optimizer", ("optimizer.safetensors", "loop.json", "model.safetensors"), _optimizer),
    ("generators", ("rng.safetensors",), _generators),
    ("schedule", ("loop.json",), _schedule),
    ("data", ("data.json",), _data),
    ("state", ("trainer_state.json",), _state),
)


def _slow(save: Path, manifest: Manifest) -> str:
    """Whether writing took far longer than for the other saves of the folder."""
    others = [
        other.manifest.write_s
        for other in list_saves(save.parent, manifest.kind)
        if other.manifest is not None and other.step != manifest.step
    ]
    if len(others) < _SLOW_OTHERS:
        return ""
    usual = statistics.median(others)
    if manifest.write_s > usual * _SLOW_FACTOR and manifest.write_s > usual + _SLOW_S:
        return f"took {manifest.write_s:.1f} s, the others {usual:.1f} s"
    return ""


def _odd_metrics(save: Path, manifest: Manifest) -> str:
    """A metric that is not finite, or a loss far above its running median."""
    odd = [name for name, value in manifest.metrics.items() if not math.isfinite(value)]
    if odd:
        return f"{odd[0]} is {manifest.metrics[odd[0]]}"
    if manifest.kind == "light" or not manifest.lineage.get("judge_loss", True):
        return ""
    history = _json(save / "trainer_state.json")["log_history"]
    losses = [float(entry["loss"]) for entry in history if "loss" in entry]
    return loss_spike(losses)


def loss_spike(losses: list[float]) -> str:
    """What is odd about the last losses: the median of the last five against the 50 before, in
    robust deviations (1.4826 times the median absolute deviation)."""
    last, before = losses[-_SPIKE_LAST:], losses[-_SPIKE_WINDOW - _SPIKE_LAST : -_SPIKE_LAST]
    if len(before) < _SPIKE_LEAST:
        return ""
    usual = statistics.median(before)
    deviation = 1.4826 * statistics.median(abs(loss - usual) for loss in before)
    now = statistics.median(last)
    if now - usual > max(_SPIKE_DEVIATIONS * deviation, 0.5 * abs(usual)):
        return f"loss {now:.4g} against a running median of {usual:.4g}"
    return ""


def _json(path: Path) -> Mapping[str, Any]:
    document = json.loads(path.read_bytes())
    if not isinstance(document, dict):
        raise ValueError(f"{path.name}: no object")
    return document


def damaged_files(health: Health) -> frozenset[str]:
    """Files of a save that are damaged, or whose content fails its check."""
    files = {
        name.removeprefix("file ")
        for name, why in health.checks.items()
        if name.startswith("file ") and why != _OK
    }
    for name, needs, _ in _CHECKS:
        if health.checks.get(name, _OK) != _OK:
            files.add(needs[0])
    return frozenset(files & set(FULL_FILES))


def main() -> int:
    """Validate one save, print the verdict, and give its exit code."""
    parser = argparse.ArgumentParser(prog="python -m llm_assets.stages.save_checks")
    parser.add_argument("folder", type=Path, help="the folder of one save")
    parser.add_argument("--dry-run", action="store_true", help="write no health.json")
    parser.add_argument("--background", action="store_true", help="at the lowest priority")
    arguments = parser.parse_args()
    if arguments.background:
        with suppress(OSError):
            os.nice(19)
    health = validate(arguments.folder, write=not arguments.dry_run)
    print(json.dumps({"verdict": health.verdict, "reasons": list(health.reasons)}))
    return EXIT_CODES[health.verdict]


if __name__ == "__main__":
    sys.exit(main())
