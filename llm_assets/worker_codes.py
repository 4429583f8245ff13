"""Exit codes of a worker that the launching side must know."""

BUSY = 75
"""Somebody else holds the lease on the identity."""

INTERRUPTED = 143
"""Stopped by SIGTERM."""
