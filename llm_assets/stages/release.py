"""The ship decision and the manifest. No torch: all that it needs stands in the lineage.

SHIP when every gate of the recipe passed or was overridden for that artifact, the cost is within
the budget, and the manifest is whole. HOLD otherwise, with each reason. The manifest is the record
of the whole pipeline state: enough to replay it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from llm_assets.gates.thresholds import GateResult, evaluate
from llm_assets.stages.context import Metric, StageContext, StageResult

FORMAT = 2
_NEEDED = ("artifact", "identity", "source_hash")


def run(context: StageContext) -> StageResult:
    """Decide on the lineage: {"recipe", "gates", "stages", "checked", "overrides",
    "rollback_plan"}. `checked`: what the checks measured beside the records, by stage."""
    lineage = context.lineage
    stages: Mapping[str, Mapping[str, Any]] = lineage.get("stages", {})
    overrides: Sequence[Mapping[str, Any]] = lineage.get("overrides", [])
    verdicts = _verdicts(lineage, stages, overrides)
    failed = [entry for entry in verdicts if entry["blocks"] and entry["override"] is None]
    reasons = [_reason(entry) for entry in failed]
    reasons += _gaps(context, stages)
    reasons += _over_budget(lineage)
    if "rollback_plan" in lineage and not lineage["rollback_plan"]:
        reasons.append("no rollback plan: the release could not be taken back")
    decision = "HOLD" if reasons else "SHIP"

    manifest = {
        "format": FORMAT,
        "pipeline": context.pipeline,
        "decision": decision,
        "reasons": reasons,
        "warnings": [
            *(_warning(entry) for entry in verdicts if entry["override"] is not None),
            *(_reason(entry) for entry in verdicts if not (entry["passed"] or entry["blocks"])),
        ],
        "seed": context.seed,
        "recipe": lineage.get("recipe", {}),
        "stages": stages,
        "inputs": {name: entry.artifact for name, entry in sorted(context.inputs.items())},
        "gates": verdicts,
        "overrides": list(overrides),
        "rollback_plan": lineage.get("rollback_plan"),
        "cost_usd": _cost(stages),
    }
    text = json.dumps(manifest, indent=2, ensure_ascii=False, sort_keys=True) + "\n"
    (context.out / "manifest.json").write_bytes(text.encode("utf-8"))
    overridden = sum(entry["override"] is not None for entry in verdicts)
    passed = f"{overridden} gates overridden" if overridden else "every gate passed"
    context.progress.say(f"{decision}: {'; '.join(reasons) or passed}")
    return StageResult(
        metrics={
            "ship": Metric(value=float(decision == "SHIP")),
            "num_failed_gates": Metric(value=float(len(failed))),
            "num_gates": Metric(value=float(len(verdicts))),
            "num_overrides": Metric(value=float(overridden)),
            "cost_usd": Metric(value=_cost(stages)),
        },
        metadata={"decision": decision},
        tables={
            "gates": [
                {
                    "stage": entry["stage"],
                    "metric": entry["name"],
                    "verdict": "overridden" if entry["override"] else entry["verdict"],
                    "value": entry["value"],
                    "n": entry["n"],
                    "why": entry["why"],
                }
                for entry in verdicts
            ],
            "reasons": [{"reason": reason} for reason in reasons],
        },
    )


def _verdicts(
    lineage: Mapping[str, Any],
    stages: Mapping[str, Mapping[str, Any]],
    overrides: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
    """Every gate with its verdict, and the override that lets a failed one through, if any."""
    gates: Mapping[str, Mapping[str, Any]] = lineage.get("gates", {})
    checked: Mapping[str, Mapping[str, Any]] = lineage.get("checked", {})
    verdicts = []
    for stage in sorted(gates):
        entry = stages.get(stage, {})
        metrics = {**entry.get("metrics", {}), **checked.get(stage, {})}
        for result in evaluate(metrics, gates[stage]):
            override = None if not result.blocks else _override(stage, entry, result, overrides)
            verdicts.append({"stage": stage, **result.as_dict(), "override": override})
    return verdicts


def _override(
    stage: str,
    entry: Mapping[str, Any],
    result: GateResult,
    overrides: Sequence[Mapping[str, Any]],
) -> Mapping[str, Any] | None:
    """An override counts for one gate of one artifact, and nothing else."""
    names = (result.name, f"{stage}.{result.name}", f"{stage}/{result.name}")
    for override in overrides:
        artifact = override.get("artifact")
        if artifact and artifact == entry.get("artifact") and override.get("gate") in names:
            return override
    return None


def _reason(entry: Mapping[str, Any]) -> str:
    return f"gate {entry['stage']}.{entry['name']}: {entry['why']}"


def _warning(entry: Mapping[str, Any]) -> str:
    override = entry["override"]
    who, why = override.get("reviewer", "somebody"), override.get("reason", "no reason given")
    return f"gate {entry['stage']}.{entry['name']}: {entry['why']}; overridden by {who}: {why}"


def _gaps(context: StageContext, stages: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What a manifest must name and this one does not. A pinned stage has its artifact only."""
    gaps = []
    for name, entry in sorted(stages.items()):
        needed = ("artifact",) if entry.get("status") == "pinned" else _NEEDED
        missing = [key for key in needed if not entry.get(key)]
        if missing:
            gaps.append(f"manifest: {name} has no {', '.join(missing)}")
    known = {entry.get("artifact") for entry in stages.values()}
    for name, taken in sorted(context.inputs.items()):
        if taken.artifact not in known:
            gaps.append(f"manifest: the {name} that was taken, {taken.artifact}, is in no stage")
    return gaps


def _over_budget(lineage: Mapping[str, Any]) -> list[str]:
    recipe_usd = lineage.get("recipe", {}).get("budget", {}).get("limit_usd")
    # The limit may have been raised since the recipe was written.
    limit = lineage.get("limit_usd", recipe_usd)
    cost = _cost(lineage.get("stages", {}))
    if limit is not None and cost > limit:
        return [f"budget: the stages cost ${cost:.2f}, the limit is ${limit:.2f}"]
    return []


def _cost(stages: Mapping[str, Mapping[str, Any]]) -> float:
    return float(sum(entry.get("cost_usd") or 0.0 for entry in stages.values()))
