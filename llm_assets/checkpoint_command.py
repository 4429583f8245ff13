"""`llm-assets checkpoints`: look at in-training saves, prove them, go back, adopt, migrate."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click

from llm_assets.places import store_url
from llm_assets.store import open_store
from llm_assets.store.showing import age, columns, size

if TYPE_CHECKING:
    from llm_assets.checkpoint_rows import Course
    from llm_assets.checkpoints import SaveInfo
    from llm_assets.jobs import StageJob
    from llm_assets.recipe import Recipe
    from llm_assets.save_rollback import Impact, Rehearsal
    from llm_assets.store.protocol import Store

Command = TypeVar("Command", bound=Callable[..., Any])


def _selection(command: Command) -> Command:
    for option in (
        click.option("--json", "as_json", is_flag=True, help="For machines."),
        click.option("--identity", "prefix", default="", help="Its first digits."),
        click.option("--stage", help="Only of this stage."),
        click.option("-r", "--recipe", "recipe_path", help="Only of this recipe as it stands."),
    ):
        command = option(command)
    return command


def _courses(recipe_path: str | None, stage: str | None, prefix: str) -> list[Course]:
    from llm_assets.checkpoint_rows import find_courses

    return find_courses(
        open_store(store_url(), create=False),
        recipe=_recipe(recipe_path),
        stage=stage,
        prefix=prefix,
    )


def _recipe(path: str | None) -> Recipe | None:
    if path is None:
        return None
    from llm_assets.recipe import load_recipe

    return load_recipe(path)


@click.group()
def checkpoints() -> None:
    """In-training saves: look, prove, go back; and artifacts in their place."""


@checkpoints.command("ls")
@_selection
def list_(recipe_path: str | None, stage: str | None, prefix: str, as_json: bool) -> int:
    """List the saves of trainings that have not ended, by stage, the newest first."""
    found = _courses(recipe_path, stage, prefix)
    if as_json:
        click.echo(json.dumps({"courses": [course.as_json() for course in found]}, indent=2))
        return 0
    if not found:
        click.echo("no saves: they are there from the first one of a training until its record")
    for course in found:
        _print_course(course)
    return 0


def _print_course(course: Course) -> None:
    click.echo(f"{course.pipeline}/{course.stage}  identity {course.identity}")
    if course.running:
        click.echo(f"  {course.running} trains it now")
    if course.choice is not None:
        choice = course.choice
        click.echo(f"  {choice.who} chose step {choice.step} at {choice.at}: {choice.why}")
    table = [["save", "step", "tokens", "loss", "verdict", "size", "age", "where", ""]]
    table += [_cells(course, save) for save in course.saves]
    for line in columns(table, right=(1, 2, 3, 5, 6)):
        click.echo(f"  {line}")
    if course.goes_on_from is None and course.saves:
        click.echo("  no healthy save: a run stops and asks; see `checkpoints rollback`")


def _cells(course: Course, save: SaveInfo) -> list[str]:
    notes = []
    if save is course.goes_on_from:
        notes.append("goes on from here")
    if save is course.best:
        notes.append(f"best by {', '.join(f'{n} ({w})' for n, w in course.criteria.items())}")
    if save.verdict in ("review", "corrupt"):
        notes.append("; ".join(save.health.reasons if save.health else (save.problem,)))
    manifest = save.manifest
    if manifest is None:
        row = [save.path.name, str(save.step), "", "", save.verdict, "", ""]
        return [*row, ", ".join(save.places), "; ".join(notes)]
    made = datetime.datetime.fromisoformat(manifest.created_at)
    seconds = (datetime.datetime.now(datetime.UTC) - made).total_seconds()
    return [
        save.path.name,
        str(save.step),
        f"{int(manifest.counters.get('tokens', 0)):,}",
        f"{manifest.metrics['loss']:.4f}" if "loss" in manifest.metrics else "",
        save.verdict,
        size(manifest.size_bytes),
        age(seconds),
        ", ".join(save.places),
        "; ".join(notes),
    ]


@checkpoints.command()
@_selection
@click.option("--step", type=int, help="Else the save that a run would go on from.")
def show(
    recipe_path: str | None, stage: str | None, prefix: str, as_json: bool, step: int | None
) -> int:
    """Show one save: lineage, metrics, health with every check, environment, files."""
    from llm_assets.checkpoint_rows import one_course, save_row

    course = one_course(_courses(recipe_path, stage, prefix))
    save = course.save(step)
    row = save_row(save)
    row |= {"identity": course.identity, "stage": course.stage, "pipeline": course.pipeline}
    if save.manifest is not None:
        row["files"] = {name: dict(entry) for name, entry in save.manifest.files.items()}
        row["architecture"] = dict(save.manifest.architecture)
        row["data"] = dict(save.manifest.data)
    row["checks"] = dict(save.health.checks) if save.health else {}
    if as_json:
        click.echo(json.dumps(row, indent=2))
        return 0
    for name, value in row.items():
        if isinstance(value, dict):
            click.echo(f"{name}:")
            for key, entry in value.items():
                click.echo(f"  {key}: {json.dumps(entry) if isinstance(entry, dict) else entry}")
        else:
            click.echo(f"{name}: {value}")
    return 0


@checkpoints.command()
@_selection
@click.option("--step", type=int, help="Only this one.")
def verify(
    recipe_path: str | None, stage: str | None, prefix: str, as_json: bool, step: int | None
) -> int:
    """Prove saves again, each in a process of its own; of those that are in the store only, the
    files, by the server's checksums. Exit 1 when one is corrupt."""
    from llm_assets.checkpoints.remote import prove_copy

    rows = []
    for course in _courses(recipe_path, stage, prefix):
        for save in course.saves if step is None else [course.save(step)]:
            apart = course.remote if "machine" not in save.places else None
            proved = prove(save) if apart is None else prove_copy(apart, save)
            where = {"stage": course.stage, "identity": course.identity}
            rows.append({**where, "places": list(save.places), **proved})
    if as_json:
        click.echo(json.dumps({"saves": rows}, indent=2))
    for row in rows if not as_json else ():
        why = f": {'; '.join(row['reasons'])}" if row["reasons"] else ""
        click.echo(f"{row['stage']} {row['name']} {row['verdict']}{why}")
    return 1 if any(row["verdict"] == "corrupt" for row in rows) else 0


def prove(save: SaveInfo) -> dict[str, Any]:
    """The verdict on a save by a fresh process; it stands in the save's health.json too."""
    done = subprocess.run(
        [sys.executable, "-m", "llm_assets.stages.save_checks", str(save.path)],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )
    lines = done.stdout.splitlines()
    if not lines:
        return {"name": save.path.name, "verdict": "corrupt", "reasons": [done.stderr[-500:]]}
    return {"name": save.path.name, **json.loads(lines[-1])}


@checkpoints.command()
@_selection
@click.option("--step", type=int, help="Go on from this save.")
@click.option("--best", "take_best", is_flag=True, help="From the best one by the recipe.")
@click.option("--restart", is_flag=True, help="Consent to a start from the first step.")
@click.option("--why", default="", help="Recorded; needed unless --dry-run.")
@click.option("--who", help="Recorded; default: you.")
@click.option("--dry-run", is_flag=True, help="Rehearse and say what it would cost, no more.")
@click.option(
    "--rehearse/--no-rehearse",
    default=None,
    help="Take one step from a copy first; by itself with -r, for saves up to 2 GiB.",
)
def rollback(
    recipe_path: str | None,
    stage: str | None,
    prefix: str,
    as_json: bool,
    step: int | None,
    take_best: bool,
    restart: bool,
    why: str,
    who: str | None,
    dry_run: bool,
    rehearse: bool | None,
) -> int:
    """Go back: the next run goes on from an earlier save, weights and loop state together.

    The save is copied into a scratch area and proved there first. Newer saves are set aside, not
    deleted. Refused while a process trains the same identity."""
    from llm_assets.checkpoint_rows import one_course
    from llm_assets.guards import me
    from llm_assets.save_rollback import impact_of, roll_back
    from llm_assets.save_rollback import rehearse as try_out

    if sum((step is not None, take_best, restart)) != 1:
        raise click.UsageError("give one of --step N, --best and --restart")
    if not why and not dry_run:
        raise click.UsageError("give --why: a rollback says why; or --dry-run")
    store = open_store(store_url(), create=False)
    course = one_course(_courses(recipe_path, stage, prefix))
    target = None if restart else _target(course, step)
    job = _job_for(course, target, _recipe(recipe_path), store, rehearse)
    rehearsal = None if target is None else try_out(target, job, course.remote)
    impact = impact_of(course, target, store)
    if not dry_run:
        roll_back(store, course, target, who=who or me(), why=why, rehearsal=rehearsal)
    _tell_rollback(course, impact, rehearsal, done=not dry_run, as_json=as_json)
    return 0 if rehearsal is None or rehearsal.passed else 1


def _target(course: Course, step: int | None) -> SaveInfo:
    if step is not None:
        return course.save(step)
    if course.best is None:
        raise click.UsageError(f"no save has {', '.join(course.criteria)}: give --step")
    return course.best


def _job_for(
    course: Course,
    target: SaveInfo | None,
    recipe: Recipe | None,
    store: Store,
    wanted: bool | None,
) -> StageJob | None:
    """The stage's job when a step can be taken from the save: its recipe is known, and it is cheap
    or asked for."""
    from llm_assets.engine import build_job
    from llm_assets.planning import make_plan
    from llm_assets.save_rollback import REHEARSED_BYTES

    if target is None or target.manifest is None or wanted is False:
        return None
    if recipe is None:
        if wanted:
            raise click.UsageError("--rehearse needs the recipe: give -r")
        return None
    if wanted is None and target.manifest.size_bytes > REHEARSED_BYTES:
        return None
    plan = make_plan(recipe, store)
    return build_job(plan, course.stage, store, run_id="rehearsal")


def _tell_rollback(
    course: Course, impact: Impact, rehearsal: Rehearsal | None, *, done: bool, as_json: bool
) -> None:
    if as_json:
        document = {
            "identity": course.identity,
            "stage": course.stage,
            "done": done,
            "impact": impact.as_json(),
            "rehearsal": None if rehearsal is None else rehearsal.as_json(),
        }
        click.echo(json.dumps(document, indent=2))
        return
    if rehearsal is not None:
        step = {None: "no step tried", True: "one step taken", False: "no step possible"}
        reasons = f": {'; '.join(rehearsal.reasons)}" if rehearsal.reasons else ""
        said = f" ({rehearsal.said})" if rehearsal.said else ""
        tried = f"{step[rehearsal.stepped]}{said}"
        click.echo(f"in a scratch area: {rehearsal.verdict}{reasons}; {tried}")
    cost = "unknown cost" if impact.cost_usd is None else f"${impact.cost_usd:.4f}"
    where = f"step {impact.to_step}" if impact.to_step else "the first step"
    click.echo(
        f"{'the next run goes on from' if done else 'would go on from'} {where}: "
        f"{impact.steps} steps, {impact.tokens:,} tokens, {impact.seconds:.0f} s, {cost} again"
    )
    if impact.set_aside:
        aside = "set aside" if done else "would be set aside"
        click.echo(f"{aside}: {', '.join(impact.set_aside)}")


@checkpoints.command()
@click.argument("artifact", required=False)
@click.option("-r", "--recipe", "recipe_path", default="tiny", help="A path, or a packaged name.")
@click.option("--stage", required=True, help="In whose place it stands from now on.")
@click.option("--why", required=True, help="Recorded.")
@click.option("--who", help="Recorded; default: you.")
@click.option("--accept-differences", "accept", is_flag=True, help="Although a migration is due.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def adopt(
    artifact: str | None,
    recipe_path: str,
    stage: str,
    why: str,
    who: str | None,
    accept: bool,
    as_json: bool,
) -> int:
    """Let a stored ARTIFACT stand for what a stage gave; nothing above it is trained again.

    Without ARTIFACT: the newest whole output of the stage beside the one that stands now. It is
    compared first: parameters, layers, tokenizer, chat template. `llm-assets plan` shows what runs
    then."""
    from llm_assets.adopting import adopt as choose_artifact
    from llm_assets.adopting import last_good
    from llm_assets.errors import NotFoundError
    from llm_assets.guards import me
    from llm_assets.planning import make_plan
    from llm_assets.recipe import load_recipe
    from llm_assets.store.showing import find_artifact

    store: Any = open_store(store_url(), create=False)
    plan = make_plan(load_recipe(recipe_path), store)
    if stage not in plan.nodes:
        raise click.UsageError(f"unknown stage {stage!r}: one of {', '.join(plan.nodes)}")
    found = find_artifact(store, artifact) if artifact else last_good(store, plan, stage)
    if found is None:
        raise NotFoundError(f"{plan.recipe.pipeline}/{stage}: no other whole output in the store")
    body = choose_artifact(store, plan, stage, found, who=who or me(), why=why, accept=accept)
    after = make_plan(plan.recipe, store)
    if as_json:
        click.echo(json.dumps({**body, "rerun": after.rerun}, indent=2))
        return 0
    click.echo(f"{plan.recipe.pipeline}/{stage}: {found} from now on")
    click.echo(f"to run: {', '.join(after.rerun) or 'nothing'}")
    return 0


@checkpoints.command()
@click.argument("found")
@click.argument("expected")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def compare(found: str, expected: str, as_json: bool) -> int:
    """Compare two checkpoints: artifacts of the store or folders, saves too. Exit 1 when they
    differ; each difference says which migration it needs."""
    from pathlib import Path

    from llm_assets.compatibility import differences, profile_of
    from llm_assets.store.showing import find_artifact

    folders = []
    for text in (found, expected):
        if Path(text).is_dir():
            folders.append(Path(text))
        else:
            store: Any = open_store(store_url(), create=False)
            folders.append(store.fetch(find_artifact(store, text)))
    wrong = differences(*(profile_of(folder) for folder in folders))
    if as_json:
        rows = [{n: getattr(d, n) for n in d.__dataclass_fields__} for d in wrong]
        click.echo(json.dumps({"differences": rows}, indent=2))
    else:
        click.echo("\n".join(d.text() for d in wrong) or "no difference")
    return 1 if wrong else 0


@checkpoints.command()
@_selection
@click.option("--step", type=int, help="Only this one.")
def migrate(
    recipe_path: str | None, stage: str | None, prefix: str, as_json: bool, step: int | None
) -> int:
    """Write saves of an older format anew, in today's. The old ones are set aside, not changed."""
    from llm_assets.save_migration import migrate_folder

    store = open_store(store_url(), create=False)
    rows = []
    for identity, folder in store.checkpoint_folders().items():
        if identity.startswith(prefix):
            rows += migrate_folder(folder, identity=identity, stage=stage or "", step=step)
    if as_json:
        click.echo(json.dumps({"migrated": rows}, indent=2))
    elif not rows:
        click.echo("nothing to migrate")
    for row in rows if not as_json else ():
        click.echo(f"{row['path']}: format {row['from']} to {row['to']}; {row['kept']}")
    return 0


@checkpoints.command()
@click.option("-r", "--recipe", "recipe_path", help="Only of this recipe's pipeline.")
@click.option("--sample", "count", default=4, show_default=True, help="How many.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def reverify(recipe_path: str | None, count: int, as_json: bool) -> int:
    """Prove stored checkpoints again: bytes, and their number on a fixed batch, as each night's
    job does. Exit 1 on damage or drift."""
    from llm_assets.reverifying import reverify as prove_again

    recipe = _recipe(recipe_path)
    found = prove_again(
        open_store(store_url(), create=False),
        pipelines=None if recipe is None else [recipe.pipeline],
        count=count,
        say=(lambda text: None) if as_json else click.echo,
    )
    if as_json:
        click.echo(json.dumps({"checkpoints": [entry.as_json() for entry in found]}, indent=2))
    elif not found:
        click.echo("no stored checkpoint")
    return 1 if any(entry.alarming for entry in found) else 0
