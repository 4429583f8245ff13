"""ChatML with generation marks, and what every chat template must do."""

from __future__ import annotations

from typing import Any

from llm_assets.errors import ModelError

CHATML = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' }}"
    "{%- if message['role'] == 'assistant' %}"
    "{%- generation %}{{- message['content'] + '<|im_end|>' }}{%- endgeneration %}"
    "{{- '\\n' }}"
    "{%- else %}"
    "{{- message['content'] + '<|im_end|>\\n' }}"
    "{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
"""ChatML. What stands between the generation marks is what the assistant says, its end included."""

_PROBE = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "first question"},
    {"role": "assistant", "content": "first answer"},
    {"role": "user", "content": "second question"},
    {"role": "assistant", "content": "second answer"},
]


def has_generation_marks(template: str) -> bool:
    """The template marks what the assistant says."""
    return any(mark in template for mark in ("{% generation", "{%- generation"))


def turn_end(tokenizer: Any) -> str | None:
    """The special token that a template writes after an answer; None when it writes none."""
    text = render_text(tokenizer, _PROBE[1:3])
    rest = text.rsplit("first answer", 1)[-1].lstrip()
    found = [token for token in special_tokens(tokenizer) if rest.startswith(token)]
    return max(found, key=len) if found else None


def special_tokens(tokenizer: Any) -> list[str]:
    """Texts of the special tokens, in id order."""
    added = sorted(tokenizer.added_tokens_decoder.items())
    return [token.content for _, token in added if token.special]


def render_text(tokenizer: Any, messages: list[dict[str, str]], **options: Any) -> str:
    """A conversation as text. ModelError when the template cannot be rendered."""
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
    except Exception as error:  # Jinja, and whatever raise_exception() of a template gives.
        raise ModelError(
            where="chat template",
            found=f"{type(error).__name__}: {error}",
            rule="a chat template renders turns of user and assistant",
            remedy="mend the template",
        ) from error


def check_template(tokenizer: Any, *, where: str) -> None:
    """ModelError unless the template of a tokenizer made here can be trained with.

    Contents stand in it in order, an answer ends with eos, the generation prompt is a prefix of the
    whole, and, with generation marks, exactly the answers and their ends are marked.
    """
    text = render_text(tokenizer, _PROBE[1:])
    contents = [message["content"] for message in _PROBE[1:]]
    positions = [text.find(content) for content in contents]
    if -1 in positions or positions != sorted(positions):
        raise _error(where, f"rendered as {text!r}", "every turn's content stands in it, in order")
    end = turn_end(tokenizer)
    if end != tokenizer.eos_token:
        raise _error(
            where,
            f"an answer ends with {end!r}, eos is {tokenizer.eos_token!r}",
            "an answer ends with the eos token, or the model never stops",
        )
    prompt = render_text(tokenizer, _PROBE[1:2], add_generation_prompt=True)
    if not render_text(tokenizer, _PROBE[1:3]).startswith(prompt):
        raise _error(
            where,
            f"generation prompt {prompt!r}",
            "the prompt with add_generation_prompt is a prefix of the conversation",
        )
    if not has_generation_marks(tokenizer.chat_template):
        return
    encoded = tokenizer.apply_chat_template(
        _PROBE[1:], tokenize=True, return_dict=True, return_assistant_tokens_mask=True
    )
    marked = [
        index
        for index, mark in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True)
        if mark
    ]
    wanted = f"first answer{end}second answer{end}"
    if tokenizer.decode(marked) != wanted:
        raise _error(
            where,
            f"marked as generated: {tokenizer.decode(marked)!r}",
            f"exactly the answers and their ends are marked: {wanted!r}",
        )


def _error(where: str, found: str, rule: str) -> ModelError:
    return ModelError(
        where=where,
        found=found,
        rule=rule,
        remedy="write `chat_template: chatml`, or mend the template",
    )
