"""`llm-assets schema`."""

from __future__ import annotations

import json
from pathlib import Path

import click

from llm_assets.recipe import SCHEMA_PATH, json_schema


@click.command()
@click.option("--write", is_flag=True, help="Write it beside the packaged recipes.")
@click.option("--to", type=click.Path(path_type=Path), help="Write it to this file.")
def schema(write: bool, to: Path | None) -> None:
    """Print the JSON schema of a recipe, for editors."""
    text = json.dumps(json_schema(), indent=2, ensure_ascii=False) + "\n"
    target = SCHEMA_PATH if write else to
    if target is None:
        click.echo(text, nl=False)
    else:
        target.write_text(text, encoding="utf-8")
        click.echo(f"wrote {target}")
