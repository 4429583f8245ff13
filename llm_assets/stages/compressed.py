"""Quantized weights on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoModelForCausalLM

from llm_assets.stages.models import refuse_pickles


def load_quantized(folder: Path) -> Any:
    """The causal LM of a folder of compressed-tensors weights, on the CPU, in its own type.

    A folder of full weights does as well: what a server loads when nothing is quantized.
    """
    refuse_pickles(folder)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype="auto", local_files_only=True, use_safetensors=True
    )
    return model.eval()
