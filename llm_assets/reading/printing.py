"""The report of `check-data` for people."""

from __future__ import annotations

from collections import Counter

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from llm_assets.reading.checking import Check
from llm_assets.reading.problems import REASONS, FileReport, shown

_BAR = 30


def print_check(result: Check, said: str = "") -> None:
    """Files, rows, lengths, problems, what would be kept, and errors last."""
    console = Console(soft_wrap=True)
    console.print(f"[bold]{result.purpose}[/bold]" + (f" ({escape(said)})" if said else ""))
    reports = [report for source in result.sources for report in source.files]
    if reports:
        console.print(_files(reports))
    for report in reports:
        _print_problems(console, report)
    _print_rows(console, result)
    _print_mix(console, result)
    for stage, found in result.fits:
        console.print(f"{stage}: {found.sentence()}", highlight=False)
    for error in result.errors:
        console.print(f"[red]error:[/red] {escape(str(error))}", highlight=False)
    if result.ok:
        console.print("[green]ok[/green]: the stage would take this")
    else:
        count = len(result.errors)
        console.print(f"[red]{count} error{'s' * (count != 1)}[/red]: the stage would stop")


def _files(reports: list[FileReport]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("file", overflow="fold")
    for heading in ("format", "form"):
        table.add_column(heading)
    for heading in ("rows", "kept", "dropped"):
        table.add_column(heading, justify="right")
    table.add_column("notes", overflow="fold")
    labels = Counter(report.file.label for report in reports)
    for report in reports:
        alone = labels[report.file.label] == 1
        notes = report.all_notes() + (["not readable, see below"] if report.error else [])
        table.add_row(
            escape(report.file.label if alone else shown(report.file.path)),
            report.format,
            report.form or "?",
            str(report.num_rows),
            str(report.num_kept),
            str(report.num_dropped),
            escape("; ".join(notes)),
        )
    return table


def _print_problems(console: Console, report: FileReport) -> None:
    for reason, count in report.counts.most_common():
        rows = f"{count} row{'s' * (count != 1)}"
        console.print(
            f"[yellow]{reason}[/yellow]: {rows} of {escape(shown(report.file.path))}",
            highlight=False,
        )
        console.print(f"  rule: {escape(REASONS[reason].rule)}", highlight=False)
        console.print(f"  next: {escape(REASONS[reason].remedy)}", highlight=False)
        examples = report.examples[reason]
        for problem in examples:
            place = f"{report.file.unit} {problem.line}"
            console.print(f"  {place}: {escape(problem.found)}", highlight=False)
        if count > len(examples):
            console.print(f"  … and {count - len(examples)} more", highlight=False)


def _print_rows(console: Console, result: Check) -> None:
    statistics = result.statistics
    if not statistics.lengths:
        return
    unit = statistics.measure.unit
    if statistics.roles:
        roles = ", ".join(f"{count} {role}" for role, count in sorted(statistics.roles.items()))
        console.print(
            f"turns: {roles}; {statistics.num_multi_turn} rows of several turns", highlight=False
        )
    parts = ", ".join(f"{name} {value}" for name, value in statistics.percentiles().items())
    console.print(f"length in {unit}: {parts}", highlight=False)
    histogram = statistics.histogram()
    most = max(rows for _, _, rows in histogram)
    width = len(str(histogram[-1][1]))
    for first, last, rows in histogram:
        bar = "█" * round(_BAR * rows / most)
        console.print(f"  {first:>{width}}-{last:<{width}} {bar} {rows}", highlight=False)
    if result.purpose != "evals":
        about = "" if statistics.measure.unit == "tokens" else "about "
        console.print(f"supervised tokens: {about}{statistics.supervised_tokens}", highlight=False)


def _print_mix(console: Console, result: Check) -> None:
    total = sum(result.used)
    if len(result.sources) > 1 and total:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("source", overflow="fold")
        for heading in ("read", "dropped", "used", "share"):
            table.add_column(heading, justify="right")
        for source, used in zip(result.sources, result.used, strict=True):
            table.add_row(
                escape(source.name),
                str(source.num_rows),
                str(source.num_dropped),
                str(used),
                f"{used / total:.1%}",
            )
        console.print(table)
    if result.kept:
        kept = ", ".join(f"{count} {name}" for name, count in result.kept.items())
        crossing = (
            f"; {result.num_crossing} training rows left out for a held-out prompt"
            if result.num_crossing
            else ""
        )
        console.print(f"would be kept: {kept}{crossing}", highlight=False)
