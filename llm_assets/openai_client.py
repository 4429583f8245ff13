"""A client of the OpenAI chat protocol: what the smoke test and the chat need, no more.

`http.client` is used directly: a proxy of the environment must not see loopback requests.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llm_assets.errors import ServerError

Messages = Sequence[Mapping[str, str]]


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One answer. Times count from the request; `num_tokens` as the server counted them."""

    text: str
    num_tokens: int
    prompt_tokens: int | None
    finish_reason: str
    first_token_s: float
    total_s: float


def is_healthy(host: str, port: int, timeout_s: float = 2.0) -> bool:
    """GET /health answers 200."""
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.request("GET", "/health")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def chat_completion(
    host: str,
    port: int,
    body: Mapping[str, Any],
    *,
    timeout_s: float = 120.0,
    on_text: Callable[[str], Any] | None = None,
) -> Answer:
    """POST /v1/chat/completions, streamed.

    ServerError when there is no server, it refuses, it breaks off, or it answers as another model.
    """
    started = time.monotonic()
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    where = f"http://{host}:{port}/v1/chat/completions"
    try:
        payload = json.dumps({**body, "stream": True}).encode()
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/chat/completions", payload, headers)
        response = connection.getresponse()
        if response.status != 200:
            detail = response.read(2000).decode("utf-8", errors="replace")
            raise ServerError(f"{where}: status {response.status}: {detail}")
        return _collect(_events(response, where), str(body["model"]), started, where, on_text)
    except (OSError, http.client.HTTPException) as error:
        raise ServerError(f"{where}: {type(error).__name__}: {error}") from error
    finally:
        connection.close()


def _events(response: http.client.HTTPResponse, where: str) -> Iterator[dict[str, Any]]:
    """The JSON documents of a server-sent event stream."""
    for raw in response:
        line = raw.decode("utf-8").strip()
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError as error:
            raise ServerError(f"{where}: not JSON in the stream: {data[:200]!r}") from error
        if "error" in event:
            raise ServerError(f"{where}: {event['error']}")
        yield event


def _collect(
    events: Iterator[dict[str, Any]],
    model: str,
    started: float,
    where: str,
    on_text: Callable[[str], Any] | None,
) -> Answer:
    pieces: list[str] = []
    first: float | None = None
    finish = ""
    usage: dict[str, Any] = {}
    for event in events:
        # transformers adds the revision: NAME@main.
        answering = str(event.get("model", "")).split("@")[0]
        if answering != model:
            raise ServerError(f"{where}: asked {model}, {answering or 'nobody'} answered")
        usage = event.get("usage") or usage
        for choice in event.get("choices", ()):
            finish = choice.get("finish_reason") or finish
            text = (choice.get("delta") or {}).get("content")
            if text:
                first = first if first is not None else time.monotonic() - started
                pieces.append(text)
                if on_text is not None:
                    on_text(text)
    if not finish:
        raise ServerError(f"{where}: the stream broke off after {''.join(pieces)[:200]!r}")
    total = time.monotonic() - started
    return Answer(
        text="".join(pieces),
        num_tokens=int(usage.get("completion_tokens", len(pieces))),
        prompt_tokens=usage.get("prompt_tokens"),
        finish_reason=finish,
        first_token_s=total if first is None else first,
        total_s=total,
    )
