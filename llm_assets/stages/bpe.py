"""What stages 1 and 2 share: special tokens, and how text is split before merging."""

from __future__ import annotations

from typing import Any

from tokenizers import decoders, pre_tokenizers

PAD, END_OF_TEXT, TURN_START, TURN_END = "<|pad|>", "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (PAD, END_OF_TEXT, TURN_START, TURN_END)


def pre_tokenizer() -> Any:
    """Digits one by one, then byte-level words, as in Llama-family tokenizers."""
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )


def decoder() -> Any:
    """The inverse of the byte-level step."""
    return decoders.ByteLevel()
