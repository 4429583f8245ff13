"""Starts worker processes under Dagster Pipes, follows them, and ends their whole group."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from dagster import (
    AssetExecutionContext,
    ConfigurableResource,
    PipesTempFileContextInjector,
    PipesTempFileMessageReader,
    open_pipes_session,
)
from pydantic import Field

from llm_assets.compat import cancelled
from llm_assets.errors import WorkerError
from llm_assets.jobs import StageJob
from llm_assets.places import home
from llm_assets.worker_codes import LOST_PROCESS

ProgressListener = Callable[[Mapping[str, Any]], None]

_listeners: list[ProgressListener] = []


@contextlib.contextmanager
def listening(listener: ProgressListener) -> Iterator[None]:
    """While open, `listener` gets every progress event of the workers that this process follows."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def listening_event(event: Mapping[str, Any]) -> None:
    """Hand one event to the listeners of this process."""
    for listener in list(_listeners):
        listener(event)


@dataclass(frozen=True, kw_only=True)
class WorkerExit:
    """How a worker ended. `error` is the text that it left for people, "" without one."""

    code: int
    error: str
    kind: str
    log: Path


class Launcher(Protocol):
    """Runs a worker to its end. Whatever happens to the caller, no process of it stays behind."""

    def launch(
        self, context: AssetExecutionContext, job: StageJob, *, side_by_side: int
    ) -> WorkerExit:
        """Start the worker of a job and wait for it."""


class LocalLauncher(ConfigurableResource):
    """Workers as subprocesses of this machine, or under `accelerate launch`."""

    threads: int = Field(0, description="CPU threads of a worker; 0: all cores, shared fairly.")
    grace_s: float = Field(20.0, description="Between SIGTERM and SIGKILL.")

    def launch(
        self, context: AssetExecutionContext, job: StageJob, *, side_by_side: int
    ) -> WorkerExit:
        """See Launcher.launch."""
        folder = home() / "logs" / (job.run_id or "no-run")
        folder.mkdir(parents=True, exist_ok=True)
        log = folder / f"{job.pipeline}-{job.stage}.log"
        with (
            tempfile.TemporaryDirectory(prefix="llm-assets-") as scratch,
            open_pipes_session(
                context=context,
                context_injector=PipesTempFileContextInjector(),
                message_reader=_MessageReader(),
                extras={"job": job.as_json()},
            ) as session,
            log.open("ab") as output,
        ):
            progress = Path(scratch) / "progress.jsonl"
            env = self._env(side_by_side * job.num_processes)
            process = subprocess.Popen(
                _command(progress, job.num_processes),
                env={**os.environ, **env, **session.get_bootstrap_env_vars()},
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            follower = _Follower(progress)
            try:
                while process.poll() is None:
                    if cancelled(job.run_id):
                        raise WorkerError(f"{job.stage}: the run was cancelled")
                    follower.read()
                    time.sleep(0.05)
            finally:
                end_process_group(process, self.grace_s)
            follower.read()
        code = process.returncode if follower.code is None else follower.code
        return WorkerExit(code=code, error=follower.error, kind=follower.kind, log=log)

    def _env(self, sharing: int) -> dict[str, str]:
        """`sharing`: processes that share the cores."""
        threads = self.threads or max(1, (os.cpu_count() or 1) // sharing)
        return {
            "OMP_NUM_THREADS": str(threads),
            # A training that is told to end saves within this, and leaves time to unwind.
            "LLM_ASSETS_GRACE_S": str(self.grace_s * 0.75),
            # Threads that wait for each other spin; beside other work on the cores, long spinning
            # costs ten times the speed. Small freed memory is kept: every step asks for the same
            # again. Large buffers, such as the logits of a real vocabulary, go back at once.
            "GOMP_SPINCOUNT": "1000",
            "MALLOC_TRIM_THRESHOLD_": str(2**28),
            "MALLOC_MMAP_THRESHOLD_": str(2**26),
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONUNBUFFERED": "1",
            "TQDM_DISABLE": "1",
        }


def _command(progress: Path, num_processes: int) -> list[str]:
    module = ["-m", "llm_assets.worker", "--progress", str(progress)]
    if num_processes == 1:
        return [sys.executable, *module]
    # A file of our own: the one in the user's home could shard the model or change its precision.
    config = progress.with_name("accelerate.json")
    config.write_text(json.dumps({**_ACCELERATE, "num_processes": num_processes}))
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config)]
    return [*launch, *module]


_ACCELERATE = {
    "compute_environment": "LOCAL_MACHINE",
    # The kind for which accelerate calls torchrun, on a machine without GPUs too: for MULTI_CPU
    # it starts a single process unless it finds MPI. The backend is chosen in the process: gloo
    # on the CPU.
    "distributed_type": "MULTI_GPU",
    "num_machines": 1,
    "machine_rank": 0,
    "main_process_port": 0,
    "mixed_precision": "no",
    "gpu_ids": "all",
    "use_cpu": False,
    "debug": False,
}


class _MessageReader(PipesTempFileMessageReader):
    """One worker writes. Said here because Dagster's own property warns that it is a preview."""

    expected_writer_count = 1


class _Follower:
    """Reads a worker's progress file as it grows, and hands each event to the listeners."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.error = ""
        self.kind = ""
        self.code: int | None = None

    def read(self) -> None:
        """Hand on what was written since the last call."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            chunk = file.read()
        complete = chunk[: chunk.rfind(b"\n") + 1]
        self._offset += len(complete)
        for line in complete.splitlines():
            event = json.loads(line)
            if "code" in event:
                self.code = event["code"]
                continue
            # Of several processes one fails first; the others only see that it is gone.
            if "error" in event and self.kind in ("", LOST_PROCESS):
                self.error, self.kind = event["error"], event["kind"]
            listening_event(event)


def end_process_group(process: "subprocess.Popen[bytes]", grace_s: float) -> None:
    """End a process that leads its own group, and all that it started: SIGTERM, then SIGKILL."""
    if process.poll() is None:
        _signal_group(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=grace_s)
    # Whatever the leader left behind in its group goes too.
    _signal_group(process.pid, signal.SIGKILL)
    process.wait()


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def log_tail(path: Path, lines: int = 30) -> str:
    """The last lines of a worker's log."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 20_000))
            return "\n".join(file.read().decode("utf-8", "replace").splitlines()[-lines:])
    except OSError as error:
        return str(error)
