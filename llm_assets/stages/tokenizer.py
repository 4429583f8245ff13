"""Stage 2: special tokens and chat template around the vocabulary.

Takes `vocabulary`; gives `tokenizer`, a transformers fast tokenizer. `<|im_end|>` ends a turn and
is the eos token; `<|endoftext|>` stands between documents; `<|pad|>` is nothing else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
from llm_assets.stages.chat_template import CHATML, check_template, render_text
from llm_assets.stages.context import Metric, StageContext, StageResult
from llm_assets.stages.encoding import IGNORED, encode_conversations
from llm_assets.stages.models import load_tokenizer

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

_QUESTION = {"role": "user", "content": "What is it?"}
_ANSWER = {"role": "assistant", "content": "It is an apple, naïvely."}
_PROBES = (
    [_QUESTION, _ANSWER],
    [{"role": "system", "content": "Be brief."}, _QUESTION, _ANSWER],
    [_QUESTION, _ANSWER, {"role": "user", "content": "And now?"}, _ANSWER, _QUESTION, _ANSWER],
)
_SHOWN = [
    {"role": "user", "content": "Who are you?"},
    {"role": "assistant", "content": "A villager."},
]


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
    check_template(tokenizer, where="stages.tokenizer.chat_template")
    tokenizer.save_pretrained(context.out)
    read_back = load_tokenizer(context.out)
    _check_round_trip(read_back)
    _check_special_tokens(read_back)
    if read_back.chat_template != tokenizer.chat_template:
        raise ModelError(
            where="stages.tokenizer.chat_template",
            found="another template after saving and loading",
            rule="chat_template.jinja gives the template back",
            remedy="take out what a file changes, such as a carriage return",
        )
    masked = _masked(read_back)
    return StageResult(
        metrics={
            "num_tokens": Metric(value=len(read_back)),
            "round_trip": Metric(value=1.0, n=len(NASTY_TEXTS)),
            "special_tokens": Metric(value=1.0, n=len(SPECIAL_TOKENS)),
            "answer_mask": Metric(
                value=sum(row["right"] for row in masked) / len(masked), n=len(masked)
            ),
        },
        metadata={"num_tokens": len(read_back)},
        samples=[{"conversation": render_text(read_back, _SHOWN)}],
        tables={"answer_mask": masked},
    )


def _masked(tokenizer: Any) -> list[dict[str, Any]]:
    """What fine-tuning would learn from each probe: its answers and their ends, nothing else."""
    rows = []
    for messages in _PROBES:
        answers = [turn["content"] for turn in messages if turn["role"] == "assistant"]
        wanted = "".join(f"{answer}{tokenizer.eos_token}" for answer in answers)
        (example,), _ = encode_conversations(
            tokenizer,
            [{"messages": messages}],
            max_length=10_000,
            too_long="drop",
            where="tokenizer",
        )
        learned = tokenizer.decode([label for label in example.labels if label != IGNORED])
        right = "".join(learned.split()) == "".join(wanted.split())
        rows.append({"wanted": wanted, "learned": learned, "right": right})
    return rows


def _check_round_trip(tokenizer: Any) -> None:
    for text in NASTY_TEXTS:
        back = tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"])
        if back != text:
            raise ModelError(
                where="tokenizer",
                found=f"{text!r} comes back as {back!r}",
                rule="a byte-level tokenizer gives every text back",
                remedy="the vocabulary must hold all 256 bytes: raise vocabulary.size",
            )


def _check_special_tokens(tokenizer: Any) -> None:
    for token in SPECIAL_TOKENS:
        ids = tokenizer(token, add_special_tokens=False)["input_ids"]
        if ids != [tokenizer.convert_tokens_to_ids(token)]:
            raise ModelError(
                where="tokenizer",
                found=f"{token} is encoded as {ids}",
                rule="a special token is one id",
                remedy="take it out of the vocabulary's merges",
            )
