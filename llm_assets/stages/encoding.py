"""Rows of conversations and preference pairs as token ids, with a count of every row left out.

All alignment stages encode through here, so that what is supervised, cut or dropped is the same
everywhere and is said once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from llm_assets.errors import DataError
from llm_assets.stages.context import Metric, StageContext

Message = dict[str, str]
Conversation = list[Message]
TooLong = Literal["drop", "truncate"]
Supervise = Literal["answers", "last answer", "everything"]
IGNORED = -100
"""The label that torch's cross entropy leaves out."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """One conversation: `input_ids`, and `labels` of the same length, IGNORED off the answers."""

    input_ids: list[int]
    labels: list[int]

    @property
    def num_supervised(self) -> int:
        """Tokens that the loss counts; the first token has no prediction."""
        return sum(label != IGNORED for label in self.labels[1:])


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One preference pair; `chosen_ids` and `rejected_ids` go on after `prompt_ids`."""

    row: Mapping[str, Any]
    prompt_ids: list[int]
    chosen_ids: list[int]
    rejected_ids: list[int]

    @property
    def chosen(self) -> list[int]:
        """Prompt and chosen answer."""
        return self.prompt_ids + self.chosen_ids

    @property
    def rejected(self) -> list[int]:
        """Prompt and rejected answer."""
        return self.prompt_ids + self.rejected_ids


@dataclass(kw_only=True)
class Counts:
    """What became of the rows: `truncated` are kept; `dropped` maps a reason to a number."""

    rows: int = 0
    truncated: int = 0
    dropped: dict[str, int] = field(default_factory=dict)

    @property
    def num_dropped(self) -> int:
        """All rows left out."""
        return sum(self.dropped.values())

    @property
    def kept(self) -> int:
        """Rows that are used."""
        return self.rows - self.num_dropped

    def drop(self, reason: str) -> None:
        """Count one row left out."""
        self.dropped[reason] = self.dropped.get(reason, 0) + 1

    def sentence(self, name: str) -> str:
        """For a person: `train: 990 of 1000 rows, 3 cut to length, 10 dropped (10 too long)`."""
        text = f"{name}: {self.kept} of {self.rows} rows"
        if self.truncated:
            text += f", {self.truncated} cut to length"
        if self.dropped:
            reasons = ", ".join(f"{count} {why}" for why, count in sorted(self.dropped.items()))
            text += f", {self.num_dropped} dropped ({reasons})"
        return text

    def nothing_left(self, where: str, max_length: int) -> DataError:
        """The error for a split of which no row is kept."""
        return DataError(
            where=where,
            found=f"no row is left: {self.sentence('rows')}",
            rule=f"at least one row fits into {max_length} tokens",
            remedy="raise max_length, set too_long: truncate, or look at the data",
        )

    def as_rows(self, name: str) -> list[dict[str, Any]]:
        """Rows of a table: split, what, rows."""
        entries = [("kept", self.kept), ("cut to length", self.truncated)]
        entries += [(f"dropped: {why}", count) for why, count in sorted(self.dropped.items())]
        return [{"split": name, "what": what, "rows": count} for what, count in entries]


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file. DataError names the line that is not an object."""
    rows = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                row = str(error)
            if not isinstance(row, dict):
                raise DataError(
                    where=f"{path.name}, line {number}",
                    found=str(row)[:120],
                    rule="each line is one JSON object",
                    remedy="look at the data stage that wrote the file",
                )
            rows.append(row)
    return rows


def render(
    tokenizer: Any, conversations: Sequence[Conversation], *, generation_prompt: bool = False
) -> list[list[int]]:
    """Token ids of conversations through the chat template; nothing is cut."""
    if not conversations:
        return []
    encoded = _apply(tokenizer, list(conversations), add_generation_prompt=generation_prompt)
    return [list(ids) for ids in encoded["input_ids"]]


def encode_conversations(
    tokenizer: Any,
    rows: Sequence[Mapping[str, Any]],
    *,
    max_length: int,
    too_long: TooLong,
    where: str,
    supervise: Supervise = "answers",
) -> tuple[list[Example], Counts]:
    """Conversations with loss on the assistant's turns, its last turn, or on everything.

    A row over `max_length` tokens is dropped, or cut at the end; one whose cut leaves no answer is
    dropped. DataError when a conversation has nothing to learn from, or when no row is left.
    """
    counts = Counts(rows=len(rows))
    conversations = [list(row["messages"]) for row in rows]
    examples: list[Example] = []
    for index, (ids, mask) in enumerate(
        zip(*_with_masks(tokenizer, conversations, supervise), strict=True)
    ):
        if not any(mask[1:]):
            raise DataError(
                where=f"{where}, row {index + 1}",
                found="no supervised token: " + _roles(conversations[index]),
                rule="the loss is taken on the assistant's turns; with none it would be NaN",
                remedy="add the assistant's answer, or leave the row out",
            )
        if len(ids) > max_length:
            if too_long == "drop":
                counts.drop("too long")
                continue
            ids, mask = ids[:max_length], mask[:max_length]
            if not any(mask[1:]):
                counts.drop("no answer within max_length")
                continue
            counts.truncated += 1
        labels = [token if on else IGNORED for token, on in zip(ids, mask, strict=True)]
        examples.append(Example(input_ids=ids, labels=labels))
    if not examples:
        raise counts.nothing_left(where, max_length)
    return examples, counts


def encode_pairs(
    tokenizer: Any,
    rows: Sequence[Mapping[str, Any]],
    *,
    max_length: int,
    too_long: TooLong,
    where: str,
) -> tuple[list[Pair], Counts]:
    """Preference pairs. A pair is dropped when one side is over `max_length` tokens, or both are
    cut at the end; a pair that the cut leaves without a difference is dropped.

    DataError when no pair is left.
    """
    counts = Counts(rows=len(rows))
    prompts = [list(row["prompt"]) for row in rows]
    prompt_ids = render(tokenizer, prompts, generation_prompt=True)
    sides = [
        render(tokenizer, [p + list(row[side]) for p, row in zip(prompts, rows, strict=True)])
        for side in ("chosen", "rejected")
    ]
    pairs: list[Pair] = []
    for row, prompt, chosen, rejected in zip(rows, prompt_ids, *sides, strict=True):
        start = min(_common(prompt, chosen), _common(prompt, rejected))
        cut = max(len(chosen), len(rejected)) > max_length
        if cut and too_long == "drop":
            counts.drop("too long")
            continue
        chosen, rejected = chosen[:max_length], rejected[:max_length]
        if chosen == rejected or start >= min(len(chosen), len(rejected)):
            counts.drop("no difference within max_length" if cut else "chosen equal to rejected")
            continue
        counts.truncated += cut
        pairs.append(
            Pair(
                row=row,
                prompt_ids=prompt[:start],
                chosen_ids=chosen[start:],
                rejected_ids=rejected[start:],
            )
        )
    if not pairs:
        raise counts.nothing_left(where, max_length)
    return pairs, counts


def read_pairs(
    context: StageContext, tokenizer: Any
) -> tuple[dict[str, list[Pair]], dict[str, Counts]]:
    """Both splits of the input `preferences`, encoded; what was cut or left out is said."""
    folder = context.inputs["preferences"].path
    pairs: dict[str, list[Pair]] = {}
    counts: dict[str, Counts] = {}
    for split in ("train", "held_out"):
        pairs[split], counts[split] = encode_pairs(
            tokenizer,
            read_rows(folder / f"{split}.jsonl"),
            max_length=context.config.max_length,
            too_long=context.config.too_long,
            where=f"preferences/{split}.jsonl",
        )
        context.progress.say(counts[split].sentence(f"preferences, {split}"))
    return pairs, counts


def count_metrics(counts: Mapping[str, Counts]) -> dict[str, Metric]:
    """Rows left out and rows cut, over the splits."""
    dropped = sum(count.num_dropped for count in counts.values())
    cut = sum(count.truncated for count in counts.values())
    return {
        "rows_dropped": Metric(value=float(dropped)),
        "rows_truncated": Metric(value=float(cut)),
    }


def count_rows(counts: Mapping[str, Counts]) -> list[dict[str, Any]]:
    """The table of what became of the rows."""
    return [row for name, count in counts.items() for row in count.as_rows(name)]


def _with_masks(
    tokenizer: Any, conversations: list[Conversation], supervise: Supervise
) -> tuple[list[list[int]], list[list[int]]]:
    """Token ids, and 1 where a token belongs to an answer."""
    if not conversations:
        return [], []
    if supervise == "everything":
        rendered = render(tokenizer, conversations)
        return rendered, [[1] * len(ids) for ids in rendered]
    if supervise == "last answer":
        rendered = render(tokenizer, conversations)
        prompts = render(tokenizer, [c[:-1] for c in conversations], generation_prompt=True)
        starts = [_common(p, ids) for p, ids in zip(prompts, rendered, strict=True)]
        return rendered, [
            [int(i >= start) for i in range(len(ids))]
            for start, ids in zip(starts, rendered, strict=True)
        ]
    if "{% generation" in _template(tokenizer) or "{%- generation" in _template(tokenizer):
        encoded = _apply(tokenizer, conversations, return_assistant_tokens_mask=True)
        ids = [list(row) for row in encoded["input_ids"]]
        return ids, [list(mask) for mask in encoded["assistant_masks"]]
    pairs = [_mask_by_prefix(tokenizer, conversation) for conversation in conversations]
    return [ids for ids, _ in pairs], [mask for _, mask in pairs]


def _apply(tokenizer: Any, conversations: list[Conversation], **options: Any) -> Any:
    # Its warning about rows over the model's length comes before they are cut or dropped here.
    tokenizer.deprecation_warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
    return tokenizer.apply_chat_template(conversations, tokenize=True, return_dict=True, **options)


def _template(tokenizer: Any) -> str:
    template = tokenizer.chat_template
    return template if isinstance(template, str) else str(template)


def _mask_by_prefix(tokenizer: Any, conversation: Conversation) -> tuple[list[int], list[int]]:
    """For a template without generation marks: an answer is what its turn adds to the prompt."""
    ids = render(tokenizer, [conversation])[0]
    mask = [0] * len(ids)
    for turn, message in enumerate(conversation):
        if message["role"] != "assistant":
            continue
        prompt = render(tokenizer, [conversation[:turn]], generation_prompt=True)[0]
        until = render(tokenizer, [conversation[: turn + 1]])[0]
        for position in range(_common(prompt, ids), _common(until, ids)):
            mask[position] = 1
    return ids, mask


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """Length of the common prefix."""
    length = min(len(first), len(second))
    return next((i for i in range(length) if first[i] != second[i]), length)


def _roles(conversation: Conversation) -> str:
    return "roles " + ", ".join(message["role"] for message in conversation)
