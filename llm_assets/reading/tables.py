"""Readers of CSV, TSV, Parquet and plain text."""

from __future__ import annotations

import csv
import gzip
import io
import re
import tempfile
from collections import Counter
from collections.abc import Iterator
from typing import IO, Any

from llm_assets.errors import DataError
from llm_assets.reading.files import MAX_LINE_BYTES, Record, open_bytes
from llm_assets.reading.problems import FileRef, FileReport, shorten

# A document of a plain text file: whole paragraphs up to so many characters.
DOCUMENT_CHARACTERS = 4000
_SEPARATOR = re.compile(r"^[ \t]*(?:<\|endoftext\|>|</s>|\f)[ \t]*$", re.MULTILINE)
_BLANK_LINES = re.compile(r"\n[ \t]*\n+")
_PARQUET_ROWS = 512


def read_csv(file: FileRef, report: FileReport, stream: IO[bytes]) -> Iterator[Record]:
    """Rows of a CSV or TSV file with a header. Values are text; an empty field is ""."""
    csv.field_size_limit(MAX_LINE_BYTES)
    tab = report.format == "tsv"
    text = io.TextIOWrapper(stream, encoding="utf-8-sig", newline="")
    reader = csv.reader(text, delimiter="\t" if tab else ",", strict=True)
    line = 1
    try:
        header = next(reader, None)
        if header is None:
            return
        _check_header(file, header, tab)
        line = reader.line_num + 1
        for fields in reader:
            if fields:
                yield _csv_row(line, header, fields)
            line = reader.line_num + 1
    except csv.Error as error:
        raise DataError(
            where=file.where(line),
            found=f"{error} (in the row that begins on this line)",
            rule="quotes are closed, doubled inside a quoted field, and a field has at most "
            f"{MAX_LINE_BYTES // 2**20} MiB",
            remedy="mend the quotes; the file may have been cut",
        ) from error


def _csv_row(line: int, header: list[str], fields: list[str]) -> Record:
    if len(fields) != len(header):
        found = f"{len(fields)} fields under a header of {len(header)}"
        return Record(line, None, "wrong_columns", found)
    values = (field.replace("\r\n", "\n") for field in fields)
    return Record(line, dict(zip(header, values, strict=True)))


def _check_header(file: FileRef, header: list[str], tab: bool) -> None:
    header[:] = [name.strip() for name in header]
    twice = [name for name, count in Counter(header).items() if count > 1]
    if twice:
        raise DataError(
            where=file.where(1),
            found=f"the column {twice[0]!r} twice",
            rule="a column's name stands once in the header",
            remedy="rename one of the two",
        )
    other = ";" if not tab and len(header) == 1 and ";" in header[0] else ""
    other = other or ("\t" if not tab and len(header) == 1 and "\t" in header[0] else "")
    if other:
        raise DataError(
            where=file.where(1),
            found=f"one column, {shorten(header[0])}: fields seem to be separated by {other!r}",
            rule="a .csv file is separated by commas, a .tsv file by tabs",
            remedy="rename it to .tsv" if other == "\t" else "write it again with commas",
        )


def read_parquet(file: FileRef, report: FileReport) -> Iterator[Record]:
    """Rows of a Parquet file, in batches."""
    import pyarrow
    import pyarrow.parquet

    with tempfile.TemporaryFile() as unpacked, open_bytes(file.path, report) as stream:
        source: Any = stream
        if isinstance(stream, gzip.GzipFile):
            # Parquet is read from its end; a gzip stream cannot seek there.
            while block := stream.read(2**20):
                unpacked.write(block)
            unpacked.seek(0)
            source = unpacked
        number = 0
        file.unit = "row"
        try:
            parquet = pyarrow.parquet.ParquetFile(source)
            twice = [name for name, n in Counter(parquet.schema_arrow.names).items() if n > 1]
            if twice:
                raise DataError(
                    where=str(file.path),
                    found=f"the column {twice[0]!r} twice",
                    rule="a column's name stands once",
                    remedy="rename one of the two",
                )
            for batch in parquet.iter_batches(batch_size=_PARQUET_ROWS):
                for value in batch.to_pylist():
                    number += 1
                    yield Record(number, value)
        except (pyarrow.ArrowException, OSError) as error:
            raise DataError(
                where=f"{file.path}: after row {number}",
                found=f"no whole Parquet file: {str(error).splitlines()[0]}",
                rule="a .parquet file has its footer and all its pages",
                remedy="fetch or write the file again; it may have been cut",
            ) from error


def read_text(
    file: FileRef, report: FileReport, stream: IO[bytes], *, whole: bool
) -> Iterator[Record]:
    """Documents of a plain text file as {"text": …}.

    Lines of `<|endoftext|>`, `</s>` or a form feed separate documents. Without any, the file is cut
    at blank lines into documents of whole paragraphs of up to DOCUMENT_CHARACTERS; with `whole` it
    is one document.
    """
    text = stream.read().decode("utf-8-sig")
    if "\r" in text:
        report.note("lines end with CRLF; read as LF")
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    if whole or _SEPARATOR.search(text):
        for start, part in _split(text, _SEPARATOR):
            yield Record(_line_at(text, start), {"text": part})
        return
    report.note(f"cut at blank lines into documents of up to {DOCUMENT_CHARACTERS} characters")
    line, counted, first, kept = 1, 0, 0, ""
    for start, part in _split(text, _BLANK_LINES):
        if kept and len(kept) + len(part) + 2 > DOCUMENT_CHARACTERS:
            line += text.count("\n", counted, first)
            counted = first
            yield Record(line, {"text": kept})
            kept = ""
        if not kept:
            first = start
        kept = f"{kept}\n\n{part}" if kept else part
    if kept:
        yield Record(line + text.count("\n", counted, first), {"text": kept})


def _split(text: str, separator: re.Pattern[str]) -> Iterator[tuple[int, str]]:
    """Parts that are not blank, each with the position at which it begins."""
    position = 0
    for match in separator.finditer(text):
        yield from _part(text, position, match.start())
        position = match.end()
    yield from _part(text, position, len(text))


def _part(text: str, start: int, end: int) -> Iterator[tuple[int, str]]:
    part = text[start:end].strip("\n")
    if part.strip():
        yield start + len(text[start:end]) - len(text[start:end].lstrip("\n")), part


def _line_at(text: str, position: int) -> int:
    return text.count("\n", 0, position) + 1
