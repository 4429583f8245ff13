"""A run for a drill to disrupt: `python -m llm_assets.drills.course RECIPE STAGE...`.

Runs the stages as `llm-assets run` would, through Dagster, and prints one JSON object a line: every
progress event of the workers, and at the end {"end": {succeeded, errors, retries}}.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

from llm_assets.places import ensure_dagster_home
from llm_assets.recipe import load_recipe


def _print(document: Mapping[str, Any]) -> None:
    print(json.dumps(document), flush=True)


def main() -> int:
    """0 when all stages have their record."""
    from dagster import DagsterEventType, DagsterInstance

    from llm_assets.dagster_run import run_stages
    from llm_assets.resources.launcher import listening

    recipe = load_recipe(sys.argv[1])
    ensure_dagster_home()
    with listening(_print):
        result = run_stages(recipe, sys.argv[2:])
    with DagsterInstance.get() as instance:
        retries = [
            str(entry.dagster_event.step_retry_data.error)
            for entry in instance.all_logs(result.run_id)
            if entry.dagster_event is not None
            and entry.dagster_event.event_type is DagsterEventType.STEP_UP_FOR_RETRY
        ]
    _print({"end": {"succeeded": result.succeeded, "errors": result.errors, "retries": retries}})
    return 0 if result.succeeded else 1


if __name__ == "__main__":
    sys.exit(main())
