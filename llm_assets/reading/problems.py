"""Why a row is dropped, and the log that counts it. A row never disappears without an entry here.

Two kinds of reasons. A *counted* reason drops the row; the share of dropped rows may not exceed the
recipe's `max_dropped`. A *fatal* reason makes the whole file an error, however rare it is.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from llm_assets.errors import DataError

EXAMPLES_KEPT = 10
LINES_NAMED = 5
REPAIRED = "_repaired"
"""Key under which a conversion says what it mended in a row. It is counted and never written."""


@dataclass(frozen=True, kw_only=True)
class Reason:
    """A rule that a row can break, and what to do about it."""

    rule: str
    remedy: str
    fatal: bool = False


REASONS: Mapping[str, Reason] = {
    "broken_line": Reason(
        rule="each line of a JSONL file is one JSON object",
        remedy="mend or delete the line; a broken last line often means an unfinished download",
        fatal=True,
    ),
    "duplicate_keys": Reason(
        rule="a key stands once in an object", remedy="rename or remove one of the two"
    ),
    "wrong_columns": Reason(
        rule="a row has as many fields as the header",
        remedy='quote fields that hold the separator or a line break ("…")',
    ),
    "wrong_type": Reason(
        rule="text fields are strings, conversations are lists of objects",
        remedy="convert the field, or name the right column under `columns`",
    ),
    "missing_field": Reason(
        rule="a row has all fields of its form",
        remedy="add the field, or name the right column under `columns`",
    ),
    "other_form": Reason(
        rule="all rows of a file have the same form",
        remedy="split the file by form, each a source of its own",
    ),
    "none_content": Reason(rule="no text is null", remedy="fill the text in or remove the row"),
    "empty_content": Reason(
        rule="no text is empty or blank", remedy="fill the text in or remove the row"
    ),
    "nul_character": Reason(
        rule="no text holds a NUL character", remedy="remove the character (tr -d '\\000')"
    ),
    "lone_surrogate": Reason(
        rule="all text can be written as UTF-8; half of a surrogate pair cannot",
        remedy="repair the text where it was cut or decoded",
    ),
    "unsupported_content": Reason(
        rule="content is text; images, audio and tool calls are not trained on",
        remedy="remove the block or the row",
    ),
    "unknown_role": Reason(
        rule="roles are system, user and assistant (or human, gpt, bot, …)",
        remedy="rename the role or remove the row",
    ),
    "role_order": Reason(
        rule="system at most first, then user and assistant in turn, user first",
        remedy="join repeated turns or remove the row",
    ),
    "no_assistant": Reason(
        rule="a conversation has an assistant turn: nothing else is trained on, "
        "and a loss over no token is NaN",
        remedy="add the answer or remove the row",
    ),
    "ends_with_user": Reason(
        rule="a conversation ends with the assistant's turn",
        remedy="cut the last user turn or add the answer",
    ),
    "no_prompt": Reason(
        rule="a pair has a prompt: a field of its own, or two conversations' shared beginning",
        remedy="add a `prompt` column",
    ),
    "prompts_differ": Reason(
        rule="chosen and rejected answer the same prompt: they differ in the last turn only",
        remedy="remove the pair, or give the prompt in a column of its own",
    ),
    "equal_pair": Reason(
        rule="chosen and rejected differ: an equal pair teaches nothing",
        remedy="remove the pair",
    ),
    "unknown_split": Reason(
        rule="a row's own `split` is train, held_out, test, validation or dev",
        remedy="rename the split, or map another column under `columns`",
    ),
    "not_a_question": Reason(
        rule="a multiple-choice item has at least two choices and a right one among them",
        remedy="add the choices or remove the item",
    ),
    "unknown_label": Reason(
        rule="a refusal item is labelled safe or unsafe", remedy="correct the label"
    ),
    "prompt_in_held_out": Reason(
        rule="no prompt is both trained on and held out",
        remedy="nothing to do: the training row was left out; or correct the rows' own `split`",
    ),
}


class BadRow(ValueError):
    """A row that cannot be used. Always caught by the reader, which counts it."""

    def __init__(self, reason: str, found: str) -> None:
        super().__init__(f"{reason}: {found}")
        self.reason = reason
        self.found = found


def shown(path: Path) -> str:
    """A path for a message: what is no UTF-8 in it is replaced, so that it can be printed."""
    return os.fsencode(path).decode("utf-8", "replace")


def shorten(value: object, length: int = 80) -> str:
    """`repr` of a value, cut for a message."""
    text = repr(value)
    return text if len(text) <= length else text[: length - 1] + "…"


@dataclass(kw_only=True)
class FileRef:
    """A file: where it lies, and its name in everything that is stored.

    `label` is relative to the fixed part of the glob, in NFC, with `/`: the same on every machine.
    `unit` is what rows are counted by: lines of the file, or rows where it has no lines.
    """

    path: Path
    label: str
    unit: str = "line"

    def where(self, line: int) -> str:
        """Place of a row for a message."""
        place = f":{line}" if self.unit == "line" else f": row {line}"
        return shown(self.path) + place


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One row that is not used."""

    file: FileRef
    line: int
    reason: str
    found: str


@dataclass(kw_only=True)
class FileReport:
    """What reading one file gave."""

    file: FileRef
    format: str = ""
    form: str = ""
    num_rows: int = 0
    num_kept: int = 0
    notes: list[str] = field(default_factory=list)
    error: str = ""
    repaired: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[Problem]] = field(default_factory=dict)

    def add(self, line: int, reason: str, found: str) -> None:
        """Count one dropped row."""
        self.counts[reason] += 1
        kept = self.examples.setdefault(reason, [])
        if len(kept) < EXAMPLES_KEPT:
            kept.append(Problem(file=self.file, line=line, reason=reason, found=found))

    def note(self, text: str) -> None:
        """Something a person should know, once."""
        if text not in self.notes:
            self.notes.append(text)

    def all_notes(self) -> list[str]:
        """The notes, and what was mended in how many rows that are used."""
        return [*self.notes, *(f"{what} in {n} rows" for what, n in sorted(self.repaired.items()))]

    @property
    def num_dropped(self) -> int:
        """Rows that are not used."""
        return sum(self.counts.values())


def raise_if_fatal(report: FileReport) -> None:
    """DataError when a row of the file broke a fatal rule."""
    for reason, examples in report.examples.items():
        if REASONS[reason].fatal:
            first = examples[0]
            others = [str(problem.line) for problem in examples[1:]]
            more = f" (also {first.file.unit} {', '.join(others)})" if others else ""
            raise DataError(
                where=first.file.where(first.line),
                found=first.found + more,
                rule=REASONS[reason].rule,
                remedy=REASONS[reason].remedy,
            )


def raise_if_too_many(reports: list[FileReport], max_dropped: float) -> None:
    """DataError when more than the share `max_dropped` of one source's rows are dropped."""
    rows = sum(report.num_rows for report in reports)
    dropped = sum(report.num_dropped for report in reports)
    if dropped <= max_dropped * rows:
        return
    counts: Counter[str] = Counter()
    for report in reports:
        counts.update(report.counts)
    parts = []
    for reason, count in counts.most_common():
        places = [
            f"{problem.file.where(problem.line)} ({problem.found})"
            for report in reports
            for problem in report.examples.get(reason, [])
        ]
        parts.append(f"{reason}: {count}, first {'; '.join(places[:LINES_NAMED])}")
    limit = f"at most {max_dropped:.1%} of the rows may be dropped (max_dropped)"
    main = counts.most_common(1)[0][0]
    worst = max(reports, key=lambda report: report.num_dropped)
    line = worst.examples[worst.counts.most_common(1)[0][0]][0].line
    raise DataError(
        where=worst.file.where(line),
        found=f"{dropped} of {rows} rows cannot be used ({dropped / rows:.1%}):\n    "
        + "\n    ".join(parts),
        rule=f"{REASONS[main].rule}; "
        + ("some row of a file can be used" if dropped == rows else limit),
        remedy=f"{REASONS[main].remedy}"
        + ("" if dropped == rows else "; or raise max_dropped in the recipe"),
    )
