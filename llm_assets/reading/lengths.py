"""How long rows are, and how many do not fit the context."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from llm_assets.errors import DataError

CHARACTERS_PER_TOKEN = 4
"""English text in a common vocabulary; only used where there is no tokenizer."""

Message = Mapping[str, str]
TooLong = Literal["drop", "truncate"]


@dataclass(frozen=True, kw_only=True)
class Measure:
    """How text is counted: `text` of a string, `conversation` of turns with their markup.

    `unit` names what is counted; `exact` says that it is what the stages will count.
    """

    text: Callable[[str], int]
    conversation: Callable[[Sequence[Message]], int]
    unit: str
    exact: bool


def characters() -> Measure:
    """Characters; a turn counts its text only."""
    return Measure(
        text=len,
        conversation=lambda turns: sum(len(turn["content"]) for turn in turns),
        unit="characters",
        exact=False,
    )


def tokens_of(tokenizer: Any) -> Measure:
    """Tokens of a transformers tokenizer; conversations by its chat template when it has one."""

    def text(value: str) -> int:
        return len(tokenizer.encode(value, add_special_tokens=False))

    from jinja2.exceptions import TemplateError

    def conversation(turns: Sequence[Message]) -> int:
        if not tokenizer.chat_template:
            return sum(text(turn["content"]) for turn in turns)
        try:
            rendered = tokenizer.apply_chat_template([dict(turn) for turn in turns], tokenize=False)
        except TemplateError as error:
            raise DataError(
                where="the tokenizer's chat template",
                found=f"it refuses turns of {', '.join(turn['role'] for turn in turns)}: {error}",
                rule="the template can write every conversation",
                remedy="remove what it refuses (often the system turn), or change the template",
            ) from error
        return text(rendered)

    return Measure(
        text=text, conversation=conversation, unit="tokens", exact=bool(tokenizer.chat_template)
    )


@dataclass(frozen=True, kw_only=True)
class Fit:
    """How rows fit a limit. `num_lost` is counted in the unit of the lengths."""

    limit: int
    num_rows: int
    num_over: int
    num_lost: int
    longest: int
    too_long: TooLong
    unit: str

    def sentence(self) -> str:
        """For a person: how many rows are cut or dropped."""
        if not self.num_over:
            return (
                f"all {self.num_rows} rows fit {self.limit} {self.unit} (longest: {self.longest})"
            )
        what = "dropped" if self.too_long == "drop" else "cut"
        share = self.num_over / self.num_rows
        return (
            f"{self.num_over} of {self.num_rows} rows ({share:.1%}) are longer than {self.limit} "
            f"{self.unit} and would be {what}: {self.num_lost} {self.unit} lost "
            f"(longest: {self.longest})"
        )


def fit(lengths: Sequence[int], limit: int, too_long: TooLong, unit: str = "tokens") -> Fit:
    """Count the rows over `limit`, and what is lost by cutting or dropping them."""
    over = [length for length in lengths if length > limit]
    return Fit(
        limit=limit,
        num_rows=len(lengths),
        num_over=len(over),
        num_lost=sum(over) if too_long == "drop" else sum(over) - limit * len(over),
        longest=max(lengths, default=0),
        too_long=too_long,
        unit=unit,
    )


@dataclass(kw_only=True)
class Statistics:
    """Roles, turns and lengths of the rows of a data set, in `measure`'s unit."""

    measure: Measure
    lengths: array[int] = field(default_factory=lambda: array("q"))
    roles: Counter[str] = field(default_factory=Counter)
    supervised: int = 0
    num_multi_turn: int = 0

    def add(self, row: Mapping[str, Any]) -> None:
        """Count one row of a corpus, of instructions, of preferences or of evals."""
        if "messages" in row:
            self._add_turns(row["messages"])
            self.lengths.append(self.measure.conversation(row["messages"]))
            self._supervise(row["messages"])
        elif "chosen" in row:
            self._add_turns([*row["prompt"], *row["chosen"]])
            sides = [[*row["prompt"], *row[side]] for side in ("chosen", "rejected")]
            self.lengths.append(max(self.measure.conversation(side) for side in sides))
            self._supervise(row["chosen"])
            self._supervise(row["rejected"])
        else:
            text = row["text"] if "text" in row else row["question"]
            self.lengths.append(self.measure.text(text))
            if "text" in row:
                self.supervised += self.lengths[-1]

    def _add_turns(self, turns: Sequence[Message]) -> None:
        self.roles.update(turn["role"] for turn in turns)
        self.num_multi_turn += sum(turn["role"] == "user" for turn in turns) > 1

    def _supervise(self, turns: Sequence[Message]) -> None:
        self.supervised += sum(
            self.measure.text(turn["content"]) for turn in turns if turn["role"] == "assistant"
        )

    @property
    def supervised_tokens(self) -> int:
        """Tokens that the loss sees; about, when characters were counted."""
        if self.measure.unit == "tokens":
            return self.supervised
        return math.ceil(self.supervised / CHARACTERS_PER_TOKEN)

    def token_lengths(self) -> list[int]:
        """Lengths in tokens; about, when characters were counted."""
        if self.measure.unit == "tokens":
            return list(self.lengths)
        return [math.ceil(length / CHARACTERS_PER_TOKEN) for length in self.lengths]

    def percentiles(self) -> dict[str, int]:
        """min, median, p95, p99 and max by the nearest rank, and the sum."""
        ordered = sorted(self.lengths)
        if not ordered:
            return {}

        def at(share: float) -> int:
            return ordered[max(0, math.ceil(share * len(ordered)) - 1)]

        return {
            "min": ordered[0],
            "median": at(0.5),
            "p95": at(0.95),
            "p99": at(0.99),
            "max": ordered[-1],
            "sum": sum(ordered),
        }

    def histogram(self) -> list[tuple[int, int, int]]:
        """(from, to, rows) by powers of two; `to` is the last length inside."""
        counts = Counter(max(length, 1).bit_length() for length in self.lengths)
        if not counts:
            return []
        bits = range(min(counts), max(counts) + 1)
        return [(2 ** (bit - 1), 2**bit - 1, counts.get(bit, 0)) for bit in bits]
