"""Runs a server, and ends it when told to or when whoever started it is gone.

A script of its own, standard library only: `python -I serving_guard.py GRACE_S COMMAND...`. The
starter puts it into a new process group and keeps the write end of its standard input. The pipe
closes when the starter ends, however it ends, and the server is then stopped.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from types import FrameType

_POLL_S = 0.1


def main(grace_s: float, command: list[str]) -> int:
    """Run `command` until it ends, standard input closes or SIGTERM comes; its exit code."""
    told: list[int] = []

    def remember(number: int, _frame: FrameType | None) -> None:
        told.append(number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, remember)
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    orphaned = False
    while child.poll() is None and not told and not orphaned:
        readable, _, _ = select.select([sys.stdin], [], [], _POLL_S)
        orphaned = bool(readable) and not os.read(sys.stdin.fileno(), 1)
    if child.poll() is None:
        child.terminate()
        try:
            child.wait(grace_s)
        except subprocess.TimeoutExpired:
            child.kill()
    code = child.wait()
    # What the server itself started and left behind is in this process group, as is this process.
    # Nobody is there to look after a stubborn rest when the starter is gone.
    os.killpg(0, signal.SIGKILL if orphaned else signal.SIGTERM)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2:]))
