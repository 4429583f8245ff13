"""Conversations in the forms that people have, turned into [{role, content}, …] and checked.

Every function raises BadRow, with a reason of problems.py, for what cannot be used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from llm_assets.reading.problems import BadRow, shorten

Message = dict[str, str]

ROLES: Mapping[str, str] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "prompter": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "bot": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
}
_TOOL_ROLES = ("tool", "function", "ipython", "observation", "function_call", "tool_call")
_TURN = re.compile(r"(?:\A\s*|\n\n)(Human|Assistant|User|System):")
_SURROGATE = re.compile("[\ud800-\udfff]")


def text_of(value: Any, name: str) -> str:
    """A text field, checked: a string, not blank, no NUL, no half surrogate pair."""
    if value is None:
        raise BadRow("none_content", f"{name} is null")
    if not isinstance(value, str):
        raise BadRow("wrong_type", f"{name} is {shorten(value, 40)}, where text belongs")
    if not value or value.isspace():
        raise BadRow("empty_content", f"{name} is {shorten(value, 20)}")
    if "\0" in value:
        raise BadRow("nul_character", f"{name} holds NUL at character {value.index(chr(0)) + 1}")
    if not value.isascii():
        match = _SURROGATE.search(value)
        if match:
            found = f"{name} holds U+{ord(match[0]):04X} alone at character {match.start() + 1}"
            raise BadRow("lone_surrogate", found)
    return value


def optional_text(value: Any, name: str) -> str:
    """Like `text_of`, but null and blank give ""."""
    if value is None or (isinstance(value, str) and (not value or value.isspace())):
        return ""
    return text_of(value, name)


def content_of(value: Any, name: str) -> str:
    """Text, or a list of typed content blocks: {"type": "text", "text" or "value": …}."""
    if not isinstance(value, list):
        return text_of(value, name)
    texts = []
    for number, block in enumerate(value, 1):
        if isinstance(block, str):
            texts.append(block)
            continue
        if not isinstance(block, Mapping):
            raise BadRow("wrong_type", f"block {number} of {name} is {shorten(block, 40)}")
        kind = block.get("type", "text")
        if kind not in ("text", "input_text", "output_text"):
            raise BadRow("unsupported_content", f"{name} has a block of type {shorten(kind, 30)}")
        text = block.get("text")
        text = block.get("value") if text is None else text
        texts.append(text_of(text, f"block {number} of {name}"))
    return text_of("".join(texts), name)


def message_of(value: Any, name: str) -> Message:
    """One turn: {role, content} or {from, value}. Other keys (a name, a weight) are not kept."""
    if not isinstance(value, Mapping):
        raise BadRow("wrong_type", f"{name} is {shorten(value, 40)}, where an object belongs")
    role = value.get("role")
    role = value.get("from") if role is None else role
    if role is None:
        raise BadRow("missing_field", f"{name} has neither `role` nor `from`")
    if not isinstance(role, str):
        raise BadRow("wrong_type", f"the role of {name} is {shorten(role, 40)}")
    known = ROLES.get(role.strip().lower())
    if known is None:
        if role.strip().lower() in _TOOL_ROLES:
            raise BadRow("unsupported_content", f"{name} has the role {shorten(role, 30)}")
        raise BadRow("unknown_role", f"{name} has the role {shorten(role, 30)}")
    if value.get("tool_calls"):
        raise BadRow("unsupported_content", f"{name} has tool calls")
    for key in ("content", "value", "text"):
        if key in value and (value[key] is not None or key == "content"):
            return {"role": known, "content": content_of(value[key], f"{name} ({known})")}
    raise BadRow("missing_field", f"{name} has neither `content` nor `value`")


def messages_of(value: Any, name: str) -> list[Message]:
    """A list of turns. Their order is not checked here."""
    if value is None:
        raise BadRow("none_content", f"{name} is null")
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise BadRow("wrong_type", f"{name} is {shorten(value, 40)}, where a list of turns belongs")
    if not value:
        raise BadRow("empty_content", f"{name} has no turns")
    return [message_of(turn, f"turn {number} of {name}") for number, turn in enumerate(value, 1)]


def is_transcript(value: Any) -> bool:
    """A text such as "\\n\\nHuman: … \\n\\nAssistant: …"."""
    if not isinstance(value, str):
        return False
    match = _TURN.match(value)
    return match is not None and "\n\nAssistant:" in value


def transcript_of(value: Any, name: str) -> list[Message]:
    """The turns of a transcript. Blanks around a turn are not kept."""
    text = text_of(value, name)
    parts = _TURN.split(text)
    if parts[0].strip() or len(parts) == 1:
        raise BadRow("wrong_type", f"{name} does not begin with a turn: {shorten(text, 40)}")
    messages = []
    for number, (speaker, said) in enumerate(zip(parts[1::2], parts[2::2], strict=True), 1):
        role = ROLES[speaker.lower()]
        content = text_of(said.strip(), f"turn {number} of {name} ({role})")
        messages.append({"role": role, "content": content})
    return messages


def check_order(messages: list[Message], name: str) -> None:
    """BadRow unless: system at most first, user first, user and assistant in turn."""
    turns = messages[1:] if messages[0]["role"] == "system" else messages
    if not turns:
        raise BadRow("no_assistant", f"{name} has only a system turn")
    for number, turn in enumerate(turns):
        wanted = "user" if number % 2 == 0 else "assistant"
        if turn["role"] != wanted:
            roles = ", ".join(message["role"] for message in messages[:8])
            found = f"{name}: turn {number + 1} is {turn['role']}, expected {wanted} ({roles})"
            raise BadRow("role_order", found)


def conversation_of(messages: list[Message], name: str) -> list[Message]:
    """A whole conversation to train on: roles in order, an assistant's turn at the end."""
    if not any(message["role"] == "assistant" for message in messages):
        raise BadRow("no_assistant", f"{name} has {len(messages)} turns, none of the assistant")
    check_order(messages, name)
    if messages[-1]["role"] != "assistant":
        raise BadRow("ends_with_user", f"{name} ends with a user turn")
    return messages


def prompt_of(value: Any, name: str, system: Any = None) -> list[Message]:
    """What an answer follows: a text, a transcript or turns; ends with the user's turn."""
    if is_transcript(value):
        messages = transcript_of(value, name)
    elif isinstance(value, list):
        messages = messages_of(value, name)
    else:
        messages = [{"role": "user", "content": text_of(value, name)}]
    instruction = optional_text(system, "system")
    if instruction and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": instruction}, *messages]
    check_order(messages, name)
    if messages[-1]["role"] != "user":
        raise BadRow("role_order", f"{name} ends with {messages[-1]['role']}, not with the user")
    return messages
