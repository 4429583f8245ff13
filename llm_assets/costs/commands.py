"""`llm-assets estimate`, `llm-assets costs` and `llm-assets budget`."""

from __future__ import annotations

import getpass
import json
import os
from pathlib import Path
from typing import Literal

import click
from rich import box
from rich.console import Console
from rich.table import Table

from llm_assets.costs.budget import budget_log, current_limit, set_limit, standing
from llm_assets.costs.devices import find_device
from llm_assets.costs.entries import ledger_entries
from llm_assets.costs.estimate import DEFAULT_UTILIZATION, price, training_flops
from llm_assets.costs.parameters import from_folder
from llm_assets.costs.quantities import (
    parse_count,
    parse_rate,
    parse_usd,
    parse_utilization,
    show_count,
    show_seconds,
    show_usd,
)
from llm_assets.costs.report import GROUPINGS, By, CostRow, as_csv, cost_rows, total_row
from llm_assets.errors import UserError
from llm_assets.places import store_url
from llm_assets.recipe import Recipe, load_recipe
from llm_assets.store import open_store


@click.command()
@click.option("--params", metavar="N", help="Parameters: 135M, 7B.")
@click.option("--config", "config_path", type=Path, help="A config.json, instead of --params.")
@click.option("--tokens", metavar="T", help="Training tokens: 600M, 2T.")
@click.option("--device", metavar="NAME", help="One of the device table: H100, A100, cpu.")
@click.option("--peak-tflops", type=float, help="Overrides the device table: 10^12 FLOP/s.")
@click.option("--utilization", metavar="SHARE", default=str(DEFAULT_UTILIZATION), show_default=True)
@click.option("--rate", metavar="USD", help="Rent of one device, US dollars an hour.")
@click.option("--devices", metavar="N", default="1", show_default=True)
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def estimate(
    params: str | None,
    config_path: Path | None,
    tokens: str | None,
    device: str | None,
    peak_tflops: float | None,
    utilization: str,
    rate: str | None,
    devices: str,
    as_json: bool,
) -> None:
    """What training costs: 6 x parameters x tokens, at a device's throughput and rent."""
    parameters = _parameters(params, config_path)
    num_tokens = parse_count(_given(tokens, "--tokens", "2T"), where="--tokens")
    kind = find_device(
        _given(device, "--device", "H100"), where="--device", peak_tflops=peak_tflops
    )
    usd_per_hour = parse_rate(_given(rate, "--rate", "2.50"), where="--rate")
    num_devices = parse_count(devices, where="--devices")
    share = parse_utilization(utilization, where="--utilization")
    result = price(
        training_flops(parameters, num_tokens),
        device=kind,
        utilization=share,
        devices=num_devices,
        usd_per_hour=usd_per_hour,
    )
    if as_json:
        document = {
            "flops": result.flops,
            "gpu_hours": result.gpu_hours,
            "cost_usd": result.cost_usd,
            "wall_s": result.wall_s,
            "params": parameters,
            "tokens": num_tokens,
            "device": kind.name,
            "peak_tflops": kind.peak_tflops,
            "utilization": share,
            "devices": num_devices,
            "usd_per_hour": usd_per_hour,
        }
        click.echo(json.dumps(document, indent=2))
        return
    click.echo(
        f"{show_count(parameters)} parameters x {show_count(num_tokens)} tokens x 6 = "
        f"{result.flops:.3e} FLOP\n"
        f"{num_devices} x {kind.name}: {kind.peak_tflops:g} TFLOP/s at {share:.0%}\n"
        f"{result.gpu_hours:,.{0 if result.gpu_hours >= 100 else 3}f} device-hours, "
        f"{show_seconds(result.wall_s)} of wall time, {show_usd(result.cost_usd)}"
    )


def _given(value: str | None, option: str, example: str) -> str:
    if value is None or not value.strip():
        rule = {
            "--rate": "no rent is assumed: prices differ by provider and by the month",
            "--tokens": "the number of training tokens is given",
            "--device": "the device is given",
        }[option]
        raise UserError(
            where=option, found="nothing", rule=rule, remedy=f"add {option} {example}, for example"
        )
    return value


def _parameters(params: str | None, config_path: Path | None) -> int:
    if (params is None) == (config_path is None):
        raise UserError(
            where="--params",
            found="nothing" if params is None else "both --params and --config",
            rule="the parameters are given once, as a number or as a config.json",
            remedy="add --params 7B, or --config with a model folder, for example",
        )
    if config_path is not None:
        return from_folder(config_path).active
    return parse_count(params or "", where="--params")


@click.command()
@click.option("--by", type=click.Choice(GROUPINGS), default="stage", show_default=True)
@click.option("--campaign", metavar="NAME", help="Of one campaign only.")
@click.option("--pipeline", metavar="NAME", help="Of one pipeline only.")
@click.option("--run", "run_id", metavar="ID", help="Of one run only.")
@click.option("--json", "as_json", is_flag=True, help="For machines.")
@click.option("--csv", "csv_wanted", is_flag=True, help="For spreadsheets.")
def costs(
    by: By,
    campaign: str | None,
    pipeline: str | None,
    run_id: str | None,
    as_json: bool,
    csv_wanted: bool,
) -> None:
    """The money that was spent; attempts that failed, were cancelled or still run included."""
    if as_json and csv_wanted:
        raise click.UsageError("--json and --csv exclude each other")
    entries = [
        entry
        for entry in ledger_entries(open_store(store_url()), campaign)
        if pipeline in (None, entry.info.pipeline) and run_id in (None, entry.info.run_id)
    ]
    rows, total = cost_rows(entries, by), total_row(entries)
    if csv_wanted:
        click.echo(as_csv(rows, by), nl=False)
        return
    if as_json:
        document = {
            "by": by,
            "rows": [row.as_json(by) for row in rows],
            "total": {
                name: value for name, value in total.as_json("name").items() if name != "name"
            },
        }
        click.echo(json.dumps(document, indent=2))
        return
    if not rows:
        named = {"campaign": campaign, "pipeline": pipeline, "run": run_id}
        asked = ", ".join(f"{name} {value}" for name, value in named.items() if value is not None)
        click.echo(f"no attempt of {asked}" if asked else "nothing was spent yet")
        return
    _print(rows, total, by)


def _print(rows: list[CostRow], total: CostRow, by: By) -> None:
    lines = [(row.name, *_cells(row)) for row in rows]
    last = ("total", *_cells(total))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_footer=True)
    headings = (by, "attempts", "device-hours", "USD", "wasted", "estimated", "tokens", "util.")
    kept = [place for place in range(len(headings)) if any(line[place] for line in lines)]
    for place in kept:
        side: Literal["left", "right"] = "right" if place else "left"
        table.add_column(headings[place], footer=last[place], justify=side, no_wrap=True)
    for line in lines:
        table.add_row(*(line[place] for place in kept))
    console = Console()
    # A file or a pipe has no width: numbers must not be cut there.
    console.width = console.width if console.is_terminal else 160
    console.print(table)


def _cells(row: CostRow) -> list[str]:
    running = f" ({row.running} running)" if row.running else ""
    return [
        f"{row.attempts}{running}",
        f"{row.usage.gpu_hours:.3f}",
        _usd(row.usage.cost_usd),
        _usd(row.wasted_usd) if row.wasted_usd else "",
        "" if row.estimate_usd is None else _usd(row.estimate_usd),
        show_count(row.usage.tokens) if row.usage.tokens else "",
        "" if row.utilization is None else f"{row.utilization:.1%}",
    ]


def _usd(value: float) -> str:
    return show_usd(value).removesuffix(" USD")


@click.group()
def budget() -> None:
    """Limits of campaigns, and their changes."""


_RECIPE = click.option(
    "-r", "--recipe", "recipe_path", default="tiny", help="A path, or a packaged name."
)
_CAMPAIGN = click.option("--campaign", metavar="NAME", help="Default: the recipe's.")


def _campaign(recipe: Recipe, campaign: str | None) -> tuple[str, float | None, str | None]:
    """The campaign; what the recipe says about it, and its pipeline, when it is the recipe's."""
    if campaign is None or campaign == recipe.campaign:
        return recipe.campaign, recipe.budget.limit_usd, recipe.pipeline
    return campaign, None, None


@budget.command()
@_RECIPE
@_CAMPAIGN
@click.option("--json", "as_json", is_flag=True, help="For machines.")
def show(recipe_path: str, campaign: str | None, as_json: bool) -> None:
    """Limit, spent, reserved and left, and how the limit came about."""
    recipe = load_recipe(recipe_path)
    name, recipe_usd, pipeline = _campaign(recipe, campaign)
    store = open_store(store_url())
    limit = current_limit(store, name, recipe_usd, pipeline=pipeline)
    now = standing(store, name, limit)
    log = budget_log(store, name)
    if as_json:
        document = {
            "campaign": name,
            "limit_usd": now.limit_usd,
            "spent_usd": now.spent_usd,
            "reserved_usd": now.reserved_usd,
            "left_usd": now.left_usd,
            "changes": [change.as_json() for change in log],
        }
        click.echo(json.dumps(document, indent=2))
        return
    left = "no limit" if now.left_usd is None else f"{show_usd(now.left_usd)} left"
    of = "" if now.limit_usd is None else f" of {show_usd(now.limit_usd)}"
    click.echo(f"{name}: {left}{of}; {show_usd(now.spent_usd)} spent, ", nl=False)
    click.echo(f"{show_usd(now.reserved_usd)} reserved by running runs")
    for change in log:
        before = "none" if change.before_usd is None else show_usd(change.before_usd)
        after = "none" if change.after_usd is None else show_usd(change.after_usd)
        click.echo(
            f"  {change.at}  {before} → {after}  {change.who} ({change.source}): {change.why}"
        )


# A negative limit is an amount, and an error that says so, not an unknown option.
@budget.command("set", context_settings={"ignore_unknown_options": True})
@click.argument("limit")
@_RECIPE
@_CAMPAIGN
@click.option("--why", required=True, help="Recorded.")
@click.option("--who", help="Recorded; default: you.")
def set_(limit: str, recipe_path: str, campaign: str | None, why: str, who: str | None) -> None:
    """Set a campaign's limit, in US dollars. The change is recorded."""
    recipe = load_recipe(recipe_path)
    name, recipe_usd, pipeline = _campaign(recipe, campaign)
    change = set_limit(
        open_store(store_url()),
        name,
        parse_usd(limit, where="LIMIT"),
        who=who or _me(),
        why=why,
        recipe_usd=recipe_usd,
        pipeline=pipeline,
    )
    before = "none" if change.before_usd is None else show_usd(change.before_usd)
    click.echo(f"{name}: {before} → {show_usd(change.after_usd or 0.0)}, recorded for {change.who}")


def _me() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return os.environ.get("USER", "")
