"""Exit codes of a worker, and a kind of error, that the launching side must know."""

BUSY = 75
"""Somebody else holds the lease on the identity."""

INTERRUPTED = 143
"""Stopped by SIGTERM."""

LOST_PROCESS = "LostProcess"
"""Kind of the error when one of several processes of a training is gone."""
