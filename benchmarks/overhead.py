"""What Dagster costs: a whole recipe under Dagster against its bare workers, one after another.

    python benchmarks/overhead.py [-r RECIPE]

Both start from an empty store, in the same order, on the same machine, each worker with the
threads that the launcher would give it. Prints one JSON object; `ratio` is Dagster's wall time
over the bare workers'. Reward model and DPO run side by side, which may bring it under 1.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from llm_assets.engine import build_job
from llm_assets.planning import make_plan
from llm_assets.recipe import Recipe, load_recipe
from llm_assets.store import open_store


def environment(home: Path, recipe: Recipe) -> dict[str, str]:
    """Places of its own for one side of the comparison."""
    return {
        **os.environ,
        "LLM_ASSETS_HOME": str(home),
        "DAGSTER_HOME": str(home / "dagster"),
        "LLM_ASSETS_RECIPES": str(recipe.path),
        "TOKENIZERS_PARALLELISM": "false",
    }


def under_dagster(recipe: Recipe, home: Path) -> float:
    """Wall seconds of `llm-assets run`."""
    started = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "llm_assets.cli", "run", "-r", str(recipe.path)],
        env=environment(home, recipe),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    elapsed = time.monotonic() - started
    if done.returncode:
        sys.exit(done.stdout)
    return elapsed


def bare(recipe: Recipe, home: Path) -> tuple[float, dict[str, float]]:
    """Wall seconds of all workers one after another, and of each."""
    store = open_store(str(home / "store"))
    each: dict[str, float] = {}
    for name, node in make_plan(recipe, store).nodes.items():
        job = build_job(make_plan(recipe, store), name, store, run_id="bare")
        path = home / f"{name}.json"
        path.write_text(json.dumps(job.as_json()))
        threads = max(1, (os.cpu_count() or 1) // node.stage.side_by_side)
        started = time.monotonic()
        done = subprocess.run(
            [sys.executable, "-m", "llm_assets.worker", "--job", str(path)],
            env={**environment(home, recipe), "OMP_NUM_THREADS": str(threads)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        each[name] = time.monotonic() - started
        if done.returncode:
            sys.exit(done.stdout)
    return sum(each.values()), each


def main() -> None:
    """Measure both and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-r", "--recipe", default="tiny")
    recipe = load_recipe(parser.parse_args().recipe)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "bare").mkdir()
        bare_s, each = bare(recipe, Path(folder) / "bare")
        dagster_s = under_dagster(recipe, Path(folder) / "dagster")
    print(
        json.dumps(
            {
                "recipe": recipe.pipeline,
                "dagster_s": round(dagster_s, 1),
                "bare_s": round(bare_s, 1),
                "ratio": round(dagster_s / bare_s, 3),
                "bare_each_s": {name: round(seconds, 1) for name, seconds in each.items()},
            },
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
