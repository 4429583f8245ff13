"""Readers of JSONL and JSON."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import IO, Any

from llm_assets.errors import DataError
from llm_assets.reading.files import MAX_LINE_BYTES, Record, wrong_encoding
from llm_assets.reading.problems import FileRef, FileReport, shorten, shown

MAX_JSON_BYTES = 2**30
_BOM = b"\xef\xbb\xbf"


class _DuplicateKey(ValueError):
    pass


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _DuplicateKey(key)
            seen.add(key)
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_object)
_DECODER_PLAIN = json.JSONDecoder()


def _as_row(line: int, value: Any) -> Record:
    if not isinstance(value, dict):
        return Record(line, None, "wrong_type", f"{shorten(value)}, where an object belongs")
    return Record(line, value)


def read_jsonl(file: FileRef, report: FileReport, stream: IO[bytes]) -> Iterator[Record]:
    """One object a line; blank lines are no rows. A byte order mark and CRLF are accepted."""
    number = 0
    while raw := stream.readline(MAX_LINE_BYTES + 1):
        number += 1
        if number == 1 and raw.startswith(_BOM):
            report.note("begins with a byte order mark; skipped")
            raw = raw[len(_BOM) :]
        if len(raw) > MAX_LINE_BYTES:
            raise DataError(
                where=file.where(number),
                found=f"a line of more than {MAX_LINE_BYTES // 2**20} MiB",
                rule="each line of a JSONL file is one row, of at most "
                f"{MAX_LINE_BYTES // 2**20} MiB",
                remedy="name the file .json if it is one JSON document, or put each row on a line",
            )
        if raw.endswith(b"\r\n"):
            report.note("lines end with CRLF")
        try:
            text = raw.decode("utf-8").strip(" \t\r\n")
        except UnicodeDecodeError as error:
            raise wrong_encoding(file, error, line=number, raw=raw) from error
        if not text:
            continue
        if number == 1 and text[0] == "[" and text != "[]":
            raise DataError(
                where=file.where(1),
                found="the beginning of a JSON array",
                rule="each line of a JSONL file is one JSON object",
                remedy="rename the file to .json",
            )
        yield parse_line(number, text)


def parse_line(number: int, text: str) -> Record:
    """One JSON object as a record; what is wrong with it is the record's reason."""
    try:
        return _as_row(number, _DECODER.decode(text))
    except _DuplicateKey as error:
        return Record(number, None, "duplicate_keys", f"the key {str(error)!r} twice")
    except json.JSONDecodeError as error:
        found = f"not JSON: {error.msg} at character {error.pos + 1}: {shorten(text, 60)}"
        return Record(number, None, "broken_line", found)
    except (ValueError, RecursionError) as error:
        return Record(number, None, "broken_line", f"not JSON: {error}")


def read_json(file: FileRef, report: FileReport, stream: IO[bytes]) -> Iterator[Record]:
    """An array of objects, an object that holds one, a single object, or JSONL named .json."""
    raw = stream.read(MAX_JSON_BYTES + 1)
    if len(raw) > MAX_JSON_BYTES:
        raise DataError(
            where=shown(file.path),
            found=f"a JSON document of more than {MAX_JSON_BYTES // 2**20} MiB",
            rule="a JSON file is read into memory whole",
            remedy="convert it to JSONL or Parquet",
        )
    if raw.startswith(_BOM):
        report.note("begins with a byte order mark; skipped")
        raw = raw[len(_BOM) :]
    text = raw.decode("utf-8")
    start = _skip_space(text, 0)
    if start == len(text):
        return
    if text[start] == "[":
        yield from _read_array(file, text, start)
        return
    try:
        value, end = _DECODER.raw_decode(text, start)
    except _DuplicateKey as error:
        yield Record(1, None, "duplicate_keys", f"the key {str(error)!r} twice")
        return
    except (ValueError, RecursionError) as error:
        if _is_jsonl(text[start:]):
            yield from read_jsonl(file, report, io.BytesIO(raw))
            return
        raise _broken_json(file, error) from error
    if _skip_space(text, end) < len(text):
        report.note("one JSON object a line, in spite of the name .json")
        yield from read_jsonl(file, report, io.BytesIO(raw))
        return
    rows = _rows_inside(value)
    if rows is None:
        yield _as_row(1, value)
        return
    key, items = rows
    report.note(f"rows are taken from the key {key!r}")
    file.unit = "row"
    for number, item in enumerate(items, 1):
        yield _as_row(number, item)


def _is_jsonl(text: str) -> bool:
    first, _, rest = text.partition("\n")
    return bool(rest.strip()) and parse_line(1, first).reason in ("", "duplicate_keys")


def _rows_inside(value: Any) -> tuple[str, list[Any]] | None:
    """A document such as {"version": 1, "data": [{…}, …]}: the key and its rows."""
    if not isinstance(value, dict):
        return None
    for key in ("data", "rows", "examples", "train", "instances"):
        items = value.get(key)
        if isinstance(items, list) and items and all(isinstance(item, dict) for item in items):
            # A row may have such a list too; then it has text beside it.
            if any(other in value for other in ("instruction", "messages", "prompt", "question")):
                return None
            return key, items
    return None


def _read_array(file: FileRef, text: str, start: int) -> Iterator[Record]:
    """The objects of a JSON array, by the line that each begins on; by number on one long line."""
    line = text.count("\n", 0, start) + 1
    before = position = start
    number = 0
    while True:
        after = _skip_space(text, position + 1)
        line += text.count("\n", position, after)
        position = after
        if number == 0 and text[position : position + 1] == "]":
            break
        number += 1
        if number == 2 and "\n" not in text[before:position]:
            file.unit = "row"
        before = position
        place = line if file.unit == "line" else number
        try:
            value, end = _DECODER.raw_decode(text, position)
            record = _as_row(place, value)
        except _DuplicateKey as error:
            end = _DECODER_PLAIN.raw_decode(text, position)[1]
            record = Record(place, None, "duplicate_keys", f"the key {str(error)!r} twice")
        except (ValueError, RecursionError) as error:
            raise _broken_json(file, error) from error
        yield record
        after = _skip_space(text, end)
        line += text.count("\n", position, after)
        position = after
        if text[position : position + 1] != ",":
            break
    closed = text[position : position + 1] == "]"
    if not closed or _skip_space(text, position + 1) < len(text):
        found = text[position : position + 20]
        raise DataError(
            where=f"{shown(file.path)}:{line}",
            found=f"{shorten(found or 'the end of the file')} after row {number}",
            rule="a JSON array has a comma between rows and ] at its end",
            remedy="mend the file; it may have been cut",
        )


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position


def _broken_json(file: FileRef, error: Exception) -> DataError:
    line, column, reason = 1, "", str(error)
    if isinstance(error, json.JSONDecodeError):
        # A document that was cut breaks at its end: the last line that is there is named.
        end = len(error.doc.rstrip())
        line = error.doc.count("\n", 0, min(error.pos, end)) + 1
        column = f" at column {error.colno}" if error.pos < end else " at the end of the file"
        reason = error.msg
    return DataError(
        where=f"{shown(file.path)}:{line}",
        found=f"not JSON: {reason}{column}",
        rule="a .json file is one JSON array of objects",
        remedy="mend the line; the file may have been cut",
    )
