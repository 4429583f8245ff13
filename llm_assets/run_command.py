"""`llm-assets run`: materialize exactly what is stale, through Dagster, with live progress.

When nothing is stale it says so without importing Dagster.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import click
from rich.console import Console

from llm_assets.errors import BudgetError
from llm_assets.measured import measure_missing, waiting_pins
from llm_assets.places import ensure_dagster_home, store_url
from llm_assets.planning import Plan, make_plan
from llm_assets.recipe import load_recipe
from llm_assets.report_card import all_gates_pass, print_report, wide_console
from llm_assets.reporting import progress_line
from llm_assets.store import open_store
from llm_assets.store.protocol import Store

if TYPE_CHECKING:
    from llm_assets.dagster_run import RunResult


@click.command()
@click.option("-r", "--recipe", "recipe_path", default="tiny", help="A path, or a packaged name.")
def run(recipe_path: str) -> int:
    """Materialize what is stale. Exit 0: all is there and every gate passed; 1: failed; 3: refused;
    130: interrupted.

    A run that was interrupted goes on where it was: finished stages are hits, a stage that trains
    resumes from its newest checkpoint.
    """
    recipe = load_recipe(recipe_path)
    store = open_store(store_url())
    return run_plan(make_plan(recipe, store), store, wide_console())


def run_plan(plan: Plan, store: Store, console: Console) -> int:
    """Run the rerun set of a plan, or say that there is none; the exit code of `run`."""
    recipe = plan.recipe
    # Beside the stages: another model may have gone into production since.
    measure_missing(plan, plan.nodes, store)
    if plan.complete:
        console.print(f"{recipe.pipeline}: nothing is stale, {_count(plan, 'hit')} hits")
        print_report(console, plan, store)
        return 0 if all_gates_pass(plan, store) else 1
    # Imported only when there is something to spend.
    from llm_assets.costs.quantities import show_seconds, show_usd
    from llm_assets.guards import forecast_plan, me, refusals, start_run
    from llm_assets.run_tags import REPLAY_TAG, RESERVATION_TAG

    estimates = forecast_plan(plan, store)
    stopped = refusals(plan, store, estimates)
    if stopped:
        return _refuse(console, stopped)
    console.print(
        f"{recipe.pipeline}: {len(plan.rerun)} to run ({', '.join(plan.rerun)}), "
        f"{_count(plan, 'hit')} hits, at most {show_usd(estimates.cost_usd)} and "
        f"{show_seconds(estimates.wall_s)}"
    )
    outcomes: dict[str, str] = {
        name: "not run" if name in plan.rerun else entry.status
        for name, entry in plan.stages.items()
    }
    try:
        reserved = start_run(plan, store, estimates, owner=f"{me()}, llm-assets run")
    except BudgetError as error:
        return _refuse(console, [str(error)])
    with reserved:
        tags = {RESERVATION_TAG: reserved.name}
        if plan.replay:
            tags[REPLAY_TAG] = plan.replay
        # The check of a pinned checkpoint that waits for a data set is made by the same run.
        stages = [*waiting_pins(plan), *plan.rerun]
        result = _through_dagster(plan, stages, console, outcomes, tags)
    if result.interrupted:
        console.print(f"run {result.run_id}", highlight=False)
        console.print("interrupted; the next `llm-assets run` goes on from here")
        return 130
    after = make_plan(recipe, store, replay=plan.replay)
    print_report(console, after, store, outcomes)
    return 0 if result.succeeded and after.complete and all_gates_pass(after, store) else 1


def _refuse(console: Console, texts: list[str]) -> int:
    for text in texts:
        console.print(f"refused: {text}", markup=False)
    return 3


def _count(plan: Plan, status: str) -> int:
    return sum(entry.status == status for entry in plan.stages.values())


class _Screen:
    """Prints progress as it comes, a line a stage at most each `every_s`, from any thread."""

    def __init__(self, console: Console, outcomes: dict[str, str], every_s: float = 5.0) -> None:
        self._console = console
        self._outcomes = outcomes
        self._every_s = every_s
        self._last: dict[str, float] = {}
        self._lock = threading.Lock()
        self._started = time.monotonic()

    def __call__(self, event: Mapping[str, Any]) -> None:
        with self._lock:
            stage = str(event["stage"])
            if "outcome" in event:
                self._outcomes[stage] = str(event["outcome"])
                self._print(f"{stage} · {event['outcome']}")
                return
            if "error" in event:
                self._outcomes[stage] = "failed"
                return  # printed whole at the end
            now = time.monotonic()
            last = event.get("step") is not None and event["step"] >= event["total"]
            if "text" in event or last or now - self._last.get(stage, 0.0) >= self._every_s:
                self._last[stage] = now
                self._print(progress_line(dict(event)))

    def _print(self, line: str) -> None:
        elapsed = time.monotonic() - self._started
        self._console.print(
            f"[{int(elapsed // 60):2d}:{elapsed % 60:04.1f}] {line}", markup=False, highlight=False
        )


def _through_dagster(
    plan: Plan,
    stages: Sequence[str],
    console: Console,
    outcomes: dict[str, str],
    tags: Mapping[str, str],
) -> RunResult:
    """Run stages of a plan as a Dagster run of this process."""
    ensure_dagster_home()
    from llm_assets.dagster_run import run_stages
    from llm_assets.resources.launcher import listening

    with listening(_Screen(console, outcomes)):
        result = run_stages(plan.recipe, stages, tags=tags)
    for stage in result.failed:
        outcomes[stage] = "held back" if stage in result.gated else "failed"
    for text in result.errors:
        console.print(f"\nfailed: {text}", markup=False, style="red")
    for text in result.rollback:
        console.print(f"\n{text}", markup=False, highlight=False)
    if not result.interrupted:
        console.print(f"run {result.run_id}", highlight=False)
    return result
