"""From a file to records: JSONL, JSON, CSV, TSV, Parquet and plain text, each possibly gzipped.

What makes a whole file unreadable raises DataError here; what spoils one row becomes a Record with
a reason, which the caller counts.
"""

from __future__ import annotations

import gzip
import zlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from llm_assets.errors import DataError
from llm_assets.reading.problems import FileRef, FileReport, shown

MAX_LINE_BYTES = 64 * 2**20
_GZIP_MAGIC = b"\x1f\x8b"

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
            where=shown(path),
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
                where=shown(path),
                found="a directory",
                rule="a source names files, by path or by glob",
                remedy=f"write {shown(path)}/*{_common_suffix(path)}",
            )
        if not path.exists():
            raise DataError(
                where=shown(path),
                found="no such file",
                rule="every file of a source exists",
                remedy="check the path; relative paths start at the recipe's folder",
            )
        if not path.is_file():
            raise DataError(
                where=shown(path),
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
        raise wrong_encoding(file, error) from error
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
            where=shown(path),
            found="no gzip file, by its first bytes",
            rule="a file named .gz is gzip",
            remedy="rename it, or fetch it again (a web page may have been saved in its place)",
        )
    return stream


def _read(file: FileRef, report: FileReport, whole_text: bool) -> Iterator[Record]:
    # Imported here: the readers and this module need each other's helpers.
    from llm_assets.reading import json_files, tables

    if report.format == "parquet":
        yield from tables.read_parquet(file, report)
        return
    if report.format == "text":
        yield from tables.read_text(file, report, whole=whole_text)
        return
    with open_bytes(file.path, report) as stream:
        if report.format == "jsonl":
            yield from json_files.read_jsonl(file, report, stream)
        elif report.format == "json":
            yield from json_files.read_json(file, report, stream)
        else:
            yield from tables.read_csv(file, report, stream)


def wrong_encoding(
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
    """The ending of most data files in a folder."""
    endings: Counter[str] = Counter()
    try:
        for entry in folder.iterdir():
            suffixes = [suffix.lower() for suffix in entry.suffixes]
            packed = suffixes[-1:] == [".gz"]
            known = suffixes[-2 if packed else -1 :][:1]
            if known and known[0] in FORMATS:
                endings[known[0] + (".gz" if packed else "")] += 1
    except OSError:
        return ".jsonl"
    return min(endings, key=lambda ending: (-endings[ending], ending), default=".jsonl")


def _empty(path: Path, found: str) -> DataError:
    return DataError(
        where=shown(path),
        found=found,
        rule="every file of a source has at least one row",
        remedy="remove the file from the source, or write it again",
    )


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(
        where=shown(path),
        found=error.strerror or str(error),
        rule="every file of a source can be read",
        remedy="check the path and the permissions",
    )
