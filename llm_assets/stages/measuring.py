"""A policy against its reference on held-out prompts: answers, oracle, KL. For stages 8 and 9."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llm_assets.gates.statistics import ratio_interval
from llm_assets.stages.context import Metric, StageContext, with_ends
from llm_assets.stages.generation import Answer, Divergence, divergence, generate
from llm_assets.stages.judging import (
    Question,
    answer_deltas,
    answer_metrics,
    by_kind,
    compare,
    oracle_scores,
    regressions,
    sample_rows,
)

_Z = 1.959964
"""97.5 % point of the normal distribution."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What `measure_policy` found; `before` and `after` are the greedy answers, `sampled` those of
    the policy at temperature 1."""

    metrics: dict[str, Metric]
    tables: dict[str, list[dict[str, Any]]]
    samples: list[dict[str, Any]]
    before: list[Answer]
    after: list[Answer]
    sampled: list[Answer]


def measure_policy(
    context: StageContext,
    policy: Any,
    reference: Any,
    tokenizer: Any,
    questions: Sequence[Question],
    *,
    max_new_tokens: int,
) -> Measured:
    """Greedy answers of both models, judged and compared, and the KL on the policy's own samples.

    `win_rate`: oracle's score of the policy's answer against the reference's, ties half.
    `length_ratio`: mean length against the reference's. `entropy_ratio`: entropy of the policy
    against the reference's after the same words; near 0 the policy says one thing only. `M_delta`:
    metric M against the reference, on the same questions.
    """
    context.progress.say(f"measuring on {len(questions)} held-out prompts")
    prompts = [question.prompt for question in questions]
    before = generate(reference, tokenizer, prompts, max_new_tokens=max_new_tokens)
    after = generate(policy, tokenizer, prompts, max_new_tokens=max_new_tokens)
    sampled = generate(
        policy,
        tokenizer,
        prompts,
        max_new_tokens=max_new_tokens,
        temperature=1.0,
        seed=context.seed,
    )
    found = divergence(policy, reference, sampled, pad_token_id=tokenizer.pad_token_id)
    metrics = {
        **answer_metrics(questions, after),
        **answer_deltas(questions, before, after),
        **kl_metrics(found, [len(answer.ids) for answer in sampled]),
        **_ratio("length_ratio", *([float(len(a.ids)) for a in said] for said in (after, before))),
        **_ratio("entropy_ratio", found.entropies, found.reference_entropies),
    }
    first = answer_metrics(questions, before)
    comparison = compare(questions, before, after)
    if comparison.n:
        metrics["win_rate"] = Metric(value=comparison.value, n=comparison.n)
        metrics["oracle_score_before"] = first["oracle_score"]
        totals = oracle_scores(questions, [answer.text for answer in after])
        metrics.update(_bounds("oracle_score", [t for t in totals if t is not None]))
    return Measured(
        metrics=metrics,
        tables={
            "answers_by_kind": by_kind(questions, before=before, after=after),
            "win_rate": [
                {"outcome": name, "questions": getattr(comparison, name)}
                for name in ("wins", "ties", "losses")
            ],
            "regressions": regressions(questions, before, after),
        },
        samples=sample_rows(questions, before, after),
        before=before,
        after=after,
        sampled=sampled,
    )


def measure_step(
    policy: Any,
    incoming: Any,
    tokenizer: Any,
    questions: Sequence[Question],
    measured: Measured,
    *,
    max_new_tokens: int,
) -> tuple[dict[str, Metric], list[Answer]]:
    """The policy against the one that came into the stage, when that is not the reference.

    Gives `win_rate_over_input`, `kl_per_token_to_input` and `kl_per_sequence_to_input`, and the
    incoming policy's greedy answers.
    """
    prompts = [question.prompt for question in questions]
    before = generate(incoming, tokenizer, prompts, max_new_tokens=max_new_tokens)
    found = divergence(policy, incoming, measured.sampled, pad_token_id=tokenizer.pad_token_id)
    metrics = {
        "kl_per_token_to_input": Metric(value=found.per_token, n=found.num_tokens),
        "kl_per_sequence_to_input": Metric(value=found.per_sequence, n=len(found.sequences)),
    }
    comparison = compare(questions, before, measured.after)
    if comparison.n:
        metrics["win_rate_over_input"] = Metric(value=comparison.value, n=comparison.n)
    return metrics, before


def kl_metrics(found: Divergence, lengths: Sequence[int]) -> dict[str, Metric]:
    """KL per token and per sequence with the ends of their 95 % intervals, and the entropy.

    Answers are the independent items; the interval of the ratio per token is the one of Cochran
    (1977, section 6.3), by linearization.
    """
    values = found.sequences
    n = len(values)
    residuals = [v - found.per_token * length for v, length in zip(values, lengths, strict=True)]
    spread = math.sqrt(sum(r * r for r in residuals) / max(1, n - 1))
    error = _Z * spread * math.sqrt(n) / max(1, found.num_tokens)
    return {
        "kl_per_token": Metric(value=found.per_token, n=found.num_tokens),
        "kl_per_token_low": Metric(value=max(0.0, found.per_token - error)),
        "kl_per_token_high": Metric(value=found.per_token + error),
        "kl_per_sequence": Metric(value=found.per_sequence, n=n),
        **_bounds("kl_per_sequence", values),
        "entropy_per_token": Metric(value=found.entropy, n=found.num_tokens),
    }


def _ratio(name: str, ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Metric]:
    """The ratio of two sums over the same answers, with its interval; absent over nothing."""
    total = math.fsum(theirs)
    if not total > 0:
        return {}
    return with_ends(name, math.fsum(ours) / total, ratio_interval(ours, theirs), len(ours))


def _bounds(name: str, values: Sequence[float]) -> dict[str, Metric]:
    """`NAME_low` and `NAME_high`: 95 % interval of a mean, normal approximation."""
    n = len(values)
    middle = sum(values) / n
    deviation = math.sqrt(sum((v - middle) ** 2 for v in values) / max(1, n - 1))
    error = _Z * deviation / math.sqrt(n)
    return {
        f"{name}_low": Metric(value=middle - error),
        f"{name}_high": Metric(value=middle + error),
    }
