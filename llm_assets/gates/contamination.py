"""Overlap of a training set with every eval task: whole items and 13-grams of words.

An item is contaminated when its prompt is a turn, a line or a whole text of the training set, or
when one of its 13-grams (question and right answer, lower case, punctuation left out) stands in
one, as in Brown et al. 2020, appendix C. As there, a shorter item counts as a whole from 8 words on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
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
_ROWS_SHOWN = 50
_SHOWN = 200
Item = tuple[str, str]


class _Index:
    """The whole prompts and the n-grams of all eval items, each with the items that have it."""

    def __init__(self, evals: Input) -> None:
        self.num_items: dict[str, int] = defaultdict(int)
        self.whole: dict[tuple[str, ...], list[Item]] = defaultdict(list)
        self.grams: dict[tuple[str, ...], list[Item]] = defaultdict(list)
        for task, name, prompt, with_answer in eval_items(evals):
            self.num_items[task] += 1
            asked = tuple(words(prompt))
            if asked:
                self.whole[asked].append((task, name))
            for gram in {*_grams(asked), *_grams(tuple(words(with_answer)))}:
                self.grams[gram].append((task, name))
        self.lengths = sorted({len(gram) for gram in self.grams})
        # Most positions of a text begin with a word that begins no n-gram.
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


def _grams(said: tuple[str, ...]) -> set[tuple[str, ...]]:
    if len(said) < NUM_WORDS:
        return {said} if len(said) >= LEAST_WORDS else set()
    return {said[start : start + NUM_WORDS] for start in range(len(said) - NUM_WORDS + 1)}


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
