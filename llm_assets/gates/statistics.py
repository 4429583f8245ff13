"""Intervals and tests for gates and reports. Pure Python; the same result on every platform."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist


@dataclass(frozen=True)
class Interval:
    """A confidence interval, both ends inside."""

    low: float
    high: float


def wilson(successes: float, n: float, confidence: float = 0.95) -> Interval:
    """Score interval of a rate (Wilson 1927; recommended by Brown, Cai & DasGupta 2001).

    `successes` may be a sum of n values in [0, 1]: their variance is at most that of a coin with
    the same mean, so the interval is then conservative. ValueError unless 0 <= successes <= n and
    n >= 1.
    """
    if n < 1 or not 0 <= successes <= n:
        raise ValueError(f"a rate needs 0 <= successes <= n and n >= 1, got {successes} of {n}")
    z = _z(confidence)
    rate = successes / n
    scale = 1 + z * z / n
    centre = (rate + z * z / (2 * n)) / scale
    half = z * math.sqrt(rate * (1 - rate) / n + z * z / (4 * n * n)) / scale
    low = 0.0 if successes == 0 else max(0.0, centre - half)
    high = 1.0 if successes == n else min(1.0, centre + half)
    return Interval(low, high)


@dataclass(frozen=True, kw_only=True)
class McNemar:
    """Discordant pairs and the two-sided exact p-value. `won`: right only in the first series."""

    won: int
    lost: int
    p_value: float


def mcnemar_exact(first: Sequence[bool], second: Sequence[bool]) -> McNemar:
    """Exact test of two paired series of yes and no (McNemar 1947).

    Given the number of discordant pairs, the wins are binomial with p = 1/2 when the two are
    equally good. The p-value is twice the smaller tail, at most 1. No discordant pair: 1.
    """
    if len(first) != len(second):
        raise ValueError(f"paired series need one length, got {len(first)} and {len(second)}")
    won = sum(1 for a, b in zip(first, second, strict=True) if a and not b)
    lost = sum(1 for a, b in zip(first, second, strict=True) if b and not a)
    total = won + lost
    if total == 0:
        return McNemar(won=0, lost=0, p_value=1.0)
    # Integers until the last step: the tail is exact at every length.
    tail = sum(math.comb(total, k) for k in range(min(won, lost) + 1))
    return McNemar(won=won, lost=lost, p_value=min(1.0, 2 * tail / 2**total))


def bootstrap_mean(
    values: Sequence[float], *, seed: int = 0, resamples: int = 2000, confidence: float = 0.95
) -> Interval:
    """Percentile bootstrap interval of a mean (Efron & Tibshirani 1993, chapter 13)."""
    if not values:
        raise ValueError("a mean of no values has no interval")
    if min(values) == max(values):
        return Interval(values[0], values[0])
    n = len(values)
    # Mersenne twister with random(): its sequence is fixed by Python for a seed.
    draw = random.Random(seed).random
    means = sorted(
        math.fsum(values[int(draw() * n)] for _ in range(n)) / n for _ in range(resamples)
    )
    tail = (1 - confidence) / 2
    return Interval(_quantile(means, tail), _quantile(means, 1 - tail))


def bootstrap_ratio(
    numerators: Sequence[float],
    denominators: Sequence[float],
    *,
    seed: int = 0,
    resamples: int = 2000,
    confidence: float = 0.95,
) -> Interval:
    """Percentile bootstrap interval of sum(numerators) / sum(denominators); pairs are resampled.

    For a mean over tokens when what was drawn are conversations. Denominators are positive.
    """
    if not denominators or len(numerators) != len(denominators) or min(denominators) < 0:
        raise ValueError("a ratio needs pairs with denominators of at least 0")
    n = len(denominators)
    draw = random.Random(seed).random
    ratios = []
    for _ in range(resamples):
        chosen = [int(draw() * n) for _ in range(n)]
        below = math.fsum(denominators[index] for index in chosen)
        if below > 0:
            ratios.append(math.fsum(numerators[index] for index in chosen) / below)
    if not ratios:
        raise ValueError("a ratio needs a denominator over 0")
    ratios.sort()
    tail = (1 - confidence) / 2
    return Interval(_quantile(ratios, tail), _quantile(ratios, 1 - tail))


def paired_bootstrap(
    first: Sequence[float],
    second: Sequence[float],
    *,
    seed: int = 0,
    resamples: int = 2000,
    confidence: float = 0.95,
) -> Interval:
    """Interval of the mean of first - second over the same items (paired: items are resampled).

    As in Koehn 2004, "Statistical significance tests for machine translation evaluation".
    """
    if len(first) != len(second):
        raise ValueError(f"paired series need one length, got {len(first)} and {len(second)}")
    differences = [a - b for a, b in zip(first, second, strict=True)]
    return bootstrap_mean(differences, seed=seed, resamples=resamples, confidence=confidence)


def paired_rate_interval(won: int, lost: int, n: int, confidence: float = 0.95) -> Interval:
    """Interval of the difference of two paired rates, (won - lost) / n.

    Score interval of Tango 1998, "Equivalence test and confidence interval for the difference in
    proportions for the paired-sample design". It stays honest where the bootstrap has nothing to
    resample: no discordant pair among n items is evidence about n items only.
    """
    if n < 1 or min(won, lost) < 0 or won + lost > n:
        raise ValueError(f"discordant pairs need won + lost <= n, got {won} + {lost} of {n}")
    z = _z(confidence)
    point = (won - lost) / n
    return Interval(
        _tango_bound(won, lost, n, z, low=-1.0, high=point, rising=True),
        _tango_bound(won, lost, n, z, low=point, high=1.0, rising=False),
    )


def combined_mean(estimates: Sequence[float], intervals: Sequence[Interval]) -> Interval:
    """Interval of the mean of independent estimates from an interval of each.

    Method of variance estimates recovery (Zou & Donner 2008): the distances from each estimate to
    its bounds add in squares. One estimate keeps its own interval.
    """
    if not estimates or len(estimates) != len(intervals):
        raise ValueError("a mean needs one interval for each estimate, and at least one")
    n = len(estimates)
    mean = math.fsum(estimates) / n
    pairs = list(zip(estimates, intervals, strict=True))
    below = math.sqrt(math.fsum((value - interval.low) ** 2 for value, interval in pairs)) / n
    above = math.sqrt(math.fsum((interval.high - value) ** 2 for value, interval in pairs)) / n
    return Interval(mean - below, mean + above)


def difference(first: float, one: Interval, second: float, other: Interval) -> Interval:
    """Interval of first - second, two independent estimates, from an interval of each.

    Method of variance estimates recovery, as in `combined_mean`.
    """
    low = math.hypot(first - one.low, other.high - second)
    high = math.hypot(one.high - first, second - other.low)
    return Interval(first - second - low, first - second + high)


def ratio_interval(
    numerators: Sequence[float], denominators: Sequence[float], confidence: float = 0.95
) -> Interval:
    """Interval of sum(numerators) / sum(denominators) by linearization (Cochran 1977, section 6.3).

    For a mean over tokens when what was drawn are answers. ValueError unless there are pairs and
    the denominators' sum is over 0. One pair says nothing of the spread: the interval is infinite.
    """
    total = math.fsum(denominators)
    n = len(denominators)
    if n != len(numerators) or not total > 0:
        raise ValueError("a ratio needs pairs with denominators of more than 0 in all")
    ratio = math.fsum(numerators) / total
    if n == 1:
        return Interval(-math.inf, math.inf)
    residuals = [a - ratio * b for a, b in zip(numerators, denominators, strict=True)]
    spread = math.sqrt(math.fsum(r * r for r in residuals) / (n - 1))
    error = _z(confidence) * spread * math.sqrt(n) / total
    return Interval(ratio - error, ratio + error)


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Interval of a mean, normal approximation; infinite for one value."""
    return ratio_interval(values, [1.0] * len(values), confidence)


def correlation_interval(r: float, n: int, controlled: int = 0) -> Interval:
    """Interval of a correlation of n pairs, partial for `controlled` variables (Fisher 1921, 1924).

    The whole range where n is too small to tell.
    """
    if n - controlled - 3 < 1:
        return Interval(-1.0, 1.0)
    centre = math.atanh(max(-0.999999, min(0.999999, r)))
    half = _z(0.95) / math.sqrt(n - controlled - 3)
    return Interval(math.tanh(centre - half), math.tanh(centre + half))


def _tango_bound(
    won: int, lost: int, n: int, z: float, *, low: float, high: float, rising: bool
) -> float:
    """Bisection for the difference whose score statistic is z (below the point) or -z (above)."""
    for _ in range(60):
        middle = (low + high) / 2
        inside = abs(_tango_score(won, lost, n, middle)) <= z
        if inside == rising:
            high = middle
        else:
            low = middle
    return (low + high) / 2


def _tango_score(won: int, lost: int, n: int, difference: float) -> float:
    """Tango's statistic: the restricted estimate of the losing share solves a quadratic."""
    b = -won - lost + (2 * n - won + lost) * difference
    c = -lost * difference * (1 - difference)
    root = math.sqrt(max(0.0, b * b - 8 * n * c))
    share = (root - b) / (4 * n)
    variance = n * (2 * share + difference * (1 - difference))
    distance = won - lost - n * difference
    if variance <= 0:
        return 0.0 if distance == 0 else math.copysign(math.inf, distance)
    return distance / math.sqrt(variance)


def _z(confidence: float) -> float:
    if not 0 < confidence < 1:
        raise ValueError(f"a confidence lies between 0 and 1, got {confidence}")
    return NormalDist().inv_cdf(0.5 + confidence / 2)


def _quantile(ordered: Sequence[float], share: float) -> float:
    """Linear interpolation between order statistics (type 7 of Hyndman & Fan 1996)."""
    position = share * (len(ordered) - 1)
    below = math.floor(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])
