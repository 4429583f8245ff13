"""Stage 1: a byte-level BPE vocabulary (Sennrich et al. 2016), by the `tokenizers` library.

Takes `corpus`; gives `vocabulary`: vocab.json and merges.txt, without special tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from llm_assets.errors import DataError
from llm_assets.stages.bpe import SPECIAL_TOKENS, decoder, pre_tokenizer
from llm_assets.stages.context import Metric, StageContext, StageResult
from llm_assets.stages.documents import read_documents

if TYPE_CHECKING:
    from llm_assets.stage_settings import VocabularySettings

_BATCH = 1000
_SHOWN = 120


def run(context: StageContext) -> StageResult:
    """Train the merges on the whole corpus; the order of its documents does not matter."""
    settings: VocabularySettings = context.config
    corpus = context.inputs["corpus"].path
    texts = [document.text for document in read_documents(corpus)]
    num_bytes = sum(len(text.encode()) for text in texts)
    if num_bytes == 0:
        raise DataError(
            where=str(corpus / "documents.jsonl"),
            found=f"{len(texts)} documents without any text",
            rule="a vocabulary is trained on text",
            remedy="look at the sources of data.corpus",
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer()
    tokenizer.decoder = decoder()
    trainer = trainers.BpeTrainer(
        vocab_size=settings.size - len(SPECIAL_TOKENS),
        min_frequency=settings.min_frequency,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        (texts[start : start + _BATCH] for start in range(0, len(texts), _BATCH)),
        trainer=trainer,
        length=len(texts),
    )
    tokenizer.model.save(str(context.out))
    num_tokens = sum(len(entry.ids) for entry in tokenizer.encode_batch(texts))
    size = tokenizer.get_vocab_size()
    context.progress.say(f"{size} tokens, {num_bytes / num_tokens:.2f} bytes a token")
    wanted = settings.size - len(SPECIAL_TOKENS)
    if size < wanted:
        context.progress.say(
            f"the corpus gives no more than that of {wanted}: no other pair is seen "
            f"{settings.min_frequency} times"
        )
    return StageResult(
        metrics={
            "num_tokens": Metric(value=size),
            "bytes_per_token": Metric(value=num_bytes / num_tokens),
        },
        metadata={"num_tokens": size},
        samples=[_cut(tokenizer, text[:_SHOWN]) for text in texts[:3]],
        tokens=num_tokens,
    )


def _cut(tokenizer: Any, text: str) -> dict[str, str]:
    """How a text is cut into tokens, for a person."""
    pieces = [tokenizer.decode([index]) for index in tokenizer.encode(text).ids]
    return {"text": text, "tokens": "|".join(pieces)}
