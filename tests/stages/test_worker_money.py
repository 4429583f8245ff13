"""Real workers that train for money: one is killed, one runs out of it, one is paid and goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from alignment_parts import Shop

from llm_assets.cli import main
from llm_assets.costs.ledger import LedgerEntry, ledger_entries
from llm_assets.engine import build_job
from llm_assets.planning import make_plan
from llm_assets.recipe import load_recipe
from llm_assets.store import Store, open_store
from llm_assets.store.digest import Identity
from tests.simulation import add_record, put_output
from tests.test_telemetry import Receiver, attributes_of, span_of

MICRO = Path(__file__).parents[1] / "recipes" / "micro.yaml"
STEPS = 200
USD_A_SECOND = 1.0
FLUSH_EVERY_S = 0.3

# The worker as it is, but it looks at the money and gives up a dead one's lease sooner.
_WORKER = f"""
import sys
from llm_assets import spending, worker
spending.FLUSH_EVERY_S = {FLUSH_EVERY_S}
worker.LEASE_TTL_S = 3.0
sys.exit(worker.main())
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return open_store(str(tmp_path_factory.mktemp("money") / "store"))


@pytest.fixture(scope="module")
def recipe_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The micro recipe with a fine-tuning that takes a few seconds, and a rent that shows."""
    document = yaml.safe_load(MICRO.read_text())
    document["stages"]["sft_checkpoint"].update(
        max_steps=STEPS, max_length=128, checkpoint={"every_steps": 5}
    )
    document["rates"]["usd_per_hour"] = 3600 * USD_A_SECOND
    document["budget"]["limit_usd"] = 1000.0
    path = tmp_path_factory.mktemp("recipe") / "recipe.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


@pytest.fixture(scope="module")
def job_file(tmp_path_factory: pytest.TempPathFactory, store: Store, recipe_path: Path) -> Path:
    """What the worker of the fine-tuning is told. Its two inputs are real, what stands above them
    is not."""
    folder = tmp_path_factory.mktemp("parts")
    shop = Shop(folder)
    real: dict[str, tuple[Path, str, dict[str, Any]]] = {
        "instructions": (shop.paths["instructions"], "instructions", {"num_rows": 400}),
        "midtrained_checkpoint": (shop.paths["base"], "checkpoint", {"num_parameters": 50_000}),
    }
    recipe = load_recipe(recipe_path)
    for _ in range(20):
        plan = make_plan(recipe, store)
        ready = [name for name in plan.rerun if plan.stages[name].identity is not None]
        if "sft_checkpoint" in ready:
            break
        name = ready[0]
        if name in real:
            path, kind, metadata = real[name]
            output = store.put(path, type=kind, metadata=metadata)
        else:
            output = put_output(store, name)
        add_record(plan, name, store, output=output)
    job = build_job(plan, "sft_checkpoint", store, run_id="money-run")
    file = folder / "job.json"
    file.write_text(json.dumps(job.as_json()))
    return file


class Worker:
    """A worker process and what it reports."""

    def __init__(self, job: Path, folder: Path, **environment: str) -> None:
        self.progress = folder / "progress.jsonl"
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            [sys.executable, "-c", _WORKER, "--job", str(job), "--progress", str(self.progress)],
            env={**os.environ, **environment},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def events(self) -> list[dict[str, Any]]:
        if not self.progress.exists():
            return []
        complete = self.progress.read_text().rpartition("\n")[0]
        return [json.loads(line) for line in complete.splitlines()]

    def steps(self) -> list[int]:
        return [event["step"] for event in self.events() if "step" in event]

    def wait_for_step(self, step: int) -> None:
        while not any(found >= step for found in self.steps()):
            if self.process.poll() is not None:
                raise AssertionError(self.process.communicate()[0])
            time.sleep(0.05)

    def end(self) -> tuple[int, str]:
        said = self.process.communicate()[0]
        return self.process.returncode, said


Start = Callable[..., Worker]


@pytest.fixture
def start(tmp_path: Path, job_file: Path) -> Iterator[Start]:
    started: list[Worker] = []

    def begin(**environment: str) -> Worker:
        folder = tmp_path / str(len(started))
        folder.mkdir()
        started.append(Worker(job_file, folder, **environment))
        return started[-1]

    yield begin
    for worker in started:
        worker.process.kill()
        worker.process.wait()


def attempts(store: Store) -> list[LedgerEntry]:
    return list(ledger_entries(store))


def set_limit(store: Store, recipe_path: Path, usd: float, why: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LLM_ASSETS_STORE", store.url)
        said = ["budget", "set", f"{usd:.4f}", "-r", str(recipe_path), "--why", why]
        assert main(said) == 0


def test_killed_then_out_of_money_then_paid(
    store: Store, recipe_path: Path, job_file: Path, start: Start
) -> None:
    identity = Identity.parse(json.loads(job_file.read_text())["identity"])

    # Killed: its money stands in the ledger up to the last flush.
    first = start()
    first.wait_for_step(20)
    time.sleep(2 * FLUSH_EVERY_S)
    first.process.send_signal(signal.SIGKILL)
    first.end()
    (killed,) = attempts(store)
    last = [event["spent_usd"] for event in first.events()][-1]
    assert killed.status == "running"  # until its silence is noticed
    assert killed.usage.tokens > 0
    assert killed.usage.cost_usd == pytest.approx(killed.usage.seconds * USD_A_SECOND)
    # Progress is written twice a second, the ledger each FLUSH_EVERY_S; both in dollars.
    assert last - killed.usage.cost_usd < (FLUSH_EVERY_S + 1.0) * USD_A_SECOND

    while store.lease_owner(f"stage/{identity}") is not None:
        time.sleep(0.1)

    # Out of money while it trains: it stops at the next step, with a save.
    second = start()
    second.wait_for_step(40)
    set_limit(store, recipe_path, sum(a.usage.cost_usd for a in attempts(store)), "enough of it")
    code, said = second.end()
    assert code == 1
    assert "the budget of campaign micro is spent" in said
    assert "budget set" in said
    stopped = int(said.split("saved: step ")[1].split(",")[0])
    assert 40 <= stopped < STEPS
    assert (store.checkpoints(identity) / f"save-{stopped:08d}").is_dir()
    assert not store.records(identity)

    # Paid: it goes on at that step, not at the first one.
    set_limit(store, recipe_path, 1000.0, "go on")
    receiver = Receiver()
    try:
        third = start(OTEL_EXPORTER_OTLP_ENDPOINT=receiver.url)
        code, said = third.end()
    finally:
        receiver.close()
    assert code == 0, said
    assert f"goes on from save-{stopped:08d}" in said
    assert third.steps()[0] == stopped + 1
    (record,) = store.records(identity)
    assert [step for step, _ in record.series["loss"]] == list(range(1, STEPS + 1))
    assert int(record.environment["resumed_at_tokens"]) > 0
    ends = [entry.status for entry in attempts(store) if entry.info != killed.info]
    assert sorted(ends) == ["done", "failed"]

    # The receiver of the last one got its span, with what the stage cost.
    ((_, _, document),) = receiver.got
    found = attributes_of(span_of(document))
    assert int(found["llm_assets.parameters"]) > 0
    assert int(found["llm_assets.tokens"]) == record.tokens
    assert found["llm_assets.loss"] == pytest.approx(record.series["loss"][-1][1])
    assert found["llm_assets.cost_usd"] == pytest.approx(record.cost_usd)
