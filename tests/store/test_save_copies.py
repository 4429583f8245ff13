"""Saves that outlive a lost machine: real trainings on a real S3 server."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import torch
from transformers import Trainer, TrainingArguments

sys.path.insert(0, str(Path(__file__).parents[1] / "stages"))

from click.testing import CliRunner
from test_kills import forked
from toy import Rows, toy_context, toy_model, toy_settings, train_toy

from llm_assets.checkpoints import list_saves
from llm_assets.checkpoints.remote import list_copies, rollbacks_of
from llm_assets.cli import app
from llm_assets.errors import SaveError
from llm_assets.interruption import Interruption, Terminated
from llm_assets.save_copies import SaveCopies, copies_for
from llm_assets.save_sending import send
from llm_assets.stage_settings import CheckpointSettings
from llm_assets.stages.resuming import find_source
from llm_assets.stages.training import run_training, training_arguments
from llm_assets.store import open_store
from llm_assets.store.digest import Identity
from tests.store.proxy import FaultyProxy, Request
from tests.store.weed import ACCESS_KEY, SECRET_KEY
from tests.store.worlds import S3World, flip

ONE = Identity.parse("ab" * 32)
SETTINGS = CheckpointSettings(keep=2)


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the processes that open the store by its URL."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET_KEY)


class Said:
    """A Progress that keeps what was said, and does something at each step."""

    def __init__(self, at_step: Callable[[int], object] = lambda step: None) -> None:
        self.lines: list[str] = []
        self.copies: Any = None
        self.at_step = at_step

    def step(self, step: int, total: int, **_: Any) -> None:
        self.at_step(step)

    def say(self, text: str) -> None:
        self.lines.append(text)


def train(url: str, root: Path, progress: Any, **changes: Any) -> tuple[Any, Any]:
    """The toy on the machine whose cache the URL names, as the worker runs it."""
    store = open_store(url)
    folder = store.checkpoints(ONE)
    progress.copies = copies = copies_for(store, ONE, folder, progress.say)
    context = dataclasses.replace(
        toy_context(root, toy_settings(), progress),
        identity=ONE, checkpoints=folder, copies=copies, **changes,
    )  # fmt: skip
    model = toy_model()
    arguments = training_arguments(TrainingArguments, context)
    trainer = Trainer(model=model, args=arguments, train_dataset=Rows())
    return model, run_training(context, trainer, tokens_per_step=64)


def copied(copies: Any, name: str) -> bool:
    """Wait until the copy is there, as fast as this machine can."""
    until = time.monotonic() + 300
    while name not in copies.remote.names():
        copies.hurry()
        if time.monotonic() > until:
            return False
        time.sleep(0.3)
    return True


def same(model: Any, other: Any) -> bool:
    pairs = zip(model.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(one, two) for one, two in pairs)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return train_toy(tmp_path_factory.mktemp("undisturbed"), Said())[0]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saves of steps 3 and 6, of the identity."""
    root = tmp_path_factory.mktemp("saves")
    context = dataclasses.replace(
        toy_context(root, toy_settings(max_steps=7), Said()), identity=ONE
    )
    arguments = training_arguments(TrainingArguments, context)
    run_training(context, Trainer(model=toy_model(), args=arguments, train_dataset=Rows()))
    return root / "checkpoints"


def machine(world: S3World) -> tuple[Any, SaveCopies, list[str]]:
    """A machine with an empty cache: its store, its copies, what was said."""
    store, lines = world.open(), []
    copies = copies_for(store, ONE, store.checkpoints(ONE), lines.append)
    assert copies is not None
    return store, copies, lines


def send_all(world: S3World, trained: Path, course: int = 0) -> None:
    """Copy the saves of `trained`, in order, from a machine of their own."""
    store = world.open()
    folder = store.checkpoints(ONE)
    shutil.copytree(trained, folder, dirs_exist_ok=True)
    for save in reversed(list_saves(folder, "full")):
        send(store, store.remote_saves(ONE), ONE, save.path, course, SETTINGS)


def call(*arguments: str) -> tuple[int, str]:
    """`llm-assets checkpoints ...`."""
    done = CliRunner().invoke(app, ["checkpoints", *arguments], standalone_mode=False)
    if done.exception is not None:
        return 1, str(done.exception)
    return done.return_value or 0, done.output


def steps(folder: Path) -> list[int]:
    return [save.step for save in list_saves(folder)]


def test_a_lost_machine_loses_no_save_that_was_copied(
    s3_world: S3World,
    tmp_path: Path,
    undisturbed: Any,
) -> None:
    """SIGKILL, the cache is gone; another machine ends with the very weights."""
    first, second = s3_world.url("lost"), s3_world.url("other")

    def die(step: int) -> None:
        if step == 14 and copied(doomed.copies, "save-00000012"):
            os.kill(os.getpid(), signal.SIGKILL)

    doomed = Said(die)
    pid = forked(lambda: train(first, tmp_path / "one", doomed))
    assert os.WTERMSIG(os.waitpid(pid, 0)[1]) == signal.SIGKILL
    shutil.rmtree(s3_world.folder / "lost")
    progress = Said()
    model, log = train(second, tmp_path / "two", progress)
    assert log.resumed_from == 12
    assert any(line.startswith("fetched save-00000012 from s3://") for line in progress.lines)
    assert same(model, undisturbed)
    # Retention holds for the copies too.
    remote: Any = open_store(second).remote_saves(ONE)
    assert len(remote.names()) <= 2


@pytest.mark.slow
def test_a_preempted_training_copies_its_last_save_in_the_grace_period(
    s3_world: S3World,
    tmp_path: Path,
    undisturbed: Any,
) -> None:
    told = Interruption(grace_s=600)

    def preempt(step: int) -> None:
        if step == 7:
            told.requested, told._first = True, time.monotonic()

    progress = Said(preempt)
    with pytest.raises(Terminated, match="saved: step 7"):
        train(s3_world.url("lost"), tmp_path / "one", progress, interruption=told)
    assert any(line.startswith("save-00000007 is in the store too") for line in progress.lines)
    model, log = train(s3_world.url("other"), tmp_path / "two", Said())
    assert log.resumed_from == 7 and same(model, undisturbed)


def test_a_damaged_copy_is_passed_over_and_marked(s3_world: S3World, trained: Path) -> None:
    send_all(s3_world, trained)
    sizes = {len(s3_world.read(k)): k for k in s3_world.keys(f"checkpoints/{ONE}/save-00000006/")}
    flip(s3_world, sizes[max(sizes)])
    store, copies, lines = machine(s3_world)
    copies.bring(SETTINGS)
    assert steps(store.checkpoints(ONE)) == [3]
    assert "the copy of save-00000006 is not taken" in lines[0]
    source = find_source(
        store.checkpoints(ONE), identity=ONE, world_size=1, settings=SETTINGS, say=lines.append
    )
    assert source is not None and source.manifest.step == 3
    newest, older = list_copies(copies.remote, copies.folder, [])
    assert (newest.step, newest.verdict, older.verdict) == (6, "corrupt", "healthy")
    # The next machine does not try it again. Without a whole one nothing starts over by itself.
    flip(s3_world, next(iter(s3_world.keys(f"checkpoints/{ONE}/save-00000003/"))))
    store, copies, lines = machine(s3_world)
    copies.bring(SETTINGS)
    assert "is corrupt" in lines[0] and "save-00000003 is not taken" in lines[1]
    with pytest.raises(SaveError, match="saves were published"):
        find_source(
            store.checkpoints(ONE), identity=ONE, world_size=1, settings=SETTINGS, say=lines.append
        )


def test_a_newer_save_of_this_machine_and_a_damaged_one(
    s3_world: S3World,
    trained: Path,
) -> None:
    send_all(s3_world, trained)
    store, copies, lines = machine(s3_world)
    folder = store.checkpoints(ONE)
    shutil.copytree(trained, folder, dirs_exist_ok=True)
    copies.bring(SETTINGS)
    assert lines == [] and steps(folder) == [6, 3]
    damaged = folder / "save-00000006" / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    copies.bring(SETTINGS)
    assert lines[0].startswith("fetched save-00000006")
    assert [save.verdict for save in list_saves(folder)] == ["healthy", "healthy"]
    assert list((folder / "set-aside").glob("*-replaced/save-00000006"))


def test_a_rollback_holds_on_every_machine(
    s3_world: S3World,
    trained: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    send_all(s3_world, trained)
    monkeypatch.setenv("LLM_ASSETS_STORE", s3_world.url("person"))
    (course,) = json.loads(call("ls", "--json")[1])["courses"]
    assert [(s["step"], s["places"]) for s in course["saves"]] == [(6, ["store"]), (3, ["store"])]
    assert course["goes_on_from"] == 6
    assert not list((s3_world.folder / "person" / "checkpoints").rglob("*.safetensors"))
    assert call("show", "--step", "3")[0] == 0
    code, text = call("rollback", "--step", "3", "--why", "the loss jumped")
    assert code == 0 and "in a scratch area: healthy" in text
    (course,) = json.loads(call("ls", "--json")[1])["courses"]
    assert [save["step"] for save in course["saves"]] == [3]
    assert course["chosen"]["step"] == 3
    # A machine that lay still since before, with the newer save on its disk; and an empty one.
    store = s3_world.open("still")
    folder = store.checkpoints(ONE)
    shutil.copytree(trained, folder, dirs_exist_ok=True)
    for cache in ("still", "empty"):
        store = s3_world.open(cache)
        copies = copies_for(store, ONE, store.checkpoints(ONE), print)
        assert copies is not None
        copies.bring(SETTINGS)
        assert steps(store.checkpoints(ONE)) == [3]
    # A copy of the course that was left, made late, does not count; one of the new course does.
    send_all(s3_world, trained)
    rollbacks = rollbacks_of(store, ONE)
    assert [s.step for s in list_copies(copies.remote, folder, rollbacks)] == [3]
    send(store, copies.remote, ONE, trained / "save-00000006", len(rollbacks), SETTINGS)
    assert [s.step for s in list_copies(copies.remote, folder, rollbacks)] == [6, 3]


def test_verify_finds_a_damaged_copy_without_a_download(
    s3_world: S3World,
    trained: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    send_all(s3_world, trained)
    monkeypatch.setenv("LLM_ASSETS_STORE", s3_world.url("person"))
    assert call("verify")[0] == 0
    flip(s3_world, s3_world.keys(f"checkpoints/{ONE}/save-00000006/")[0])
    code, text = call("verify")
    assert code == 1 and "save-00000006 corrupt" in text and "save-00000003 healthy" in text
    (course,) = json.loads(call("ls", "--json")[1])["courses"]
    assert course["goes_on_from"] == 3
    assert call("rollback", "--step", "6", "--why", "x")[0] == 1


@pytest.fixture
def gate(s3_world: S3World) -> Iterator[Any]:
    """A proxy before the server, whose `fault` can be changed, and a URL that goes through it."""
    parts = urlsplit(s3_world.server.endpoint)

    class Gate:
        fault: Callable[[Request], str] = staticmethod(lambda request: "")

    found: Any = Gate()
    with FaultyProxy(str(parts.hostname), int(parts.port or 0), lambda r: found.fault(r)) as proxy:
        found.url = lambda cache: s3_world.url(cache).replace(
            s3_world.server.endpoint, proxy.endpoint
        )
        yield found


def through(gate: Any, trained: Path) -> tuple[SaveCopies, list[str]]:
    store, lines = open_store(gate.url("through")), []
    shutil.copytree(trained, store.checkpoints(ONE), dirs_exist_ok=True)
    copies = copies_for(store, ONE, store.checkpoints(ONE), lines.append)
    assert copies is not None
    return copies, lines


def answer(copies: SaveCopies) -> str:
    """What the sender says next."""
    until = time.monotonic() + 300
    while time.monotonic() < until:
        copies.hurry()
        if found := copies.told():
            return found[0]
        time.sleep(0.02)
    raise TimeoutError


def refused_then_taken(gate: Any, trained: Path, fault: str) -> None:
    copies, _ = through(gate, trained)
    gate.fault = lambda request: fault if request.method == "PUT" else ""
    try:
        copies.offer("save-00000003")
        assert answer(copies).startswith("save-00000003 was not copied into the store: ")
        assert copies.remote.names() == []
        gate.fault = lambda request: ""
        copies.offer("save-00000006")
        assert answer(copies).startswith("save-00000006 is in the store too")
        assert copies.remote.names() == ["save-00000006"]
    finally:
        copies.finish(0)


def test_a_store_that_refuses_is_told_and_the_next_save_is_copied(gate: Any, trained: Path) -> None:
    refused_then_taken(gate, trained, "403")


@pytest.mark.slow
def test_a_store_that_is_away_is_told_and_the_next_save_is_copied(gate: Any, trained: Path) -> None:
    refused_then_taken(gate, trained, "drop")


@pytest.mark.slow
def test_a_training_goes_on_while_the_store_is_away(
    gate: Any, tmp_path: Path, undisturbed: Any
) -> None:
    """From the first save to the fifth nothing is copied; the sixth is."""

    def at(step: int) -> None:
        if step == 1:
            gate.fault = lambda request: "drop" if request.method == "PUT" else ""
        if step == 16:
            while not any("was not copied" in line for line in progress.lines):
                progress.copies.hurry()
                progress.lines += progress.copies.told()
                time.sleep(0.3)
            gate.fault = lambda request: ""
        if step == 20:
            assert copied(progress.copies, "save-00000018")

    progress = Said(at)
    model, log = train(gate.url("one"), tmp_path, progress)
    assert log.steps == 20 and same(model, undisturbed)


def test_a_copy_that_is_cut_off_by_a_kill_is_no_copy(gate: Any, trained: Path) -> None:
    copies, _ = through(gate, trained)
    arrived, hold = threading.Event(), threading.Event()
    counted = iter(range(100))

    def third_waits(request: Request) -> str:
        if request.method == "PUT" and next(counted) == 2:
            arrived.set()
            hold.wait(300)
            return "drop"
        return ""

    gate.fault = third_waits
    copies.offer("save-00000006")
    while not arrived.wait(0.3):
        copies.hurry()
    sender = copies._sender
    assert sender is not None and sender.stdin is not None
    # As when the training is killed: its end of the pipe closes.
    sender.stdin.close()
    assert sender.wait(30) == 0
    hold.set()
    assert copies.remote.names() == []
    gate.fault = lambda request: ""
    copies.offer("save-00000006")
    assert answer(copies).startswith("save-00000006 is in the store too")
    copies.finish(0)
    assert copies.remote.damage("save-00000006") == {}


def test_what_is_not_wanted_is_not_copied(s3_world: S3World, trained: Path) -> None:
    store, copies, _ = machine(s3_world)
    shutil.copytree(trained, store.checkpoints(ONE), dirs_exist_ok=True)
    copies.bring(CheckpointSettings(upload=False))
    copies.offer("save-00000006")
    copies.finish(5)
    assert copies._sender is None and copies.remote.names() == []
    send_all(s3_world, trained)
    copies.clear()
    assert s3_world.keys("checkpoints/") == []
