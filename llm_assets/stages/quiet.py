"""What a stage does to its process: libraries quiet, memory given back after the training."""

from __future__ import annotations

import gc

import torch
from datasets import disable_progress_bars
from transformers.utils import logging


def quiet_libraries() -> None:
    """No progress bars of datasets and transformers in this process."""
    disable_progress_bars()
    logging.disable_progress_bar()


def release_memory() -> None:
    """Free a trainer that is out of use: its cycles hold model, reference and optimizer state."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
