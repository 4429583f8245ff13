"""Names of processes that outlive them, in leases and tags of runs: HOST:PID:STARTED."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def process_name(pid: int | None = None) -> str:
    """The name of a process of this machine; of this process without `pid`."""
    pid = os.getpid() if pid is None else pid
    return f"{socket.gethostname()}:{pid}:{_started(pid)}"


def is_gone(name: str) -> bool:
    """The named process ran on this machine and is no more. `name` may go on after another colon.

    False for what is no name of a process, and for processes of other machines.
    """
    host, pid, started, *_ = (*name.split(":"), "", "")
    if host != socket.gethostname() or not pid.isdigit():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return _started(int(pid)) != started


def _started(pid: int) -> str:
    """When a process started, in clock ticks since boot: tells a reused pid from the process that
    had it before. "" where /proc is absent."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return stat.rpartition(")")[2].split()[19]
