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
from llm_assets.reading.files import MAX_LINE_BYTES, Record, open_bytes, wrong_encoding
from llm_assets.reading.problems import FileRef, FileReport, shorten, shown

# A document of a plain text file: whole paragraphs up to so many characters.
DOCUMENT_CHARACTERS = 4000
_SEPARATOR = re.compile(r"[ \t]*(?:<\|endoftext\|>|</s>|\f)[ \t]*")
_PARQUET_ROWS = 512


def read_csv(file: FileRef, report: FileReport, stream: IO[bytes]) -> Iterator[Record]:
    """Rows of a CSV or TSV file with a header. Values are text; an empty field is ""."""
    csv.field_size_limit(MAX_LINE_BYTES)
    tab = report.format == "tsv"
    if stream.read(3) == b"\xef\xbb\xbf":
        report.note("begins with a byte order mark; skipped")
    stream.seek(0)
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
    finally:
        # The stream belongs to the caller: the wrapper must not close it when it is collected.
        text.detach()


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
                    where=shown(file.path),
                    found=f"the column {twice[0]!r} twice",
                    rule="a column's name stands once",
                    remedy="rename one of the two",
                )
            for batch in parquet.iter_batches(batch_size=_PARQUET_ROWS):
                for value in batch.to_pylist():
                    number += 1
                    yield Record(number, value)
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            raise DataError(
                where=f"{shown(file.path)}: after row {number}",
                found=f"no whole Parquet file: {str(error).splitlines()[0]}",
                rule="a .parquet file has its footer and all its pages",
                remedy="fetch or write the file again; it may have been cut",
            ) from error


def read_text(file: FileRef, report: FileReport, *, whole: bool) -> Iterator[Record]:
    """Documents of a plain text file as {"text": …}, one in memory at a time.

    Lines of `<|endoftext|>`, `</s>` or a form feed separate documents. Without any, the file is cut
    at blank lines into documents of whole paragraphs of up to DOCUMENT_CHARACTERS; with `whole` it
    is one document.
    """
    by_separator = whole or any(_SEPARATOR.fullmatch(line) for _, line in _lines(file, report))
    if by_separator:
        yield from _documents(file, report)
        return
    report.note(f"cut at blank lines into documents of up to {DOCUMENT_CHARACTERS} characters")
    kept: list[str] = []
    begin, size = 1, 0
    for number, paragraph in _paragraphs(file, report):
        if kept and size + len(paragraph) + 2 > DOCUMENT_CHARACTERS:
            yield Record(begin, {"text": "\n\n".join(kept)})
            kept, size = [], 0
        if not kept:
            begin = number
        kept.append(paragraph)
        size += len(paragraph) + 2
    if kept:
        yield Record(begin, {"text": "\n\n".join(kept)})


def _lines(file: FileRef, report: FileReport) -> Iterator[tuple[int, str]]:
    """Lines without their ends, counted from 1."""
    with open_bytes(file.path, report) as stream:
        number = 0
        while raw := stream.readline(MAX_LINE_BYTES + 1):
            number += 1
            if len(raw) > MAX_LINE_BYTES:
                raise DataError(
                    where=file.where(number),
                    found=f"a line of more than {MAX_LINE_BYTES // 2**20} MiB",
                    rule=f"a line of a text file has at most {MAX_LINE_BYTES // 2**20} MiB",
                    remedy="break the text into lines, or write it as JSONL",
                )
            try:
                line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise wrong_encoding(file, error, line=number, raw=raw) from error
            if line.endswith("\r\n"):
                report.note("lines end with CRLF; read as LF")
            yield number, line.rstrip("\r\n")


def _documents(file: FileRef, report: FileReport) -> Iterator[Record]:
    kept: list[str] = []
    begin = 1
    for number, line in _lines(file, report):
        if not _SEPARATOR.fullmatch(line):
            begin = begin if kept else number
            if kept or line.strip():
                kept.append(line)
            continue
        if kept:
            yield Record(begin, {"text": "\n".join(kept).rstrip("\n")})
        kept = []
    if kept:
        yield Record(begin, {"text": "\n".join(kept).rstrip("\n")})


def _paragraphs(file: FileRef, report: FileReport) -> Iterator[tuple[int, str]]:
    kept: list[str] = []
    begin = 1
    for number, line in _lines(file, report):
        if line.strip():
            begin = begin if kept else number
            kept.append(line)
        elif kept:
            yield begin, "\n".join(kept)
            kept = []
    if kept:
        yield begin, "\n".join(kept)
