"""What a reward model learned beside the labels: length, formatting, vendors; and its ceiling."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence
from statistics import median

from llm_assets.gates.statistics import (
    Interval,
    correlation_interval,
    difference,
    paired_rate_interval,
    wilson,
)
from llm_assets.stages.context import Metric, with_ends
from llm_assets.stages.encoding import Pair

_FORMAT = re.compile(r"^\s*(?:[-*+]|\d+[.)]|#{1,6})\s|\*\*|`|\n", re.MULTILINE)
"""List items, headings, bold, code, line breaks."""


def bias_metrics(pairs: Sequence[Pair], margins: Sequence[float]) -> dict[str, Metric]:
    """Length and formatting beyond the labels. `margins`: score of chosen minus rejected.

    `length_preference`, `label_length_preference`: share of the pairs of unlike length in which
    the model, and the label, prefer the longer answer; `length_bias`: the first minus the second.
    `accuracy_balanced`: mean of the accuracy where the label prefers the longer answer and that
    where it prefers the shorter one: a model of length alone gets one half. Absent when all labels
    agree with length, which leaves nothing to tell the two apart by.
    `length_partial`, `format_partial`: correlation of the margin with the difference in tokens, and
    in marks of formatting, with the label held fixed.
    """
    metrics: dict[str, Metric] = {}
    uneven = [
        (len(pair.chosen_ids) > len(pair.rejected_ids), margin)
        for pair, margin in zip(pairs, margins, strict=True)
        if len(pair.chosen_ids) != len(pair.rejected_ids)
    ]
    if uneven:
        n = len(uneven)
        model = [longer == (margin > 0) for longer, margin in uneven]
        label = [longer for longer, _ in uneven]
        won = sum(m and not b for m, b in zip(model, label, strict=True))
        lost = sum(b and not m for m, b in zip(model, label, strict=True))
        metrics["length_preference"] = Metric(value=sum(model) / n, n=n)
        metrics["label_length_preference"] = Metric(value=sum(label) / n, n=n)
        interval = paired_rate_interval(won, lost, n)
        metrics.update(with_ends("length_bias", (won - lost) / n, interval, n))
        metrics.update(_balanced(uneven))
    for name, measure in (("length", _tokens), ("format", _marks)):
        metrics.update(_partial(f"{name}_partial", pairs, margins, measure))
    return metrics


def _balanced(uneven: Sequence[tuple[bool, float]]) -> dict[str, Metric]:
    sides = [[_right(m) for longer, m in uneven if longer is side] for side in (True, False)]
    if not all(sides):
        return {}
    rates = [sum(side) / len(side) for side in sides]
    errors = [wilson(sum(side), len(side)) for side in sides]
    low = math.hypot(*(r - e.low for r, e in zip(rates, errors, strict=True))) / 2
    high = math.hypot(*(e.high - r for r, e in zip(rates, errors, strict=True))) / 2
    value = sum(rates) / 2
    interval = Interval(max(0.0, value - low), min(1.0, value + high))
    return with_ends("accuracy_balanced", value, interval, len(uneven))


def _partial(
    name: str, pairs: Sequence[Pair], margins: Sequence[float], measure: Callable[[Pair], float]
) -> dict[str, Metric]:
    """Partial correlation given the label. Pairs have no order, so each counts both ways round:
    all means are 0, and the label of a pair as it stands is +1. Absent without any variation."""
    amounts = [measure(pair) for pair in pairs]
    n = len(pairs)
    square = math.fsum(a * a for a in amounts)
    energy = math.fsum(m * m for m in margins)
    if not square or not energy:
        return {}
    both = math.fsum(m * a for m, a in zip(margins, amounts, strict=True))
    with_margin = both / math.sqrt(square * energy)
    label_amount = math.fsum(amounts) / math.sqrt(n * square)
    label_margin = math.fsum(margins) / math.sqrt(n * energy)
    rest = (1 - label_amount**2) * (1 - label_margin**2)
    # All amounts alike, or all margins: nothing is left once the label is held fixed.
    if rest < 1e-9:
        return {}
    value = (with_margin - label_amount * label_margin) / math.sqrt(rest)
    interval = correlation_interval(value, n, controlled=1)
    return with_ends(name, value, interval, n)


def _tokens(pair: Pair) -> float:
    return float(len(pair.chosen_ids) - len(pair.rejected_ids))


def _marks(pair: Pair) -> float:
    chosen, rejected = (
        len(_FORMAT.findall(pair.row[side][-1]["content"])) for side in ("chosen", "rejected")
    )
    return float(chosen - rejected)


def margin_metrics(margins: Sequence[float]) -> dict[str, Metric]:
    """The distribution of the margins: mean, median, standard deviation."""
    n = len(margins)
    middle = math.fsum(margins) / n
    spread = math.sqrt(math.fsum((m - middle) ** 2 for m in margins) / max(1, n - 1))
    return {
        "margin_mean": Metric(value=middle, n=n),
        "margin_median": Metric(value=median(margins), n=n),
        "margin_spread": Metric(value=spread, n=n),
    }


def vendor_metrics(pairs: Sequence[Pair], margins: Sequence[float]) -> dict[str, Metric]:
    """`accuracy_worst_vendor`: the lowest accuracy of a vendor; its interval allows for having
    looked at all of them (Bonferroni). Absent with fewer than two vendors."""
    groups: dict[str, list[float]] = {}
    for pair, margin in zip(pairs, margins, strict=True):
        if pair.row.get("vendor"):
            groups.setdefault(str(pair.row["vendor"]), []).append(_right(margin))
    if len(groups) < 2:
        return {}
    worst = min(groups.values(), key=lambda rights: sum(rights) / len(rights))
    n = len(worst)
    interval = wilson(sum(worst), n, confidence=1 - 0.05 / len(groups))
    return with_ends("accuracy_worst_vendor", sum(worst) / n, interval, n)


def ceiling_metrics(pairs: Sequence[Pair], accuracy: float) -> dict[str, Metric]:
    """How accurate a model can be, as far as the votes tell.

    `annotator_agreement`: mean share of a pair's votes that are with its label. `accuracy_ceiling`:
    the share of the labels that are right, which is the accuracy of a model that is always right;
    of annotators who err alike and independently (Condorcet 1785), whose error follows from how
    often two of them agree. `accuracy_gap`: ceiling minus accuracy. Absent without votes.
    """
    votes = [
        [vote.get("choice") == "chosen" for vote in pair.row["votes"]]
        for pair in pairs
        if pair.row.get("votes")
    ]
    if not votes:
        return {}
    shares = [sum(v) / len(v) for v in votes]
    metrics = {"annotator_agreement": Metric(value=math.fsum(shares) / len(shares), n=len(shares))}
    agree = [a == b for v in votes for a, b in itertools.combinations(v, 2)]
    if not agree:
        return metrics
    rate = sum(agree) / len(agree)
    right = (1 + math.sqrt(max(0.0, 2 * rate - 1))) / 2
    n = len(votes)
    ceiling = math.fsum(_majority_right(len(v), right) for v in votes) / n
    metrics["accuracy_ceiling"] = Metric(value=ceiling, n=n)
    error = wilson(min(len(pairs), accuracy * len(pairs)), len(pairs))
    gap = difference(ceiling, Interval(ceiling, ceiling), accuracy, error)
    return {**metrics, **with_ends("accuracy_gap", ceiling - accuracy, gap, len(pairs))}


def _majority_right(count: int, right: float) -> float:
    """Probability that most of `count` votes are right; half of a tie."""
    total = 0.0
    for k in range(count + 1):
        share = 1.0 if 2 * k > count else 0.5 if 2 * k == count else 0.0
        total += share * math.comb(count, k) * right**k * (1 - right) ** (count - k)
    return total


def _right(margin: float) -> float:
    return 1.0 if margin > 0 else 0.5 if margin == 0 else 0.0
