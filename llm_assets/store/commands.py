"""`llm-assets store`: look into the store, move artifacts in and out, check it, clean it."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from llm_assets.errors import RefusedError, message
from llm_assets.places import store_url
from llm_assets.store import open_store
from llm_assets.store.showing import age, columns, find_artifact, size

Command = TypeVar("Command", bound=Callable[..., Any])


def _store_option(command: Command) -> Command:
    return click.option(
        "--store",
        "url",
        metavar="URL",
        help="A folder or s3://bucket/prefix; else $LLM_ASSETS_STORE, or the project's own.",
    )(command)


def _json_option(command: Command) -> Command:
    return click.option("--json", "as_json", is_flag=True, help="For machines.")(command)


def _open(url: str | None) -> Any:
    """A store that exists. `Any`: the commands use more of it than the Protocol promises."""
    return open_store(url or store_url(), create=False)


@click.group()
def store() -> None:
    """Look into the artifact store."""


@store.command("ls")
@_store_option
@click.option("--type", "kind", help="Only artifacts of this type.")
@click.option("--stage", help="Only outputs of this stage.")
@_json_option
def list_artifacts(url: str | None, kind: str | None, stage: str | None, as_json: bool) -> None:
    """List the artifacts, the newest first."""
    from llm_assets.store.listing import list_rows

    rows = [
        row
        for row in list_rows(_open(url))
        if (not kind or row.type == kind) and (not stage or stage in row.stages)
    ]
    if as_json:
        click.echo(json.dumps([row.as_dict() for row in rows], indent=2))
        return
    if not rows:
        click.echo("no artifacts")
        return
    table = [("artifact", "type", "stage", "files", "size", "age", "refs")]
    table += [
        (
            row.artifact[:12],
            row.type,
            ", ".join(row.stages) or "-",
            str(row.num_files),
            size(row.size_bytes),
            age(row.age_s),
            ", ".join(row.refs),
        )
        for row in rows
    ]
    for line in columns(table, right=(3, 4, 5)):
        click.echo(line)


@store.command()
@click.argument("artifact")
@_store_option
@_json_option
def show(artifact: str, url: str | None, as_json: bool) -> None:
    """Show an artifact's files, metadata, records and refs. ARTIFACT: a hash, its first digits
    (six or more), or a ref."""
    from llm_assets.store.listing import describe, describe_lines

    opened = _open(url)
    found = describe(opened, find_artifact(opened, artifact))
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    for line in describe_lines(found):
        click.echo(line)


@store.command()
@click.argument("folder", type=click.Path(path_type=Path))
@_store_option
@click.option("--type", "kind", required=True, help="The artifact's type, such as checkpoint.")
@click.option("--metadata", default="{}", metavar="JSON", help="A JSON object, or @FILE with one.")
def put(folder: Path, url: str | None, kind: str, metadata: str) -> None:
    """Store FOLDER as an artifact, and print its hash."""
    opened = open_store(url or store_url())
    click.echo(opened.put(folder, type=kind, metadata=_metadata(metadata)))


def _metadata(text: str) -> dict[str, Any]:
    try:
        content = Path(text[1:]).read_text() if text.startswith("@") else text
        value = json.loads(content)
    except (OSError, ValueError) as error:
        raise click.BadParameter(str(error), param_hint="--metadata") from error
    if not isinstance(value, dict):
        raise click.BadParameter("a JSON object is needed", param_hint="--metadata")
    return value


@store.command()
@click.argument("artifact")
@click.argument("target", required=False, type=click.Path(path_type=Path))
@_store_option
def get(artifact: str, target: Path | None, url: str | None) -> None:
    """Print the path of an artifact's verified, read-only folder; with TARGET, copy it there.

    ARTIFACT: a hash, its first digits (six or more), or a ref."""
    opened = _open(url)
    folder = opened.fetch(find_artifact(opened, artifact))
    if target is None:
        click.echo(str(folder))
        return
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise RefusedError(
            message(
                where=str(target),
                found="something there already",
                rule="an artifact is copied into a new or empty folder",
                remedy="give another folder",
            )
        )
    from llm_assets.store.directory_backend import disk_errors

    total = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    with disk_errors(target, total):
        shutil.copytree(folder, target, copy_function=shutil.copyfile, dirs_exist_ok=True)
    click.echo(str(target))


@store.command()
@click.argument("artifacts", nargs=-1)
@_store_option
@click.option("--deep", is_flag=True, help="S3: download everything and hash it here.")
@_json_option
@click.pass_context
def verify(
    context: click.Context, artifacts: tuple[str, ...], url: str | None, deep: bool, as_json: bool
) -> None:
    """Check ARTIFACTS, or the whole store with its records and refs. Exits 1 when anything is
    damaged, and names artifact, file and stage."""
    from llm_assets.store.checking import check

    opened = _open(url)
    chosen = [find_artifact(opened, text) for text in artifacts] or None
    report = check(opened, chosen, deep=deep)
    if as_json:
        click.echo(json.dumps(report.as_dict(), indent=2))
    else:
        for problem in report.problems:
            click.echo(problem.line)
        click.echo(report.summary)
    if report.problems:
        context.exit(1)


@store.command()
@_store_option
@_json_option
def stats(url: str | None, as_json: bool) -> None:
    """Show the root, and the bytes before and after deduplication."""
    from llm_assets.store.stats import read_stats

    found = read_stats(_open(url))
    if as_json:
        click.echo(json.dumps(found.as_dict(), indent=2))
        return
    rows = [
        ("root", found.root),
        ("artifacts", str(found.artifacts)),
        ("records", str(found.records)),
        ("refs", str(found.refs)),
        ("objects", f"{found.objects}, {size(found.size_bytes)}"),
        ("logical", f"{size(found.logical_bytes)} (deduplication saves {found.saved_share:.0%})"),
        ("saves", f"{size(found.saves_bytes)} of trainings that have not ended"),
    ]
    for line in columns(rows):
        click.echo(line)


@store.command()
@_store_option
@click.option("--keep-newest", type=click.IntRange(1), metavar="N", help="Of each stage.")
@click.option("--keep-days", type=click.FloatRange(0), metavar="D", help="Everything younger.")
@click.option(
    "--keep-best",
    multiple=True,
    metavar="METRIC[:min]",
    help="The best of each stage by a metric. May be given several times.",
)
@click.option("--keep", multiple=True, metavar="ARTIFACT", help="This one and its lineage.")
@click.option(
    "--grace-hours",
    type=click.FloatRange(0),
    default=24.0,
    show_default=True,
    help="What is younger stays: nothing reaches an artifact between its put and its record.",
)
@click.option("--dry-run", is_flag=True, help="Print what would be deleted, and stop.")
@click.option("--yes", is_flag=True, help="Delete without asking.")
@_json_option
def gc(
    url: str | None,
    keep_newest: int | None,
    keep_days: float | None,
    keep_best: tuple[str, ...],
    keep: tuple[str, ...],
    grace_hours: float,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Delete what nothing reaches. Refs, pins, running leases, and all that ever was in production
    keep their artifacts and lineage. So does every record, unless a --keep option is given: then
    records that no option keeps expire. Prints what it would delete before it does."""
    from llm_assets.store.gc import Settings, collect, make_plan
    from llm_assets.store.listing import plan_lines
    from llm_assets.store.retention import BestBy, Retention

    opened = _open(url)
    settings = Settings(
        retention=Retention(
            newest=keep_newest,
            days=keep_days,
            best=tuple(BestBy.parse(text) for text in keep_best),
        ),
        grace_s=grace_hours * 3600,
        also=tuple(find_artifact(opened, text) for text in keep),
    )
    plan = make_plan(opened, settings)
    if not as_json:
        for line in plan_lines(plan):
            click.echo(line)
    if not dry_run and not plan.is_empty:
        if not yes:
            if as_json or not sys.stdin.isatty():
                raise click.UsageError("give --yes to delete without asking, or --dry-run")
            click.confirm("Delete this?", abort=True)
        plan = collect(opened, settings, plan)
        if not as_json:
            click.echo(f"deleted: {len(plan.artifacts)} artifacts, {size(plan.size_bytes)}")
    if as_json:
        click.echo(json.dumps({**plan.as_dict(), "deleted": not dry_run}, indent=2))


@store.command()
@_store_option
@click.option("--encryption", default="AES256", show_default=True, help="Or aws:kms.")
@click.option("--kms-key", metavar="ID", help="With aws:kms; else the account's default key.")
@click.option("--create-bucket", is_flag=True, help="S3: make the bucket when there is none.")
@click.option("--keep-bucket", is_flag=True, help="S3: leave the bucket's settings as they are.")
def init(
    url: str | None, encryption: str, kms_key: str | None, create_bucket: bool, keep_bucket: bool
) -> None:
    """Make a store. In S3, also set and check encryption, versioning and lifecycle rules, and prove
    that the server refuses a second writer and a wrong checksum."""
    target = url or store_url()
    if not target.startswith("s3://"):
        click.echo(f"store: {open_store(target).url}")
        return
    from llm_assets.store.bucket import initialize

    for line in initialize(
        target,
        encryption=encryption,
        kms_key=kms_key,
        create_bucket=create_bucket,
        configure_bucket=not keep_bucket,
    ):
        click.echo(line)
