"""One OpenTelemetry span a stage, when an endpoint is configured.

Sent as OTLP over HTTP in its JSON form, which every receiver of the protocol takes, so no library
is needed. The standard variables count: OTEL_EXPORTER_OTLP_ENDPOINT (`/v1/traces` is added) or
OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, ..._HEADERS, OTEL_SERVICE_NAME, OTEL_SDK_DISABLED. All stages of
a run stand in one trace. A receiver that is away is said once and never stops a stage.

Format: https://opentelemetry.io/docs/specs/otlp/ (JSON Protobuf encoding, OTLP/HTTP).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

from llm_assets import __version__
from llm_assets.jobs import StageJob

_TIMEOUT_S = 5.0
_INTERNAL = 1
_OK, _ERROR = 1, 2


def endpoint(environment: Mapping[str, str] | None = None) -> str:
    """Where spans go; "" for nowhere."""
    found = os.environ if environment is None else environment
    if found.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return ""
    if traces := found.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "").strip():
        return traces
    base = found.get("OTEL_EXPORTER_OTLP_ENDPOINT", "").strip()
    return f"{base.rstrip('/')}/v1/traces" if base else ""


class StageSpan:
    """A running span: `set` its attributes; None values are left out."""

    def __init__(self) -> None:
        self.attributes: dict[str, Any] = {}

    def set(self, **attributes: Any) -> None:
        """Add attributes, named `llm_assets.<name>` in the span."""
        self.attributes.update(
            {f"llm_assets.{name}": value for name, value in attributes.items() if value is not None}
        )


@contextlib.contextmanager
def stage_span(job: StageJob, say: Callable[[str], None]) -> Iterator[StageSpan]:
    """The span of one stage; sent when the block ends, whatever its end."""
    span = StageSpan()
    span.set(
        stage=job.stage,
        pipeline=job.pipeline,
        run_id=job.run_id,
        identity=job.identity,
        campaign=job.campaign,
        device=job.device,
        devices=job.devices,
        estimate_usd=job.estimate_usd,
    )
    started_ns = time.time_ns()
    error: BaseException | None = None
    try:
        yield span
    except BaseException as raised:
        error = raised
        raise
    finally:
        if target := endpoint():
            document = span_document(job, span, started_ns, time.time_ns(), error)
            if problem := _send(target, document):
                say(f"telemetry: {problem}")


def span_document(
    job: StageJob, span: StageSpan, started_ns: int, ended_ns: int, error: BaseException | None
) -> dict[str, Any]:
    """The export request of one span."""
    run = job.run_id or secrets.token_hex(16)
    status: dict[str, Any] = {"code": _OK}
    if error is not None:
        status = {"code": _ERROR, "message": f"{type(error).__name__}: {error}"[:500]}
    body = {
        "traceId": hashlib.sha256(run.encode()).hexdigest()[:32],
        "spanId": secrets.token_hex(8),
        "name": f"{job.pipeline}/{job.stage}",
        "kind": _INTERNAL,
        "startTimeUnixNano": str(started_ns),
        "endTimeUnixNano": str(ended_ns),
        "attributes": _attributes(span.attributes),
        "status": status,
    }
    resource = {
        "service.name": os.environ.get("OTEL_SERVICE_NAME", "llm-assets"),
        "service.version": __version__,
    }
    scope = {"name": "llm_assets", "version": __version__}
    return {
        "resourceSpans": [
            {
                "resource": {"attributes": _attributes(resource)},
                "scopeSpans": [{"scope": scope, "spans": [body]}],
            }
        ]
    }


def _attributes(values: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in sorted(values.items())]


def _value(value: Any) -> dict[str, Any]:
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}  # 64-bit numbers are text in Protobuf's JSON
    if isinstance(value, float):
        return {"doubleValue": value}
    return {"stringValue": str(value)}


def _headers() -> dict[str, str]:
    given = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_HEADERS") or os.environ.get(
        "OTEL_EXPORTER_OTLP_HEADERS", ""
    )
    pairs = (entry.partition("=") for entry in given.split(",") if "=" in entry)
    return {unquote(name.strip()): unquote(value.strip()) for name, _, value in pairs}


def _send(target: str, document: Mapping[str, Any]) -> str:
    """Post the document; what went wrong, "" when nothing did."""
    if urlsplit(target).scheme not in ("http", "https"):
        return f"{target} is no http(s) endpoint; OTLP over HTTP is what is spoken here"
    request = urllib.request.Request(
        target,
        data=json.dumps(document).encode(),
        headers={**_headers(), "Content-Type": "application/json"},
        method="POST",
    )
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S):
            return ""
    except (OSError, ValueError) as error:
        return f"{target}: {error}"
