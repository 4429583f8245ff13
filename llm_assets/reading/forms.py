"""The forms of rows: how each is recognized, and how it becomes a row of ours.

`recognize` looks at the keys and types of a file's first rows. `convert` turns one record into
rows, or raises BadRow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llm_assets.errors import DataError
from llm_assets.reading import eval_items
from llm_assets.reading.conversations import content_of as _content_of
from llm_assets.reading.conversations import (
    conversation_of,
    is_transcript,
    messages_of,
    optional_text,
    prompt_of,
    text_of,
    transcript_of,
)
from llm_assets.reading.pairs import join_input, pair
from llm_assets.reading.problems import BadRow, shorten

Row = dict[str, Any]
PURPOSES = ("corpus", "instructions", "preferences", "evals")
ROWS_LOOKED_AT = 100
_ANSWERS = ("completion", "response", "answer", "output")


@dataclass(frozen=True, kw_only=True)
class Form:
    """A form: which data sets take it, how it is told from others, and its conversion."""

    name: str
    purposes: tuple[str, ...]
    columns: str
    fits: Callable[[Mapping[str, Any]], bool]
    rows: Callable[[Mapping[str, Any]], list[Row]]


def _messages(row: Mapping[str, Any]) -> list[Row]:
    name = next((key for key in ("messages", "conversation") if key in row), "messages")
    messages = messages_of(_field(row, name), name)
    return [{"messages": conversation_of(_with_system(messages, row), name)}]


def _sharegpt(row: Mapping[str, Any]) -> list[Row]:
    messages = messages_of(_field(row, "conversations"), "conversations")
    return [{"messages": conversation_of(_with_system(messages, row), "conversations")}]


def _alpaca(row: Mapping[str, Any]) -> list[Row]:
    _field(row, "instruction")
    answer = _first(row, ("output", "response"))
    messages = prompt_of(join_input(row), "instruction", row.get("system"))
    history = row.get("history") or []
    if not isinstance(history, list):
        raise BadRow("wrong_type", f"history is {shorten(history, 40)}")
    turns: list[dict[str, str]] = []
    for number, pair_ in enumerate(history, 1):
        if not isinstance(pair_, list) or len(pair_) != 2:
            raise BadRow("wrong_type", f"turn {number} of history is {shorten(pair_, 40)}")
        turns.append({"role": "user", "content": text_of(pair_[0], f"history {number}")})
        turns.append({"role": "assistant", "content": text_of(pair_[1], f"history {number}")})
    return [_answered([*messages[:-1], *turns, messages[-1]], answer, "output")]


def _prompt_completion(row: Mapping[str, Any]) -> list[Row]:
    prompt = prompt_of(_field(row, "prompt"), "prompt", row.get("system"))
    return [_answered(prompt, _first(row, _ANSWERS), "completion")]


def _question_answer(row: Mapping[str, Any]) -> list[Row]:
    prompt = prompt_of(_field(row, "question"), "question", row.get("system"))
    return [_answered(prompt, _first(row, ("answer", "response")), "answer")]


def _self_instruct(row: Mapping[str, Any]) -> list[Row]:
    instances = _field(row, "instances")
    if not isinstance(instances, list):
        raise BadRow("wrong_type", f"instances is {shorten(instances, 40)}")
    if not instances:
        raise BadRow("empty_content", "instances is []")
    rows = []
    for number, instance in enumerate(instances, 1):
        if not isinstance(instance, Mapping):
            raise BadRow("wrong_type", f"instance {number} is {shorten(instance, 40)}")
        whole = {"instruction": row.get("instruction"), "input": instance.get("input")}
        prompt = prompt_of(join_input(whole), "instruction")
        answer = _field(instance, "output")
        rows.append(_answered(prompt, answer, f"output of instance {number}"))
    return rows


def _transcript(row: Mapping[str, Any]) -> list[Row]:
    name = next((key for key in ("transcript", "text", "conversation") if key in row), "text")
    return [{"messages": conversation_of(transcript_of(_field(row, name), name), name)}]


def _pairs(row: Mapping[str, Any]) -> list[Row]:
    return [pair(row)]


def _text(row: Mapping[str, Any]) -> list[Row]:
    return [{"text": text_of(_field(row, "text"), "text")}]


def _field(row: Mapping[str, Any], name: str) -> Any:
    if name not in row:
        raise BadRow("missing_field", f"no `{name}`; the row has {shorten(sorted(row), 60)}")
    return row[name]


def _first(row: Mapping[str, Any], names: Sequence[str]) -> Any:
    for name in names:
        if name in row:
            return row[name]
    raise BadRow("missing_field", f"no `{names[0]}`; the row has {shorten(sorted(row), 60)}")


def _with_system(messages: list[dict[str, str]], row: Mapping[str, Any]) -> list[dict[str, str]]:
    system = optional_text(row.get("system"), "system")
    if system and messages[0]["role"] != "system":
        return [{"role": "system", "content": system}, *messages]
    return messages


def _answered(prompt: list[dict[str, str]], answer: Any, name: str) -> Row:
    first = answer[0] if isinstance(answer, list) and answer else None
    if isinstance(first, Mapping) and ("role" in first or "from" in first):
        return {"messages": conversation_of([*prompt, *messages_of(answer, name)], name)}
    content = _content_of(answer, name).strip()
    return {"messages": [*prompt, {"role": "assistant", "content": content}]}


FORMS: Mapping[str, Form] = {
    form.name: form
    for form in (
        Form(
            name="pairs",
            purposes=("preferences",),
            columns="chosen, rejected; prompt unless both are whole conversations",
            fits=lambda row: "chosen" in row or "rejected" in row,
            rows=_pairs,
        ),
        Form(
            name="truthfulqa",
            purposes=("evals",),
            columns="question, mc1_targets {choices, labels}",
            fits=lambda row: "question" in row and "mc1_targets" in row,
            rows=eval_items.truthfulqa,
        ),
        Form(
            name="multiple_choice",
            purposes=("evals",),
            columns="question, choices, answer (index, letter or text)",
            fits=lambda row: "question" in row and "choices" in row,
            rows=eval_items.multiple_choice,
        ),
        Form(
            name="refusals",
            purposes=("evals",),
            columns="prompt, label (safe or unsafe) or XSTest's type",
            fits=lambda row: "prompt" in row and ("label" in row or "type" in row),
            rows=eval_items.refusals,
        ),
        Form(
            name="messages",
            purposes=("instructions",),
            columns="messages [{role, content}]",
            fits=lambda row: "messages" in row or isinstance(row.get("conversation"), list),
            rows=_messages,
        ),
        Form(
            name="sharegpt",
            purposes=("instructions",),
            columns="conversations [{from, value}]",
            fits=lambda row: "conversations" in row,
            rows=_sharegpt,
        ),
        Form(
            name="self_instruct",
            purposes=("instructions",),
            columns="instruction, instances [{input, output}]",
            fits=lambda row: "instruction" in row and "instances" in row,
            rows=_self_instruct,
        ),
        Form(
            name="alpaca",
            purposes=("instructions",),
            columns="instruction, output; input, system, history if there are any",
            fits=lambda row: "instruction" in row and ("output" in row or "response" in row),
            rows=_alpaca,
        ),
        Form(
            name="prompt_completion",
            purposes=("instructions",),
            columns="prompt, completion (or response, answer, output)",
            fits=lambda row: "prompt" in row and any(name in row for name in _ANSWERS),
            rows=_prompt_completion,
        ),
        Form(
            name="question_answer",
            purposes=("instructions", "evals"),
            columns="question, answer",
            fits=lambda row: "question" in row and ("answer" in row or "response" in row),
            rows=_question_answer,
        ),
        Form(
            name="transcript",
            purposes=("instructions",),
            columns='text "\\n\\nHuman: … \\n\\nAssistant: …"',
            fits=lambda row: any(
                is_transcript(row.get(name)) for name in ("text", "transcript", "conversation")
            ),
            rows=_transcript,
        ),
        Form(
            name="text",
            purposes=("corpus",),
            columns="text",
            fits=lambda row: isinstance(row.get("text"), str) or set(row) == {"text"},
            rows=_text,
        ),
    )
}


def form_of_row(row: Mapping[str, Any], purpose: str) -> str:
    """Name of the first form for `purpose` that the row fits, or ""."""
    for form in FORMS.values():
        if purpose in form.purposes and form.fits(row):
            return form.name
    return ""


def recognize(rows: Sequence[Mapping[str, Any]], purpose: str, given: str, *, where: str) -> str:
    """The form of a file: the one given by name, or the one that most of the first rows fit.

    DataError when the name is unknown or for another data set, or when no form fits.
    """
    if given != "auto":
        if given not in FORMS or purpose not in FORMS[given].purposes:
            raise DataError(
                where=where,
                found=f"form: {given}" + ("" if given in FORMS else ", which is no form"),
                rule=f"{purpose} take: {', '.join(names_for(purpose))}",
                remedy="leave `form` out to have it recognized, or name one of these",
            )
        return given
    votes = Counter(name for row in rows if (name := form_of_row(row, purpose)))
    if votes:
        return votes.most_common(1)[0][0]
    columns = sorted({key for row in rows for key in row})
    hints = sorted({name for row in rows for name in _elsewhere(row, purpose)})
    hint = f" (it would serve as {', '.join(hints)})" if hints else ""
    raise DataError(
        where=where,
        found=f"columns {shorten(columns, 200)}: no form of {purpose} has them{hint}",
        rule=f"{purpose} take: "
        + "; ".join(f"{FORMS[name].name} ({FORMS[name].columns})" for name in names_for(purpose)),
        remedy="map the columns under `columns`, or rename them in the file",
    )


def names_for(purpose: str) -> list[str]:
    """The forms that a data set takes."""
    return [form.name for form in FORMS.values() if purpose in form.purposes]


def _elsewhere(row: Mapping[str, Any], purpose: str) -> list[str]:
    return [other for other in PURPOSES if other != purpose and form_of_row(row, other)]


def convert(row: Mapping[str, Any], form: str, purpose: str) -> list[Row]:
    """The rows that one record gives (self_instruct: several); BadRow when it cannot be used.

    `kind`, `check`, `source`, `split` and a pair's provenance are taken over.
    """
    entry = FORMS[form]
    if form == "question_answer" and purpose == "evals":
        rows = eval_items.question_answer(row)
    else:
        try:
            rows = entry.rows(row)
        except BadRow as error:
            other = form_of_row(row, purpose)
            if error.reason == "missing_field" and other and other != form:
                raise BadRow("other_form", f"a row of the form {other}, not {form}") from error
            raise
    extra = _extra(row, form, purpose)
    return [{**one, **extra} for one in rows]


def _extra(row: Mapping[str, Any], form: str, purpose: str) -> Row:
    extra: Row = {}
    if purpose == "instructions":
        kind = row.get("kind")
        extra["kind"] = kind if isinstance(kind, str) and kind else form
    elif isinstance(row.get("kind"), str):
        extra["kind"] = row["kind"]
    if isinstance(row.get("check"), dict):
        extra["check"] = row["check"]
    if purpose != "evals" and isinstance(row.get("source"), str) and row["source"].strip():
        extra["source"] = text_of(row["source"], "source")
    if purpose == "preferences":
        for name in ("rubric", "vendor"):
            extra[name] = optional_text(row.get(name), name) or "unknown"
        extra["votes"] = _votes(row.get("votes"))
    split = row.get("split")
    if split is not None and purpose in ("instructions", "preferences"):
        extra["split"] = _split_of(split)
    return extra


_SPLITS = {
    "train": "train",
    "training": "train",
    "held_out": "held_out",
    "heldout": "held_out",
    "test": "held_out",
    "validation": "held_out",
    "valid": "held_out",
    "val": "held_out",
    "dev": "held_out",
    "eval": "held_out",
}


def _split_of(value: Any) -> str:
    name = _SPLITS.get(value.strip().lower().replace("-", "_")) if isinstance(value, str) else None
    if name is None:
        raise BadRow("unknown_split", f"split is {shorten(value, 40)}")
    return name


def _votes(value: Any) -> list[Row]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise BadRow("wrong_type", f"votes is {shorten(value, 40)}")
    for vote in value:
        if not isinstance(vote, Mapping) or not {"annotator", "choice"} <= set(vote):
            raise BadRow("wrong_type", f"a vote is {shorten(vote, 60)}")
    return [dict(vote) for vote in value]
