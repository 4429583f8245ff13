"""Overlap of a training set with every eval task: whole items and 13-grams of words.

An item is contaminated when its prompt is a turn, a line or a whole text of the training set, or
when one of its 13-grams (question and right answer, lower case, punctuation left out) stands in
one, as in Brown et al. 2020, appendix C. As there, a shorter item counts as a whole, from 8 words.

What the items of a task share is its template and tells nothing: words of a 5-gram that stands in 3
prompts and in 1 % of them do not count, and an n-gram needs 8 words that do. (Leaving out n-grams
that are frequent in the training set instead would overlook an item that was copied often.)
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llm_assets.gates.artifact_rows import (
    Input,
    Measured,
    eval_items,
    texts_of,
    trained_rows,
    words,
)

NUM_WORDS = 13
LEAST_WORDS = 8
_TEMPLATE_WORDS = 5
_TEMPLATE_PROMPTS = 3
_TEMPLATE_SHARE = 0.01
_ROWS_SHOWN = 50
_SHOWN = 200
Item = tuple[str, str]
Words = tuple[str, ...]


class _Index:
    """The whole prompts and the n-grams of all eval items, each with the items that have it."""

    def __init__(self, evals: Input) -> None:
        self.num_items: Counter[str] = Counter()
        self.whole: dict[Words, list[Item]] = defaultdict(list)
        self.grams: dict[Words, list[Item]] = defaultdict(list)
        items = [
            (task, name, tuple(words(prompt)), tuple(words(with_answer)))
            for task, name, prompt, with_answer in eval_items(evals)
        ]
        templates = _templates(items)
        for task, name, prompt, with_answer in items:
            self.num_items[task] += 1
            if prompt:
                self.whole[prompt].append((task, name))
            for gram in {*_grams(prompt, templates[task]), *_grams(with_answer, templates[task])}:
                self.grams[gram].append((task, name))
        self.lengths = sorted({len(gram) for gram in self.grams})
        # Most positions of a text begin with words that begin no n-gram.
        self.first = {gram[:2] for gram in self.grams}

    def found(self, text: str) -> Iterator[tuple[str, str, Item]]:
        """(kind, the words, item) of all that a text has of the items."""
        said = tuple(words(text))
        units = {said} if "\n" not in text else {said, *(tuple(words(x)) for x in text.split("\n"))}
        for unit in units:
            for item in self.whole.get(unit, ()):
                yield "exact", " ".join(unit), item
        for start in range(len(said) - LEAST_WORDS + 1):
            if said[start : start + 2] in self.first:
                for length in self.lengths:
                    gram = said[start : start + length]
                    if len(gram) == length:
                        for item in self.grams.get(gram, ()):
                            yield f"{length}-gram", " ".join(gram), item


def _templates(items: Sequence[tuple[str, str, Words, Words]]) -> dict[str, set[Words]]:
    """Of each task the 5-grams that many of its different prompts have."""
    prompts: dict[str, set[Words]] = defaultdict(set)
    for task, _, prompt, _ in items:
        prompts[task].add(prompt)
    found = {}
    for task, asked in prompts.items():
        counts = Counter(gram for prompt in asked for gram in _windows(prompt, _TEMPLATE_WORDS))
        least = max(_TEMPLATE_PROMPTS, _TEMPLATE_SHARE * len(asked))
        found[task] = {gram for gram, count in counts.items() if count >= least}
    return found


def _windows(said: Words, length: int) -> set[Words]:
    return {said[start : start + length] for start in range(len(said) - length + 1)}


def _grams(said: Words, template: set[Words]) -> set[Words]:
    """The n-grams of an item with enough words of its own."""
    own = [True] * len(said)
    for start in range(len(said) - _TEMPLATE_WORDS + 1):
        if said[start : start + _TEMPLATE_WORDS] in template:
            own[start : start + _TEMPLATE_WORDS] = [False] * _TEMPLATE_WORDS
    length = min(NUM_WORDS, len(said))
    return {
        said[start : start + length]
        for start in range(len(said) - length + 1)
        if sum(own[start : start + length]) >= LEAST_WORDS
    }


def measure(inputs: Mapping[str, Input]) -> Measured:
    """`data` against `evals`. `contamination`: the largest share over the eval tasks of items that
    the training set holds. `contaminated_rows`: the share of its rows that hold one."""
    index = _Index(inputs["evals"])
    hit: dict[str, dict[str, str]] = defaultdict(dict)
    table: list[dict[str, Any]] = []
    num_rows = num_bad = 0
    for number, row in enumerate(trained_rows(inputs["data"])):
        num_rows += 1
        seen: dict[Item, tuple[str, str]] = {}
        for text in texts_of(row):
            for kind, said, item in index.found(text):
                seen.setdefault(item, (kind, said))
        num_bad += bool(seen)
        for (task, name), (kind, said) in seen.items():
            hit[task].setdefault(name, kind)
            if len(table) < _ROWS_SHOWN:
                table.append(
                    {
                        "row": number,
                        "source": str(row.get("source", "")),
                        "task": task,
                        "item": name,
                        "kind": kind,
                        "words": said[:_SHOWN],
                    }
                )
    tasks = [
        {
            "task": task,
            "items": count,
            "contaminated": len(hit[task]),
            "exact": sum(kind == "exact" for kind in hit[task].values()),
            "share": len(hit[task]) / count,
        }
        for task, count in index.num_items.items()
    ]
    worst = max(tasks, key=lambda entry: (entry["share"], entry["items"]), default=None)
    return Measured(
        metrics={
            "contamination": {
                "value": worst["share"] if worst else None,
                "n": worst["items"] if worst else 0,
            },
            "contaminated_rows": {
                "value": num_bad / num_rows if num_rows else None,
                "n": num_rows,
            },
        },
        tables={"contamination": table or tasks, "contaminated_rows": table},
    )
