"""Exact and near duplicates of documents: SHA-256, and MinHash with LSH (Broder 1997).

Near: Jaccard similarity of the sets of word 5-grams at or over a threshold. MinHash finds the
candidates (datasketch); the similarity itself is then computed exactly, so no document is left out
because of an estimate. Of duplicates the first one stays.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from datasketch import MinHash, MinHashLSH

SHINGLE_WORDS = 5
# The permutations are part of what decides; they must not depend on the recipe's seed.
_SEED = 1
_WORDS = re.compile(r"\w+")

Kind = Literal["exact", "near"]


@dataclass(frozen=True, kw_only=True)
class Duplicate:
    """Document `index` is left out for `of`, an earlier one; Jaccard similarity of word 5-grams."""

    index: int
    of: int
    kind: Kind
    similarity: float


def shingles(text: str) -> set[str]:
    """Word 5-grams, in lower case; of a shorter text the whole."""
    words = _WORDS.findall(text.lower())
    if len(words) <= SHINGLE_WORDS:
        return {" ".join(words)}
    return {
        " ".join(words[start : start + SHINGLE_WORDS])
        for start in range(len(words) - SHINGLE_WORDS + 1)
    }


def jaccard(first: set[str], second: set[str]) -> float:
    """Size of the intersection over the size of the union; 1 for two empty sets."""
    union = len(first | second)
    return len(first & second) / union if union else 1.0


def find_duplicates(
    texts: Sequence[str],
    *,
    method: Literal["none", "exact", "minhash"],
    threshold: float,
    num_permutations: int,
) -> list[Duplicate]:
    """The documents to leave out, in order. The same on every machine."""
    if method == "none":
        return []
    first: dict[bytes, int] = {}
    found: list[Duplicate] = []
    unique: list[int] = []
    for index, text in enumerate(texts):
        digest = hashlib.sha256(text.strip().encode()).digest()
        if digest in first:
            found.append(Duplicate(index=index, of=first[digest], kind="exact", similarity=1.0))
        else:
            first[digest] = index
            unique.append(index)
    if method == "minhash":
        found += _near(texts, unique, threshold, num_permutations)
    return sorted(found, key=lambda duplicate: duplicate.index)


def _near(
    texts: Sequence[str], indices: Sequence[int], threshold: float, num_permutations: int
) -> list[Duplicate]:
    # At its own optimum LSH misses about a third of the pairs at the threshold itself; candidates
    # are cheap to check, so it looks somewhat lower.
    lsh = MinHashLSH(threshold=max(0.1, threshold - 0.1), num_perm=num_permutations)
    blank = MinHash(num_perm=num_permutations, seed=_SEED)
    found = []
    for index in indices:
        own = shingles(texts[index])
        signature = blank.copy()
        signature.update_batch([shingle.encode() for shingle in sorted(own)])
        match = None
        for candidate in sorted(lsh.query(signature)):
            similarity = jaccard(own, shingles(texts[candidate]))
            if similarity >= threshold:
                match = Duplicate(index=index, of=candidate, kind="near", similarity=similarity)
                break
        if match is not None:
            found.append(match)
        else:
            lsh.insert(index, signature)
    return found
