"""Spans arrive at an OTLP receiver, and one that is away stops nothing."""

import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from llm_assets.jobs import StageJob
from llm_assets.telemetry import endpoint, stage_span

JOB = StageJob(
    stage="sft_checkpoint",
    pipeline="tiny",
    identity="i" * 64,
    source_hash="s",
    recipe_part={},
    config={},
    seed=1,
    inputs={},
    identity_inputs={},
    store_url="",
    run_id="run-1",
    campaign="tiny",
)


class Receiver:
    """An OTLP receiver on the loopback; keeps what it got."""

    def __init__(self) -> None:
        self.got: list[tuple[str, dict[str, str], dict[str, Any]]] = []
        receiver = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.got.append(
                    (self.path, {k.lower(): v for k, v in self.headers.items()}, json.loads(body))
                )
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *_: object) -> None:
                return None

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


def span_of(document: dict[str, Any]) -> dict[str, Any]:
    (resource,) = document["resourceSpans"]
    (scope,) = resource["scopeSpans"]
    (span,) = scope["spans"]
    return dict(span)


def attributes_of(span: dict[str, Any]) -> dict[str, Any]:
    return {entry["key"]: next(iter(entry["value"].values())) for entry in span["attributes"]}


def test_a_stage_is_a_span(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=a%20b")
    said: list[str] = []
    with stage_span(JOB, said.append) as span:
        span.set(parameters=7, tokens=500, loss=0.5, cost_usd=0.25, artifact=None)
    with stage_span(JOB, said.append):
        pass
    assert said == []
    (path, headers, document), (_, _, second) = receiver.got
    assert path == "/v1/traces"
    assert headers["x-key"] == "a b"
    sent = span_of(document)
    assert sent["name"] == "tiny/sft_checkpoint"
    assert sent["status"] == {"code": 1}
    assert int(sent["endTimeUnixNano"]) >= int(sent["startTimeUnixNano"])
    found = attributes_of(sent)
    assert found["llm_assets.parameters"] == "7"
    assert found["llm_assets.loss"] == 0.5
    assert found["llm_assets.cost_usd"] == 0.25
    assert "llm_assets.artifact" not in found
    # One run is one trace; each stage a span of its own.
    assert span_of(second)["traceId"] == sent["traceId"]
    assert span_of(second)["spanId"] != sent["spanId"]


def test_a_failed_stage_says_so(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{receiver.url}/here")
    with pytest.raises(KeyError), stage_span(JOB, print):
        raise KeyError("lost")
    path, _, document = receiver.got[0]
    assert path == "/here"
    assert span_of(document)["status"] == {"code": 2, "message": "KeyError: 'lost'"}


def test_a_receiver_that_is_away_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    with stage_span(JOB, said.append):
        pass
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "grpc://collector")
    with stage_span(JOB, said.append):
        pass
    assert len(said) == 2
    assert "127.0.0.1:9" in said[0]
    assert "no http(s) endpoint" in said[1]


def test_nothing_is_sent_without_an_endpoint() -> None:
    assert endpoint({}) == ""
    assert endpoint({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a/"}) == "http://a/v1/traces"
    assert endpoint({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://a", "OTEL_SDK_DISABLED": "true"}) == ""
