"""Large saves, which a process of their own writes and proves."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from llm_assets.checkpoints.listing import list_saves
from llm_assets.stages import save_process
from llm_assets.stages.save_buffers import TensorBuffer
from llm_assets.stages.save_files import WRITING, Request
from llm_assets.stages.save_writer import Pending, SaveWriter

_WEIGHTS = {"a": torch.arange(3_000_000, dtype=torch.float32), "b": torch.ones(7, dtype=torch.bool)}


def pending(
    folder: Path,
    step: int = 1,
    weights: dict[str, torch.Tensor] = _WEIGHTS,
    patience_s: float = 60.0,
) -> Pending:
    """A light save of 12 MB that is written apart."""
    buffer = TensorBuffer()
    buffer.take(weights)
    manifest = {
        "identity": "test",
        "stage": "base_checkpoint",
        "pipeline": "test",
        "world_size": 1,
        "environment": {},
        "counters": {},
        "metrics": {},
        "data": {},
        "architecture": {},
        "lineage": {},
    }
    request = Request(
        folder=str(folder),
        kind="light",
        step=step,
        documents={},
        manifest=manifest,
        stall_s=0.0,
        waits=False,
    )
    return Pending(request=request, tensors={"model.safetensors": buffer}, patience_s=patience_s)


@pytest.fixture
def writer() -> SaveWriter:
    return SaveWriter(retain=lambda: None)


def children() -> list[psutil.Process]:
    """The processes that write or prove; this process has others, a server of another test say."""
    return [child for child in psutil.Process().children() if _is_writer(child)]


def _is_writer(process: psutil.Process) -> bool:
    try:
        return save_process.__name__ in process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return False


def until(condition: Callable[[], object], what: str) -> None:
    """Wait for it, a minute at most."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)


def test_what_stood_there_at_the_step_is_written_and_proved(
    tmp_path: Path, writer: SaveWriter
) -> None:
    weights = {name: value.clone() for name, value in _WEIGHTS.items()}
    writer.submit(pending(tmp_path, weights=weights))
    weights["a"].zero_()
    writer.wait()
    (save,) = list_saves(tmp_path)
    loaded = load_file(save.path / "model.safetensors")
    assert all(torch.equal(loaded[name], value) for name, value in _WEIGHTS.items())
    until(lambda: writer.judged, "no verdict")
    writer.close()
    (written,), (judged,) = writer.ended, writer.judged
    assert (
        not written.error and written.size_bytes == (save.path / "model.safetensors").stat().st_size
    )
    # The architecture that the manifest names is another one: the proof read the weights.
    assert judged.health is not None and judged.health.checks["files"] == "ok"


def test_weights_that_are_not_finite_are_named(tmp_path: Path, writer: SaveWriter) -> None:
    weights = {"fine": torch.ones(9), "bad": torch.tensor([1.0, float("inf")])}
    writer.submit(pending(tmp_path, weights=weights))
    writer.close()
    assert writer.ended[0].not_finite == "bad"
    assert not list(tmp_path.iterdir())


def test_a_writer_that_is_killed_leaves_no_save(tmp_path: Path, writer: SaveWriter) -> None:
    writer.submit(pending(tmp_path))
    until(lambda: children(), "no process")
    children()[0].kill()
    writer.close()
    assert "ended with -9" in writer.ended[0].error
    assert not list_saves(tmp_path)


def test_a_writer_is_not_told_to_end(tmp_path: Path, writer: SaveWriter) -> None:
    writer.submit(pending(tmp_path))
    until(lambda: list(tmp_path.glob(f"{WRITING}*")), "nothing is written")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        for child in children():
            child.send_signal(number)
    writer.wait()
    assert not writer.ended[0].error
    assert [save.step for save in list_saves(tmp_path)] == [1]
    writer.close()


def test_a_writer_gives_way_for_a_while(tmp_path: Path, writer: SaveWriter) -> None:
    # Large enough to be stopped while it is written.
    weights = {"a": torch.zeros(75_000_000)}
    writer.submit(pending(tmp_path, weights=weights, patience_s=3.0))
    until(lambda: list(tmp_path.glob(f"{WRITING}*")), "nothing is written")
    (child,) = children()
    child.suspend()
    assert not list_saves(tmp_path)
    assert os.sched_getscheduler(child.pid) == os.SCHED_IDLE
    until(lambda: os.sched_getscheduler(child.pid) == os.SCHED_OTHER, "it gives way for ever")
    child.resume()
    writer.close()
    assert [save.step for save in list_saves(tmp_path)] == [1]


def test_a_full_device_is_told(tmp_path: Path, writer: SaveWriter) -> None:
    save = pending(tmp_path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, before[1]))
    try:
        writer.submit(save)
        writer.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "File too large" in writer.ended[0].error
    assert not list(tmp_path.iterdir())
    writer.close()


def test_a_proof_that_is_not_at_its_end_is_given_up(tmp_path: Path, writer: SaveWriter) -> None:
    writer.submit(pending(tmp_path))
    writer.wait()
    for child in children():
        child.suspend()
    writer.close()
    assert not writer.judged
    assert not children()


def test_two_saves_wait_for_each_other_and_both_are_proved(
    tmp_path: Path, writer: SaveWriter
) -> None:
    writer.submit(pending(tmp_path, 1))
    writer.submit(pending(tmp_path, 2))
    assert [written.step for written in writer.ended] == [1]
    until(lambda: len(writer.judged) == 2, "no two verdicts")
    writer.close()
    assert [save.step for save in writer.judged] == [1, 2]


_TRAINER = """
import sys, time
import torch
from pathlib import Path
from tests.stages.test_save_writer import SaveWriter, children, pending
folder = Path(sys.argv[1])
writer = SaveWriter(retain=lambda: None)
writer.submit(pending(folder, weights={"a": torch.zeros(75_000_000)}))
while not list(folder.glob(".writing-*")):
    time.sleep(0.001)
children()[0].suspend()
print(children()[0].pid, list(folder.glob("light-*")), flush=True)
time.sleep(600)
"""


def test_nothing_is_published_for_a_training_that_is_gone(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _TRAINER, str(tmp_path)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    ) as trainer:
        assert trainer.stdout is not None
        pid, published = trainer.stdout.readline().split()
        child = psutil.Process(int(pid))
        assert published == "[]"
        trainer.kill()
    child.resume()
    child.wait(60)
    assert not list(tmp_path.iterdir())
