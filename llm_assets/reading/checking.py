"""Reading and checking a data set as its stage does, without a run, and without stopping early.

A stage stops at the first error; here every file is read and every error is kept, so that one look
shows all there is to mend.
"""

from __future__ import annotations

import tempfile
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
from llm_assets.reading.fingerprint import resolve_files
from llm_assets.reading.lengths import Fit, Measure, Statistics, TooLong, fit
from llm_assets.reading.mixing import Entry, Spool, mix, split, take_first
from llm_assets.reading.problems import REASONS, FileRef, FileReport, raise_if_too_many, shown
from llm_assets.reading.rows import (
    SourceReport,
    check_one_form,
    check_settings,
    read_file,
    read_source,
    source_name,
)

Source = FileSource | HubSource | VillageSource


@dataclass(frozen=True, kw_only=True)
class Context:
    """A stage that takes the rows, and how long a row may be there, in tokens."""

    stage: str
    max_length: int
    too_long: TooLong


@dataclass(kw_only=True)
class Check:
    """What checking one data set found. `kept` maps a split to the rows that it would have."""

    purpose: str
    statistics: Statistics
    sources: list[SourceReport] = field(default_factory=list)
    errors: list[DataError] = field(default_factory=list)
    kept: dict[str, int] = field(default_factory=dict)
    used: list[int] = field(default_factory=list)
    num_crossing: int = 0
    fits: list[tuple[str, Fit]] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """The stage would take this."""
        return not self.errors


def check(
    config: DataSettings,
    purpose: str,
    recipe_folder: Path,
    *,
    measure: Measure,
    contexts: list[Context] | None = None,
) -> Check:
    """Read all sources of a data set, mix and split as its stage does, and keep every error."""
    result = Check(purpose=purpose, statistics=Statistics(measure=measure))
    try:
        check_settings(config, purpose)
    except DataError as error:
        result.errors.append(error)
    with tempfile.TemporaryDirectory() as folder, Spool(Path(folder) / "rows.jsonl") as spool:
        by_source = []
        for index, source in enumerate(config.sources):
            report = SourceReport(name=source_name(source))
            result.sources.append(report)
            begin = len(spool.entries)
            _read(source, index, config, recipe_folder, result, report, spool)
            by_source.append(spool.entries[begin:])
        _choose(config, by_source, result)
    unit = "tokens" if measure.exact else f"tokens (about; {measure.unit} were counted)"
    lengths = result.statistics.token_lengths()
    for context in contexts or []:
        if lengths:
            found = fit(lengths, context.max_length, context.too_long, unit)
            result.fits.append((context.stage, found))
            if found.num_over == found.num_rows and context.too_long == "drop":
                result.errors.append(_nothing_fits(context, found))
    return result


def _read(
    source: Source,
    index: int,
    config: DataSettings,
    recipe_folder: Path,
    result: Check,
    report: SourceReport,
    spool: Spool,
) -> None:
    def take(row: dict[str, Any], encoded: bytes) -> None:
        result.statistics.add(row)
        counted = {"text": row["question"]} if result.purpose == "evals" else row
        spool.add(index, counted, encoded)

    if not isinstance(source, FileSource):
        if isinstance(source, VillageSource) and result.purpose == "evals":
            _count_village_tasks(config, report)
            return
        try:
            for row, encoded in read_source(
                source,
                purpose=result.purpose,
                config=config,
                recipe_folder=recipe_folder,
                report=report,
            ):
                take(row, encoded)
        except DataError as error:
            result.errors.append(error)
        return
    for file in _files(source, recipe_folder, result):
        file_report = FileReport(file=file)
        report.files.append(file_report)
        try:
            for row, encoded in read_file(file_report, result.purpose, source.form, source.columns):
                take(row, encoded)
        except DataError as error:
            file_report.error = error.found
            result.errors.append(error)
    readable = [entry for entry in report.files if not entry.error]
    for checked in (check_one_form, lambda files: raise_if_too_many(files, config.max_dropped)):
        try:
            if readable:
                checked(readable)
        except DataError as error:
            result.errors.append(error)


def _count_village_tasks(config: DataSettings, report: SourceReport) -> None:
    from llm_assets import village

    settings = config.village or VillageSettings.model_validate({})
    with tempfile.TemporaryDirectory() as folder:
        tasks = village.write_eval_tasks(settings, Path(folder))
        for task in tasks:
            file = FileRef(path=Path(task["name"]), label=task["name"], unit="row")
            count = task["num_items"]
            report.files.append(
                FileReport(
                    file=file,
                    format="village",
                    form=task["role"],
                    num_rows=count,
                    num_kept=count,
                )
            )


def _files(source: FileSource, recipe_folder: Path, result: Check) -> list[FileRef]:
    patterns = [source.files] if isinstance(source.files, str) else list(source.files)
    found: dict[Path, FileRef] = {}
    for pattern in patterns:
        one = source.model_copy(update={"files": pattern})
        try:
            for file in resolve_files(one, recipe_folder):
                found.setdefault(file.path.resolve(), file)
        except DataError as error:
            result.errors.append(error)
    return sorted(found.values(), key=lambda file: file.label)


def _choose(config: DataSettings, by_source: list[list[Entry]], result: Check) -> None:
    """What the mix and the split would take."""
    if not any(by_source):
        return
    if result.purpose == "evals":
        limits = [(source.limit, config.max_rows) for source in config.sources]
        result.used = [
            len(take_first(entries, min((n for n in limit if n is not None), default=None)))
            for entries, limit in zip(by_source, limits, strict=True)
        ]
        result.kept = {"rows": sum(result.used)}
        return
    taken = mix(
        by_source,
        limits=[source.limit for source in config.sources],
        weights=[source.weight for source in config.sources],
        max_rows=config.max_rows,
    )
    result.used = [len(entries) for entries in taken]
    if result.purpose == "corpus":
        result.kept = {"rows": sum(result.used)}
        return
    try:
        parts = split(
            [entry for entries in taken for entry in entries],
            config.held_out,
            where=result.purpose,
        )
    except DataError as error:
        result.errors.append(error)
        return
    result.kept = {"train": len(parts.train), "held_out": len(parts.held_out)}
    result.num_crossing = len(parts.crossing)


def _nothing_fits(context: Context, found: Fit) -> DataError:
    return DataError(
        where=f"stages.{context.stage}.max_length",
        found=f"{found.limit}, and every row is longer (up to {found.longest} {found.unit})",
        rule="some rows fit the context",
        remedy="raise max_length, or set too_long: truncate",
    )


def as_document(result: Check) -> dict[str, Any]:
    """The check for machines."""
    statistics = result.statistics
    return {
        "data": result.purpose,
        "ok": result.ok,
        "errors": [
            {"where": e.where, "found": e.found, "rule": e.rule, "remedy": e.remedy}
            for e in result.errors
        ],
        "sources": [_source_document(result, index) for index in range(len(result.sources))],
        "roles": dict(sorted(statistics.roles.items())),
        "num_multi_turn": statistics.num_multi_turn,
        "lengths": {"unit": statistics.measure.unit, **statistics.percentiles()},
        "supervised_tokens": statistics.supervised_tokens,
        "supervised_is_exact": statistics.measure.exact,
        "kept": result.kept,
        "prompt_in_held_out": result.num_crossing,
        "contexts": [
            {
                "stage": stage,
                "max_length": found.limit,
                "num_over": found.num_over,
                "too_long": found.too_long,
                "num_lost_tokens": found.num_lost,
            }
            for stage, found in result.fits
        ],
    }


def _source_document(result: Check, index: int) -> dict[str, Any]:
    report = result.sources[index]
    used = result.used[index] if index < len(result.used) else 0
    total = sum(result.used)
    return {
        "source": report.name,
        "rows_read": report.num_rows,
        "rows_dropped": report.num_dropped,
        "rows_used": used,
        "share_of_mix": round(used / total, 4) if total else 0.0,
        "files": [_file_document(entry) for entry in report.files],
    }


def _file_document(report: FileReport) -> dict[str, Any]:
    return {
        "file": shown(report.file.path),
        "format": report.format,
        "form": report.form,
        "rows": report.num_rows,
        "kept": report.num_kept,
        "dropped": report.num_dropped,
        "error": report.error,
        "notes": report.all_notes(),
        "problems": [
            {
                "reason": reason,
                "rows": count,
                "rule": REASONS[reason].rule,
                "remedy": REASONS[reason].remedy,
                "counted_by": report.file.unit,
                "first": [
                    {"at": problem.line, "found": problem.found}
                    for problem in report.examples[reason]
                ],
            }
            for reason, count in report.counts.most_common()
        ],
    }
