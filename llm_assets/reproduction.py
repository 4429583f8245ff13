"""Was a manifest reproduced by another one? Compared stage by stage.

Reproduced means: the same source hash, recipe and source data, and headline metrics within the
recipe's tolerance. Stages that are bit-identical on replay must give the same output from the same
inputs; weights need not.

A metric that measures the machine and not the model is not compared: its name ends in its unit
(`_s`, `_per_s`, `_usd`). `tolerance.metrics` of the recipe can name one all the same.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from llm_assets.graph import STAGES
from llm_assets.identity import changed_keys
from llm_assets.manifests import Manifest

Verdict = Literal["same", "weights differ", "not reproduced"]

_OF_THE_MACHINE = ("_s", "_usd")
_OUTSIDE = ("source", "import")


@dataclass(frozen=True, kw_only=True)
class StageVerdict:
    """One stage of two manifests. `why`: what keeps it from being reproduced, by how much."""

    stage: str
    verdict: Verdict
    why: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """The verdict over all stages."""

    stages: tuple[StageVerdict, ...]

    @property
    def reproduced(self) -> bool:
        """No stage is `not reproduced`."""
        return all(entry.verdict != "not reproduced" for entry in self.stages)

    @property
    def text(self) -> str:
        """`reproduced`, `reproduced, weights differ`, or the first stage that was not, and why."""
        for entry in self.stages:
            if entry.verdict == "not reproduced":
                return f"not reproduced: {entry.stage}, {'; '.join(entry.why)}"
        if any(entry.verdict == "weights differ" for entry in self.stages):
            return "reproduced, weights differ"
        return "reproduced"

    def as_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return {
            "verdict": self.text,
            "reproduced": self.reproduced,
            "stages": [
                {"name": entry.stage, "verdict": entry.verdict, "why": list(entry.why)}
                for entry in self.stages
            ],
        }


def compare(original: Manifest, replay: Manifest) -> Reproduction:
    """Whether `replay` reproduces `original`, within the tolerance of the original's recipe."""
    tolerance = original.body["recipe"].get("tolerance") or {}
    names = dict.fromkeys([*original.stages, *replay.stages])
    ordered = sorted(names, key=list(STAGES).index) if set(names) <= set(STAGES) else list(names)
    return Reproduction(
        stages=tuple(
            _compare_stage(name, original.stages.get(name), replay.stages.get(name), tolerance)
            for name in ordered
        )
    )


def _compare_stage(
    name: str,
    one: Mapping[str, Any] | None,
    other: Mapping[str, Any] | None,
    tolerance: Mapping[str, Any],
) -> StageVerdict:
    if one is None or other is None:
        missing = "the original" if one is None else "the replay"
        return StageVerdict(stage=name, verdict="not reproduced", why=(f"{missing} has no such",))
    why = [*_other_work(one, other), *_other_metrics(one, other, tolerance)]
    same = one.get("artifact") == other.get("artifact")
    stage = STAGES.get(name)
    if not same and stage is not None and stage.bit_identical and _same_inputs(one, other):
        why.append(
            f"output {str(one.get('artifact'))[:12]} and {str(other.get('artifact'))[:12]} from "
            "the same inputs, and the stage is bit-identical on replay"
        )
    if why:
        return StageVerdict(stage=name, verdict="not reproduced", why=tuple(why))
    return StageVerdict(stage=name, verdict="same" if same else "weights differ")


def _same_inputs(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return bool(one.get("inputs") == other.get("inputs"))


def _other_work(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    """Code, recipe, seed or source data that are not the same."""
    if one.get("source_hash") != other.get("source_hash"):
        changed = [
            key
            for part in ("modules", "libraries")
            for key in sorted({*(one.get(part) or {}), *(other.get(part) or {})})
            if (one.get(part) or {}).get(key) != (other.get(part) or {}).get(key)
        ]
        yield f"source hash: {', '.join(changed) or 'other code'}"
    for key, before, after in changed_keys(one.get("recipe") or {}, other.get("recipe") or {}):
        yield f"recipe: {key} {before!r} and {after!r}"
    if one.get("seed") != other.get("seed"):
        yield f"seed: {one.get('seed')} and {other.get('seed')}"
    for key in _OUTSIDE:
        before, after = (one.get("inputs") or {}).get(key), (other.get("inputs") or {}).get(key)
        if before != after:
            yield f"source data: {key} {str(before)[:12]} and {str(after)[:12]}"


def _other_metrics(
    one: Mapping[str, Any], other: Mapping[str, Any], tolerance: Mapping[str, Any]
) -> Iterator[str]:
    """Metrics that are further apart than the tolerance, relative to the original."""
    chosen: Mapping[str, float] = tolerance.get("metrics") or {}
    before, after = one.get("metrics") or {}, other.get("metrics") or {}
    for name in sorted({*before, *after}):
        if name.endswith(_OF_THE_MACHINE) and name not in chosen:
            continue
        allowed = float(chosen.get(name, tolerance.get("default", 0.0)))
        left, right = before.get(name, {}).get("value"), after.get(name, {}).get("value")
        if left is None or right is None:
            yield f"{name}: {left} and {right}"
            continue
        # Relative to the original; where that is zero there is nothing to be relative to.
        scale = abs(left) if left else 1.0
        apart = abs(right - left) / scale
        if not math.isfinite(apart) or apart > allowed:
            yield f"{name}: {left:.4g} and {right:.4g}, {apart:.1%} apart, {allowed:.1%} allowed"
