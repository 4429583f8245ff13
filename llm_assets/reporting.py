"""How a worker reports: a line of JSON for machines, now and then a line for people."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_MEASURING = "measuring"
"""What a stage says when it turns from its work to what gates and report cards read."""


def progress_line(event: dict[str, Any]) -> str:
    """One progress event as a line for people: stage, step of steps, loss, speed, time, money."""
    parts = [f"{event['stage']}"]
    if event.get("total"):
        parts.append(f"step {event['step']}/{event['total']}")
    if event.get("loss") is not None:
        parts.append(f"loss {event['loss']:.3f}")
    if event.get("tokens_per_s"):
        parts.append(f"{event['tokens_per_s']:,.0f} tokens/s")
    if event.get("left_s") is not None:
        parts.append(f"{_duration(event['left_s'])} left")
    if event.get("spent_usd") is not None:
        parts.append(f"${event['spent_usd']:.4f}")
    if event.get("text"):
        parts.append(event["text"])
    return " · ".join(parts)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 5400:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h"


class Reporter:
    """Implements stages.context.Progress. `path` gets every event at most each `every_s`; `log`
    gets a line at most each `log_every_s`. Never raises into the stage. `measure_s`: how long the
    stage measured what it made, for its gates."""

    def __init__(
        self,
        *,
        stage: str,
        path: Path | None,
        log: Callable[[str], Any],
        usd_per_hour: float = 0.0,
        every_s: float = 0.5,
        log_every_s: float = 10.0,
    ) -> None:
        self._stage = stage
        self._path = path
        self._log = self._guarded(log)
        self._usd_per_hour = usd_per_hour
        self._every_s = every_s
        self._log_every_s = log_every_s
        self._started = time.monotonic()
        self._first_step: tuple[float, int, int] | None = None
        self._last_event = 0.0
        self._last_log = 0.0
        self._measuring_since: float | None = None
        self.measure_s = 0.0
        self.spending: Callable[[], float] = self._own_spending
        self.on_step: Callable[[int, int | None], None] = lambda step, tokens: None

    @staticmethod
    def _guarded(log: Callable[[str], Any]) -> Callable[[str], Any]:
        """A log whose place is gone, such as that of a launcher that was killed, stops nothing."""

        def tell(text: str) -> None:
            try:
                log(text)
            except OSError as error:
                print(f"{text} (not logged: {error})", file=sys.stderr, flush=True)

        return tell

    def _own_spending(self) -> float:
        return (time.monotonic() - self._started) / 3600 * self._usd_per_hour

    def step(
        self,
        step: int,
        total: int,
        *,
        loss: float | None = None,
        tokens: int | None = None,
        **metrics: float,
    ) -> None:
        """See stages.context.Progress.step."""
        self.on_step(step, tokens)
        now = time.monotonic()
        if self._first_step is None or step <= self._first_step[1]:
            self._first_step = (now, step, tokens or 0)
        last = step >= total
        if now - self._last_event < self._every_s and not last:
            return
        self._last_event = now
        began, first, first_tokens = self._first_step
        event: dict[str, Any] = {
            "stage": self._stage,
            "step": step,
            "total": total,
            "loss": loss,
            "spent_usd": self.spending(),
            **metrics,
        }
        if step > first and now > began:
            event["left_s"] = (now - began) / (step - first) * (total - step)
            if tokens:
                event["tokens_per_s"] = (tokens - first_tokens) / (now - began)
        self._write(event)
        if now - self._last_log >= self._log_every_s or last:
            self._last_log = now
            self._log(progress_line(event))

    def say(self, text: str) -> None:
        """See stages.context.Progress.say."""
        now = time.monotonic()
        if self._measuring_since is not None:
            self.measure_s += now - self._measuring_since
        self._measuring_since = now if text.startswith(_MEASURING) else None
        event = {"stage": self._stage, "text": text, "spent_usd": self.spending()}
        self._write(event)
        self._log(progress_line(event))

    def failed(self, kind: str, text: str) -> None:
        """The stage ended with an error that people must read."""
        self._write({"stage": self._stage, "error": text, "kind": kind})
        self._log(text)

    def ended(self, code: int) -> None:
        """The exit code that the worker would have by itself."""
        self._write({"stage": self._stage, "code": code})

    def _write(self, event: dict[str, Any]) -> None:
        if self._path is None:
            return
        try:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(event) + "\n")
        except OSError as error:
            self._log(f"progress file: {error}")
            self._path = None
