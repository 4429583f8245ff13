"""`llm-assets`: each command is imported when it is called."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any

import click

from llm_assets import __version__
from llm_assets.errors import LlmAssetsError, UserError

_COMMANDS: Mapping[str, tuple[str, str, str]] = {
    "run": ("llm_assets.run_command", "run", "Materialize what is stale, through Dagster."),
    "plan": ("llm_assets.plan_command", "plan", "What would run, why, and what it would cost."),
    "rollback-plan": (
        "llm_assets.rollback_command",
        "rollback",
        "What happens when a stage fails.",
    ),
    "checkpoints": (
        "llm_assets.checkpoint_command",
        "checkpoints",
        "In-training saves: look, prove, go back.",
    ),
    "drill": ("llm_assets.drill_command", "drill", "Disrupt a scratch pipeline, see it recover."),
    "approve": ("llm_assets.approve_command", "approve", "Let a held stage run, once."),
    "override": (
        "llm_assets.override_command",
        "override",
        "Let one artifact through a gate that it failed.",
    ),
    "manifest": ("llm_assets.manifest_command", "manifest", "Show and compare manifests."),
    "reproduce": ("llm_assets.manifest_command", "reproduce", "Was a manifest reproduced?"),
    "replay": ("llm_assets.replay_command", "replay", "Run a manifest again, from its sources."),
    "report": ("llm_assets.report_command", "report", "The report card of a recipe."),
    "chat": ("llm_assets.chat_command", "chat", "Talk to the served model."),
    "check-data": ("llm_assets.reading.commands", "check_data", "Read data files as a run would."),
    "store": ("llm_assets.store.commands", "store", "Look into the artifact store."),
    "estimate": ("llm_assets.costs.commands", "estimate", "Cost of a training run."),
    "costs": ("llm_assets.costs.commands", "costs", "Money that was spent."),
    "budget": ("llm_assets.costs.commands", "budget", "Limits, and their changes."),
    "schema": ("llm_assets.schema_command", "schema", "The recipe's JSON schema, for editors."),
}


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, attribute, _ = _COMMANDS[cmd_name]
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, help) for name, (_, _, help) in _COMMANDS.items()])


@click.group(cls=_LazyGroup)
@click.version_option(__version__)
def app() -> None:
    """Language-model pipelines as Dagster assets."""


def main(arguments: list[str] | None = None) -> Any:
    """Entry point. 2: what the user wrote is wrong; 1: the work failed; 130: interrupted."""
    try:
        return app.main(args=arguments, standalone_mode=False) or 0
    except click.exceptions.Abort:
        click.echo("interrupted", err=True)
        return 130
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except UserError as error:
        click.echo(f"error: {error}", err=True)
        return 2
    except LlmAssetsError as error:
        click.echo(f"error: {error}", err=True)
        return 1
    except BrokenPipeError:
        sys.stderr.close()
        return 1


if __name__ == "__main__":
    sys.exit(main())
