"""How far one data set is from another: lengths, vocabulary, mix of sources.

PSI is the population stability index, sum of (p - q) ln(p / q) over bins, the symmetric
Kullback-Leibler divergence (Jeffreys 1946); by habit under 0.1 is no shift and over 0.25 a large
one (Siddiqi 2006, Credit Risk Scorecards). KS is the largest distance between two empirical
distribution functions (Smirnov 1948).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from llm_assets.gates.artifact_rows import Input, Measured, texts_of, trained_rows, words

_BINS = 10
_TOP_WORDS = 100
_OTHER = "(all other words)"
_WORDS_SHOWN = 20


def psi(expected: Mapping[Any, float], actual: Mapping[Any, float]) -> float:
    """Population stability index of two counts over the same bins. A bin that one side lacks
    counts half an item there, so that the index stays finite."""
    whole, seen = sum(expected.values()), sum(actual.values())
    if not whole or not seen:
        raise ValueError("the stability index compares two sets that hold something")
    total = 0.0
    for key in {*expected, *actual}:
        p = max(expected.get(key, 0.0), 0.5) / whole
        q = max(actual.get(key, 0.0), 0.5) / seen
        total += (q - p) * math.log(q / p)
    return total


def ks(first: Sequence[float], second: Sequence[float]) -> float:
    """Largest distance between the distribution functions of two samples."""
    if not first or not second:
        raise ValueError("the distance of two distributions needs two samples")
    one, other = sorted(first), sorted(second)
    return max(
        abs(bisect_right(one, x) / len(one) - bisect_right(other, x) / len(other))
        for x in {*one, *other}
    )


class _Profile:
    """Lengths, words and sources of a data set."""

    def __init__(self, data: Input) -> None:
        self.lengths: list[int] = []
        self.words: Counter[str] = Counter()
        self.sources: Counter[str] = Counter()
        for row in trained_rows(data):
            said = [word for text in texts_of(row) for word in words(text)]
            self.lengths.append(len(said))
            self.words.update(said)
            self.sources[str(row.get("source", ""))] += 1


def measure(inputs: Mapping[str, Input]) -> Measured:
    """`data` against `reference`: PSI of lengths over the reference's deciles, of its 100 most
    frequent words and all others, and of the sources; KS of lengths; both numbers of rows."""
    new, old = _Profile(inputs["data"]), _Profile(inputs["reference"])
    if not new.lengths or not old.lengths:
        return Measured(metrics={})
    edges = _deciles(old.lengths)
    before, after = (Counter(bisect_right(edges, n) for n in p.lengths) for p in (old, new))
    top = [word for word, _ in old.words.most_common(_TOP_WORDS)]
    old_words, new_words = (_top(profile.words, top) for profile in (old, new))
    n = min(len(new.lengths), len(old.lengths))
    return Measured(
        metrics={
            "length_drift": {"value": psi(before, after), "n": n},
            "length_ks": {"value": ks(old.lengths, new.lengths), "n": n},
            "vocabulary_drift": {"value": psi(old_words, new_words), "n": n},
            "source_drift": {"value": psi(old.sources, new.sources), "n": n},
        },
        tables={
            "length_drift": _shares(before, after, lambda bin_: _bin(edges, bin_), "words"),
            "vocabulary_drift": _shares(old_words, new_words, str, "word")[:_WORDS_SHOWN],
            "source_drift": _shares(old.sources, new.sources, str, "source"),
        },
    )


def _deciles(lengths: Sequence[int]) -> list[int]:
    ordered = sorted(lengths)
    return sorted({ordered[len(ordered) * k // _BINS] for k in range(1, _BINS)})


def _bin(edges: Sequence[int], index: int) -> str:
    low = 0 if index == 0 else edges[index - 1]
    return f"{low} to {edges[index] - 1}" if index < len(edges) else f"{low} and more"


def _top(counted: Mapping[str, int], top: Sequence[str]) -> dict[str, float]:
    shares = {word: float(counted.get(word, 0)) for word in top}
    shares[_OTHER] = float(sum(counted.values())) - sum(shares.values())
    return shares


def _shares(
    before: Mapping[Any, float], after: Mapping[Any, float], show: Any, name: str
) -> list[dict[str, Any]]:
    """Both shares of each bin, the largest change first."""
    whole, seen = sum(before.values()), sum(after.values())
    rows = [
        {
            name: show(key),
            "reference": round(before.get(key, 0.0) / whole, 4),
            "now": round(after.get(key, 0.0) / seen, 4),
        }
        for key in sorted({*before, *after}, key=str)
    ]
    return sorted(rows, key=lambda row: -abs(row["now"] - row["reference"]))
