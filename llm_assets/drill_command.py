"""`llm-assets drill`: disrupt a scratch pipeline and see it recover."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import click

from llm_assets.store.showing import columns

NAMES = (
    "crash",
    "preempt",
    "corrupt-weights",
    "corrupt-optimizer",
    "torn-save",
    "disk-full",
    "store-down",
)


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(NAMES))
@click.option("--all", "every", is_flag=True, help="All of them, two to three minutes.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
@click.option("--keep", type=click.Path(path_type=Path), help="Leave the scratch pipelines there.")
def drill(names: tuple[str, ...], every: bool, as_json: bool, keep: Path | None) -> int:
    """Kill, preempt, damage, fill up: on a scratch copy of a small pipeline, never on your store.

    Says of each disruption whether it was detected, whether the training recovered to the very
    same weights, how many steps were done again and how long that took. Exit 1 when one failed."""
    from llm_assets.drills.disruptions import DrillResult, run_drill
    from llm_assets.drills.scratch import Scratch

    chosen = NAMES if every else tuple(dict.fromkeys(names))
    if not chosen:
        raise click.UsageError(f"name a drill ({', '.join(NAMES)}), or give --all")
    root = Path(tempfile.mkdtemp(prefix="llm-assets-drill-")) if keep is None else keep.absolute()
    results: list[DrillResult] = []
    try:
        scratch = Scratch(root)
        for name in chosen:
            results.append(run_drill(name, scratch))
            if not as_json:
                _print(results[-1], first=len(results) == 1)
    finally:
        if keep is None:
            shutil.rmtree(root, ignore_errors=True)
    if as_json:
        click.echo(json.dumps({"drills": [result.as_json() for result in results]}, indent=2))
    return 0 if all(result.passed for result in results) else 1


def _print(result: object, *, first: bool) -> None:
    from llm_assets.drills.disruptions import DrillResult

    if not isinstance(result, DrillResult):
        return
    heading = ("drill", "detected", "recovered", "steps lost", "recovery")
    row = (
        result.name.ljust(17),
        "yes" if result.detected else "NO",
        "yes" if result.recovered else "NO",
        "?" if result.steps_lost is None else str(result.steps_lost),
        "?" if result.recovery_s is None else f"{result.recovery_s:.1f} s",
    )
    lines = columns([heading, row])
    for line in lines if first else lines[1:]:
        click.echo(line)
    if result.said:
        click.echo(f"  {result.said}")
