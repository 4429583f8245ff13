"""Forms of rows: recognized, converted, and dropped with a reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from llm_assets.errors import DataError
from llm_assets.reading.forms import FORMS, convert, form_of_row, recognize
from llm_assets.reading.problems import REASONS, BadRow
from tests.reading.reading_parts import chat, chats, pairs, read, write_jsonl

USER = {"role": "user", "content": "Hi"}
REPLY = {"role": "assistant", "content": "Hello"}
SYSTEM = {"role": "system", "content": "Be brief."}
HI = [USER, REPLY]


def human(text: str) -> dict[str, str]:
    return {"from": "human", "value": text}


def gpt(text: str) -> dict[str, str]:
    return {"from": "gpt", "value": text}


INSTRUCTIONS: list[tuple[str, dict[str, Any], list[dict[str, str]]]] = [
    ("messages", {"messages": HI}, HI),
    ("messages", {"messages": [SYSTEM, *HI]}, [SYSTEM, *HI]),
    (
        "messages",
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
                {"role": "assistant", "content": [{"type": "text", "value": "Hello"}]},
            ]
        },
        HI,
    ),
    ("messages", {"messages": [{**USER, "name": None}, {**REPLY, "tool_calls": None}]}, HI),
    ("messages", {"conversation": HI}, HI),
    ("sharegpt", {"conversations": [human("Hi"), gpt("Hello")]}, HI),
    ("sharegpt", {"conversations": HI}, HI),
    (
        "sharegpt",
        {"conversations": [human("Hi"), gpt("Hello")], "system": "Be brief."},
        [SYSTEM, *HI],
    ),
    ("alpaca", {"instruction": "Hi", "input": " ", "output": "Hello"}, HI),
    (
        "alpaca",
        {"instruction": "A", "output": "B", "input": "x", "history": [["Hi", "Hello"]]},
        [*HI, {"role": "user", "content": "A\n\nx"}, {"role": "assistant", "content": "B"}],
    ),
    ("alpaca", {"instruction": "Hi", "context": "", "response": "Hello"}, HI),
    ("prompt_completion", {"prompt": "Hi", "completion": " Hello"}, HI),
    ("prompt_completion", {"prompt": [USER], "completion": [REPLY]}, HI),
    ("prompt_completion", {"prompt": "Hi", "response": "Hello"}, HI),
    ("question_answer", {"question": "Hi", "answer": "Hello"}, HI),
    ("transcript", {"text": "\n\nHuman: Hi\n\nAssistant: Hello"}, HI),
    ("self_instruct", {"instruction": "Hi", "instances": [{"input": "", "output": "Hello"}]}, HI),
]


@pytest.mark.parametrize(("form", "row", "messages"), INSTRUCTIONS)
def test_instructions(form: str, row: dict[str, Any], messages: list[dict[str, str]]) -> None:
    assert form_of_row(row, "instructions") == form
    assert recognize([row], "instructions", "auto", where="x") == form
    (converted,) = convert(row, form, "instructions")
    assert converted == {"messages": messages, "kind": form}


PAIR = {"prompt": [USER], "chosen": [REPLY], "rejected": [{"role": "assistant", "content": "No"}]}
NO = {"role": "assistant", "content": "No"}


@pytest.mark.parametrize(
    "row",
    [
        {"chosen": [USER, REPLY], "rejected": [USER, NO]},
        {"prompt": "Hi", "chosen": "Hello", "rejected": "No"},
        {"prompt": [USER], "chosen": [REPLY], "rejected": [NO]},
        {"prompt": "Hi", "chosen": [USER, REPLY], "rejected": [USER, NO]},
        {"prompt": "Hi", "chosen": [USER, REPLY], "rejected": "No"},
        {"conversations": [human("Hi")], "chosen": gpt("Hello"), "rejected": gpt("No")},
        {"question": "Hi", "system": "", "chosen": "Hello", "rejected": "No"},
        {"instruction": "Hi", "input": "", "chosen": "Hello", "rejected": "No"},
        {
            "chosen": "\n\nHuman: Hi\n\nAssistant: Hello",
            "rejected": "\n\nHuman: Hi\n\nAssistant: No",
        },
        {
            "prompt": "Hi",
            "chosen": [{"type": "text", "text": "Hello"}],
            "rejected": [{"type": "text", "text": "No"}],
        },
    ],
)
def test_pairs(row: dict[str, Any]) -> None:
    assert form_of_row(row, "preferences") == "pairs"
    (converted,) = convert(row, "pairs", "preferences")
    assert converted == {**PAIR, "rubric": "unknown", "vendor": "unknown", "votes": []}


def test_provenance_passes_through() -> None:
    extra = {
        "rubric": "brief",
        "vendor": "v",
        "votes": [{"annotator": "a", "choice": "chosen"}],
        "kind": "fact",
        "check": {"kind": "fact", "accept": ["x"]},
        "source": "mine",
    }
    row = {"prompt": "Hi", "chosen": "Hello", "rejected": "No", "split": "test", "other": 1}
    (converted,) = convert({**row, **extra}, "pairs", "preferences")
    assert converted == {**PAIR, **extra, "split": "held_out"}


BAD_INSTRUCTIONS: list[tuple[str, dict[str, Any]]] = [
    ("missing_field", {"other": 1}),
    ("none_content", {"messages": None}),
    ("wrong_type", {"messages": "Hi"}),
    ("wrong_type", {"messages": [1]}),
    ("empty_content", {"messages": []}),
    ("missing_field", {"messages": [{"content": "Hi"}]}),
    ("missing_field", {"messages": [{"role": "user"}]}),
    ("wrong_type", {"messages": [{"role": 1, "content": "Hi"}]}),
    ("unknown_role", {"messages": [{"role": "narrator", "content": "Hi"}]}),
    ("unsupported_content", {"messages": [{"role": "tool", "content": "Hi"}]}),
    ("unsupported_content", {"messages": [USER, {**REPLY, "tool_calls": [{"id": 1}]}]}),
    ("unsupported_content", {"messages": [{**USER, "content": [{"type": "image_url"}]}, REPLY]}),
    ("none_content", {"messages": [USER, {**REPLY, "content": None}]}),
    ("empty_content", {"messages": [USER, {**REPLY, "content": " \n"}]}),
    ("wrong_type", {"messages": [USER, {**REPLY, "content": 3}]}),
    ("nul_character", {"messages": [USER, {**REPLY, "content": "a\0b"}]}),
    ("lone_surrogate", {"messages": [USER, {**REPLY, "content": "a\ud83d"}]}),
    ("role_order", {"messages": [REPLY, USER]}),
    ("role_order", {"messages": [USER, USER, REPLY]}),
    ("role_order", {"messages": [USER, REPLY, REPLY]}),
    ("role_order", {"messages": [USER, SYSTEM, REPLY]}),
    ("no_assistant", {"messages": [USER]}),
    ("no_assistant", {"messages": [SYSTEM]}),
    ("ends_with_user", {"messages": [USER, REPLY, USER]}),
    ("unknown_split", {"messages": HI, "split": "calibration"}),
    ("unknown_split", {"messages": HI, "split": 3}),
]


@pytest.mark.parametrize(("reason", "row"), BAD_INSTRUCTIONS)
def test_bad_instructions(reason: str, row: dict[str, Any]) -> None:
    with pytest.raises(BadRow) as caught:
        convert(row, "messages", "instructions")
    assert caught.value.reason == reason
    assert reason in REASONS
    assert caught.value.found


BAD_PAIRS: list[tuple[str, dict[str, Any]]] = [
    ("missing_field", {"prompt": "Hi", "rejected": "No"}),
    ("missing_field", {"prompt": "Hi", "chosen": "No"}),
    ("equal_pair", {"prompt": "Hi", "chosen": "No", "rejected": "No "}),
    ("equal_pair", {"chosen": [USER, REPLY], "rejected": [USER, REPLY]}),
    ("none_content", {"prompt": "Hi", "chosen": None, "rejected": "No"}),
    ("empty_content", {"prompt": "Hi", "chosen": "Yes", "rejected": ""}),
    ("no_prompt", {"chosen": "Yes", "rejected": "No"}),
    ("no_prompt", {"chosen": [REPLY], "rejected": [NO]}),
    ("prompts_differ", {"chosen": [USER, REPLY], "rejected": [{**USER, "content": "Ho"}, NO]}),
    ("prompts_differ", {"prompt": "Ha", "chosen": [USER, REPLY], "rejected": [USER, NO]}),
    ("role_order", {"chosen": [USER, USER, REPLY], "rejected": [USER, USER, NO]}),
    ("role_order", {"prompt": [USER, REPLY], "chosen": "Yes", "rejected": "No"}),
    ("role_order", {"prompt": "Hi", "chosen": [USER], "rejected": "No"}),
    ("no_assistant", {"chosen": [USER, USER], "rejected": [USER, SYSTEM]}),
    ("wrong_type", {"prompt": "Hi", "chosen": "Yes", "rejected": "No", "votes": 3}),
    ("wrong_type", {"prompt": "Hi", "chosen": "Yes", "rejected": "No", "votes": [{}]}),
    ("wrong_type", {"prompt": 3, "chosen": "Yes", "rejected": "No"}),
]


@pytest.mark.parametrize(("reason", "row"), BAD_PAIRS)
def test_bad_pairs(reason: str, row: dict[str, Any]) -> None:
    with pytest.raises(BadRow) as caught:
        convert(row, "pairs", "preferences")
    assert caught.value.reason == reason


def test_several_instances_give_several_rows() -> None:
    instances = [{"input": str(n), "output": str(n)} for n in range(3)]
    row = {"instruction": "Say", "instances": instances}
    assert len(convert(row, "self_instruct", "instructions")) == 3


def test_each_form_of_the_recipe_is_named() -> None:
    from llm_assets.data_settings import FileSource

    said = str(FileSource.model_fields["form"].description)
    assert all(name in said for name in FORMS)


def test_no_form_fits(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [{"Frage": "a", "Antwort": "b"}])
    with pytest.raises(DataError) as caught:
        read(path, "instructions")
    assert "'Antwort', 'Frage'" in caught.value.found
    assert "alpaca (instruction, output" in caught.value.rule
    columns = {"question": "Frage", "answer": "Antwort"}
    rows, report = read(path, "instructions", columns=columns)
    assert report.form == "question_answer"
    assert rows[0]["messages"][0]["content"] == "a"
    with pytest.raises(DataError, match="the columns are"):
        read(path, "instructions", columns={"question": "frage"})


def test_the_form_of_another_data_set(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", pairs(3))
    with pytest.raises(DataError, match="would serve as preferences"):
        read(path, "corpus")
    with pytest.raises(DataError, match="form: pairs"):
        read(path, "instructions", form="pairs")
    with pytest.raises(DataError, match="is no form"):
        read(path, "instructions", form="parrots")


def test_rows_of_another_form_in_one_file(tmp_path: Path) -> None:
    rows = [*chats(5), {"instruction": "a", "output": "b"}]
    report = read(write_jsonl(tmp_path / "rows.jsonl", rows), "instructions")[1]
    assert report.form == "messages"
    (problem,) = report.examples["other_form"]
    assert (problem.line, problem.found) == (6, "a row of the form alpaca, not messages")


def test_duplicate_keys_and_wrong_types_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    good = [json.dumps(row) for row in chats(3)]
    path.write_text("\n".join([*good, '{"messages": [], "messages": []}', "[]", "7"]))
    rows, report = read(path, "instructions")
    assert len(rows) == 3
    assert report.counts == {"duplicate_keys": 1, "wrong_type": 2}
    assert report.num_rows == report.num_kept + report.num_dropped
    array = tmp_path / "rows.json"
    array.write_text("[" + ",\n".join([*good, '{"messages": 1, "messages": 2}', "7"]) + "]")
    assert read(array, "instructions")[1].counts == {"duplicate_keys": 1, "wrong_type": 1}


def test_a_check_that_json_cannot_hold(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    row = {**chat("a", "b"), "check": {"n": float("nan")}}
    other = {**chat("a", "b"), "kind": "\ud800"}
    path.write_text("\n".join(json.dumps(one) for one in [row, other, *chats(2)]))
    assert read(path, "instructions")[1].counts == {"wrong_type": 1, "lone_surrogate": 1}


def test_the_first_ten_of_each_reason_are_kept(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [*chats(1), *[{"messages": [USER]}] * 25])
    report = read(path, "instructions")[1]
    assert report.counts["no_assistant"] == 25
    assert [problem.line for problem in report.examples["no_assistant"]] == list(range(2, 12))


CHOICE: list[tuple[str, dict[str, Any], int]] = [
    ("multiple_choice", {"question": "q", "choices": ["a", "b"], "answer": 1}, 1),
    ("multiple_choice", {"question": "q", "choices": ["a", "b"], "answer": "B"}, 1),
    ("multiple_choice", {"question": "q", "choices": ["x", "y"], "answer": "y"}, 1),
    (
        "multiple_choice",
        {"question": "q", "choices": {"text": ["a", "b"], "label": ["1", "2"]}, "answerKey": "2"},
        1,
    ),
    (
        "truthfulqa",
        {"question": "q", "mc1_targets": {"choices": ["a", "b"], "labels": [1, 0]}},
        0,
    ),
]


@pytest.mark.parametrize(("form", "row", "answer"), CHOICE)
def test_multiple_choice(form: str, row: dict[str, Any], answer: int) -> None:
    assert form_of_row(row, "evals") == form
    (item,) = convert(row, form, "evals")
    assert (item["task"], item["answer"]) == ("choice", answer)


def test_blank_and_repeated_choices_are_left_out_and_counted(tmp_path: Path) -> None:
    row = {"question": "q", "choices": ["", "a", "b", "a", None], "answer": 2}
    rows, report = read(write_jsonl(tmp_path / "rows.jsonl", [row]), "evals")
    assert (rows[0]["choices"], rows[0]["answer"]) == (["a", "b"], 1)
    assert report.all_notes() == ["blank or repeated wrong choices left out in 1 rows"]


@pytest.mark.parametrize(
    ("reason", "row"),
    [
        ("not_a_question", {"question": "q", "choices": ["a"], "answer": 0}),
        ("not_a_question", {"question": "q", "choices": ["a", "b"], "answer": 2}),
        ("not_a_question", {"question": "q", "choices": ["a", "b"], "answer": "c d"}),
        ("not_a_question", {"question": "q", "choices": ["a", "a"], "answer": 0}),
        ("empty_content", {"question": "q", "choices": ["", "a"], "answer": 0}),
        ("wrong_type", {"question": "q", "choices": "ab", "answer": 0}),
        ("missing_field", {"question": "q", "choices": ["a", "b"]}),
        ("none_content", {"question": None, "choices": ["a", "b"], "answer": 0}),
    ],
)
def test_bad_multiple_choice(reason: str, row: dict[str, Any]) -> None:
    with pytest.raises(BadRow) as caught:
        convert(row, "multiple_choice", "evals")
    assert caught.value.reason == reason


@pytest.mark.parametrize(
    ("row", "role"),
    [
        ({"prompt": "p", "label": "safe"}, "harmless"),
        ({"prompt": "p", "label": "Unsafe"}, "unsafe"),
        ({"prompt": "p", "type": "homonyms"}, "harmless"),
        ({"prompt": "p", "type": "contrast_homonyms"}, "unsafe"),
    ],
)
def test_refusals(row: dict[str, Any], role: str) -> None:
    assert form_of_row(row, "evals") == "refusals"
    assert convert(row, "refusals", "evals") == [{"task": role, "question": "p"}]


def test_a_refusal_item_without_a_known_label() -> None:
    for row in ({"prompt": "p", "label": "maybe"}, {"prompt": "p", "type": "new"}, {"prompt": "p"}):
        with pytest.raises(BadRow) as caught:
            convert(row, "refusals", "evals")
        assert caught.value.reason == "unknown_label"


def test_the_final_answer_of_a_worked_one() -> None:
    row = {"question": "q", "answer": "1 + 1 = 2\n#### 2"}
    assert convert(row, "question_answer", "evals")[0]["answer"] == "2"
    assert convert({**row, "answer": "Paris"}, "question_answer", "evals")[0]["answer"] == "Paris"
