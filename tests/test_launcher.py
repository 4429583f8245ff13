"""Workers end with their whole process group."""

import os
import subprocess
import sys
import time
from pathlib import Path

from llm_assets.resources.launcher import end_process_group, log_tail

PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {child!r}])
print(child.pid, flush=True)
time.sleep(60)
"""
STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def start(child: str) -> tuple["subprocess.Popen[bytes]", int]:
    process = subprocess.Popen(
        [sys.executable, "-c", PARENT.format(child=child)],
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    grandchild = int(process.stdout.readline())
    return process, grandchild


def test_a_grandchild_that_ignores_sigterm_ends_too() -> None:
    process, grandchild = start(STUBBORN)
    time.sleep(0.5)
    assert alive(grandchild)
    end_process_group(process, grace_s=5)
    process.stdout.close()  # type: ignore[union-attr]
    deadline = time.monotonic() + 5
    while alive(grandchild) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(grandchild)
    assert process.returncode == -15


def test_what_a_finished_leader_left_behind_ends_too() -> None:
    process, grandchild = start("import time; time.sleep(60)")
    os.kill(process.pid, 9)
    process.wait()
    assert alive(grandchild)
    end_process_group(process, grace_s=1)
    process.stdout.close()  # type: ignore[union-attr]
    deadline = time.monotonic() + 5
    while alive(grandchild) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(grandchild)


def test_log_tail(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    log.write_text("".join(f"line {n}\n" for n in range(100)))
    assert log_tail(log, 2) == "line 98\nline 99"
    assert "No such file" in log_tail(tmp_path / "none")
