"""The fixed batch: one number of a stored checkpoint, by other code than that which trained it.

    python -m llm_assets.stages.probing FOLDER      prints {"name", "value", "num_tokens", "batch"}

`loss`: mean cross-entropy of a causal language model, nats a token. `reward`: mean score of a
reward model. The batch depends on the size of the vocabulary alone. Text would say more of quality,
but this asks whether the weights are still what they were, and needs no tokenizer and no data.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

_ROWS, _LENGTH = 4, 64


def fixed_batch(vocab_size: int) -> torch.Tensor:
    """[4, 64] token ids: SHA-256 of the position, modulo the vocabulary."""
    ids = [
        int.from_bytes(hashlib.sha256(f"probe {i}".encode()).digest()[:8], "big") % vocab_size
        for i in range(_ROWS * _LENGTH)
    ]
    return torch.tensor(ids).view(_ROWS, _LENGTH)


@torch.inference_mode()
def probe(folder: Path) -> dict[str, Any]:
    """Name and value of the number, float32 on the CPU, and a hash of the batch."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    scores = any("SequenceClassification" in name for name in config.architectures or [])
    kind: Any = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    model = kind.from_pretrained(
        folder, dtype=torch.float32, local_files_only=True, use_safetensors=True
    ).eval()
    batch = fixed_batch(int(config.vocab_size))
    # Every position counts, also where an id happens to be that of the padding.
    output = model(input_ids=batch, attention_mask=torch.ones_like(batch))
    if scores:
        value = float(output.logits.float().mean())
    else:
        value = float(
            torch.nn.functional.cross_entropy(
                output.logits[:, :-1].flatten(0, 1).float(), batch[:, 1:].flatten()
            )
        )
    return {
        "name": "reward" if scores else "loss",
        "value": value,
        "num_tokens": batch.numel(),
        "batch": hashlib.sha256(batch.numpy().tobytes()).hexdigest(),
    }


def main() -> int:
    """Print the number of one folder as JSON."""
    parser = argparse.ArgumentParser(prog="python -m llm_assets.stages.probing")
    parser.add_argument("folder", type=Path)
    print(json.dumps(probe(parser.parse_args().folder)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
