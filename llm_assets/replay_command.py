"""`llm-assets replay`: run a manifest again, from its sources, into second records."""

from __future__ import annotations

from pathlib import Path

import click

from llm_assets.manifest_command import newest_replay
from llm_assets.manifests import find_manifest, recipe_of
from llm_assets.places import store_url
from llm_assets.planning import make_plan
from llm_assets.replaying import begin_replay, end_replay, other_code
from llm_assets.report_card import wide_console
from llm_assets.reproduction import compare
from llm_assets.store import open_store


@click.command()
@click.argument("manifest")
@click.option(
    "--folder",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=Path(),
    help="Where relative paths of its recipe start; default: here.",
)
@click.option("--any-code", is_flag=True, help="Also when code or libraries are not the same.")
def replay(manifest: str, folder: Path, any_code: bool) -> int:
    """Run MANIFEST again from its sources, and compare. Exit 0: reproduced; 1: not; 3: refused.

    Nothing is taken from the first run: every stage runs, into a second record. A replay that was
    interrupted goes on.
    """
    store = open_store(store_url(), create=False)
    original = find_manifest(store, manifest)
    recipe = recipe_of(original, folder.resolve())
    console = wide_console()
    changed = other_code(recipe, original, store)
    if changed and not any_code:
        for stage, what in changed.items():
            console.print(
                f"refused: {stage}: other code than in the manifest: {', '.join(what)}",
                markup=False,
            )
        console.print(
            "  rule: reproduced means the same code and libraries\n"
            "  next: check out the code that wrote it, or --any-code to see what comes out"
        )
        return 3
    from llm_assets.run_command import run_plan

    name = begin_replay(store, original)
    console.print(f"replay {name} of {original.short}", highlight=False)
    code = run_plan(make_plan(recipe, store, replay=name), store, console)
    after = make_plan(recipe, store, replay=name)
    release = after.stages["release"].artifact
    if release is None:
        return code or 1
    end_replay(store, original, name, release)
    result = compare(original, newest_replay(store, original))
    console.print(f"\n{original.short} and {release.short}: {result.text}", markup=False)
    return 0 if result.reproduced else 1
