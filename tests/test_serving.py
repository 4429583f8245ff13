"""Servers start, answer and end: also when their starter is killed.

Real processes and sockets, but a server that starts in a moment; tests/stages/test_inference_server
starts the real one.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from llm_assets.errors import ModelError, ServerError
from llm_assets.openai_client import chat_completion, is_healthy
from llm_assets.serving import (
    ServerSpec,
    command_line,
    free_port,
    make_spec,
    require_engine,
    spec_of,
    start_server,
)

# Answers /health and nothing else; ignores SIGTERM when told to.
_HEALTHY = """
import http.server, signal, subprocess, sys
if "stubborn" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "family" in sys.argv:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
http.server.HTTPServer((sys.argv[1], int(sys.argv[2])), Handler).serve_forever()
"""


def stand_in(tmp_path: Path, *flags: str) -> ServerSpec:
    """A spec of a server that starts in a moment."""
    script = tmp_path / "stand_in.py"
    script.write_text(_HEALTHY)
    argv = (sys.executable, str(script), "{host}", "{port}", *flags)
    return ServerSpec(engine="transformers", weights="0" * 64, model="stand-in", argv=argv)


def living(group: int) -> list[str]:
    """The processes of a group that are no zombies."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(stat.parent.name)
    return found


def wait_until_gone(group: int, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while living(group) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert living(group) == []


@pytest.mark.parametrize("flags", [(), ("family",)])
def test_nothing_is_left_after_stop(tmp_path, flags):
    with start_server(stand_in(tmp_path, *flags), tmp_path, tmp_path) as server:
        group = server.group
        assert server.alive()
        assert is_healthy(server.host, server.port)
        assert len(living(group)) == 2 + len(flags)
    assert not server.alive()
    assert living(group) == []
    assert not is_healthy(server.host, server.port)
    server.stop()


def test_a_server_that_ignores_sigterm_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr("llm_assets.serving._GRACE_S", 0.5)
    with start_server(stand_in(tmp_path, "stubborn"), tmp_path, tmp_path) as server:
        group = server.group
    assert living(group) == []


def test_nothing_is_left_after_an_error_in_the_block(tmp_path):
    group = 0
    with (
        pytest.raises(KeyboardInterrupt),
        start_server(stand_in(tmp_path), tmp_path, tmp_path) as server,
    ):
        group = server.group
        raise KeyboardInterrupt
    assert living(group) == []


_STARTER = """
import sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from test_serving import stand_in
from llm_assets.serving import start_server
folder = Path(sys.argv[2])
server = start_server(stand_in(folder, *sys.argv[3:]), folder, folder)
print(server.group, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_server_ends_with_the_process_that_started_it(tmp_path, number):
    starter = subprocess.Popen(
        [sys.executable, "-c", _STARTER, str(Path(__file__).parent), str(tmp_path), "family"],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert starter.stdout is not None
    group = int(starter.stdout.readline())
    assert len(living(group)) == 3
    starter.send_signal(number)
    starter.wait()
    starter.stdout.close()
    wait_until_gone(group)


def test_a_server_that_ends_at_once_says_why(tmp_path):
    argv = (sys.executable, "-c", "raise SystemExit('no such model here')")
    spec = ServerSpec(engine="transformers", weights="0" * 64, model="m", argv=argv)
    with pytest.raises(ServerError, match=r"exit code 1(.|\n)*no such model here"):
        start_server(spec, tmp_path, tmp_path)


def test_a_server_that_never_answers_is_ended(tmp_path):
    argv = (sys.executable, "-c", "import time; print('still loading', flush=True); time.sleep(60)")
    spec = ServerSpec(engine="transformers", weights="0" * 64, model="quiet-one", argv=argv)
    with pytest.raises(ServerError, match=r"within 1 s(.|\n)*still loading"):
        start_server(spec, tmp_path, tmp_path, timeout_s=1.0)
    running = subprocess.run(
        ["ps", "-ww", "-eo", "args"], capture_output=True, text=True, check=True
    )
    assert "still loading" not in running.stdout


def test_a_taken_port_is_an_error_that_names_it(tmp_path):
    argv = (
        sys.executable,
        "-c",
        "import socket, sys; s = socket.socket(); s.bind((sys.argv[1], int(sys.argv[2])))",
        "{host}",
        "{port}",
    )
    spec = ServerSpec(engine="transformers", weights="0" * 64, model="m", argv=argv)
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ServerError, match=f"port {port} of 127.0.0.1 is taken"):
            start_server(spec, tmp_path, tmp_path, port=port)


def test_specs_survive_the_round_trip_and_name_no_path(tmp_path):
    spec = make_spec(engine="transformers", weights="ab" * 32, max_tokens=48, context_length=256)
    path = tmp_path / "server.json"
    path.write_text(json.dumps(spec.as_dict()))
    assert spec_of(path) == spec
    assert spec.model == "llm-assets-abababababab"
    line = command_line(spec, host="127.0.0.1", port=8123)
    assert line[1:] == ["serve", spec.model, "--host", "127.0.0.1", "--port", "8123"]
    assert Path(line[0]).name == "transformers"
    assert "/" not in json.dumps(spec.as_dict()).replace("\\/", "/")


def test_a_spec_that_would_run_something_else_is_refused(tmp_path):
    spec = make_spec(engine="transformers", weights="ab" * 32, max_tokens=48)
    document = {**spec.as_dict(), "argv": ["rm", "-rf", "{weights}"]}
    (tmp_path / "server.json").write_text(json.dumps(document))
    with pytest.raises(ModelError, match="with the engine's command"):
        spec_of(tmp_path / "server.json")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 2}', '{"format": 1}'])
def test_a_spec_that_is_none_is_refused(tmp_path, text):
    (tmp_path / "server.json").write_text(text)
    with pytest.raises(ModelError, match="server spec is a JSON document of format 1"):
        spec_of(tmp_path / "server.json")


def test_an_engine_that_is_not_installed_is_refused(monkeypatch):
    require_engine("transformers")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"not installed: vllm(.|\n)*pip install vllm"):
        require_engine("vllm")


class _Scripted(BaseHTTPRequestHandler):
    """Plays one stream; the lines are set by the test."""

    status = 200
    lines: tuple[bytes, ...] = ()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(self.status)
        self.end_headers()
        for line in self.lines:
            self.wfile.write(line)

    def log_message(self, *args: object) -> None:
        """Quiet."""


@pytest.fixture
def scripted() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Scripted,), {}))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def chunk(text: str | None, finish: str | None = None, model: str = "m", **more: object) -> bytes:
    choice = {"delta": {"content": text}, "finish_reason": finish, "index": 0}
    return b"data: " + json.dumps({"model": model, "choices": [choice], **more}).encode() + b"\n\n"


def ask(server: ThreadingHTTPServer, **more):
    host, port = server.server_address[:2]
    return chat_completion(str(host), port, {"model": "m", "messages": []}, **more)


def test_a_stream_is_put_together(scripted):
    usage = {"completion_tokens": 7, "prompt_tokens": 3}
    scripted.RequestHandlerClass.lines = (
        b": a comment\n\n",
        chunk(None),
        chunk("Anna is ", model="m@main"),
        chunk("a bäker."),
        chunk(None, "stop", usage=usage),
        b"data: [DONE]\n\n",
    )
    seen: list[str] = []
    answer = ask(scripted, on_text=seen.append)
    assert answer.text == "Anna is a bäker."
    assert seen == ["Anna is ", "a bäker."]
    assert (answer.num_tokens, answer.prompt_tokens, answer.finish_reason) == (7, 3, "stop")
    assert 0 < answer.first_token_s <= answer.total_s


@pytest.mark.parametrize(
    ("status", "lines", "said"),
    [
        (400, (b'{"detail": "pinned"}',), "status 400.*pinned"),
        (200, (chunk("half an ans"),), "broke off after 'half an ans'"),
        (200, (b'data: {"error": "out of memory"}\n\n',), "out of memory"),
        (200, (b"data: {nonsense\n\n",), "not JSON"),
        (200, (chunk("x", "stop", model="another"),), "asked m, another answered"),
    ],
)
def test_a_bad_answer_is_an_error(scripted, status, lines, said):
    scripted.RequestHandlerClass.status = status
    scripted.RequestHandlerClass.lines = lines
    with pytest.raises(ServerError, match=said):
        ask(scripted)


def test_no_server_is_an_error_and_no_proxy_is_asked(monkeypatch):
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    port = free_port()
    assert not is_healthy("127.0.0.1", port)
    with pytest.raises(ServerError, match="ConnectionRefused"):
        chat_completion("127.0.0.1", port, {"model": "m", "messages": []})


def test_asking_a_server_that_died_shows_its_log(tmp_path):
    with start_server(stand_in(tmp_path), tmp_path, tmp_path) as server:
        os.killpg(server.group, signal.SIGKILL)
        wait_until_gone(server.group)
        with pytest.raises(ServerError, match="end of its log"):
            server.ask([{"role": "user", "content": "hello"}])
