"""The data stages: artifacts, determinism, and the errors that stop them."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from llm_assets.artifacts import check_artifact
from llm_assets.errors import DataError
from llm_assets.stages import data
from llm_assets.stages.context import StageContext, StageResult
from tests.reading.reading_parts import (
    SHARED,
    chat,
    chats,
    context,
    files,
    lines,
    needs_shared,
    pairs,
    write_jsonl,
)

RUN = {
    "corpus": data.run_corpus,
    "instructions": data.run_instructions,
    "preferences": data.run_preferences,
    "evals": data.run_evals,
}
VILLAGE = {"from": "village"}
SMALL = {
    "villagers": 8,
    "corpus_documents": 60,
    "instructions": 80,
    "preferences": 60,
    "eval_items": 12,
}


def run(folder: Path, purpose: str, *sources: Any, **more: Any) -> tuple[StageContext, StageResult]:
    made = context(folder, purpose, sources=list(sources), **more)
    result = RUN[purpose](made)
    check_artifact(made.out, purpose, result.metadata)
    return made, result


def fails(folder: Path, purpose: str, *sources: Any, **more: Any) -> DataError:
    with pytest.raises(DataError) as caught:
        run(folder, purpose, *sources, **more)
    return caught.value


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.mark.parametrize("purpose", list(RUN))
def test_the_village(tmp_path: Path, purpose: str) -> None:
    first, result = run(tmp_path, purpose, VILLAGE, village=SMALL)
    again, _ = run(tmp_path, purpose, VILLAGE, village=SMALL)
    assert digests(first.out) == digests(again.out)
    assert result.metrics["num_rows"].value == result.metadata["num_rows"] > 0
    assert result.tables["dropped"] == []


def test_rows_of_the_village_keep_their_split_and_check(tmp_path: Path) -> None:
    from llm_assets import village
    from llm_assets.data_settings import VillageSettings

    made, _ = run(tmp_path, "instructions", VILLAGE, village=SMALL)
    given = list(village.instruction_rows(VillageSettings.model_validate(SMALL)))
    held = [row["messages"] for row in given if row["split"] == "held_out"]
    written = lines(made.out / "held_out.jsonl")
    assert len(held) == len(written) > 0
    assert all(row["messages"] in held for row in written)
    assert all(row["source"] == "village" and "split" not in row for row in written)
    assert all(row["kind"] and row["check"] for row in written)


def test_the_same_bytes_wherever_the_data_lie(tmp_path: Path) -> None:
    folder = tmp_path / "one"
    (folder / "data").mkdir(parents=True)
    write_jsonl(folder / "data" / "a.jsonl", chats(40))
    write_jsonl(folder / "data" / "b.jsonl", [chat(f"Q{n}", "Ä") for n in range(40)])
    shutil.copytree(folder, tmp_path / "deep" / "two")
    sources = [files("data/*.jsonl", weight=2), {**VILLAGE, "weight": 1}]
    one, result = run(folder, "instructions", *sources, village=SMALL)
    two, other = run(tmp_path / "deep" / "two", "instructions", *sources, village=SMALL)
    assert digests(one.out) == digests(two.out)
    assert result.metadata == other.metadata
    assert str(tmp_path) not in json.dumps([result.tables, list(result.samples)], default=str)
    assert str(tmp_path) not in (one.out / "train.jsonl").read_text(encoding="utf-8")


def test_lines_are_canonical(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", chats(20))
    made, _ = run(tmp_path, "instructions", files("a.jsonl"))
    text = (made.out / "train.jsonl").read_bytes()
    assert text.endswith(b"}\n") and b"\r" not in text
    for line in text.decode().splitlines():
        row = json.loads(line)
        assert json.dumps(row, sort_keys=True, separators=(",", ":"), ensure_ascii=False) == line
        assert row.keys() == {"messages", "source", "kind"}


def test_dropped_rows_are_counted_by_reason(tmp_path: Path) -> None:
    rows: list[Any] = chats(200)
    rows[3] = {"messages": [{"role": "user", "content": "Hi"}]}
    rows[90] = chat("Hi", "")
    rows[150] = chat("Hi", " ")
    write_jsonl(tmp_path / "a.jsonl", rows)
    _, result = run(tmp_path, "instructions", files("a.jsonl"))
    table = {row["reason"]: row for row in result.tables["dropped"]}
    assert table["no_assistant"]["rows"] == 1
    assert table["no_assistant"]["first_lines"] == "4"
    assert table["empty_content"]["rows"] == 2
    assert table["empty_content"]["first_lines"] == "91, 151"
    assert table["empty_content"]["file"] == "a.jsonl"
    assert result.metrics["num_rows"].value == 197
    assert result.metrics["num_dropped"].value == 3
    assert result.metrics["dropped_share"].value == pytest.approx(0.015)


def test_more_dropped_rows_than_the_recipe_allows(tmp_path: Path) -> None:
    rows: list[Any] = chats(97)
    path = write_jsonl(tmp_path / "a.jsonl", [*rows, *[chat(f"Hi {n}", "") for n in range(3)]])
    error = fails(tmp_path, "instructions", files("a.jsonl"))
    assert error.where == f"{path}:98"
    assert "3 of 100 rows cannot be used (3.0%)" in error.found
    assert f"empty_content: 3, first {path}:98" in error.found
    assert "max_dropped" in error.rule
    run(tmp_path, "instructions", files("a.jsonl"), max_dropped=0.03)


BAD_ROWS: list[tuple[str, dict[str, Any], str]] = [
    ("preferences", {"prompt": "Hi", "rejected": "b"}, "no `chosen`"),
    ("preferences", {"prompt": "Hi", "chosen": "a", "rejected": "a"}, "both 'a'"),
    ("instructions", chat("Hi", ""), "is ''"),
    ("instructions", {"messages": [{"role": "user", "content": None}]}, "is null"),
    ("instructions", {"messages": [{"role": "user", "content": "a"}]}, "none of the assistant"),
    (
        "instructions",
        {"messages": [{"role": "assistant", "content": "a"}, {"role": "user", "content": "b"}]},
        "turn 1 is assistant, expected user",
    ),
    ("instructions", chat("Hi", "nul\0"), "NUL at character 4"),
    ("instructions", chat("Hi", "half \ud800"), "U+D800 alone"),
    ("corpus", {"text": ""}, "text is ''"),
    ("evals", {"question": "q", "choices": ["a"], "answer": 0}, "1 choice"),
]


@pytest.mark.parametrize(("purpose", "row", "found"), BAD_ROWS)
def test_each_bad_row_stops_a_small_file(
    tmp_path: Path, purpose: str, row: dict[str, Any], found: str
) -> None:
    good: dict[str, list[Any]] = {
        "corpus": [{"text": f"text {n}"} for n in range(5)],
        "instructions": chats(5),
        "preferences": pairs(5),
        "evals": [{"question": f"q{n}", "choices": ["a", "b"], "answer": 0} for n in range(5)],
    }
    path = write_jsonl(tmp_path / "a.jsonl", [*good[purpose], row])
    error = fails(tmp_path, purpose, files("a.jsonl"))
    assert error.where == f"{path}:6"
    assert found in error.found
    assert error.rule and error.remedy


def test_a_file_of_which_nothing_can_be_used(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", chats(900))
    write_jsonl(tmp_path / "b.jsonl", [chat(f"x{n}", "") for n in range(5)])
    error = fails(tmp_path, "instructions", files("*.jsonl"))
    assert error.where.endswith("b.jsonl:1")
    error = fails(tmp_path, "instructions", files("b.jsonl"), max_dropped=1.0)
    assert "5 of 5 rows" in error.found


def test_mixed_forms_between_the_files_of_a_source(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", chats(20))
    write_jsonl(tmp_path / "b.jsonl", [{"instruction": "a", "output": "b"}] * 5)
    error = fails(tmp_path, "instructions", files("*.jsonl"))
    assert error.where == str(tmp_path / "b.jsonl")
    assert "alpaca" in error.found and "a.jsonl has messages" in error.found
    run(tmp_path, "instructions", files("a.jsonl"), files("b.jsonl"))


def test_the_mix_follows_the_weights(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", chats(300))
    write_jsonl(tmp_path / "b.jsonl", [chat(f"Q{n}", "A") for n in range(300)])
    sources = [files("a.jsonl", weight=3), files("b.jsonl", weight=1)]
    made, result = run(tmp_path, "instructions", *sources, max_rows=200)
    used = {row["source"]: row["rows_used"] for row in result.tables["sources"]}
    assert used == {"a.jsonl": 150, "b.jsonl": 50}
    rows = [*lines(made.out / "train.jsonl"), *lines(made.out / "held_out.jsonl")]
    assert sum(row["source"] == "a.jsonl" for row in rows) == 150


def test_no_prompt_is_on_both_sides(tmp_path: Path) -> None:
    rows: list[Any] = [{**chat(f"Q{n}", "A"), "split": "train"} for n in range(50)]
    rows += [{**chat(f"q{n} ", "B"), "split": "test"} for n in range(45, 60)]
    write_jsonl(tmp_path / "a.jsonl", rows)
    made, result = run(tmp_path, "instructions", files("a.jsonl"))
    assert len(lines(made.out / "train.jsonl")) == 45
    assert len(lines(made.out / "held_out.jsonl")) == 15
    (row,) = result.tables["dropped"]
    assert (row["reason"], row["rows"]) == ("prompt_in_held_out", 5)


def test_a_corpus_keeps_the_order_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("three\n\nfour", encoding="utf-8")
    write_jsonl(tmp_path / "a.jsonl", [{"text": "one"}, {"text": "two"}])
    made, _ = run(tmp_path, "corpus", files(["b.txt", "a.jsonl"]))
    rows = lines(made.out / "documents.jsonl")
    assert [row["text"] for row in rows] == ["one", "two", "three\n\nfour"]
    assert [row["source"] for row in rows] == ["a.jsonl", "a.jsonl", "b.txt"]


def test_no_source_and_no_rows_to_hold_out(tmp_path: Path) -> None:
    assert "from: village" in fails(tmp_path, "corpus").remedy
    write_jsonl(tmp_path / "a.jsonl", [chat("same", str(n)) for n in range(9)])
    assert "1 prompts" in fails(tmp_path, "instructions", files("a.jsonl")).found


@pytest.mark.parametrize(
    ("purpose", "source"),
    [
        ("evals", files("a.jsonl", weight=2)),
        ("evals", {**VILLAGE, "limit": 3}),
        ("evals", files("a.jsonl", form="pairs")),
        ("corpus", files("a.jsonl", form="parrots")),
        ("instructions", files("a.jsonl", task={"role": "golden"})),
    ],
)
def test_a_setting_that_cannot_be(tmp_path: Path, purpose: str, source: dict[str, Any]) -> None:
    error = fails(tmp_path, purpose, source)
    assert error.where.startswith(f"data.{purpose}.sources.0.")
    assert error.remedy


def test_eval_tasks_of_files(tmp_path: Path) -> None:
    write_jsonl(
        tmp_path / "Geo-Quiz.jsonl",
        [{"question": f"q{n}", "choices": ["a", "b"], "answer": n % 2} for n in range(9)],
    )
    write_jsonl(
        tmp_path / "safety.jsonl",
        [{"prompt": f"p{n}", "label": ["safe", "unsafe"][n % 2]} for n in range(8)],
    )
    write_jsonl(tmp_path / "sums.jsonl", [{"question": "1+1", "answer": "x\n#### 2"}] * 2)
    made, result = run(
        tmp_path,
        "evals",
        files("Geo-Quiz.jsonl", limit=4),
        files("safety.jsonl"),
        files("sums.jsonl", task={"name": "golden_sums", "role": "golden"}),
        VILLAGE,
        village=SMALL,
    )
    tasks = {task["name"]: task for task in json.loads((made.out / "tasks.json").read_text())}
    assert tasks["geo_quiz"] == {"name": "geo_quiz", "role": "capability", "num_items": 4}
    assert tasks["safety_unsafe"]["role"] == "unsafe"
    assert tasks["safety_harmless"]["role"] == "harmless"
    assert tasks["golden_sums"]["role"] == "golden"
    assert "village_facts" in tasks
    for name, task in tasks.items():
        assert len(lines(made.out / f"{name}.jsonl")) == task["num_items"]
        assert json.loads((made.out / f"{name}.yaml").read_text())["task"] == name
    assert result.metrics["num_tasks"].value == len(tasks)


def test_two_tasks_of_one_name(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"question": "q", "answer": "b"}])
    error = fails(tmp_path, "evals", files("a.jsonl"), files("a.jsonl"))
    assert "task: {name:" in error.remedy
    assert "two tasks" in fails(tmp_path, "evals", VILLAGE, VILLAGE, village=SMALL).found


@needs_shared
def test_human_preferences_with_their_flaws(tmp_path: Path) -> None:
    made, result = run(tmp_path, "preferences", files(str(SHARED / "hh-rlhf/test.jsonl.gz")))
    table = {row["reason"]: row["rows"] for row in result.tables["dropped"]}
    assert table == {"empty_content": 4, "prompts_differ": 5, "role_order": 4}
    assert result.metadata["num_rows"] == 2312 - 13
    row = lines(made.out / "train.jsonl")[0]
    assert row["prompt"][-1]["role"] == "user"
    assert row["chosen"][0]["role"] == row["rejected"][0]["role"] == "assistant"


@needs_shared
@pytest.mark.parametrize(
    ("purpose", "pattern", "num_rows"),
    [
        ("corpus", "tinyshakespeare/input.txt", None),
        ("corpus", "llamafactory-demos/c4_demo.jsonl", 300),
        ("instructions", "llamafactory-demos/v1_sft_demo.jsonl", 500),
        ("instructions", "llamafactory-demos/identity.json", 91),
        ("instructions", "self-instruct-seed/seed_tasks.jsonl", 175),
        ("instructions", "gsm8k/*.jsonl", 7473 + 1319),
        ("instructions", "xstest/*completions*.csv", 900),
        ("preferences", "llamafactory-demos/dpo_en_demo.json", 300),
        ("evals", "gsm8k/test.jsonl", 1319),
        ("evals", "truthfulqa/validation.json", 817),
        ("evals", "xstest/xstest_prompts.csv", 450),
    ],
)
def test_real_files(tmp_path: Path, purpose: str, pattern: str, num_rows: int | None) -> None:
    _, result = run(tmp_path, purpose, files(str(SHARED / pattern)))
    assert result.metrics["num_dropped"].value == 0
    if num_rows is not None:
        assert result.metadata["num_rows"] == num_rows


@needs_shared
def test_few_shot_rows_are_no_multiple_choice(tmp_path: Path) -> None:
    error = fails(tmp_path, "evals", files(str(SHARED / "truthfulqa/train.json")))
    assert "6 of 6 rows" in error.found
    assert "at least two choices" in error.rule
