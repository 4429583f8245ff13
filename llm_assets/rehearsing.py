"""One training step from a copy of a save: `python -m llm_assets.rehearsing JOB FOLDER STEP`.

Runs the stage of a job as the worker would, on saves in a scratch folder, and ends it after the
first step. Nothing is put into the store, no lease is taken, nothing is written to the ledger.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from llm_assets.errors import BudgetError, LlmAssetsError
from llm_assets.interruption import Interruption
from llm_assets.jobs import StageJob
from llm_assets.stage_job import stage_context, stage_entry_point
from llm_assets.store import open_store


class _Steps:
    """Progress that notes the last step."""

    def __init__(self) -> None:
        self.last = 0
        self.loss = float("nan")

    def step(
        self,
        step: int,
        total: int,
        *,
        loss: float | None = None,
        tokens: int | None = None,
        **metrics: float,
    ) -> None:
        """See stages.context.Progress.step."""
        self.last = step
        self.loss = self.loss if loss is None else loss

    def say(self, text: str) -> None:
        """See stages.context.Progress.say."""
        print(text, file=sys.stderr, flush=True)


def main() -> int:
    """0 when a step was taken from the save; 1 when not."""
    parser = argparse.ArgumentParser(prog="python -m llm_assets.rehearsing", description=__doc__)
    parser.add_argument("job", type=Path)
    parser.add_argument("folder", type=Path, help="holds the copy of the save, and is written to")
    parser.add_argument("step", type=int, help="of the save")
    arguments = parser.parse_args()
    job = StageJob.from_json(json.loads(arguments.job.read_text()))
    steps = _Steps()

    def enough() -> str | None:
        return "rehearsed" if steps.last > arguments.step else None

    with tempfile.TemporaryDirectory(prefix="llm-assets-rehearsal-") as work:
        context: Any = stage_context(
            job,
            open_store(job.store_url),
            Path(work),
            checkpoints=arguments.folder,
            progress=steps,
            should_stop=enough,
            interruption=Interruption(grace_s=0.0),
        )
        try:
            stage_entry_point(job)(context)
        except BudgetError:
            pass  # `enough` ended it
        except LlmAssetsError as error:
            print(error, file=sys.stderr)
            return 1
    if steps.last <= arguments.step:
        print(f"no step after {arguments.step} was taken", file=sys.stderr)
        return 1
    print(f"step {steps.last} from step {arguments.step}: loss {steps.loss:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
