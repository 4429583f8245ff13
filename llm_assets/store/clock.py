"""Time as the store writes it."""

from __future__ import annotations

from datetime import UTC, datetime


def utc_now() -> str:
    """Now, UTC, ISO 8601 with microseconds."""
    return datetime.now(UTC).isoformat(timespec="microseconds")
