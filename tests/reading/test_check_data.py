"""The command `check-data`: what it reports and how it exits."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import PreTrainedTokenizerFast

from llm_assets.cli import main
from llm_assets.errors import DataError
from llm_assets.reading.commands import check_data
from llm_assets.reading.lengths import Statistics, characters, fit, tokens_of
from tests.reading.reading_parts import SHARED, chat, chats, needs_shared, pairs, write_jsonl


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(check_data, [str(argument) for argument in arguments])


def document(*arguments: str | Path) -> Any:
    result = call(*arguments, "--json")
    assert result.exit_code in (0, 1), result.output
    return json.loads(result.stdout)


def test_good_data(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", chats(50))
    result = call(path, "--as", "instructions")
    assert result.exit_code == 0
    for part in ("messages", "turns: 50 assistant, 50 user", "would be kept", "ok"):
        assert part in result.output
    found = document(path, "--as", "instructions")
    assert found["ok"] and found["errors"] == []
    assert sum(found["kept"].values()) == 50
    assert found["lengths"]["unit"] == "characters"
    assert found["roles"] == {"assistant": 50, "user": 50}


def test_every_error_is_reported_at_once(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", chats(50))
    (tmp_path / "b.jsonl").write_text('{"messages": [\n{"x"\n', encoding="utf-8")
    (tmp_path / "c.jsonl").touch()
    write_jsonl(tmp_path / "d.jsonl", [{"instruction": "a", "output": "b"}])
    result = call(
        *(tmp_path / name for name in ("a.jsonl", "b.jsonl", "c.jsonl", "d.jsonl", "e.jsonl")),
        "--as",
        "instructions",
    )
    assert result.exit_code == 1
    assert "4 errors" in result.output
    for part in ("b.jsonl:1", "also line 2", "0 bytes", "no such file", "the form alpaca"):
        assert part in result.output


def test_dropped_rows_are_shown_with_line_rule_and_remedy(tmp_path: Path) -> None:
    rows = [*pairs(40), *[{"prompt": "Hi", "chosen": "a", "rejected": "a"}] * 12]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    result = call(path, "--as", "preferences")
    assert result.exit_code == 1
    assert "equal_pair: 12 rows" in result.output
    assert "line 41: chosen and rejected are both 'a'" in result.output
    assert "and 2 more" in result.output
    assert "next: remove the pair" in result.output
    (problem,) = document(path, "--as", "preferences")["sources"][0]["files"][0]["problems"]
    assert (problem["reason"], problem["rows"], len(problem["first"])) == ("equal_pair", 12, 10)


def test_a_few_dropped_rows_are_no_error(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [*chats(99), chat("a", "")])
    result = call(path, "--as", "instructions")
    assert result.exit_code == 0
    assert "empty_content: 1 row of" in result.output


def test_a_glob_is_taken_by_the_command_itself(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", chats(5))
    write_jsonl(tmp_path / "b.jsonl", [chat(f"q{n}", "a") for n in range(5)])
    found = document(tmp_path / "*.jsonl", "--as", "instructions")
    assert [Path(entry["file"]).name for entry in found["sources"][0]["files"]] == [
        "a.jsonl",
        "b.jsonl",
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["a.jsonl"],
        ["a.jsonl", "--as", "poems"],
        ["a.jsonl", "--as", "corpus", "--form", "pairs"],
        ["--recipe", "absent.yaml"],
    ],
)
def test_wrong_usage(arguments: list[str]) -> None:
    assert main(["check-data", *arguments]) == 2


def test_exit_codes_through_the_main_command(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", chats(20))
    assert main(["check-data", str(path), "--as", "instructions"]) == 0
    assert main(["check-data", str(path), "--as", "preferences"]) == 1


def recipe(folder: Path, sources: list[dict[str, Any]], **data: Any) -> Path:
    """A recipe of the village whose instructions are `sources`."""
    import yaml

    from llm_assets.recipe import DEFAULT_RECIPE

    document = yaml.safe_load(DEFAULT_RECIPE.read_text(encoding="utf-8"))
    document["data"]["instructions"] = {"sources": sources, **data}
    document["stages"]["sft_checkpoint"]["max_length"] = 16
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return path


def test_a_recipe_gives_forms_limits_and_context(tmp_path: Path) -> None:
    rows = [{"Frage": f"q{n}", "Antwort": "a" * (20 if n % 2 else 200)} for n in range(20)]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    assert call(path, "--as", "instructions").exit_code == 1
    columns = {"question": "Frage", "answer": "Antwort"}
    made = recipe(tmp_path, [{"from": "files", "files": "rows.jsonl", "columns": columns}])
    found = document(path, "--as", "instructions", "--recipe", made)
    assert found["ok"], found["errors"]
    (context,) = found["contexts"]
    assert (context["stage"], context["max_length"]) == ("sft_checkpoint", 16)
    assert context["num_over"] == 10
    assert (
        "10 of 20 rows (50.0%) are longer than 16"
        in call(path, "--as", "instructions", "--recipe", made).output
    )


def test_a_recipe_without_files_checks_all_its_data(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", chats(100))
    sources = [
        {"from": "files", "files": "a.jsonl", "weight": 1},
        {"from": "village", "weight": 3},
    ]
    found = {entry["data"]: entry for entry in document("--recipe", recipe(tmp_path, sources))}
    assert list(found) == ["corpus", "instructions", "preferences", "evals"]
    assert [entry["rows_used"] for entry in found["instructions"]["sources"]] == [100, 300]
    assert [entry["share_of_mix"] for entry in found["instructions"]["sources"]] == [0.25, 0.75]
    assert {entry["form"] for entry in found["evals"]["sources"][0]["files"]} >= {"unsafe"}


def test_no_row_fits_the_context(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", [chat(f"q{n}", "a" * 99) for n in range(9)])
    made = recipe(tmp_path, [{"from": "village"}])
    result = call(path, "--as", "instructions", "--recipe", made)
    assert result.exit_code == 1
    assert "stages.sft_checkpoint.max_length" in result.output


def test_fit() -> None:
    dropped = fit([5, 10, 11, 20], 10, "drop")
    assert (dropped.num_over, dropped.num_lost, dropped.longest) == (2, 31, 20)
    cut = fit([5, 10, 11, 20], 10, "truncate")
    assert (cut.num_over, cut.num_lost) == (2, 11)
    assert "2 of 4 rows (50.0%) are longer than 10 tokens and would be cut" in cut.sentence()
    assert fit([5], 10, "drop").sentence() == "all 1 rows fit 10 tokens (longest: 5)"


def test_statistics_of_characters() -> None:
    statistics = Statistics(measure=characters())
    for number in (1, 2, 100):
        statistics.add(chat("ab", "c" * number))
    assert list(statistics.lengths) == [3, 4, 102]
    assert statistics.supervised_tokens == 26
    assert statistics.percentiles()["median"] == 4
    assert statistics.histogram()[0] == (2, 3, 1)
    assert statistics.histogram()[-1] == (64, 127, 1)


def tokenizer(template: str | None) -> PreTrainedTokenizerFast:
    words = {word: number for number, word in enumerate(["[U]", "a", "b", "c", "d"])}
    inner = Tokenizer(WordLevel(words, unk_token="[U]"))
    inner.pre_tokenizer = Whitespace()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[U]")
    made.chat_template = template
    return made


def test_statistics_of_tokens() -> None:
    template = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
    statistics = Statistics(measure=tokens_of(tokenizer(template)))
    statistics.add(chat("a b", "c d a"))
    assert list(statistics.lengths) == [7]
    assert statistics.supervised_tokens == 3
    plain = Statistics(measure=tokens_of(tokenizer(None)))
    plain.add(chat("a b", "c d a"))
    assert list(plain.lengths) == [5]
    assert not plain.measure.exact


def test_a_template_that_refuses_a_role() -> None:
    measure = tokens_of(tokenizer("{{ raise_exception('no system') }}"))
    with pytest.raises(DataError, match="no system"):
        Statistics(measure=measure).add(chat("a", "b"))


@needs_shared
def test_real_pairs() -> None:
    found = document(SHARED / "hh-rlhf" / "test.jsonl.gz", "--as", "preferences")
    assert found["ok"]
    (entry,) = found["sources"][0]["files"]
    assert (entry["rows"], entry["kept"], entry["dropped"]) == (2312, 2299, 13)
