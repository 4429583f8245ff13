"""The four data stages: snapshots of a recipe's sources. No torch.

Each reads the sources of its DataSettings, counts what it cannot use, mixes, and writes canonical
JSON lines: the same inputs give the same bytes on every machine.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
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
from llm_assets.reading.eval_tasks import task_name, write_task
from llm_assets.reading.mixing import Entry, Spool, mix, split, take_first
from llm_assets.reading.problems import REASONS
from llm_assets.reading.rows import SourceReport, check_settings, read_source, source_name
from llm_assets.stages.context import Metric, StageContext, StageResult

_SAMPLES = 5
_ROWS_BETWEEN_REPORTS = 20_000


@dataclass(frozen=True, kw_only=True)
class _Taken:
    """What was read and what of it is used."""

    spool: Spool
    reports: list[SourceReport]
    by_source: list[list[Entry]]

    @property
    def entries(self) -> list[Entry]:
        return [entry for entries in self.by_source for entry in entries]


def run_corpus(context: StageContext) -> StageResult:
    """documents.jsonl: rows {text, source}, source after source, in file order."""
    with Spool(context.scratch / "corpus.jsonl") as spool:
        taken = _take(context, "corpus", spool)
        _write(context.out / "documents.jsonl", spool.read(taken.entries))
        return _result(taken, {"documents": taken.entries}, {})


def run_instructions(context: StageContext) -> StageResult:
    """train.jsonl and held_out.jsonl: rows {messages, source, kind}."""
    return _run_divided(context, "instructions")


def run_preferences(context: StageContext) -> StageResult:
    """train.jsonl and held_out.jsonl: rows {prompt, chosen, rejected, source, rubric, …}."""
    return _run_divided(context, "preferences")


def run_evals(context: StageContext) -> StageResult:
    """tasks.json, and NAME.yaml with NAME.jsonl for each lm-eval task."""
    config: DataSettings = context.config
    check_settings(config, "evals")
    tasks: list[dict[str, Any]] = []
    reports = []
    for source in config.sources:
        report = SourceReport(name=source_name(source))
        reports.append(report)
        if isinstance(source, VillageSource):
            from llm_assets import village

            settings = config.village or VillageSettings.model_validate({})
            tasks += village.write_eval_tasks(settings, context.out)
            continue
        items = _read_items(context, source, report)
        first = report.files[0]
        given = source.task.name if source.task else None
        role = (source.task.role if source.task else None) or "capability"
        name = task_name(given, first.form, first.file.label)
        tasks += _write_tasks(context.out, name, role, items)
    names = [task["name"] for task in tasks]
    if len(set(names)) != len(names):
        raise DataError(
            where="evals",
            found=f"two tasks of one name: {', '.join(sorted(names))}",
            rule="a task's name stands once",
            remedy="give a source a name of its own: task: {name: …}",
        )
    (context.out / "tasks.json").write_bytes(
        (json.dumps(tasks, indent=2, sort_keys=True, ensure_ascii=False) + "\n").encode("utf-8")
    )
    num_items = sum(task["num_items"] for task in tasks)
    return StageResult(
        metrics={
            "num_rows": Metric(value=num_items),
            "num_tasks": Metric(value=len(tasks)),
            **_dropped_metrics(reports),
        },
        metadata={"num_rows": num_items, "num_tasks": len(tasks)},
        tables={
            "dropped": _dropped_table(reports),
            "files": _files_table(reports),
            "tasks": tasks,
        },
    )


def _read_items(
    context: StageContext, source: FileSource | HubSource, report: SourceReport
) -> list[dict[str, Any]]:
    """The items of one source, at most `limit` and `max_rows` of them."""
    config: DataSettings = context.config
    context.progress.say(f"reading {report.name}")
    rows = read_source(
        source,
        purpose="evals",
        config=config,
        recipe_folder=_recipe_folder(context),
        report=report,
    )
    with Spool(context.scratch / "evals.jsonl") as spool:
        for row, encoded in rows:
            spool.add(0, {"text": row["question"]}, encoded)
        limits = [limit for limit in (source.limit, config.max_rows) if limit is not None]
        kept = take_first(spool.entries, min(limits, default=None))
        return [json.loads(line) for line in spool.read(kept)]


def _write_tasks(
    folder: Path, name: str, role: str, items: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """One task; of refusal items one for each label."""
    kinds = sorted({item["task"] for item in items})
    if len(kinds) == 1 and kinds[0] not in ("unsafe", "harmless"):
        return [write_task(folder, name, role, items)]
    return [
        write_task(folder, f"{name}_{kind}", kind, [item for item in items if item["task"] == kind])
        for kind in kinds
    ]


def _run_divided(context: StageContext, purpose: str) -> StageResult:
    config: DataSettings = context.config
    with Spool(context.scratch / f"{purpose}.jsonl") as spool:
        taken = _take(context, purpose, spool)
        parts = split(taken.entries, config.held_out, where=f"data.{purpose}")
        _write(context.out / "train.jsonl", spool.read(parts.train))
        _write(context.out / "held_out.jsonl", spool.read(parts.held_out))
        crossing = Counter(entry.source for entry in parts.crossing)
        return _result(taken, {"train": parts.train, "held_out": parts.held_out}, crossing)


def _recipe_folder(context: StageContext) -> Path:
    return Path(str(context.lineage.get("recipe_folder", ".")))


def _take(context: StageContext, purpose: str, spool: Spool) -> _Taken:
    """Read every source into the spool and choose the rows of the mix."""
    config: DataSettings = context.config
    check_settings(config, purpose)
    by_source: list[list[Entry]] = []
    reports = []
    for index, source in enumerate(config.sources):
        report = SourceReport(name=source_name(source))
        reports.append(report)
        context.progress.say(f"reading {report.name}")
        begin = len(spool.entries)
        rows = read_source(
            source,
            purpose=purpose,
            config=config,
            recipe_folder=_recipe_folder(context),
            report=report,
        )
        for number, (row, encoded) in enumerate(rows, 1):
            spool.add(index, row, encoded)
            if number % _ROWS_BETWEEN_REPORTS == 0:
                context.progress.say(f"reading {report.name}: {number} rows")
        by_source.append(spool.entries[begin:])
    mixed = mix(
        by_source,
        limits=[source.limit for source in config.sources],
        weights=[source.weight for source in config.sources],
        max_rows=config.max_rows,
    )
    return _Taken(spool=spool, reports=reports, by_source=mixed)


def _write(path: Path, lines: Iterable[bytes]) -> None:
    with path.open("wb") as stream:
        stream.writelines(lines)


def _result(
    taken: _Taken, parts: dict[str, list[Entry]], crossing: Counter[int] | dict[int, int]
) -> StageResult:
    counts = {f"num_{name}": len(entries) for name, entries in parts.items()}
    num_rows = sum(counts.values())
    size_bytes = sum(entry.length for entries in parts.values() for entry in entries)
    dropped = _dropped_table(taken.reports)
    for index, count in sorted(crossing.items()):
        dropped.append(_dropped_row(taken.reports[index].name, "", "prompt_in_held_out", count, ""))
    sources = _sources_table(taken, parts)
    samples = [
        {"split": name, **json.loads(line)}
        for name, entries in parts.items()
        for line in taken.spool.read(entries[:_SAMPLES])
    ]
    return StageResult(
        metrics={
            "num_rows": Metric(value=num_rows),
            **{name: Metric(value=value) for name, value in counts.items() if len(parts) > 1},
            "size_bytes": Metric(value=size_bytes),
            **_dropped_metrics(taken.reports),
        },
        metadata={"num_rows": num_rows, **(counts if len(parts) > 1 else {})},
        samples=samples,
        tables={"dropped": dropped, "sources": sources, "files": _files_table(taken.reports)},
    )


def _dropped_metrics(reports: Sequence[SourceReport]) -> dict[str, Metric]:
    rows = sum(report.num_rows for report in reports)
    dropped = sum(report.num_dropped for report in reports)
    return {
        "num_dropped": Metric(value=dropped),
        "dropped_share": Metric(value=dropped / rows if rows else 0.0, n=rows or None),
    }


def _dropped_table(reports: Sequence[SourceReport]) -> list[dict[str, Any]]:
    """One row for each source, file and reason, with the first lines."""
    table = []
    for source in reports:
        for report in source.files:
            for reason, count in sorted(report.counts.items()):
                lines = ", ".join(str(problem.line) for problem in report.examples[reason])
                table.append(_dropped_row(source.name, report.file.label, reason, count, lines))
    return table


def _files_table(reports: Sequence[SourceReport]) -> list[dict[str, Any]]:
    return [
        {
            "source": source.name,
            "file": report.file.label,
            "format": report.format,
            "form": report.form,
            "rows": report.num_rows,
            "kept": report.num_kept,
            "dropped": report.num_dropped,
            "notes": "; ".join(report.all_notes()),
        }
        for source in reports
        for report in source.files
    ]


def _dropped_row(source: str, file: str, reason: str, count: int, lines: str) -> dict[str, Any]:
    return {
        "source": source,
        "file": file,
        "reason": reason,
        "rows": count,
        "first_lines": lines,
        "rule": REASONS[reason].rule,
    }


def _sources_table(taken: _Taken, parts: dict[str, list[Entry]]) -> list[dict[str, Any]]:
    total = sum(len(entries) for entries in parts.values())
    table = []
    for index, report in enumerate(taken.reports):
        used = sum(entry.source == index for entries in parts.values() for entry in entries)
        forms = sorted({file.form for file in report.files})
        table.append(
            {
                "source": report.name,
                "files": len(report.files),
                "form": ", ".join(forms),
                "rows_read": report.num_rows,
                "rows_dropped": report.num_dropped,
                "rows_used": used,
                "share_of_mix": round(used / total, 4) if total else 0.0,
            }
        )
    return table
