"""From a source of a recipe to encoded rows: files, hub data sets, and the village."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llm_assets.data_settings import (
    DataSettings,
    FileSource,
    HubSource,
    VillageSettings,
    VillageSource,
)
from llm_assets.errors import DataError
from llm_assets.reading.files import Record, read_records
from llm_assets.reading.fingerprint import check_commit, resolve_files
from llm_assets.reading.forms import FORMS, ROWS_LOOKED_AT, convert, names_for, recognize
from llm_assets.reading.problems import (
    REPAIRED,
    BadRow,
    FileRef,
    FileReport,
    raise_if_fatal,
    raise_if_too_many,
    shorten,
    shown,
)

Row = dict[str, Any]


@dataclass(kw_only=True)
class SourceReport:
    """What reading one source gave, file by file."""

    name: str
    files: list[FileReport] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        """Rows as they stand in the files."""
        return sum(report.num_rows for report in self.files)

    @property
    def num_dropped(self) -> int:
        """Rows that cannot be used."""
        return sum(report.num_dropped for report in self.files)


def source_name(source: FileSource | HubSource | VillageSource) -> str:
    """How a source is called in tables: as the recipe writes it, no absolute path of ours."""
    if isinstance(source, VillageSource):
        return "village"
    if isinstance(source, HubSource):
        return f"{source.name}@{source.revision[:12]}"
    return source.files if isinstance(source.files, str) else ", ".join(source.files)


def check_settings(config: DataSettings, purpose: str) -> None:
    """DataError for a data set without a source, or a setting that would have no effect."""

    def refuse(place: str, found: str, rule: str, remedy: str) -> None:
        where = f"data.{purpose}.sources{place}"
        raise DataError(where=where, found=found, rule=rule, remedy=remedy)

    if not config.sources:
        refuse(
            "",
            "no source",
            "a data set that a stage needs has at least one source",
            "add `- from: village`, or `- from: files` with `files:`",
        )
    for index, source in enumerate(config.sources):
        form = getattr(source, "form", "auto")
        if form != "auto" and form not in names_for(purpose):
            refuse(
                f".{index}.form",
                form if form in FORMS else f"{form}, which is no form",
                f"{purpose} take: {', '.join(names_for(purpose))}",
                "leave `form` out to have it recognized, or name one of these",
            )
        if isinstance(source, HubSource):
            check_commit(source)
        if purpose == "evals" and source.weight is not None:
            refuse(
                f".{index}.weight",
                f"{source.weight}",
                "evals are not mixed: each source is a task of its own",
                "remove it; `limit` says how many items a task has",
            )
        if purpose != "evals" and getattr(source, "task", None) is not None:
            refuse(f".{index}.task", "a task", "only evals make tasks", "remove it")
        if purpose == "evals" and isinstance(source, VillageSource) and source.limit is not None:
            refuse(
                f".{index}.limit",
                f"{source.limit}",
                "the village says itself how many items its tasks have",
                "set data.village.eval_items",
            )


def encode(row: Mapping[str, Any]) -> bytes:
    """A row as one canonical JSON line: sorted keys, UTF-8, LF. BadRow when it has none."""
    try:
        text = json.dumps(
            row, ensure_ascii=False, sort_keys=True, separators=(",", ":"), allow_nan=False
        )
        return text.encode("utf-8") + b"\n"
    except UnicodeEncodeError as error:
        raise BadRow("lone_surrogate", f"half a surrogate pair: {error.reason}") from error
    except (TypeError, ValueError) as error:
        raise BadRow("wrong_type", f"a value that JSON cannot hold: {error}") from error


def read_source(
    source: FileSource | HubSource | VillageSource,
    *,
    purpose: str,
    config: DataSettings,
    recipe_folder: Path,
    report: SourceReport,
) -> Iterator[tuple[Row, bytes]]:
    """Rows of one source, in file order, each with its encoding (without `split`).

    DataError for an unreadable file, for files of different forms, and at the end when more than
    `config.max_dropped` of the rows are unusable.
    """
    if isinstance(source, VillageSource):
        yield from _village(config, purpose, report)
        return
    if isinstance(source, HubSource):
        yield from _hub(source, purpose, report)
    else:
        for file in resolve_files(source, recipe_folder):
            file_report = FileReport(file=file)
            report.files.append(file_report)
            yield from read_file(file_report, purpose, source.form, source.columns)
            check_one_form(report.files)
    raise_if_too_many(report.files, config.max_dropped)


def read_file(
    report: FileReport, purpose: str, form: str = "auto", columns: Mapping[str, str] | None = None
) -> Iterator[tuple[Row, bytes]]:
    """Usable rows of one file; all others are counted in `report`."""
    records = read_records(report.file, report, whole_text=purpose != "corpus")
    yield from _convert(records, report, purpose, form, columns or {})


def check_one_form(reports: list[FileReport]) -> None:
    """DataError when the files of one source have different forms."""
    first = reports[0]
    for report in reports[1:]:
        if report.form != first.form:
            raise DataError(
                where=shown(report.file.path),
                found=f"rows of the form {report.form}; {shown(first.file.path)} has {first.form}",
                rule="all files of a source have the same form",
                remedy="make each form a source of its own, or name the right `form`",
            )


def _convert(
    records: Iterable[Record],
    report: FileReport,
    purpose: str,
    form: str,
    columns: Mapping[str, str],
) -> Iterator[tuple[Row, bytes]]:
    records = iter(records)
    head = list(itertools.islice(records, ROWS_LOOKED_AT))
    whole = itertools.chain(head, records)
    usable = [_renamed(record.value, columns) for record in head if not record.reason]
    if usable:
        where = shown(report.file.path)
        _check_columns([record.value for record in head if not record.reason], columns, where)
        report.form = recognize(usable, purpose, form, where=where)
    for record in whole:
        reason, found = record.reason, record.found
        if not reason and not report.form:
            reason, found = "other_form", "no form was recognized in the rows before"
        if not reason:
            try:
                rows = convert(_renamed(record.value, columns), report.form, purpose)
                mended = [row[REPAIRED] for row in rows if REPAIRED in row]
                encoded = [_with_source(row, report.file.label) for row in rows]
            except BadRow as error:
                reason, found = error.reason, error.found
        if reason:
            report.add(record.line, reason, found)
            continue
        report.num_kept += len(encoded)
        report.repaired.update(mended)
        yield from encoded
    raise_if_fatal(report)
    if not report.num_kept:
        raise_if_too_many([report], 0.0)


def _with_source(row: Row, label: str) -> tuple[Row, bytes]:
    row.setdefault("source", label)
    row.pop(REPAIRED, None)
    return row, encode({key: value for key, value in row.items() if key != "split"})


def _renamed(row: Row, columns: Mapping[str, str]) -> Row:
    if not columns:
        return row
    renamed = {key: value for key, value in row.items() if key not in columns.values()}
    renamed.update({ours: row[theirs] for ours, theirs in columns.items() if theirs in row})
    return renamed


def _check_columns(rows: list[Row], columns: Mapping[str, str], where: str) -> None:
    present = {key for row in rows for key in row}
    for ours, theirs in columns.items():
        if theirs not in present:
            raise DataError(
                where=where,
                found=f"columns: {ours}: {theirs}, but the columns are {shorten(sorted(present))}",
                rule="`columns` maps our name of a column to a column of the file",
                remedy="correct the name",
            )


def _village(
    config: DataSettings, purpose: str, report: SourceReport
) -> Iterator[tuple[Row, bytes]]:
    from llm_assets import village

    settings = config.village or VillageSettings.model_validate({})
    rows_of = {
        "corpus": village.corpus_documents,
        "instructions": village.instruction_rows,
        "preferences": village.preference_rows,
    }[purpose]
    file = FileRef(path=Path("village"), label="village", unit="row")
    file_report = FileReport(file=file, format="village", form=purpose)
    report.files.append(file_report)
    for row in rows_of(settings):
        file_report.num_rows += 1
        file_report.num_kept += 1
        yield _with_source(dict(row), "village")


def _hub(source: HubSource, purpose: str, report: SourceReport) -> Iterator[tuple[Row, bytes]]:
    check_commit(source)
    file = FileRef(path=Path(f"hub:{source.name}"), label=source.name, unit="row")
    file_report = FileReport(file=file, format="hub")
    report.files.append(file_report)
    records = _hub_records(load_hub(source), file_report)
    yield from _convert(records, file_report, purpose, source.form, source.columns)


def _hub_records(data: Iterable[Row], report: FileReport) -> Iterator[Record]:
    for number, row in enumerate(data, 1):
        report.num_rows += 1
        yield Record(number, row)


def load_hub(source: HubSource) -> Any:
    """The data set from the hub or its local cache; DataError when neither has it."""
    import datasets

    where = f"hub data set {source.name}, split {source.split}, revision {source.revision}"
    try:
        return datasets.load_dataset(
            source.name, source.config, split=source.split, revision=source.revision
        )
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        first = str(error).strip().splitlines() or [type(error).__name__]
        raise DataError(
            where=where,
            found=f"it cannot be loaded: {first[0]}",
            rule="a hub data set is reached over the network or lies in the local cache",
            remedy="check name, config, split and network (HF_HUB_OFFLINE, HF_TOKEN, proxy); or "
            "download it once where there is a network and name its files in a files source",
        ) from error
