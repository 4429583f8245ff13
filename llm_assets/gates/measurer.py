"""The process that measures, as whoever asks it sees it: started once, asked several times.

Its libraries take longer to import (Great Expectations: 3 s) than most data sets to measure, and
the data stages of a run come one after another. So it stays for the next batch, and ends when none
came for `_IDLE_S`, when the environment is another one, or with the process that started it.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from typing import Any

_IDLE_S = 30.0


class _Measurer:
    """One process, its stdin and stdout a line of JSON each way. What it writes to stderr goes into
    a file without a name: a pipe that nobody reads would stop it."""

    def __init__(self) -> None:
        self.environment = dict(os.environ)
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - open as long as the process
        started_at = time.time()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "llm_assets.gates.measuring", str(started_at)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**self.environment, "GX_ANALYTICS_ENABLED": "false", "TQDM_DISABLE": "1"},
        )

    @property
    def lives(self) -> bool:
        return self._process.poll() is None

    def ask(self, job: Mapping[str, Any]) -> str:
        """Have a job done; "" when it was, else what the process said."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it ended, which the missing answer says
        answer = self._process.stdout.readline()
        if answer:
            return str(json.loads(answer)["error"])
        code = self._process.wait()
        self._errors.seek(0)
        return self._errors.read().decode(errors="replace").strip() or f"exit code {code}"

    def close(self) -> None:
        """End the process, when it is not at work."""
        try:
            self._process.communicate(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()
        self._errors.close()


_lock = threading.Lock()
_kept: _Measurer | None = None
_idle: threading.Timer | None = None


def ask(job: Mapping[str, Any]) -> str:
    """Have a job done by the process of this one; "" when it was, else what it said."""
    global _kept, _idle
    with _lock:
        if _idle is not None:
            _idle.cancel()
        if _kept is not None and not (_kept.lives and _kept.environment == dict(os.environ)):
            _kept.close()
            _kept = None
        if _kept is None:
            _kept = _Measurer()
        said = _kept.ask(job)
        _idle = threading.Timer(_IDLE_S, end)
        _idle.daemon = True
        _idle.start()
        return said


def end() -> None:
    """End the process, if there is one. The next job starts another."""
    global _kept
    with _lock:
        if _kept is not None:
            _kept.close()
            _kept = None


atexit.register(end)
