"""Eval rows of users' files as items: multiple choice, refusals, questions with one answer."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from llm_assets.reading.conversations import text_of
from llm_assets.reading.problems import REPAIRED, BadRow, shorten

Row = dict[str, Any]
_LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
# XSTest (Röttger et al. 2024): types that contrast with the harmless ones are the unsafe prompts.
_UNSAFE_TYPE = "contrast_"
_SAFE_TYPES = (
    "homonyms",
    "figurative_language",
    "safe_targets",
    "safe_contexts",
    "definitions",
    "real_group_nons_discr",
    "nons_group_real_discr",
    "historical_events",
    "privacy_public",
    "privacy_fictional",
)
_LABELS = {
    "safe": "harmless",
    "harmless": "harmless",
    "benign": "harmless",
    "unsafe": "unsafe",
    "harmful": "unsafe",
}
# GSM8K (Cobbe et al. 2021): the answer's last line is "#### NUMBER".
_FINAL = re.compile(r"^####\s*(.+?)\s*$", re.MULTILINE)


def truthfulqa(row: Mapping[str, Any]) -> list[Row]:
    """TruthfulQA's mc1: one right choice, labels of 0 and 1 (Lin et al. 2022)."""
    targets = row.get("mc1_targets")
    if not isinstance(targets, Mapping):
        raise BadRow("wrong_type", f"mc1_targets is {shorten(targets, 40)}")
    labels, choices = targets.get("labels"), _list(targets.get("choices"))
    if not isinstance(labels, list) or len(labels) != len(choices) or labels.count(1) != 1:
        raise BadRow("not_a_question", f"labels are {shorten(labels, 40)}, one 1 belongs there")
    return [_choice_item(row, choices, labels.index(1))]


def multiple_choice(row: Mapping[str, Any]) -> list[Row]:
    """Choices as a list, or as {text, label} (ARC); the answer as index, letter, label or text."""
    given = row.get("choices")
    names: list[Any] = []
    if isinstance(given, Mapping):
        names = list(given.get("label") or [])
        given = given.get("text")
    choices = _list(given)
    key = next((name for name in ("answer", "answerKey", "label", "target") if name in row), None)
    if key is None:
        raise BadRow("missing_field", f"no `answer`; the row has {shorten(sorted(row), 60)}")
    return [_choice_item(row, choices, _right(row[key], choices, names))]


def _right(answer: Any, choices: list[Any], names: list[Any]) -> int:
    if answer in names:
        index = names.index(answer)
    elif isinstance(answer, int) and not isinstance(answer, bool):
        index = answer
    elif isinstance(answer, str) and answer in choices:
        index = choices.index(answer)
    elif isinstance(answer, str) and answer.strip() and answer.strip() in _LETTERS:
        index = _LETTERS.index(answer.strip())
    elif isinstance(answer, str) and answer.strip().isdecimal():
        index = int(answer.strip())
    else:
        raise BadRow("not_a_question", f"the answer {shorten(answer, 40)} is none of the choices")
    if not 0 <= index < len(choices):
        raise BadRow("not_a_question", f"the answer {shorten(answer, 40)} of {len(choices)}")
    return index


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise BadRow("wrong_type", f"choices is {shorten(value, 40)}, where a list belongs")
    return value


def _choice_item(row: Mapping[str, Any], choices: list[Any], right: int) -> Row:
    """The item. Wrong choices that are blank or stand twice are left out; that is counted."""
    question = text_of(row.get("question"), "question")
    answer = text_of(choices[right], "the right choice")
    kept: list[str] = []
    for number, choice in enumerate(choices):
        blank = choice is None or (isinstance(choice, str) and not choice.strip())
        if number == right:
            kept.append(answer)
        elif not blank:
            text = text_of(choice, f"choice {number + 1}")
            if text == answer:
                raise BadRow("not_a_question", f"choice {number + 1} is the right one again")
            if text not in kept:
                kept.append(text)
    if len(kept) < 2:
        raise BadRow("not_a_question", f"{len(kept)} choice{'s' * (len(kept) != 1)}")
    item: Row = {
        "task": "choice",
        "question": question,
        "choices": kept,
        "answer": kept.index(answer),
    }
    if len(kept) < len(choices):
        item[REPAIRED] = "blank or repeated wrong choices left out"
    return item


def refusals(row: Mapping[str, Any]) -> list[Row]:
    """A prompt that must be refused (unsafe) or must not be (a harmless look-alike)."""
    prompt = text_of(row.get("prompt"), "prompt")
    label = row.get("label")
    if label is not None:
        role = _LABELS.get(label.strip().lower()) if isinstance(label, str) else None
    else:
        kind = row.get("type")
        kind = kind.strip().lower() if isinstance(kind, str) else ""
        role = "harmless" if kind in _SAFE_TYPES else None
        role = "unsafe" if kind.startswith(_UNSAFE_TYPE) else role
        label = row.get("type")
    if role is None:
        raise BadRow("unknown_label", f"the label is {shorten(label, 40)}")
    return [{"task": role, "question": prompt}]


def question_answer(row: Mapping[str, Any]) -> list[Row]:
    """A question with one right answer; of a worked answer, what follows `####`."""
    question = text_of(row.get("question"), "question")
    key = "answer" if "answer" in row else "response"
    if key not in row:
        raise BadRow("missing_field", f"no `answer`; the row has {shorten(sorted(row), 60)}")
    answer = text_of(row[key], key)
    final = _FINAL.findall(answer)
    return [{"task": "answer", "question": question, "answer": final[-1] if final else answer}]
