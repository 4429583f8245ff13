"""What a failure costs: after each stage failed in turn, the partial rerun against the full run.

    python benchmarks/rerun.py [-r RECIPE] [--stages sft_checkpoint,dpo_policy]
    python benchmarks/rerun.py --only idle          # or failures

1. A full run from an empty store.
2. For each stage: the store as it stands when everything above is done; a run whose worker of that
   stage is killed as soon as it starts (retries are off, so the run fails); then the run that goes
   on, which is timed. `share` is its wall time over the full run's.
3. With nothing to do: `llm-assets run` against `dvc repro` on twelve trivial stages (null where dvc
   is not installed), and `dagster asset materialize` of the whole graph against twelve trivial
   assets under Dagster's default executor. Each is the median of three.

Prints one JSON object. Linux only: the worker is found through /proc.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from llm_assets.planning import invalidated_by
from llm_assets.recipe import Recipe, load_recipe

TRIVIAL = 12
TIMES = 3
DAGSTER_YAML = "telemetry:\n  enabled: false\n"


class Place:
    """A home of its own, and commands run in it."""

    def __init__(self, home: Path, recipe: Recipe) -> None:
        self.home = home
        self.recipe = recipe
        home.mkdir(parents=True, exist_ok=True)
        self.environment = {
            **os.environ,
            "LLM_ASSETS_HOME": str(home / "llm-assets"),
            "DAGSTER_HOME": str(home / "dagster"),
            "LLM_ASSETS_RECIPES": str(recipe.path),
        }

    def start(self, *command: str) -> subprocess.Popen[str]:
        """Start a module of this interpreter."""
        return subprocess.Popen(
            [sys.executable, "-m", *command],
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def timed(self, *command: str) -> float:
        """Wall seconds of a command that must succeed."""
        started = time.monotonic()
        process = self.start(*command)
        output, _ = process.communicate()
        elapsed = time.monotonic() - started
        if process.returncode:
            sys.exit(f"{' '.join(command)}: exit code {process.returncode}\n{output[-5000:]}")
        return elapsed

    def run(self) -> float:
        """Wall seconds of `llm-assets run`."""
        return self.timed("llm_assets.cli", "run", "-r", str(self.recipe.path))

    def forget(self, stages: set[str]) -> None:
        """Take the records of some stages away: the state in which the first of them failed."""
        for path in (self.home / "llm-assets" / "store" / "records").rglob("*.json"):
            if json.loads(path.read_bytes())["body"]["stage"] in stages:
                path.unlink()

    def fail(self, stage: str) -> None:
        """Start a run and kill the worker of a stage as soon as it is there."""
        process = self.start("llm_assets.cli", "run", "-r", str(self.recipe.path))
        log = f"{self.recipe.pipeline}-{stage}.log"
        while process.poll() is None:
            worker = _worker_of(process.pid, log)
            if worker is not None:
                os.kill(worker, signal.SIGKILL)
                break
            time.sleep(0.05)
        output, _ = process.communicate()
        if process.returncode != 1:
            sys.exit(f"{stage}: the run did not fail: {process.returncode}\n{output[-5000:]}")


def _worker_of(run: int, log: str) -> int | None:
    """The worker process that writes this log, a child of the run."""
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == run and os.readlink(entry / "fd" / "1").endswith(f"/{log}"):
                return int(entry.name)
        except (OSError, ValueError, IndexError):
            continue  # it ended while it was looked at
    return None


def without_retries(recipe: Recipe, folder: Path) -> Recipe:
    """A copy of the recipe whose runs fail when a worker is killed. Launcher settings are no part
    of an identity."""
    document = yaml.safe_load(recipe.path.read_text())
    launcher = document.setdefault("launcher", {})
    launcher["retries"] = {**launcher.get("retries", {}), "max_retries": 0}
    path = folder / recipe.path.name
    path.write_text(yaml.safe_dump(document))
    return load_recipe(str(path))


def failures(recipe: Recipe, done: Path, folder: Path, stages: list[str]) -> dict[str, float]:
    """Stage to the wall seconds of the run that goes on after it failed."""
    seconds = {}
    for stage in stages:
        place = Place(folder / stage, recipe)
        shutil.copytree(done / "llm-assets" / "store", place.home / "llm-assets" / "store")
        place.forget(set(invalidated_by(recipe, {stage})))
        place.fail(stage)
        seconds[stage] = place.run()
        shutil.rmtree(place.home)
        print(f"{stage}: {seconds[stage]:.1f} s", file=sys.stderr)
    return seconds


def median(measure: Callable[[], float]) -> float:
    """Of a few times, after one that is not counted."""
    measure()
    return statistics.median(measure() for _ in range(TIMES))


def trivial_assets(folder: Path) -> float:
    """Wall seconds of twelve trivial assets in a row under Dagster's default executor."""
    lines = ["from dagster import Definitions, asset"]
    for number in range(TRIVIAL):
        deps = f"deps=[a{number - 1}]" if number else ""
        lines += [f"@asset({deps})", f"def a{number}() -> None:", "    return None"]
    names = ", ".join(f"a{number}" for number in range(TRIVIAL))
    lines.append(f"defs = Definitions(assets=[{names}])")
    (folder / "trivial.py").write_text("\n".join(lines) + "\n")
    home = folder / "trivial-dagster"
    home.mkdir(exist_ok=True)
    (home / "dagster.yaml").write_text(DAGSTER_YAML)
    started = time.monotonic()
    everything = ("dagster", "asset", "materialize", "--select", "*")
    subprocess.run(
        [sys.executable, "-m", *everything, "-f", str(folder / "trivial.py")],
        env={**os.environ, "DAGSTER_HOME": str(home)},
        check=True,
        capture_output=True,
    )
    return time.monotonic() - started


def dvc_repro(folder: Path) -> float | None:
    """Wall seconds of `dvc repro` on twelve trivial stages with nothing to do."""
    dvc = shutil.which("dvc")
    if dvc is None:
        return None
    project = folder / "dvc"
    project.mkdir()
    stages: dict[str, Any] = {}
    for number in range(TRIVIAL):
        above = [f"out{number - 1}"] if number else []
        stages[f"s{number}"] = {
            "cmd": f"echo {number} > out{number}",
            "deps": above,
            "outs": [f"out{number}"],
        }
    (project / "dvc.yaml").write_text(json.dumps({"stages": stages}))
    quiet: Mapping[str, str] = {**os.environ, "DVC_NO_ANALYTICS": "1"}

    def call(*arguments: str) -> float:
        started = time.monotonic()
        subprocess.run(
            [dvc, *arguments], cwd=project, env=dict(quiet), check=True, capture_output=True
        )
        return time.monotonic() - started

    call("init", "--no-scm")
    call("repro")
    return median(lambda: call("repro"))


def idle(recipe: Recipe, done: Place, folder: Path) -> dict[str, float | None]:
    """With nothing to do: this pipeline against trivial ones."""
    run_s = median(done.run)
    materialize_s = median(
        lambda: done.timed(
            "dagster", "asset", "materialize", "--select", "*", "-m", "llm_assets.definitions"
        )
    )
    dvc_s, trivial_s = dvc_repro(folder), median(lambda: trivial_assets(folder))
    return {
        "llm_assets_run_s": round(run_s, 2),
        "dvc_repro_s": None if dvc_s is None else round(dvc_s, 2),
        "run_over_dvc": None if dvc_s is None else round(run_s / dvc_s, 2),
        "dagster_materialize_s": round(materialize_s, 2),
        "trivial_assets_s": round(trivial_s, 2),
        "materialize_over_trivial": round(materialize_s / trivial_s, 2),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-r", "--recipe", default="tiny")
    parser.add_argument("--stages", help="comma-separated; default: all but the data sets")
    parser.add_argument("--only", choices=["failures", "idle"])
    arguments = parser.parse_args()
    recipe = load_recipe(arguments.recipe)
    numbered = [name for name in invalidated_by(recipe, {"corpus", "evals", "instructions"})]
    stages = [name for name in numbered if name not in type(recipe.data).model_fields]
    if arguments.stages:
        stages = arguments.stages.split(",")
    with tempfile.TemporaryDirectory(prefix="llm-assets-rerun-") as name:
        folder = Path(name)
        recipe = without_retries(recipe, folder)
        done = Place(folder / "done", recipe)
        full_s = done.run()
        print(f"full run: {full_s:.1f} s", file=sys.stderr)
        result: dict[str, Any] = {"recipe": recipe.pipeline, "full_s": round(full_s, 1)}
        if arguments.only != "failures":
            result["idle"] = idle(recipe, done, folder)
        if arguments.only != "idle":
            after = failures(recipe, done.home, folder, stages)
            result["rerun_s"] = {stage: round(seconds, 1) for stage, seconds in after.items()}
            result["share"] = {stage: round(s / full_s, 3) for stage, s in after.items()}
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
