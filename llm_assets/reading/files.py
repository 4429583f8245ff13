"""From a file to records: JSONL, JSON, CSV, TSV, Parquet and plain text, each possibly gzipped.

What makes a whole file unreadable raises DataError here; what spoils one row becomes a Record with
a reason, which the caller counts.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from llm_assets.errors import DataError
from llm_assets.reading.problems import FileRef, FileReport, shorten

MAX_LINE_BYTES = 64 * 2**20
MAX_JSON_BYTES = 2**30
_GZIP_MAGIC = b"\x1f\x8b"
_BOM = b"\xef\xbb\xbf"

FORMATS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".txt": "text",
    ".text": "text",
    ".md": "text",
}
READ = "JSONL, JSON, CSV, TSV, Parquet and .txt files, each also as .gz"


@dataclass(slots=True)
class Record:
    """One row as it stands in the file. With a `reason` the row cannot be used."""

    line: int
    value: Any
    reason: str = ""
    found: str = ""


def format_of(path: Path) -> str:
    """The format that a file's name says; DataError when it says none that is read."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] == ".gz":
        suffixes.pop()
    if not suffixes or suffixes[-1] not in FORMATS:
        raise DataError(
            where=str(path),
            found=f"a name that ends in {path.suffix or 'no suffix'!r}",
            rule=f"the suffix says the format: {READ}",
            remedy="rename or convert the file",
        )
    return FORMATS[suffixes[-1]]


def check_readable(path: Path) -> None:
    """DataError unless `path` is a file that is not empty."""
    try:
        if path.is_dir():
            raise DataError(
                where=str(path),
                found="a directory",
                rule="a source names files, by path or by glob",
                remedy=f"write {path}/*{_common_suffix(path)}",
            )
        if not path.exists():
            raise DataError(
                where=str(path),
                found="no such file",
                rule="every file of a source exists",
                remedy="check the path; relative paths start at the recipe's folder",
            )
        if not path.is_file():
            raise DataError(
                where=str(path),
                found="neither a file nor a directory (a device, socket or pipe)",
                rule="a source names regular files",
                remedy="write the data into a file first",
            )
        if path.stat().st_size == 0:
            raise _empty(path, "an empty file (0 bytes)")
    except OSError as error:
        raise _unreadable(path, error) from error


def read_records(file: FileRef, report: FileReport, *, whole_text: bool) -> Iterator[Record]:
    """The rows of a file, in file order.

    `whole_text`: a plain text file is one row (a transcript) and not split into documents.
    Rows are counted in `report.num_rows`; notes about the file go there as well.
    """
    check_readable(file.path)
    report.format = format_of(file.path)
    try:
        for record in _read(file, report, whole_text):
            report.num_rows += 1
            yield record
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise DataError(
            where=file.where(report.num_rows + 1),
            found=f"the gzip stream is damaged or ends early: {error}",
            rule="a .gz file is one whole gzip stream",
            remedy="fetch or write the file again; `gzip -t` tests it",
        ) from error
    except UnicodeDecodeError as error:
        raise _wrong_encoding(file, error) from error
    except OSError as error:
        raise _unreadable(file.path, error) from error
    if report.num_rows == 0:
        raise _empty(file.path, "no rows")


def open_bytes(path: Path, report: FileReport | None = None) -> IO[bytes]:
    """The file's bytes, decompressed when it is gzip (by its first bytes, not by its name)."""
    stream = path.open("rb")
    magic = stream.read(2)
    stream.seek(0)
    if magic == _GZIP_MAGIC:
        stream.close()
        if report is not None:
            report.note("gzip")
        return cast(IO[bytes], gzip.open(path, "rb"))
    if path.suffix.lower() == ".gz":
        stream.close()
        raise DataError(
            where=str(path),
            found="no gzip file, by its first bytes",
            rule="a file named .gz is gzip",
            remedy="rename it, or fetch it again (a web page may have been saved in its place)",
        )
    return stream


def _read(file: FileRef, report: FileReport, whole_text: bool) -> Iterator[Record]:
    # Imported here: tables.py and this module need each other's helpers.
    from llm_assets.reading import tables

    if report.format == "parquet":
        yield from tables.read_parquet(file, report)
        return
    with open_bytes(file.path, report) as stream:
        if report.format == "jsonl":
            yield from _read_jsonl(file, report, stream)
        elif report.format == "json":
            yield from _read_json(file, report, stream)
        elif report.format == "text":
            yield from tables.read_text(file, report, stream, whole=whole_text)
        else:
            yield from tables.read_csv(file, report, stream)


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


def _as_row(line: int, value: Any) -> Record:
    if not isinstance(value, dict):
        return Record(line, None, "wrong_type", f"{shorten(value)}, where an object belongs")
    return Record(line, value)


def _read_jsonl(file: FileRef, report: FileReport, stream: IO[bytes]) -> Iterator[Record]:
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
            raise _wrong_encoding(file, error, line=number, raw=raw) from error
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


def _read_json(file: FileRef, report: FileReport, stream: IO[bytes]) -> Iterator[Record]:
    raw = stream.read(MAX_JSON_BYTES + 1)
    if len(raw) > MAX_JSON_BYTES:
        raise DataError(
            where=str(file.path),
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
            yield from _read_jsonl(file, report, io.BytesIO(raw))
            return
        raise _broken_json(file, error) from error
    if _skip_space(text, end) < len(text):
        report.note("one JSON object a line, in spite of the name .json")
        yield from _read_jsonl(file, report, io.BytesIO(raw))
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
            where=f"{file.path}:{line}",
            found=f"{shorten(found or 'the end of the file')} after row {number}",
            rule="a JSON array has a comma between rows and ] at its end",
            remedy="mend the file; it may have been cut",
        )


_DECODER_PLAIN = json.JSONDecoder()


def _skip_space(text: str, position: int) -> int:
    while position < len(text) and text[position] in " \t\r\n":
        position += 1
    return position


def _broken_json(file: FileRef, error: Exception) -> DataError:
    line = error.lineno if isinstance(error, json.JSONDecodeError) else 1
    column = f" at column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
    reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
    return DataError(
        where=f"{file.path}:{line}",
        found=f"not JSON: {reason}{column}",
        rule="a .json file is one JSON array of objects",
        remedy="mend the line; the file may have been cut",
    )


def _wrong_encoding(
    file: FileRef, error: UnicodeDecodeError, *, line: int | None = None, raw: bytes = b""
) -> DataError:
    if line is None:
        line, raw, error = _find_bad_line(file.path, error)
    head = raw[:4]
    guess, name = "perhaps Latin-1 or Windows-1252", "WINDOWS-1252"
    if line == 1 and (head.startswith((b"\xff\xfe", b"\xfe\xff"))):
        guess, name = "its beginning is that of UTF-16", "UTF-16"
    elif raw.startswith(b"PK\x03\x04"):
        guess, name = "it is a zip archive", "UTF-8"
    byte = error.object[error.start] if error.start < len(error.object) else 0
    return DataError(
        where=file.where(line),
        found=f"byte 0x{byte:02x} at byte {error.start + 1} of the line is not UTF-8 ({guess})",
        rule="text files are UTF-8",
        remedy=f"convert it: iconv -f {name} -t UTF-8 OLD > NEW",
    )


def _find_bad_line(path: Path, error: UnicodeDecodeError) -> tuple[int, bytes, UnicodeDecodeError]:
    with open_bytes(path) as stream:
        for number, raw in enumerate(stream, 1):
            try:
                raw.decode("utf-8")
            except UnicodeDecodeError as found:
                return number, raw, found
    return 1, b"", error


def _common_suffix(folder: Path) -> str:
    try:
        names = sorted(entry.name for entry in folder.iterdir() if entry.is_file())
    except OSError:
        return ".jsonl"
    for name in names:
        for suffix in FORMATS:
            for ending in (suffix, suffix + ".gz"):
                if name.lower().endswith(ending):
                    return ending
    return ".jsonl"


def _empty(path: Path, found: str) -> DataError:
    return DataError(
        where=str(path),
        found=found,
        rule="every file of a source has at least one row",
        remedy="remove the file from the source, or write it again",
    )


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(
        where=str(path),
        found=error.strerror or str(error),
        rule="every file of a source can be read",
        remedy="check the path and the permissions",
    )
