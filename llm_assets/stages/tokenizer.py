"""Stage 2: special tokens and chat template around the vocabulary.

Takes `vocabulary`; gives `tokenizer`, a transformers fast tokenizer. `<|im_end|>` ends a turn and is
the eos token; `<|endoftext|>` stands between documents; `<|pad|>` is nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenizers import AddedToken, Tokenizer, models
from transformers import PreTrainedTokenizerFast

from llm_assets.errors import ModelError
from llm_assets.stages.bpe import (
    END_OF_TEXT,
    PAD,
    SPECIAL_TOKENS,
    TURN_END,
    TURN_START,
    decoder,
    pre_tokenizer,
)
from llm_assets.stages.chat_template import CHATML, check_template
from llm_assets.stages.context import Metric, StageContext, StageResult

if TYPE_CHECKING:
    from llm_assets.stage_settings import TokenizerSettings

NASTY_TEXTS = (
    "",
    " ",
    "  two  spaces ",
    "line\nbreaks\r\n\ttabs",
    "naïve café, Ωmega, 日本語, العربية",
    "👩‍👩‍👧 emoji with joiners",
    "1234567890 3.14 -7",
    "\x00\x01 control",
    "<|im_start|>not a turn",
)


def run(context: StageContext) -> StageResult:
    """Build the tokenizer, check that it gives every text back and masks a conversation."""
    settings: TokenizerSettings = context.config
    source = context.inputs["vocabulary"].path
    bare = Tokenizer(models.BPE.from_file(str(source / "vocab.json"), str(source / "merges.txt")))
    bare.pre_tokenizer = pre_tokenizer()
    bare.decoder = decoder()
    bare.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL_TOKENS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bare,
        eos_token=TURN_END,
        pad_token=PAD,
        additional_special_tokens=[TURN_START, END_OF_TEXT],
        model_max_length=settings.model_max_length,
        clean_up_tokenization_spaces=False,
    )
    given = settings.chat_template
    tokenizer.chat_template = CHATML if given == "chatml" else given
    _check_round_trip(tokenizer)
    check_template(tokenizer, where="stages.tokenizer.chat_template")
    tokenizer.save_pretrained(context.out)
    return StageResult(
        metrics={"num_tokens": Metric(value=len(tokenizer))},
        metadata={"num_tokens": len(tokenizer)},
    )


def _check_round_trip(tokenizer: PreTrainedTokenizerFast) -> None:
    for text in NASTY_TEXTS:
        back = tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"])
        if back != text:
            raise ModelError(
                where="tokenizer",
                found=f"{text!r} comes back as {back!r}",
                rule="a byte-level tokenizer gives every text back",
                remedy="the vocabulary must hold all 256 bytes: raise vocabulary.size",
            )
