"""Preference pairs, explicit (a prompt and two answers) or implicit (two whole conversations)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llm_assets.reading.conversations import (
    Message,
    content_of,
    conversation_of,
    is_transcript,
    message_of,
    messages_of,
    optional_text,
    prompt_of,
    text_of,
    transcript_of,
)
from llm_assets.reading.problems import BadRow, shorten

_PROMPTS = ("prompt", "conversations", "messages", "question", "instruction")


def pair(row: Mapping[str, Any]) -> dict[str, Any]:
    """{prompt, chosen, rejected}, each a list of turns; BadRow when they are no usable pair."""
    for name in ("chosen", "rejected"):
        if name not in row:
            raise BadRow("missing_field", f"no `{name}`")
    prompt = _prompt(row)
    chosen = _side(row["chosen"], "chosen", prompt)
    rejected = _side(row["rejected"], "rejected", prompt)
    if prompt is None or len(chosen) > 1 or len(rejected) > 1:
        prompt, chosen, rejected = _from_conversations(prompt, chosen, rejected)
    else:
        chosen, rejected = _answer(chosen, "chosen"), _answer(rejected, "rejected")
    if _stripped(chosen) == _stripped(rejected):
        raise BadRow("equal_pair", f"chosen and rejected are both {shorten(chosen[0]['content'])}")
    return {"prompt": prompt, "chosen": chosen, "rejected": rejected}


def _prompt(row: Mapping[str, Any]) -> list[Message] | None:
    for name in _PROMPTS:
        value = row.get(name)
        if name not in row or (value is None and name != "prompt"):
            continue
        if name == "instruction":
            value = join_input(row)
        return prompt_of(value, name, row.get("system"))
    return None


def join_input(row: Mapping[str, Any]) -> str:
    """Alpaca's instruction, with its input below when it has one."""
    instruction = text_of(row.get("instruction"), "instruction")
    name = "input" if row.get("input") is not None else "context"
    more = optional_text(row.get(name), name)
    return f"{instruction}\n\n{more}" if more else instruction


def _side(value: Any, name: str, prompt: list[Message] | None) -> list[Message]:
    """One answer as turns: the answer alone, or the whole conversation that it ends."""
    if isinstance(value, Mapping):
        return [message_of(value, name)]
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        if "type" in value[0] and "role" not in value[0] and "from" not in value[0]:
            return [{"role": "assistant", "content": content_of(value, name)}]
        return messages_of(value, name)
    if isinstance(value, list):
        return messages_of(value, name)
    if prompt is None and is_transcript(value):
        return transcript_of(value, name)
    text = text_of(value, name)
    if prompt is None:
        raise BadRow("no_prompt", f"`{name}` is {shorten(text, 40)}, and there is no prompt")
    return [{"role": "assistant", "content": text}]


def _from_conversations(
    prompt: list[Message] | None, chosen: list[Message], rejected: list[Message]
) -> tuple[list[Message], list[Message], list[Message]]:
    """Prompt and answers of two whole conversations that may differ in their last turn only.

    A side of one turn is an answer to `prompt`.
    """
    if prompt is not None:
        chosen = chosen if len(chosen) > 1 else [*prompt, *chosen]
        rejected = rejected if len(rejected) > 1 else [*prompt, *rejected]
    for side, name in ((chosen, "chosen"), (rejected, "rejected")):
        if len(side) == 1:
            raise BadRow("no_prompt", f"`{name}` is one turn, and there is no prompt")
    if chosen[:-1] != rejected[:-1]:
        raise BadRow("prompts_differ", _difference(chosen[:-1], rejected[:-1]))
    conversation_of(chosen, "chosen")
    conversation_of(rejected, "rejected")
    if prompt is not None and chosen[-2]["content"].strip() != prompt[-1]["content"].strip():
        raise BadRow("prompts_differ", "`prompt` is not the last question of `chosen`")
    return chosen[:-1], chosen[-1:], rejected[-1:]


def _answer(side: list[Message], name: str) -> list[Message]:
    if side[0]["role"] != "assistant":
        raise BadRow("role_order", f"`{name}` is a turn of {side[0]['role']}")
    return side


def _difference(chosen: list[Message], rejected: list[Message]) -> str:
    for number, (one, other) in enumerate(zip(chosen, rejected, strict=False), 1):
        if one != other:
            return (
                f"turn {number} is {shorten(one['content'], 40)} in chosen, "
                f"{shorten(other['content'], 40)} in rejected"
            )
    return f"{len(chosen)} turns before the answer in chosen, {len(rejected)} in rejected"


def _stripped(messages: list[Message]) -> list[str]:
    return [message["content"].strip() for message in messages]
