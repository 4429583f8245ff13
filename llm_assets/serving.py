"""Inference servers: how one is described, started, asked and stopped. No torch here.

A `ServerSpec` is the content of a `server.json`. `start_server` runs it as a process group of its
own, bound to loopback unless told otherwise. The group ends with `stop()`, with the `with` block,
or with the process that started it, also when that one is killed.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from llm_assets import serving_guard
from llm_assets.errors import ModelError, ServerError
from llm_assets.openai_client import Answer, Messages, chat_completion, is_healthy

FORMAT = 1
_GRACE_S = 10.0
_POLL_S = 0.1
_TRIES = 3

# Distributions that an engine needs beside itself: import names.
_ENGINE_NEEDS = {
    "transformers": ("transformers", "torch", "fastapi", "uvicorn", "openai"),
    "vllm": ("vllm",),
}
_ENGINE_REMEDY = {
    "transformers": "pip install 'transformers[serving]'",
    "vllm": "pip install vllm (it needs a GPU), or set stages.inference_server.engine: "
    "transformers in the recipe",
}
# {weights} is a link with the model's name, in the folder where the server starts: so the name that
# clients use is the same on every machine.
_ARGV = {
    "transformers": (
        "transformers", "serve", "{weights}", "--host", "{host}", "--port", "{port}",
    ),
    "vllm": (
        "vllm", "serve", "{weights}", "--served-model-name", "{model}",
        "--host", "{host}", "--port", "{port}",
    ),
}  # fmt: skip
# No look at the hub, no usage reports: the weights are here.
_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTHONUNBUFFERED": "1",
}


@dataclass(frozen=True, kw_only=True)
class ServerSpec:
    """How to start a server of one artifact. A function of the weights and the recipe alone.

    `argv` is a template: {weights}, {model}, {host}, {port}. `defaults` are the sampling settings
    of a request that says nothing. `context_length` is in tokens, question and answer together.
    """

    engine: str
    weights: str
    model: str
    argv: tuple[str, ...]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    context_length: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """The part of server.json that `spec_of` reads back."""
        return {
            "format": FORMAT,
            "engine": self.engine,
            "weights": self.weights,
            "model": self.model,
            "argv": list(self.argv),
            "defaults": dict(self.defaults),
            "context_length": self.context_length,
        }


def make_spec(
    *, engine: str, weights: str, max_tokens: int, context_length: int | None = None
) -> ServerSpec:
    """The spec of an engine on the artifact `weights` (its hash); greedy by default."""
    return ServerSpec(
        engine=engine,
        weights=weights,
        model=f"llm-assets-{weights[:12]}",
        argv=_ARGV[engine],
        defaults={"temperature": 0.0, "max_tokens": max_tokens},
        context_length=context_length,
    )


def spec_of(path: Path) -> ServerSpec:
    """Read a server.json. ModelError when it is none, or of a format that is not known.

    Its command must be the engine's own: a file from a store is no reason to run anything else.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["format"] != FORMAT:
            raise ValueError(f"format {document['format']!r}")
        if tuple(document["argv"]) != _ARGV[document["engine"]]:
            raise ValueError(f"argv {document['argv']}")
        return ServerSpec(
            engine=document["engine"],
            weights=document["weights"],
            model=document["model"],
            argv=tuple(document["argv"]),
            defaults=document["defaults"],
            context_length=document.get("context_length"),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            where=str(path),
            found=f"{type(error).__name__}: {error}",
            rule=f"a server spec is a JSON document of format {FORMAT} with the engine's command",
            remedy="materialize inference_server again",
        ) from error


def require_engine(engine: str) -> None:
    """ModelError unless all that the engine needs is installed. Imports nothing."""
    missing = [name for name in _ENGINE_NEEDS[engine] if importlib.util.find_spec(name) is None]
    if missing:
        raise ModelError(
            where=f"stages.inference_server.engine: {engine}",
            found=f"not installed: {', '.join(missing)}",
            rule=f"the engine {engine} needs {', '.join(_ENGINE_NEEDS[engine])}",
            remedy=_ENGINE_REMEDY[engine],
        )


class RunningServer:
    """A server that answers. Ends with its `with` block; `stop()` may be called twice."""

    def __init__(
        self, spec: ServerSpec, process: subprocess.Popen[bytes], host: str, port: int, log: Path
    ) -> None:
        self.spec = spec
        self.host = host
        self.port = port
        self.log = log
        self._process = process
        self._stopped = False

    @property
    def url(self) -> str:
        """Base of the OpenAI protocol."""
        return f"http://{self.host}:{self.port}/v1"

    @property
    def group(self) -> int:
        """The process group of the server."""
        return self._process.pid

    def alive(self) -> bool:
        """The server's process runs."""
        return not self._stopped and self._process.poll() is None

    def ask(
        self,
        messages: Messages,
        *,
        max_tokens: int | None = None,
        temperature: float | None = None,
        timeout_s: float = 120.0,
        on_text: Callable[[str], Any] | None = None,
    ) -> Answer:
        """One chat completion, streamed; `on_text` sees each piece as it comes.

        ServerError when the server is gone, refuses the request, or answers as another model.
        """
        body: dict[str, Any] = {
            "model": self.spec.model,
            "messages": list(messages),
            **self.spec.defaults,
        }
        if max_tokens is not None:
            body["max_tokens"] = max_tokens
        if temperature is not None:
            body["temperature"] = temperature
        if self.spec.engine == "vllm":
            # vLLM counts tokens only when asked to; transformers refuses the field.
            body["stream_options"] = {"include_usage": True}
        try:
            return chat_completion(self.host, self.port, body, timeout_s=timeout_s, on_text=on_text)
        except ServerError as error:
            if self.alive():
                raise
            raise ServerError(f"{error}\n{_ending(self._process, self.log)}") from error

    def stop(self) -> None:
        """SIGTERM to the group, SIGKILL after a grace period; returns when the group is gone."""
        if not self._stopped:
            self._stopped = True
            _end_group(self._process)

    def __enter__(self) -> RunningServer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def start_server(
    spec: ServerSpec,
    weights: Path,
    scratch: Path,
    *,
    timeout_s: float = 120.0,
    host: str = "127.0.0.1",
    port: int | None = None,
) -> RunningServer:
    """Start the server on the folder `weights` and return when it answers.

    `scratch` gets its log and the link to the weights. Without `port` a free one is taken.
    ModelError when the engine is not installed; ServerError, with the end of the log, when the
    server ends or does not answer in time. Nothing is left running then.
    """
    require_engine(spec.engine)
    folder = Path(tempfile.mkdtemp(prefix="server-", dir=scratch))
    (folder / spec.model).symlink_to(weights.resolve(), target_is_directory=True)
    for attempt in range(1, _TRIES + 1):
        chosen = free_port(host) if port is None else port
        log = folder / f"server-{attempt}.log"
        process = _launch(spec, folder, host, chosen, log)
        try:
            _wait_until_healthy(process, host, chosen, log, timeout_s)
        except _PortTaken as error:
            _end_group(process)
            if port is not None or attempt == _TRIES:
                raise ServerError(f"port {chosen} of {host} is taken\n{error}") from error
            continue
        except BaseException:
            _end_group(process)
            raise
        return RunningServer(spec, process, host, chosen, log)
    raise ServerError("no free port was found")


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def command_line(spec: ServerSpec, *, host: str, port: int) -> list[str]:
    """The spec's argv, filled in; a command of this Python's environment comes first."""
    values = {"weights": spec.model, "model": spec.model, "host": host, "port": str(port)}
    argv = [part.format_map(values) for part in spec.argv]
    scripts = sysconfig.get_path("scripts")
    found = shutil.which(argv[0], path=scripts) or shutil.which(argv[0])
    if found is None:
        raise ModelError(
            where=f"server spec of {spec.model}",
            found=f"no command {argv[0]!r}",
            rule="the engine's command stands beside this Python or on the PATH",
            remedy=_ENGINE_REMEDY.get(spec.engine, f"install {spec.engine}"),
        )
    return [found, *argv[1:]]


class _PortTaken(Exception):
    """Somebody else bound the port between the look and the start."""


def _launch(
    spec: ServerSpec, folder: Path, host: str, port: int, log: Path
) -> subprocess.Popen[bytes]:
    guard = [sys.executable, "-I", str(Path(serving_guard.__file__).resolve()), str(_GRACE_S)]
    with log.open("wb") as output:
        return subprocess.Popen(
            [*guard, *command_line(spec, host=host, port=port)],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={**os.environ, **_ENVIRONMENT},
            start_new_session=True,
        )


def _wait_until_healthy(
    process: subprocess.Popen[bytes], host: str, port: int, log: Path, timeout_s: float
) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        healthy = is_healthy(host, port)
        if process.poll() is not None:
            ending = _ending(process, log)
            if "address already in use" in ending.lower():
                raise _PortTaken(ending)
            raise ServerError(f"the server ended before it answered\n{ending}")
        if healthy:
            return
        time.sleep(_POLL_S)
    raise ServerError(
        f"the server did not answer within {timeout_s:g} s\n{_tail(log)}\n"
        "next: raise stages.inference_server.startup_timeout_s, or look at the log above"
    )


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End the guard and all that is in its group; returns when they are gone."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(_GRACE_S + 2)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.stdin is not None:
        process.stdin.close()


def _ending(process: subprocess.Popen[bytes], log: Path) -> str:
    return f"exit code {process.poll()}; end of its log:\n{_tail(log)}"


def _tail(log: Path, lines: int = 20) -> str:
    text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
    return "\n".join(f"  | {line}" for line in text.splitlines()[-lines:])
