"""Progress of the libraries off: a stage reports through its context."""

from __future__ import annotations

from datasets import disable_progress_bars
from transformers.utils import logging


def quiet_libraries() -> None:
    """No progress bars of datasets and transformers in this process."""
    disable_progress_bars()
    logging.disable_progress_bar()
