"""The process that writes one large save, and then proves it.

    python -m llm_assets.stages.save_process

It gets the request as a line of JSON on its standard input, with the descriptors of the memory that
holds the tensors, and answers with a line once the save is published or failed. At the next line of
its input it proves the save; at the end of its input it ends. It runs only when nobody else wants
the processor: the training does not wait for its hashing, and it holds no lock of the interpreter
that trains. When the process that started it is gone, it publishes nothing.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from contextlib import suppress

from llm_assets.stages.save_checks import validate
from llm_assets.stages.save_files import Request, write_save
from llm_assets.stages.save_memory import mapped

_UNWANTED = 1
"""Exit code when the training is gone."""


def lowest_priority() -> None:
    """Of this process: whatever else wants a processor goes first."""
    with suppress(OSError):
        if hasattr(os, "SCHED_IDLE"):
            # Unlike a nice value it can be taken back, see `hurry`.
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        else:
            os.nice(19)


def hurry(pid: int) -> None:
    """Give a process at the lowest priority the ordinary one: somebody waits for it."""
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            os.sched_setscheduler(int(thread), os.SCHED_OTHER, os.sched_param(0))


def main() -> int:
    """Write, answer, prove."""
    # A preemption tells every process of the machine to end; the training saves first, with us.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    lowest_priority()
    line = sys.stdin.readline()
    if not line:
        return _UNWANTED
    job = json.loads(line)
    request = Request(**job["request"])
    contents = {
        name: mapped(descriptor, size) for name, (descriptor, size) in job["memory"].items()
    }
    written = write_save(request, contents, lambda: os.getppid() == job["trainer"])
    contents.clear()
    try:
        os.write(sys.stdout.fileno(), json.dumps(dataclasses.asdict(written)).encode() + b"\n")
    except BrokenPipeError:
        return _UNWANTED
    if not written.error and sys.stdin.readline():
        # Somebody may have waited for the writing.
        lowest_priority()
        validate(request.save)
    return 0


if __name__ == "__main__":
    sys.exit(main())
