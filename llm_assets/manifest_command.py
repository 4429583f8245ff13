"""`llm-assets manifest show`, `llm-assets manifest diff` and `llm-assets reproduce`."""

from __future__ import annotations

import json
from typing import Any

import click
from rich import box
from rich.table import Table

from llm_assets.errors import NotFoundError
from llm_assets.graph import STAGES
from llm_assets.manifests import Manifest, differences, find_manifest, load_manifest
from llm_assets.places import store_url
from llm_assets.replaying import replays_of
from llm_assets.report_card import wide_console
from llm_assets.reproduction import compare
from llm_assets.store import open_store
from llm_assets.store.protocol import Store


@click.group()
def manifest() -> None:
    """Manifests: the record of one whole pipeline state, enough to replay it."""


@manifest.command()
@click.argument("name")
@click.option("--json", "as_json", is_flag=True, help="The manifest itself.")
def show(name: str, as_json: bool) -> None:
    """Show the manifest NAME: a release's hash, a manifest file, a ref, or a pipeline."""
    found = find_manifest(open_store(store_url(), create=False), name)
    if as_json:
        click.echo(json.dumps(found.body, indent=2))
        return
    console = wide_console()
    title = f"{found.pipeline}: manifest {found.short}"
    table = Table(title=title, box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("stage", "artifact", "identity", "source"):
        table.add_column(heading, no_wrap=True)
    for heading in ("time", "cost"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("run", no_wrap=True)
    for stage, entry in sorted(found.stages.items(), key=lambda item: _place(item[0])):
        table.add_row(
            stage,
            str(entry.get("artifact"))[:12],
            str(entry.get("identity") or entry.get("status"))[:12],
            str(entry.get("source_hash") or "")[:12],
            f"{entry['wall_s']:.1f} s" if "wall_s" in entry else "",
            f"${entry['cost_usd']:.4f}" if "cost_usd" in entry else "",
            str(entry.get("run_id") or "")[:8],
        )
    console.print(table)
    body = found.body
    console.print(f"{body.get('decision')}  seed {body.get('seed')}", highlight=False)
    for line in [*body.get("reasons", []), *body.get("warnings", [])]:
        console.print(f"  {line}", markup=False, highlight=False)
    failed = [gate for gate in body.get("gates", []) if gate.get("blocks", not gate["passed"])]
    console.print(
        f"{len(body.get('gates', []))} gates, {len(failed)} failed, "
        f"{len(body.get('overrides', []))} overridden; rollback plan for "
        f"{len(body.get('rollback_plan') or {})} stages",
        highlight=False,
    )


def _place(stage: str) -> int:
    """A stage's place in the graph; one that this version does not know comes last."""
    return STAGES[stage].number if stage in STAGES else len(STAGES)


@manifest.command()
@click.argument("a")
@click.argument("b")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def diff(a: str, b: str, as_json: bool) -> None:
    """Where the manifests A and B differ: recipe, code, inputs, outputs, metrics."""
    store = open_store(store_url(), create=False)
    one, other = find_manifest(store, a), find_manifest(store, b)
    rows = list(differences(one, other))
    if as_json:
        document = [
            {"stage": stage or None, "what": what, "a": before, "b": after}
            for stage, what, before, after in rows
        ]
        click.echo(json.dumps(document, indent=2))
        return
    if not rows:
        click.echo("no difference")
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("stage", "what", one.short, other.short):
        table.add_column(heading, overflow="fold")
    for stage, what, before, after in rows:
        table.add_row(stage, what, _shown(before), _shown(after))
    wide_console().print(table)


def _shown(value: Any) -> str:
    if value is None:
        return "—"
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    return text[:12] if len(text) == 64 else text


@click.command()
@click.argument("a")
@click.argument("b", required=False)
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def reproduce(a: str, b: str | None, as_json: bool) -> int:
    """Was manifest A reproduced by B? Without B: by its newest replay. Exit 0: yes; 1: no."""
    store = open_store(store_url(), create=False)
    original = find_manifest(store, a)
    replay = find_manifest(store, b) if b is not None else newest_replay(store, original)
    result = compare(original, replay)
    if as_json:
        click.echo(json.dumps({"a": original.name, "b": replay.name, **result.as_json()}, indent=2))
    else:
        for entry in result.stages:
            why = f"  {'; '.join(entry.why)}" if entry.why else ""
            click.echo(f"{entry.stage:<22} {entry.verdict}{why}")
        click.echo(f"{original.short} and {replay.short}: {result.text}")
    return 0 if result.reproduced else 1


def newest_replay(store: Store, original: Manifest) -> Manifest:
    """The manifest in which the newest replay of `original` ended."""
    ended = [release for release in replays_of(store, original).values() if release is not None]
    if not ended:
        raise NotFoundError(
            f"manifest {original.short}: it was never replayed\n"
            "  rule: a manifest is compared with another one\n"
            f"  next: `llm-assets replay {original.short}`, or name the other manifest"
        )
    return load_manifest(store, ended[-1])
