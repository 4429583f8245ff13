"""An HTTP proxy that spoils traffic on purpose, between a client and a real S3 server."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

Fault = str
"""`drop`: no answer, nothing forwarded; `lost`: forwarded, no answer; `reset`: a connection reset;
`cut`: half of the answer's body; `flip`: one byte of the answer's body; `flip-up`: one byte of the
request's body; `slow`: a late answer; `503`, `500`: such an answer; `301`: another region; `403`."""

_TEXTS = {
    "503": ("503 Slow Down", "SlowDown"),
    "500": ("500 Internal Server Error", "InternalError"),
    "403": ("403 Forbidden", "AccessDenied"),
    "301": ("301 Moved Permanently", "PermanentRedirect"),
}


@dataclass(frozen=True)
class Request:
    """What a client asked for."""

    method: str
    path: str
    headers: dict[str, str]
    head: bytes
    body: bytes

    @property
    def is_object(self) -> bool:
        """An object's bytes are asked for or sent, and no listing."""
        return "list-type" not in self.path and "uploads" not in self.path


@dataclass
class FaultyProxy:
    """`with FaultyProxy(host, port, choose) as proxy:` listens on a free loopback port.

    `choose` is asked for each request and gives a fault, or "" for none.
    """

    host: str
    port: int
    choose: Callable[[Request], Fault]
    requests: list[tuple[str, str, Fault]] = field(default_factory=list)

    def __enter__(self) -> FaultyProxy:
        self._socket = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.endpoint = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._guard = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError), client:
            request = _read_request(client)
            if request is None:
                return
            with self._guard:
                fault = self.choose(request)
                self.requests.append((request.method, request.path, fault))
            self._answer(client, request, fault)

    def _answer(self, client: socket.socket, request: Request, fault: Fault) -> None:
        if fault == "drop":
            return
        if fault in _TEXTS:
            client.sendall(_error(*_TEXTS[fault]))
            return
        if fault == "slow":
            time.sleep(0.3)
        body = _flip(request.body) if fault == "flip-up" else request.body
        answer_head, answer = self._forward(request.head + body, request.method)
        if fault == "lost":
            return
        if fault == "reset":
            linger = struct.pack("ii", 1, 0)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            return
        if fault == "flip":
            answer = _flip(answer)
        client.sendall(answer_head + (answer[: len(answer) // 2] if fault == "cut" else answer))

    def _forward(self, message: bytes, method: str) -> tuple[bytes, bytes]:
        """Head (with `Connection: close`) and body of the server's answer."""
        with socket.create_connection((self.host, self.port)) as server:
            server.sendall(message)
            content = bytearray()
            while data := server.recv(1 << 20):
                content += data
        head, _, body = bytes(content).partition(b"\r\n\r\n")
        return head + b"\r\n\r\n", body


def _read_request(client: socket.socket) -> Request | None:
    content = bytearray()
    while b"\r\n\r\n" not in content:
        data = client.recv(1 << 16)
        if not data:
            return None
        content += data
    head, _, body = bytes(content).partition(b"\r\n\r\n")
    lines = head.decode("latin-1").split("\r\n")
    method, path, _ = lines[0].split(" ", 2)
    headers = {
        name.lower(): value.strip() for name, _, value in (x.partition(":") for x in lines[1:])
    }
    if headers.get("expect", "").lower() == "100-continue":
        client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
    received = bytearray(body)
    length = int(headers.get("content-length", "0"))
    while len(received) < length:
        data = client.recv(min(1 << 20, length - len(received)))
        if not data:
            return None
        received += data
    kept = [x for x in lines if not x.lower().startswith(("expect:", "connection:"))]
    forwarded = "\r\n".join([*kept, "Connection: close"]).encode("latin-1") + b"\r\n\r\n"
    return Request(method, path, headers, forwarded, bytes(received))


def _flip(body: bytes) -> bytes:
    if not body:
        return body
    spoiled = bytearray(body)
    spoiled[len(spoiled) // 2] ^= 0x10
    return bytes(spoiled)


def _error(status: str, code: str) -> bytes:
    body = f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>on purpose</Message></Error>"
    region = "x-amz-bucket-region: eu-central-1\r\n" if code == "PermanentRedirect" else ""
    return (
        f"HTTP/1.1 {status}\r\nContent-Type: application/xml\r\nConnection: close\r\n{region}"
        f"Content-Length: {len(body)}\r\n\r\n{body}"
    ).encode()
