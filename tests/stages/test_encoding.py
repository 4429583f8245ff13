"""What is supervised, what is cut, what is dropped, and that all of it is counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from alignment_parts import PLAIN_TEMPLATE, TEMPLATE, small_tokenizer

from llm_assets.errors import DataError
from llm_assets.stages.encoding import (
    IGNORED,
    encode_conversations,
    encode_pairs,
    read_rows,
)


def talk(*turns: str) -> dict[str, Any]:
    """A row whose turns are the user's and the assistant's by turns."""
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": t} for i, t in enumerate(turns)]}


def pair(prompt: str, chosen: str, rejected: str) -> dict[str, Any]:
    return {
        "prompt": [{"role": "user", "content": prompt}],
        "chosen": [{"role": "assistant", "content": chosen}],
        "rejected": [{"role": "assistant", "content": rejected}],
    }


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return small_tokenizer(["who is here? I am here. what is that? that is a cat."])


def supervised(tokenizer: Any, rows: list[dict[str, Any]], **changes: Any) -> list[str]:
    """The supervised text of each kept row."""
    settings: dict[str, Any] = {"max_length": 64, "too_long": "drop", "where": "x.jsonl"}
    examples, _ = encode_conversations(tokenizer, rows, **{**settings, **changes})
    return [tokenizer.decode([label for label in e.labels if label != IGNORED]) for e in examples]


def test_loss_is_on_the_answers_and_their_ends(tokenizer: Any) -> None:
    rows = [talk("who is here?", "I am.", "what is that?", "a cat.")]
    assert supervised(tokenizer, rows) == ["I am.<|im_end|>a cat.<|im_end|>"]
    assert supervised(tokenizer, rows, supervise="last answer") == ["a cat.<|im_end|>\n"]
    assert supervised(tokenizer, rows, supervise="everything")[0].startswith("<|im_start|>user")


def test_a_template_without_marks_supervises_the_same_turns(tokenizer: Any) -> None:
    rows = [talk("who is here?", "I am.", "what is that?", "a cat.")]
    tokenizer.chat_template = PLAIN_TEMPLATE
    try:
        assert supervised(tokenizer, rows) == ["I am.<|im_end|>\na cat.<|im_end|>\n"]
    finally:
        tokenizer.chat_template = TEMPLATE


def test_long_rows_are_dropped_or_cut_and_counted(tokenizer: Any) -> None:
    rows = [talk("who?", "I."), talk("who?", "I am here. " * 12), talk("who is here? " * 20, "I.")]
    examples, counts = encode_conversations(
        tokenizer, rows, max_length=48, too_long="drop", where="x"
    )
    assert len(examples) == counts.kept == 1
    assert counts.dropped == {"too long": 2}
    assert counts.sentence("train") == "train: 1 of 3 rows, 2 dropped (2 too long)"
    examples, counts = encode_conversations(
        tokenizer, rows, max_length=48, too_long="truncate", where="x"
    )
    assert [len(e.input_ids) for e in examples] == [len(examples[0].input_ids), 48]
    assert counts.truncated == 1
    assert counts.dropped == {"no answer within max_length": 1}
    assert {row["what"]: row["rows"] for row in counts.as_rows("train")}["kept"] == 2


def test_nothing_left_is_an_error(tokenizer: Any) -> None:
    with pytest.raises(DataError, match=r"no row is left: .*1 too long"):
        encode_conversations(
            tokenizer, [talk("who?", "I am here. " * 20)], max_length=16, too_long="drop", where="x"
        )
    with pytest.raises(DataError, match="no row is left"):
        encode_pairs(
            tokenizer, [pair("who?", "I. " * 60, "no")], max_length=16, too_long="drop", where="x"
        )


def test_a_conversation_without_answer_names_its_row(tokenizer: Any) -> None:
    rows = [talk("who?", "I."), talk("who?")]
    with pytest.raises(DataError, match=r"train.jsonl, row 2: no supervised token: roles user"):
        encode_conversations(tokenizer, rows, max_length=64, too_long="drop", where="train.jsonl")


def test_pairs_share_their_prompt(tokenizer: Any) -> None:
    pairs, counts = encode_pairs(
        tokenizer,
        [pair("who is here?", "I am.", "a cat."), pair("who?", "I.", "I.")],
        max_length=64,
        too_long="drop",
        where="x",
    )
    assert counts.dropped == {"chosen equal to rejected": 1}
    assert tokenizer.decode(pairs[0].prompt_ids).endswith("<|im_start|>assistant\n")
    assert tokenizer.decode(pairs[0].chosen_ids) == "I am.<|im_end|>\n"
    assert tokenizer.decode(pairs[0].rejected_ids) == "a cat.<|im_end|>\n"


def test_a_cut_that_removes_the_difference_drops_the_pair(tokenizer: Any) -> None:
    same = "I am here. " * 20
    rows = [pair("who?", same + "yes", same + "no"), pair("who?", "I am.", same)]
    pairs, counts = encode_pairs(tokenizer, rows, max_length=48, too_long="truncate", where="x")
    assert counts.dropped == {"no difference within max_length": 1}
    assert counts.truncated == 1
    assert len(pairs[0].rejected) == 48


def test_a_line_that_is_no_object_is_named(tmp_path: Path) -> None:
    path = tmp_path / "train.jsonl"
    path.write_text('{"a": 1}\n\n{"a": \n')
    with pytest.raises(DataError, match=r"train.jsonl, line 3"):
        read_rows(path)
    path.write_text("[1]\n")
    with pytest.raises(DataError, match=r"train.jsonl, line 1"):
        read_rows(path)
