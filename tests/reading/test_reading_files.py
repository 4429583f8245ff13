"""Formats, and what makes a whole file unreadable."""

from __future__ import annotations

import csv
import gzip
import json
import re
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from llm_assets.errors import DataError
from llm_assets.reading import files, json_files, tables
from tests.reading.reading_parts import chat, chats, read, write_jsonl


def fails(path: Path, purpose: str = "instructions", **more: Any) -> DataError:
    with pytest.raises(DataError) as caught:
        read(path, purpose, **more)
    error = caught.value
    assert error.where and error.found and error.rule and error.remedy
    return error


ALPACA = [
    {"instruction": "Add.", "input": "1 and 2", "output": "3"},
    {"instruction": "Größe?\nIn m.", "input": "", "output": "1,80 \N{SNOWMAN}"},
]


def write_as(folder: Path, name: str) -> Path:
    """The two rows of ALPACA in the format that the name says."""
    path = folder / name
    plain = folder / name.removesuffix(".gz")
    kind = plain.suffix
    if kind == ".jsonl":
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in ALPACA)
        plain.write_bytes(text.encode())
    elif kind == ".json":
        plain.write_bytes(json.dumps(ALPACA, indent=1).encode())
    elif kind == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ALPACA), plain)
    else:
        with plain.open("w", newline="", encoding="utf-8") as stream:
            dialect = csv.excel_tab if kind == ".tsv" else csv.excel
            writer = csv.DictWriter(stream, list(ALPACA[0]), dialect=dialect)
            writer.writeheader()
            writer.writerows(ALPACA)
    if path != plain:
        path.write_bytes(gzip.compress(plain.read_bytes()))
    return path


@pytest.mark.parametrize("packed", ["", ".gz"])
@pytest.mark.parametrize("kind", [".jsonl", ".json", ".csv", ".tsv", ".parquet"])
def test_every_format_gives_the_same_rows(tmp_path: Path, kind: str, packed: str) -> None:
    rows, report = read(write_as(tmp_path, f"rows{kind}{packed}"), "instructions")
    assert [row["messages"][0]["content"] for row in rows] == ["Add.\n\n1 and 2", "Größe?\nIn m."]
    assert [row["messages"][1]["content"] for row in rows] == ["3", "1,80 \N{SNOWMAN}"]
    assert report.form == "alpaca"
    assert report.format == kind[1:]
    assert ("gzip" in report.notes) == bool(packed)


def test_gzip_is_known_by_its_first_bytes(tmp_path: Path) -> None:
    path = write_as(tmp_path, "rows.jsonl.gz").rename(tmp_path / "unnamed.jsonl")
    assert len(read(path, "instructions")[0]) == 2


@pytest.mark.parametrize("name", ["e.jsonl", "e.json", "e.csv", "e.txt", "e.parquet", "e.jsonl.gz"])
def test_an_empty_file(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.touch()
    error = fails(path)
    assert error.where == str(path)
    assert "empty" in error.found


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", b"\n\n  \n"),
        ("a.json", b"[]"),
        ("a.json", b" \n"),
        ("a.csv", b"instruction,output\n"),
        ("a.txt", b"\n \n"),
        ("a.jsonl.gz", gzip.compress(b"")),
    ],
)
def test_a_file_without_rows(tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    assert fails(path, "corpus" if name == "a.txt" else "instructions").found == "no rows"


def test_bom_and_crlf_are_accepted_and_said(tmp_path: Path) -> None:
    path = tmp_path / "windows.jsonl"
    text = "\r\n".join(json.dumps(row) for row in chats(3)) + "\r\n"
    path.write_bytes(b"\xef\xbb\xbf" + text.encode())
    rows, report = read(path, "instructions")
    assert len(rows) == 3
    assert report.notes == ["begins with a byte order mark; skipped", "lines end with CRLF"]


def test_bom_and_crlf_in_csv(tmp_path: Path) -> None:
    path = tmp_path / "windows.csv"
    path.write_bytes(b"\xef\xbb\xbf" + b'prompt,completion\r\nHi,"one\r\ntwo"\r\n')
    rows, report = read(path, "instructions")
    assert rows[0]["messages"][1]["content"] == "one\ntwo"
    assert report.notes == ["begins with a byte order mark; skipped"]


def test_a_broken_line_is_named_with_all_others(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    good = [json.dumps(row) for row in chats(200)]
    good[17] = good[17][:-3]
    good[150] = "{not json}"
    path.write_text("\n".join(good), encoding="utf-8")
    error = fails(path)
    assert error.where == f"{path}:18"
    assert "not JSON" in error.found
    assert "151" in error.found


def test_an_unfinished_last_line(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", chats(300))
    path.write_bytes(path.read_bytes()[:-20])
    assert fails(path).where == f"{path}:300"


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ('[\n{"text": "a"},\n{"text": "b"\n', 3),
        ('[\n{"text": "a"}\n{"text": "b"}\n]', 3),
        ('[\n{"text": "a"},\n{"text": "b"}', 3),
        ('[\n{"text": "a"},\n]', 3),
        ('[\n{"text": "a"}\n]\n[', 3),
        ('{"text": ', 1),
    ],
)
def test_broken_json_names_the_line(tmp_path: Path, content: str, line: int) -> None:
    path = tmp_path / "rows.json"
    path.write_text(content, encoding="utf-8")
    assert fails(path, "corpus").where == f"{path}:{line}"


def test_json_in_its_other_shapes(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_text(json.dumps({"version": 1, "data": chats(2)}), encoding="utf-8")
    rows, report = read(path, "instructions")
    assert len(rows) == 2
    assert report.notes == ["rows are taken from the key 'data'"]
    path.write_text(json.dumps(chat("a", "b")), encoding="utf-8")
    assert len(read(path, "instructions")[0]) == 1
    write_jsonl(path, chats(4))
    rows, report = read(path, "instructions")
    assert len(rows) == 4
    assert "one JSON object a line" in report.notes[0]


def test_rows_of_a_json_array_have_lines_or_numbers(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    rows = [*chats(60), {"messages": None}]
    path.write_text(json.dumps(rows, indent=2), encoding="utf-8")
    (problem,) = read(path, "instructions")[1].examples["none_content"]
    text = path.read_text(encoding="utf-8").splitlines()
    assert '"messages": null' in text[problem.line]
    path.write_text(json.dumps(rows), encoding="utf-8")
    (problem,) = read(path, "instructions")[1].examples["none_content"]
    assert problem.file.where(problem.line) == f"{path}: row 61"


def test_a_json_array_named_jsonl(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(chats(3)), encoding="utf-8")
    assert fails(path).remedy == "rename the file to .json"


@pytest.mark.parametrize("kind", ["jsonl", "csv", "txt", "json"])
def test_a_wrong_encoding_names_line_and_byte(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"rows.{kind}"
    path.write_bytes('text\n"a"\n"Gr\u00f6\u00dfe"\n'.encode("latin-1"))
    error = fails(path, "corpus")
    if kind == "jsonl":
        path.write_bytes(b'{"text": "a"}\n\n{"text": "Gr\xf6"}\n')
        error = fails(path, "corpus")
    assert error.where == f"{path}:3"
    assert "0xf6" in error.found
    assert "iconv -f WINDOWS-1252" in error.remedy


def test_utf_16_is_guessed(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_bytes("prompt,completion\na,b\n".encode("utf-16"))
    assert "UTF-16" in fails(path).found


@pytest.mark.parametrize(
    "name", ["rows.jsonl.gz", "rows.csv.gz", "rows.json.gz", "rows.parquet.gz"]
)
def test_a_truncated_gzip(tmp_path: Path, name: str) -> None:
    path = write_as(tmp_path, name)
    path.write_bytes(path.read_bytes()[:-12])
    error = fails(path)
    assert "ends early" in error.found
    assert "gzip -t" in error.remedy


def test_a_damaged_gzip_and_no_gzip(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "rows.jsonl", chats(200))
    packed = bytearray(gzip.compress(path.read_bytes()))
    packed[len(packed) // 2] ^= 0xFF
    (tmp_path / "a.jsonl.gz").write_bytes(bytes(packed))
    assert "damaged" in fails(tmp_path / "a.jsonl.gz").found
    path.rename(tmp_path / "b.jsonl.gz")
    assert "no gzip" in fails(tmp_path / "b.jsonl.gz").found


@pytest.mark.parametrize("keep", [0.5, 0.9])
def test_a_truncated_parquet(tmp_path: Path, keep: float) -> None:
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ALPACA * 50), path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * keep)])
    assert "no whole Parquet file" in fails(path).found


def test_a_huge_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (json_files, tables):
        monkeypatch.setattr(module, "MAX_LINE_BYTES", 2**20)
    path = write_jsonl(tmp_path / "rows.jsonl", [*chats(2), chat("a", "b" * 2**20)])
    error = fails(path)
    assert error.where == f"{path}:3"
    assert "more than 1 MiB" in error.found
    path = tmp_path / "rows.txt"
    path.write_bytes(b"a\n\n" + b"b" * (2**20 + 1))
    assert fails(path, "corpus").where == f"{path}:3"
    path = tmp_path / "rows.csv"
    path.write_bytes(b"prompt,completion\na,b\na," + b"b" * (2**20 + 1) + b"\n")
    assert fails(path).where == f"{path}:3"


def test_a_json_document_that_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_files, "MAX_JSON_BYTES", 2**20)
    path = tmp_path / "rows.json"
    path.write_text(json.dumps([chat("a", "b" * 2**20)]), encoding="utf-8")
    assert "more than 1 MiB" in fails(path).found


def test_places_that_are_no_files(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("prompt,completion\na,b\n")
    (tmp_path / "LICENSE.txt.csv.gz").write_bytes(b"x")
    error = fails(tmp_path)
    assert error.found == "a directory"
    assert error.remedy == f"write {tmp_path}/*.csv"
    assert fails(tmp_path / "absent.jsonl").found == "no such file"


def test_a_format_that_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "rows.xlsx"
    path.write_bytes(b"PK\x03\x04")
    assert ".xlsx" in fails(path).found
    assert "Parquet" in fails(path).rule
    assert files.format_of(Path("A.JSONL.GZ")) == "jsonl"


def test_csv_faults(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('prompt,completion\na,b\nc,"d\ne,f\n', encoding="utf-8")
    assert fails(path).where == f"{path}:3"
    path.write_text("prompt,completion,prompt\na,b,c\n", encoding="utf-8")
    assert "'prompt' twice" in fails(path).found
    path.write_text("prompt;completion\na;b\n", encoding="utf-8")
    assert "separated by ';'" in fails(path).found
    body = "".join(f"q{n},a{n}\n" for n in range(99))
    path.write_text(f"prompt,completion\n{body}one,two,three\n", encoding="utf-8")
    rows, report = read(path, "instructions")
    assert len(rows) == 99
    (problem,) = report.examples["wrong_columns"]
    assert (problem.line, problem.found) == (101, "3 fields under a header of 2")


def test_lines_of_csv_rows_that_span_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text('prompt,completion\n"a\nb\nc",d\ne,\n', encoding="utf-8")
    (problem,) = read(path, "instructions")[1].examples["empty_content"]
    assert problem.line == 5


def test_text_is_cut_into_documents(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    paragraphs = [f"{n} " + "word " * 200 for n in range(12)]
    path.write_bytes("\r\n\r\n".join(paragraphs).encode())
    rows, report = read(path, "corpus")
    assert "\n\n".join(row["text"] for row in rows) == "\n\n".join(paragraphs)
    assert all(len(row["text"]) <= tables.DOCUMENT_CHARACTERS for row in rows)
    assert len(rows) == 4
    assert "lines end with CRLF; read as LF" in report.notes
    path.write_text("one\n\nstill one\n<|endoftext|>\ntwo\n", encoding="utf-8")
    assert [row["text"] for row in read(path, "corpus")[0]] == ["one\n\nstill one", "two"]


def test_unicode_names_and_content(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "données 数据 \N{PILE OF POO}.jsonl", [chat("Où?", "ici 🎈")])
    rows, report = read(path, "instructions")
    assert rows[0]["messages"][1]["content"] == "ici 🎈"
    assert rows[0]["source"] == report.file.label


def test_numbers_and_nesting_that_json_cannot_hold(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a", "n": ' + "9" * 5000 + "}\n", encoding="utf-8")
    assert re.search("digit", fails(path, "corpus").found)
    path.write_text('{"text": ' + "[" * 200_000 + "\n", encoding="utf-8")
    assert "not JSON" in fails(path, "corpus").found
    path.write_text('{"text": "a", "score": NaN}\n', encoding="utf-8")
    assert len(read(path, "corpus")[0]) == 1
