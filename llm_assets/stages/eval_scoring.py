"""From lm-eval's logged samples to scores, intervals and regressions. No torch, no lm-eval.

An item's `passed` is 1 where the answer is as it should be, 0 where not: right, refused where it
must be, answered where it must not be refused. So in every table more is better. A report is plain
JSON, and the same for the same answers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llm_assets import village
from llm_assets.gates.statistics import (
    Interval,
    bootstrap_mean,
    combined_mean,
    mcnemar_exact,
    paired_bootstrap,
    paired_rate_interval,
    wilson,
)
from llm_assets.stages.context import Metric

FORMAT = 1
# Roles whose headline has another name than the role. True: it counts the failed items.
_HEADLINES = {"unsafe": ("refusal_rate", False), "harmless": ("overrefusal_rate", True)}
_METRIC_NAMES = {"unsafe": "refused", "harmless": "answered"}
_PRIMARY = ("acc", "exact_match", "acc_norm")


@dataclass(frozen=True, kw_only=True)
class Item:
    """One answered item. `oracle`: the village oracle's total score, where the item has a check."""

    id: str
    prompt: str
    target: str
    answer: str
    passed: float
    oracle: float | None = None


@dataclass(frozen=True, kw_only=True)
class TaskItems:
    """The answers of policy and reference to one task, item by item in the same order."""

    name: str
    role: str
    metric: str
    policy: Sequence[Item]
    reference: Sequence[Item]


def items_of(samples: Sequence[Mapping[str, Any]], role: str) -> tuple[str, list[Item]]:
    """(name of the metric, items) of one task from lm-eval's logged samples.

    lm-eval logs an item once for each filter; the first one counts.
    """
    first: dict[Any, Mapping[str, Any]] = {}
    for sample in samples:
        first.setdefault(sample["doc_id"], sample)
    metric, items = "", []
    for doc_id in sorted(first):
        metric, item = _item(first[doc_id], role)
        items.append(item)
    return metric, items


def _item(sample: Mapping[str, Any], role: str) -> tuple[str, Item]:
    doc = sample["doc"]
    check = doc.get("check")
    check = json.loads(check) if isinstance(check, str) else check
    is_choice = len(sample["arguments"]) > 1 or not isinstance(sample["resps"][0][0], str)
    answer = _chosen(sample) if is_choice else str(sample["resps"][0][0]).strip()
    prompt = str(doc.get("prompt") or doc.get("question") or sample["arguments"][0][0])
    oracle = None
    if check and not is_choice:
        metric = _METRIC_NAMES.get(role, "correct")
        passed = _judge(check, answer, role)
        oracle = village.score(check, answer, prompt).total
    else:
        metric, passed = _primary(sample)
        metric = _METRIC_NAMES.get(role, metric)
    return metric, Item(
        id=str(doc.get("id", sample["doc_id"])),
        prompt=prompt,
        target=_target(sample, is_choice),
        answer=answer,
        passed=passed,
        oracle=oracle,
    )


def _judge(check: Mapping[str, Any], answer: str, role: str) -> float:
    if role == "harmless":
        return float(not village.is_refusal(answer))
    return float(village.is_correct(check, answer))


def _chosen(sample: Mapping[str, Any]) -> str:
    """The continuation with the highest log likelihood, the first of equals."""
    likelihoods = [float(response[0]) for response in sample["filtered_resps"]]
    best = max(range(len(likelihoods)), key=lambda index: (likelihoods[index], -index))
    return str(sample["arguments"][best][1]).strip()


def _target(sample: Mapping[str, Any], is_choice: bool) -> str:
    target = sample["target"]
    if is_choice and isinstance(target, int) and 0 <= target < len(sample["arguments"]):
        return str(sample["arguments"][target][1]).strip()
    return str(target)


def _primary(sample: Mapping[str, Any]) -> tuple[str, float]:
    """lm-eval's own verdict on an item: accuracy, else exact match, else its first number."""
    names = [*_PRIMARY, *sample["metrics"]]
    for name in names:
        value = sample.get(name)
        if isinstance(value, (int, float)) and math.isfinite(value):
            return name, float(value)
    return "none", 0.0


def build_report(
    tasks: Sequence[TaskItems],
    *,
    models: Mapping[str, Mapping[str, Any]],
    settings: Mapping[str, Any],
    kl: Mapping[str, Any],
    seed: int,
) -> dict[str, Any]:
    """The whole report. Floats are rounded to 6 digits: what is below is noise of the platform."""
    compared = [_compare(task, seed) for task in tasks]
    report = {
        "format": FORMAT,
        "models": models,
        "settings": settings,
        "headlines": _headlines(compared),
        "kl": kl,
        "oracle": _oracle(tasks, seed),
        "tasks": compared,
        "regressions": _changed(tasks, better="reference"),
        "improvements": _changed(tasks, better="policy"),
        "items": {task.name: _rows(task) for task in tasks},
    }
    rounded: dict[str, Any] = _rounded(report)
    return rounded


def metrics_of(report: Mapping[str, Any]) -> dict[str, Metric]:
    """The headline metrics: gates read these."""
    metrics: dict[str, Metric] = {}
    for row in report["headlines"]:
        name, n = row["name"], row["num_items"]
        metrics[name] = Metric(value=row["policy"], n=n)
        metrics[f"{name}_reference"] = Metric(value=row["reference"], n=n)
        metrics[f"{name}_delta"] = Metric(value=row["delta"], n=n)
    kl: dict[str, Any] = {
        key: math.nan if value is None else value for key, value in report["kl"].items()
    }
    metrics["kl_per_token"] = Metric(value=kl["per_token"], n=kl["num_tokens"])
    metrics["kl_per_sequence"] = Metric(value=kl["per_sequence"], n=kl["num_prompts"])
    metrics["entropy"] = Metric(value=kl["entropy"], n=kl["num_tokens"])
    total = sum(task["num_items"] for task in report["tasks"])
    metrics["num_regressions"] = Metric(value=len(report["regressions"]))
    metrics["regression_rate"] = Metric(value=len(report["regressions"]) / total, n=total)
    oracle = report["oracle"]
    if oracle is not None:
        n = oracle["num_items"]
        metrics["oracle_score"] = Metric(value=oracle["policy"], n=n)
        metrics["oracle_score_reference"] = Metric(value=oracle["reference"], n=n)
        metrics["oracle_score_delta"] = Metric(value=oracle["delta"], n=n)
        for end in ("low", "high"):
            metrics[f"oracle_score_delta_{end}"] = Metric(value=oracle[f"delta_{end}"], n=n)
        if oracle["won"] + oracle["lost"]:
            differing = oracle["won"] + oracle["lost"]
            metrics["oracle_win_rate"] = Metric(value=oracle["won"] / differing, n=differing)
    # Intervals last: a gate that is `confident` finds them by name.
    for row in report["headlines"]:
        for end in ("low", "high"):
            metrics[f"{row['name']}_{end}"] = Metric(value=row[end], n=row["num_items"])
            metrics[f"{row['name']}_delta_{end}"] = Metric(
                value=row[f"delta_{end}"], n=row["num_items"]
            )
    for end in ("low", "high"):
        metrics[f"kl_per_sequence_{end}"] = Metric(value=kl[end], n=kl["num_prompts"])
    return metrics


def compare_reports(
    ours: Mapping[str, Any], theirs: Mapping[str, Any]
) -> dict[str, dict[str, Any]]:
    """Headline name to the row that compares the policies of two reports on the same items.

    Items are matched by task and id; what only one report has is left out.
    """
    roles = {task["name"]: (task["role"], task["metric"]) for task in ours["tasks"]}
    tasks = []
    for name, rows in ours["items"].items():
        others = {row["id"]: row for row in theirs["items"].get(name, [])}
        pairs = [(row, others[row["id"]]) for row in rows if row["id"] in others]
        if pairs:
            role, metric = roles[name]
            tasks.append(
                TaskItems(
                    name=name,
                    role=role,
                    metric=metric,
                    policy=[_item_of(row) for row, _ in pairs],
                    reference=[_item_of(row) for _, row in pairs],
                )
            )
    compared = [_compare(task, 0) for task in tasks]
    found = {row["name"]: row for row in _headlines(compared)}
    oracle = _oracle(tasks, 0)
    return found if oracle is None else {**found, "oracle_score": oracle}


def _item_of(row: Mapping[str, Any]) -> Item:
    """The policy's answer to an item of a report."""
    said = row["policy"]
    return Item(
        id=row["id"],
        prompt=row["prompt"],
        target=row["target"],
        answer=said["answer"],
        passed=said["passed"],
        oracle=said["oracle"],
    )


def _compare(task: TaskItems, seed: int) -> dict[str, Any]:
    policy = [item.passed for item in task.policy]
    reference = [item.passed for item in task.reference]
    binary = set(policy) | set(reference) <= {0.0, 1.0}
    if binary:
        test = mcnemar_exact([p == 1 for p in policy], [r == 1 for r in reference])
        won, lost, p_value = test.won, test.lost, test.p_value
        delta = paired_rate_interval(won, lost, len(policy))
    else:
        won = sum(p > r for p, r in zip(policy, reference, strict=True))
        lost = sum(p < r for p, r in zip(policy, reference, strict=True))
        p_value = None
        delta = paired_bootstrap(policy, reference, seed=seed)
    return {
        "name": task.name,
        "role": task.role,
        "metric": task.metric,
        "num_items": len(policy),
        "policy": _estimate(policy, binary, seed),
        "reference": _estimate(reference, binary, seed),
        "delta": _mean(policy) - _mean(reference),
        "delta_low": delta.low,
        "delta_high": delta.high,
        "won": won,
        "lost": lost,
        "p_value": p_value,
    }


def _estimate(values: Sequence[float], binary: bool, seed: int) -> dict[str, float]:
    interval = wilson(sum(values), len(values)) if binary else bootstrap_mean(values, seed=seed)
    return {"value": _mean(values), "low": interval.low, "high": interval.high}


def _headlines(tasks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """One row a role: the mean over its tasks, each task with the same weight."""
    roles = list(dict.fromkeys(task["role"] for task in tasks))
    rows = []
    for role in roles:
        mine = [task for task in tasks if task["role"] == role]
        name, flipped = _HEADLINES.get(role, (role, False))
        policy = _flip(_combined([task["policy"] for task in mine]), flipped)
        reference = _flip(_combined([task["reference"] for task in mine]), flipped)
        delta = _combined(
            [
                {"value": task["delta"], "low": task["delta_low"], "high": task["delta_high"]}
                for task in mine
            ]
        )
        if flipped:
            delta = {"value": -delta["value"], "low": -delta["high"], "high": -delta["low"]}
        rows.append(
            {
                "name": name,
                "role": role,
                "num_items": sum(task["num_items"] for task in mine),
                "num_tasks": len(mine),
                "more_is_better": not flipped,
                "policy": policy["value"],
                "low": policy["low"],
                "high": policy["high"],
                "reference": reference["value"],
                "reference_low": reference["low"],
                "reference_high": reference["high"],
                "delta": delta["value"],
                "delta_low": delta["low"],
                "delta_high": delta["high"],
            }
        )
    return rows


def _combined(estimates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    values = [estimate["value"] for estimate in estimates]
    interval = combined_mean(values, [Interval(e["low"], e["high"]) for e in estimates])
    return {"value": _mean(values), "low": interval.low, "high": interval.high}


def _flip(estimate: Mapping[str, float], flipped: bool) -> Mapping[str, float]:
    if not flipped:
        return estimate
    return {
        "value": 1 - estimate["value"],
        "low": 1 - estimate["high"],
        "high": 1 - estimate["low"],
    }


def _oracle(tasks: Sequence[TaskItems], seed: int) -> dict[str, Any] | None:
    """The village oracle's view, over all items that it can judge; None when there are none."""
    pairs = [
        (p.oracle, r.oracle)
        for task in tasks
        for p, r in zip(task.policy, task.reference, strict=True)
        if p.oracle is not None and r.oracle is not None
    ]
    if not pairs:
        return None
    policy, reference = [p for p, _ in pairs], [r for _, r in pairs]
    interval = paired_bootstrap(policy, reference, seed=seed)
    return {
        "num_items": len(pairs),
        "policy": _mean(policy),
        "reference": _mean(reference),
        "delta": _mean(policy) - _mean(reference),
        "delta_low": interval.low,
        "delta_high": interval.high,
        "won": sum(p > r for p, r in pairs),
        "lost": sum(p < r for p, r in pairs),
    }


def _changed(tasks: Sequence[TaskItems], *, better: str) -> list[dict[str, Any]]:
    """Items that only one of the two passes."""
    found = []
    for task in tasks:
        for policy, reference in zip(task.policy, task.reference, strict=True):
            won = policy.passed >= 0.5 > reference.passed
            lost = reference.passed >= 0.5 > policy.passed
            if (won and better == "policy") or (lost and better == "reference"):
                found.append({"task": task.name, "role": task.role, **_row(policy, reference)})
    return found


def _rows(task: TaskItems) -> list[dict[str, Any]]:
    return [_row(p, r) for p, r in zip(task.policy, task.reference, strict=True)]


def _row(policy: Item, reference: Item) -> dict[str, Any]:
    return {
        "id": policy.id,
        "prompt": policy.prompt,
        "target": policy.target,
        "policy": {"answer": policy.answer, "passed": policy.passed, "oracle": policy.oracle},
        "reference": {
            "answer": reference.answer,
            "passed": reference.passed,
            "oracle": reference.oracle,
        },
    }


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        # JSON has no NaN and no infinity.
        # And -0.0 is 0.0 to a reader.
        return round(value, 6) + 0.0 if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _rounded(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(entry) for entry in value]
    return value
