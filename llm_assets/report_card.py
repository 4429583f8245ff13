"""The report card of a recipe: each stage, its outcome, time, cost, headline metrics and gates."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from llm_assets.engine import gate_results, gates_of, gates_s
from llm_assets.gates.thresholds import NOT_MEASURED, GateResult
from llm_assets.graph import STAGES
from llm_assets.overriding import overrides_of
from llm_assets.planning import Plan, StagePlan, recipe_argument
from llm_assets.store.protocol import Store

# What a reader wants to see of a stage first; the gated metrics come before these.
_HEADLINES: Mapping[str, tuple[str, ...]] = {
    "shards": ("num_tokens", "duplicate_share"),
    "base_checkpoint": ("held_out_loss", "held_out_perplexity"),
    "midtrained_checkpoint": ("held_out_loss", "held_out_perplexity"),
    "sft_checkpoint": ("held_out_loss",),
    "reward_model": ("margin_mean",),
    "dpo_policy": ("oracle_score",),
    "refined_policy": ("oracle_score", "reward_mean"),
    "eval_report": ("kl_per_token",),
    "quantized_weights": ("size_ratio",),
    "inference_server": ("tokens_per_s", "latency_s"),
    "release": ("ship",),
}


def wide_console() -> Console:
    """The terminal, or 140 columns where the output goes to a file or a pipe."""
    console = Console()
    return console if console.is_terminal else Console(width=140)


def stage_gates(plan: Plan, name: str, store: Store) -> list[tuple[GateResult, bool]]:
    """Each gate of a stage with its verdict, and whether somebody overrode it."""
    mine = plan.stages[name]
    if mine.artifact is None or not gates_of(plan.recipe, name):
        return []
    overridden = overrides_of(store, mine.artifact)
    return [(r, r.name in overridden) for r in gate_results(plan, name, store)]


def all_gates_pass(plan: Plan, store: Store) -> bool:
    """No gate of a present stage blocks what it gave, or it was overridden."""
    return all(
        not result.blocks or overridden
        for name in plan.nodes
        for result, overridden in stage_gates(plan, name, store)
    )


def print_report(
    console: Console, plan: Plan, store: Store, outcomes: Mapping[str, str] | None = None
) -> None:
    """The table, the decision, and the served model's answers. `outcomes`: hit, run or failed for
    each stage of this run; without it the status of the plan."""
    table = Table(title=f"{plan.recipe.pipeline}: report card", box=box.SIMPLE_HEAD, pad_edge=False)
    for heading, justify in (
        ("stage", "left"),
        ("", "left"),
        ("time", "right"),
        ("cost", "right"),
        ("metrics", "left"),
        ("gates", "left"),
    ):
        table.add_column(heading, justify=justify, overflow="fold")  # type: ignore[arg-type]
    total_s = total_usd = measured_s = checked_s = 0.0
    for name in STAGES:
        mine = plan.stages[name]
        if mine.status == "off":
            continue
        gates = stage_gates(plan, name, store)
        checked_s += gates_s(plan, name, store)
        record = mine.record if mine.status == "hit" else None
        if record is not None:
            total_s += record.wall_s
            total_usd += record.cost_usd
            measured_s += record.measure_s
        table.add_row(
            name,
            (outcomes or {}).get(name, mine.status),
            f"{record.wall_s:.1f} s" if record else "",
            f"${record.cost_usd:.4f}" if record else "",
            _metrics(mine, gates),
            _gates(gates),
        )
    table.add_section()
    table.add_row("all", "", f"{total_s:.1f} s", f"${total_usd:.4f}", "", "")
    console.print(table)
    if measured_s:
        console.print(
            f"The gates took {checked_s:.1f} s, {checked_s / total_s:.0%} of the stages' time: "
            f"{measured_s:.1f} s in the stages, {checked_s - measured_s:.1f} s beside them",
            highlight=False,
        )
    _print_decision(console, plan, store)
    _print_answers(console, plan, store)


def _metrics(mine: StagePlan, gates: list[tuple[GateResult, bool]]) -> str:
    if mine.status not in ("hit", "pinned") or mine.record is None:
        return "; ".join(mine.reasons) if mine.status != "hit" else ""
    names = [result.name for result, _ in gates]
    names += [name for name in _HEADLINES.get(mine.name, ()) if name not in names]
    found = mine.record.metrics
    return ", ".join(f"{name} {found[name]['value']:.4g}" for name in names if name in found)


def _gates(gates: list[tuple[GateResult, bool]]) -> str:
    if not gates:
        return ""
    told = [(result, overridden) for result, overridden in gates if not result.passed]
    passed = len(gates) - len(told)
    lines = [f"[green]{passed} passed[/green]"] if passed or not told else []
    # Several comparisons may lack the same reference: one line says so.
    names: dict[tuple[str, str], list[str]] = {}
    for result, overridden in told:
        style = "yellow" if overridden or not result.blocks else "red"
        why = f"{escape(result.why)}{' (overridden)' if overridden else ''}"
        names.setdefault((style, why), []).append(result.name)
    lines += [f"[{style}]{', '.join(of)}: {why}[/]" for (style, why), of in names.items()]
    return "\n".join(lines)


def _read(plan: Plan, store: Store, name: str, file: str) -> dict[str, Any] | None:
    mine = plan.stages[name]
    if mine.artifact is None or mine.status not in ("hit", "pinned"):
        return None
    document: dict[str, Any] = json.loads((store.fetch(mine.artifact) / file).read_bytes())
    return document


def _print_decision(console: Console, plan: Plan, store: Store) -> None:
    manifest = _read(plan, store, "release", "manifest.json")
    if manifest is None:
        _print_stop(console, plan, store)
        return
    decision = manifest["decision"]
    style = "bold green" if decision == "SHIP" else "bold red"
    console.print(f"[{style}]{decision}[/]  manifest {plan.stages['release'].artifact}")
    for reason in manifest.get("reasons", []):
        console.print(f"  {reason}", markup=False, highlight=False)
    for warning in manifest.get("warnings", []):
        if "; overridden by " in warning:
            console.print(f"  {warning}", markup=False, highlight=False, style="yellow")


def _print_stop(console: Console, plan: Plan, store: Store) -> None:
    """Why there is no release: the gates that keep what stands below them from running."""
    held = [
        f"gate {name}.{result.name}: {result.why}"
        for name in plan.nodes
        for result, overridden in stage_gates(plan, name, store)
        if result.blocks and not overridden and result.verdict != NOT_MEASURED
    ]
    if held:
        console.print("[bold red]HOLD[/]  no release: these gates hold back what stands below")
    for text in held:
        console.print(f"  {text}", markup=False, highlight=False)


def _print_answers(console: Console, plan: Plan, store: Store) -> None:
    """Questions and answers that the server's smoke test kept."""
    server = _read(plan, store, "inference_server", "server.json")
    if server is None:
        return
    console.print()
    for entry in server["smoke_test"]["answers"]:
        console.print(f"  Q: {entry['prompt']}", markup=False)
        console.print(f"  A: {entry['answer']}", markup=False)
    # The recipe of a manifest is no file.
    if plan.recipe.path.exists():
        shown = recipe_argument(plan.recipe)
        console.print(f"\nTalk to it: llm-assets chat -r {shown}", markup=False)
