"""The chat starts a server from the store, talks to it, and leaves nothing behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from llm_assets import serving
from llm_assets.chat_command import Conversation, chat
from llm_assets.errors import ModelError, NotFoundError, UserError
from llm_assets.openai_client import Answer
from llm_assets.serving import ServerSpec, make_spec
from llm_assets.store.digest import ArtifactHash, Identity
from llm_assets.store.protocol import Record, Store

# Speaks the protocol; answers with what it was asked, and how many turns it saw.
_ECHO = """
import http.server, json, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        said = body["messages"][-1]["content"]
        text = f"{len(body['messages'])}: {said} ({body['max_tokens']}, {body['temperature']})"
        self.send_response(200); self.end_headers()
        for part, finish in ((text, None), (None, "stop")):
            choice = {"delta": {"content": part}, "finish_reason": finish}
            event = {"model": body["model"], "choices": [choice]}
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\\n\\n")
    def log_message(self, *args):
        pass
http.server.HTTPServer((sys.argv[1], int(sys.argv[2])), Handler).serve_forever()
"""


@pytest.fixture
def echo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    """The transformers engine, played by a server that starts in a moment."""
    script = tmp_path / "echo.py"
    script.write_text(_ECHO)
    argv = (sys.executable, str(script), "{host}", "{port}", "{model}")
    monkeypatch.setitem(serving._ARGV, "transformers", argv)
    return argv


def put_model(store: Store, folder: Path, *, context: int = 128, kind: str = "policy") -> str:
    """Something that has the files of a model."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"max_position_embeddings": context}))
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        (folder / name).write_text(name)
    return str(store.put(folder, type=kind, metadata={"num_parameters": 1}))


def put_server(
    store: Store, folder: Path, weights: str, *, at: str, pipeline: str = "tiny", tokens: int = 48
) -> ArtifactHash:
    """A server's spec with its record."""
    folder.mkdir()
    spec = make_spec(engine="transformers", weights=weights, max_tokens=tokens)
    (folder / "server.json").write_text(json.dumps(spec.as_dict()))
    output = store.put(folder, type="server_spec", metadata={"weights": weights})
    store.add_record(
        Record(
            identity=Identity.parse(f"{tokens:064x}"),
            stage="inference_server",
            pipeline=pipeline,
            output=output,
            type="server_spec",
            source_hash="0" * 64,
            recipe={},
            seed=0,
            inputs={},
            metrics={},
            cost_usd=0.0,
            wall_s=1.0,
            created_at=at,
        )
    )
    return output


def run_chat(*arguments: str, said: str = "") -> Result:
    return CliRunner().invoke(chat, arguments, input=said, standalone_mode=False)


def servers_of(model: str) -> list[str]:
    listing = subprocess.run(
        ["ps", "-ww", "-eo", "stat,args"], capture_output=True, text=True, check=True
    )
    return [
        line
        for line in listing.stdout.splitlines()
        if line.rstrip().endswith(model) and not line.startswith("Z")
    ]


def test_once_prints_the_answer_of_the_newest_server_and_ends(store, echo, tmp_path):
    weights = put_model(store, tmp_path / "model")
    put_server(store, tmp_path / "new", weights, at="2026-03-02T00:00:00Z", tokens=48)
    put_server(store, tmp_path / "old", weights, at="2026-03-01T00:00:00Z", tokens=7)
    put_server(store, tmp_path / "x", weights, at="2026-04-01T00:00:00Z", pipeline="y", tokens=9)
    result = run_chat("--once", "What does Anna do?")
    assert result.exception is None
    assert result.stdout == "1: What does Anna do? (48, 0.0)\n"
    assert f"starting llm-assets-{weights[:12]} (transformers)" in result.stderr
    assert servers_of(f"llm-assets-{weights[:12]}") == []


def test_settings_of_the_command_line_reach_the_server(store, echo, tmp_path):
    weights = put_model(store, tmp_path / "model")
    options = ("--max-tokens", "5", "--temperature", "0.5", "--system", "Be brief.")
    result = run_chat("--artifact", weights, *options, "--once", "Hello")
    assert result.stdout == "2: Hello (5, 0.5)\n"


def test_a_conversation_is_remembered_until_new(store, echo, tmp_path):
    weights = put_model(store, tmp_path / "model", context=4096)
    result = run_chat("--artifact", weights[:8], said="one\n\ntwo\n/new\nthree\n/quit\nfour\n")
    assert result.exception is None
    assert result.stdout.splitlines() == [
        "1: one (256, 0.0)",
        "3: two (256, 0.0)",
        "1: three (256, 0.0)",
    ]
    assert servers_of(f"llm-assets-{weights[:12]}") == []


def test_a_server_spec_may_be_named_too(store, echo, tmp_path):
    weights = put_model(store, tmp_path / "model")
    spec = put_server(store, tmp_path / "spec", weights, at="2026-03-02T00:00:00Z", tokens=3)
    assert run_chat("--artifact", str(spec), "--once", "hi").stdout == "1: hi (3, 0.0)\n"


def test_what_is_not_there_is_said(store, tmp_path):
    weights = put_model(store, tmp_path / "model")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "documents.jsonl").write_text("{}\n")
    corpus = str(store.put(tmp_path / "text", type="corpus", metadata={"num_rows": 1}))
    for arguments, error, said in (
        ((), NotFoundError, "no proven server of the pipeline tiny(.|\n)*llm-assets run -r tiny"),
        (("--artifact", "f" * 64), NotFoundError, "no artifacts begin with"),
        (("--artifact", weights[:3]), UserError, "at least 6 digits"),
        (("--artifact", corpus), UserError, "a corpus(.|\n)*chat takes a server_spec"),
    ):
        with pytest.raises(error, match=said):
            raise_of(run_chat(*arguments))


def raise_of(result: Result) -> None:
    assert result.exception is not None
    raise result.exception


def test_no_store_is_said_and_none_is_made(tmp_path, monkeypatch):
    monkeypatch.setenv("LLM_ASSETS_STORE", str(tmp_path / "nowhere"))
    with pytest.raises(NotFoundError, match="no store"):
        raise_of(run_chat())
    assert not (tmp_path / "nowhere").exists()


def test_a_stored_spec_that_would_run_something_else_is_refused(store, tmp_path, monkeypatch):
    weights = put_model(store, tmp_path / "model")
    with monkeypatch.context() as patch:
        patch.setitem(serving._ARGV, "transformers", ("touch", str(tmp_path / "harm")))
        spec = put_server(store, tmp_path / "spec", weights, at="2026-03-02T00:00:00Z")
    with pytest.raises(ModelError, match="the engine's command"):
        raise_of(run_chat("--artifact", str(spec)))
    assert not (tmp_path / "harm").exists()


_PERSON = """
import sys
from llm_assets import serving
from llm_assets.chat_command import chat
serving._ARGV["transformers"] = tuple(sys.argv[2:])
sys.exit(chat(["--artifact", sys.argv[1]], standalone_mode=False))
"""


@pytest.fixture
def person(store: Store, echo: tuple[str, ...], tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A chat in a process of its own, after its first answer."""
    weights = put_model(store, tmp_path / "model")
    process = subprocess.Popen(
        [sys.executable, "-c", _PERSON, weights, *echo],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write("one\n")
    process.stdin.flush()
    assert process.stdout.readline() == "1: one (256, 0.0)\n"
    process.model = f"llm-assets-{weights[:12]}"  # type: ignore[attr-defined]
    assert len(servers_of(process.model)) == 2  # type: ignore[attr-defined]
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 0), (signal.SIGTERM, -15), (signal.SIGKILL, -9)]
)
def test_the_server_ends_with_the_chat(person, number, code):
    person.send_signal(number)
    assert person.wait(30) == code
    deadline = time.monotonic() + 20
    while servers_of(person.model) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert servers_of(person.model) == []


class Counting:
    """A server whose answers take 10 tokens, 10 more for each turn before."""

    def __init__(self, context: int) -> None:
        self.spec = ServerSpec(
            engine="transformers", weights="0" * 64, model="m", argv=(), context_length=context
        )
        self.seen: list[int] = []

    def ask(self, messages, **settings) -> Answer:
        self.seen.append(len(messages))
        return Answer(
            text="yes",
            num_tokens=5,
            prompt_tokens=10 * (len(messages) // 2) + 5,
            finish_reason="stop",
            first_token_s=0.0,
            total_s=0.0,
        )


@pytest.mark.parametrize(
    ("context", "seen"), [(1000, [1, 3, 5, 7, 9]), (45, [1, 3, 5, 5, 5]), (20, [1, 1, 1, 1, 1])]
)
def test_the_oldest_turns_make_room(context, seen):
    server = Counting(context)
    talk = Conversation(server, max_tokens=20)
    for _ in range(5):
        talk.ask("why")
    assert server.seen == seen
