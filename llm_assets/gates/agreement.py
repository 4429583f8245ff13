"""Agreement of annotators: Krippendorff's alpha for nominal data, with an interval.

Own code: the `krippendorff` package on PyPI is under the GPL, and statsmodels has no alpha. Tested
against the worked examples of Krippendorff 2011, "Computing Krippendorff's Alpha-Reliability".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np
import numpy.typing as npt

from llm_assets.gates.statistics import Interval

_RESAMPLES = 500


def krippendorff_alpha(units: Sequence[Sequence[Hashable]]) -> float | None:
    """Alpha of nominal values; each unit holds the values that its raters gave, in any order.

    1 is perfect agreement, 0 what chance gives. Units with fewer than two values do not count.
    None when no unit counts, or when only one value occurs at all: nothing can disagree then.
    """
    counts = _counts(units)
    if not len(counts):
        return None
    return _alpha(counts, np.ones(len(counts)))


def alpha_interval(
    units: Sequence[Sequence[Hashable]], *, seed: int = 0, confidence: float = 0.95
) -> Interval | None:
    """Percentile bootstrap of alpha over the units; None where alpha is None."""
    counts = _counts(units)
    if krippendorff_alpha(units) is None:
        return None
    rng = np.random.Generator(np.random.PCG64(seed))
    n = len(counts)
    found = [
        value
        for _ in range(_RESAMPLES)
        if (value := _alpha(counts, np.bincount(rng.integers(0, n, n), minlength=n).astype(float)))
        is not None
    ]
    low, high = np.quantile(found, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(float(low), float(high))


def _counts(units: Sequence[Sequence[Hashable]]) -> npt.NDArray[np.float64]:
    """[units with two values at least, values]: how often each value was given."""
    usable = [Counter(unit) for unit in units if len(unit) > 1]
    values = sorted({value for unit in usable for value in unit}, key=str)
    return np.array([[unit[value] for value in values] for unit in usable], dtype=np.float64)


def _alpha(counts: npt.NDArray[np.float64], weights: npt.NDArray[np.float64]) -> float | None:
    """1 - D_o / D_e with the coincidence matrix of weighted units."""
    sizes = counts.sum(axis=1)
    same = (counts * (counts - 1)).sum(axis=1)
    disagreeing = float((weights * (sizes * (sizes - 1) - same) / (sizes - 1)).sum())
    marginals = (weights[:, None] * counts).sum(axis=0)
    total = float(marginals.sum())
    expected = float(total * total - (marginals * marginals).sum())
    if expected <= 0:
        return None
    return 1.0 - (total - 1) * disagreeing / expected
