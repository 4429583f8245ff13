"""A stage that several real processes train: one result, one record, and any of them may die."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from base_run import MICRO, TWO, BaseRun, Parts, base_run, make_parts
from dagster import DagsterInstance, materialize
from safetensors.torch import load_file

from llm_assets.assets import asset_key, build_assets
from llm_assets.checkpoints import list_saves
from llm_assets.errors import RecipeError
from llm_assets.jobs import PROCESSES, RESUMED
from llm_assets.ranks import shared_batch
from llm_assets.recipe import load_recipe
from llm_assets.reporting import Reporter
from llm_assets.resources.launcher import LocalLauncher, _command, _Follower
from llm_assets.resources.store import StoreResource
from llm_assets.retrying import was_lost
from llm_assets.worker import run_job

ONE = {"kind": "local", "num_processes": 1, "retries": {"delay_s": 0.1}}


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Parts:
    return make_parts(tmp_path_factory.mktemp("parts"))


def test_processes_share_passes_first_then_rows() -> None:
    assert shared_batch(4, 1, 1, where="here") == (4, 1)
    assert shared_batch(4, 6, 2, where="here") == (4, 3)
    assert shared_batch(4, 1, 2, where="here") == (2, 1)
    assert shared_batch(4, 2, 8, where="here") == (1, 1)
    with pytest.raises(RecipeError, match=r"here: 3 rows x 1 .* for 2 processes"):
        shared_batch(3, 1, 2, where="here")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"launcher": {"num_processes": 2}}, r"launcher: kind local, num_processes 2"),
        ({"launcher": {"kind": "accelerate"}}, r"launcher: kind accelerate, num_processes 1"),
        (
            {"stages.sft_checkpoint.per_device_train_batch_size": 5},
            r"stages\.sft_checkpoint\.per_device_train_batch_size: 5 rows x 1",
        ),
        ({"stages.dpo_policy.fsdp": "full_shard"}, r"stages\.dpo_policy\.fsdp: 'full_shard'"),
        (
            {"rates": {"device": "h100", "usd_per_hour": 2.0}},
            r"rates\.devices: 1 for 2 processes",
        ),
    ],
)
def test_what_cannot_be_shared_is_refused_when_the_recipe_loads(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    document = yaml.safe_load(MICRO.read_text())
    for dotted, value in {"launcher": TWO, **change}.items():
        *above, last = dotted.split(".")
        place = document
        for key in above:
            place = place[key]
        place[last] = value
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(document))
    with pytest.raises(RecipeError, match=said):
        load_recipe(path)


def test_the_first_error_counts_unless_it_only_says_that_another_process_is_gone(
    tmp_path: Path,
) -> None:
    file = tmp_path / "progress.jsonl"
    events = [
        {"stage": "s", "error": "one of 2 processes was lost", "kind": "LostProcess"},
        {"stage": "s", "error": "the rows are bad", "kind": "DataError"},
        {"stage": "s", "error": "one of 2 processes was lost", "kind": "LostProcess"},
        {"stage": "s", "code": 75},
    ]
    for count, kind, code in (
        (1, "LostProcess", None),
        (3, "DataError", None),
        (4, "DataError", 75),
    ):
        follower = _Follower(file)
        file.write_text("".join(json.dumps(event) + "\n" for event in events[:count]))
        follower.read()
        assert (follower.kind, follower.code) == (kind, code)
        assert was_lost(code=1, kind=kind, num_processes=2) == (kind == "LostProcess")


def weights(run: BaseRun) -> dict[str, Any]:
    record = run.records[0]
    found: dict[str, Any] = load_file(run.store.fetch(record.output) / "model.safetensors")
    return found


def test_two_processes_give_one_record_and_the_weights_of_one(tmp_path: Path, parts: Parts) -> None:
    settings = {"max_steps": 8, "checkpoint": {"every_steps": 4}}
    two = base_run(tmp_path / "two", parts, TWO, **settings)
    progress = tmp_path / "progress.jsonl"
    done = subprocess.run(
        [*_command(progress, 2), "--job", str(two.write_job())],
        env=two.environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (record,) = two.records
    assert record.environment[PROCESSES] == "2"
    assert [row["step"] for row in record.tables["saves"]] == [4]
    assert two.store.lease_owner(f"stage/{two.identity}") is None
    events = [json.loads(line) for line in progress.read_text().splitlines()]
    assert events[-1] == {"stage": "base_checkpoint", "code": 0}
    # One of them tells what it does.
    assert sum(event.get("text", "").startswith("training ") for event in events) == 1

    one = base_run(tmp_path / "one", parts, ONE, **settings)
    assert one.identity == two.identity
    assert run_job(one.job(), one.store, Reporter(stage="base", path=None, log=print)) == 0
    assert one.records[0].tokens == record.tokens
    pairs = [(value, weights(two)[name]) for name, value in weights(one).items()]
    assert max(float((a - b).abs().max()) for a, b in pairs) < 1e-4
    assert max(float(a.abs().max()) for a, _ in pairs) > 0.01
    losses = zip(one.records[0].series["loss"], record.series["loss"], strict=True)
    assert all(math.isclose(a[1], b[1], rel_tol=1e-3) for a, b in losses)


# What follows runs through the asset, with the launcher that users have.

STEPS = {"max_steps": 240, "checkpoint": {"every_steps": 60, "every_minutes": None}}


def through_dagster(run: BaseRun, patch: pytest.MonkeyPatch) -> Any:
    """Materialize the base; each step's log is at most the error."""
    for name, value in run.environment.items():
        patch.setenv(name, value)
    recipe = run.recipe
    with DagsterInstance.ephemeral() as instance, warnings.catch_warnings():
        # Dagster's own Pipes session asks its context in a way that Dagster deprecates.
        warnings.simplefilter("ignore", DeprecationWarning)
        return materialize(
            list(build_assets(recipe)),
            instance=instance,
            resources={
                "store": StoreResource(url=run.store.url),
                "launcher": LocalLauncher(threads=1, grace_s=10.0),
            },
            selection=[asset_key(recipe, "base_checkpoint")],
            raise_on_error=False,
            run_config={"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}},
        )


def failures(result: Any) -> list[str]:
    """What the failed steps say."""
    return [str(e.step_failure_data.user_failure_data) for e in result.get_step_failure_events()]


def processes_of(launcher: psutil.Process) -> dict[str, psutil.Process]:
    """RANK to process."""
    return {child.environ()["RANK"]: child for child in launcher.children()}


class Killer(threading.Thread):
    """Kills one of the processes once the first save is there."""

    def __init__(self, run: BaseRun, whom: str) -> None:
        super().__init__(daemon=True)
        self.saves, self.whom = run.saves, whom
        self.ranks: list[psutil.Process] = []

    def run(self) -> None:
        deadline = time.monotonic() + 500
        while not list_saves(self.saves) and time.monotonic() < deadline:
            time.sleep(0.02)
        (launcher,) = (
            child
            for child in psutil.Process().children()
            if "accelerate.commands.launch" in child.cmdline()
        )
        ranks = processes_of(launcher)
        self.ranks = list(ranks.values())
        victim = launcher if self.whom == "launcher" else ranks[self.whom]
        os.kill(victim.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, parts: Parts) -> BaseRun:
    run = base_run(tmp_path_factory.mktemp("undisturbed"), parts, TWO, **STEPS)
    with pytest.MonkeyPatch.context() as patch:
        result = through_dagster(run, patch)
    assert len(run.records) == 1, failures(result)
    return run


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["launcher", "0", "1"])
def test_a_killed_process_is_one_lost_attempt_and_the_next_ends_with_the_same_bits(
    tmp_path: Path, parts: Parts, undisturbed: BaseRun, monkeypatch: pytest.MonkeyPatch, whom: str
) -> None:
    run = base_run(tmp_path / "run", parts, TWO, **STEPS)
    killer = Killer(run, whom)
    killer.start()
    result = through_dagster(run, monkeypatch)
    killer.join(timeout=5)
    assert len(killer.ranks) == 2
    assert not any(process.is_running() for process in killer.ranks)
    retries = [e for e in result.all_events if e.event_type_value == "STEP_UP_FOR_RETRY"]
    assert len(retries) == 1
    said = str(retries[0].step_retry_data.error)
    if whom == "1":
        assert "one of 2 processes of the training was lost" in said
    (record,) = run.records
    assert int(record.environment[RESUMED]) > 0
    assert record.output == undisturbed.records[0].output


@pytest.mark.slow
def test_another_number_of_processes_is_refused(
    tmp_path: Path, parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = {**TWO, "retries": {"max_retries": 0}}
    run = base_run(tmp_path / "run", parts, once, **STEPS)
    killer = Killer(run, "0")
    killer.start()
    assert not through_dagster(run, monkeypatch).success
    saves = list_saves(run.saves)
    assert saves[0].verdict == "healthy"
    run.write(ONE, **STEPS)
    result = through_dagster(run, monkeypatch)
    (failure,) = result.get_step_failure_events()
    said = failure.step_failure_data.user_failure_data.description
    assert "written by 2 processes, here are 1" in said
    assert "set launcher.num_processes to 2" in said
    assert run.records == []
    assert [save.path for save in list_saves(run.saves)] == [save.path for save in saves]
