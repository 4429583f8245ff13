"""Fifty recipes in one code location against one: loading the definitions, and one recipe's plan.

    python benchmarks/recipes.py [--recipes 50]

The recipes are the packaged `tiny` with a name and a seed of its own. `load_s` is the wall time of
a fresh interpreter that loads `llm_assets.definitions`; `plan_s` that of `llm-assets plan`, on a
store that holds a record of every stage for every recipe. Medians of five after one that is not
counted. Prints one JSON object; exits 1 when a target is missed.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from llm_assets.recipe import RECIPES_FOLDER, load_recipe
from llm_assets.store import open_store
from llm_assets.store.digest import Identity
from tests.simulation import simulate

TIMES = 5
LOAD_RATIO = 3.0
PLAN_S = 2.0
COUNT_ASSETS = (
    "from llm_assets.definitions import defs;"
    "print(len(defs.resolve_asset_graph().materializable_asset_keys))"
)


def write_recipes(folder: Path, count: int) -> list[Path]:
    """Copies of `tiny` that differ in name and seed."""
    document = yaml.safe_load((RECIPES_FOLDER / "tiny.yaml").read_text())
    paths = []
    for number in range(count):
        path = folder / f"recipe_{number:03d}.yaml"
        path.write_text(yaml.safe_dump({**document, "pipeline": path.stem, "seed": number}))
        paths.append(path)
    return paths


def median_s(command: list[str], environment: dict[str, str], codes: tuple[int, ...]) -> float:
    """Median wall seconds of a command in a fresh interpreter."""
    seconds = []
    for _ in range(TIMES + 1):
        started = time.monotonic()
        done = subprocess.run(
            [sys.executable, *command], env=environment, capture_output=True, text=True
        )
        seconds.append(time.monotonic() - started)
        if done.returncode not in codes:
            sys.exit(f"{command}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    return statistics.median(seconds[1:])


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--recipes", type=int, default=50)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="llm-assets-recipes-") as name:
        folder = Path(name)
        paths = write_recipes(folder, arguments.recipes)
        environment = {
            **os.environ,
            "LLM_ASSETS_HOME": str(folder / "home"),
            "LLM_ASSETS_CACHE": str(folder / "cache"),
            "DAGSTER_HOME": str(folder),
        }
        os.environ["LLM_ASSETS_CACHE"] = environment["LLM_ASSETS_CACHE"]
        one = {**environment, "LLM_ASSETS_RECIPES": str(paths[0])}
        many = {**environment, "LLM_ASSETS_RECIPES": str(folder / "recipe_*.yaml")}
        load = ["-c", "import llm_assets.definitions"]
        load_one_s, load_many_s = median_s(load, one, (0,)), median_s(load, many, (0,))
        counted = subprocess.run(
            [sys.executable, "-c", COUNT_ASSETS], env=many, check=True, capture_output=True
        )
        store = open_store(str(folder / "home" / "store"))
        simulate(load_recipe(str(paths[0])), store)
        for record in list(store.all_records()):
            for path in paths[1:]:
                identity = Identity(hashlib.sha256(f"{path}{record.identity}".encode()).hexdigest())
                store.add_record(dataclasses.replace(record, pipeline=path.stem, identity=identity))
        plan = ["-m", "llm_assets.cli", "plan", "-r", str(paths[0])]
        # Nothing that is simulated passed a gate: the plan may refuse, and is a plan all the same.
        plan_s = median_s(plan, many, (0, 3))
        records = sum(1 for _ in store.all_records())
    result = {
        "recipes": arguments.recipes,
        "assets": int(counted.stdout),
        "load_one_s": round(load_one_s, 2),
        "load_s": round(load_many_s, 2),
        "load_ratio": round(load_many_s / load_one_s, 2),
        "records": records,
        "plan_s": round(plan_s, 2),
    }
    print(json.dumps(result, indent=2))
    return 0 if load_many_s / load_one_s < LOAD_RATIO and plan_s < PLAN_S else 1


if __name__ == "__main__":
    sys.exit(main())
