"""Stage 6: supervised fine-tuning on conversations, with TRL's SFTTrainer.

Takes `midtrained_checkpoint` (or what was handed on in its place) and `instructions`; gives an
`sft_checkpoint`. The loss is taken on the assistant's turns only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llm_assets.errors import ModelError
from llm_assets.gates.statistics import Interval, difference, ratio_interval
from llm_assets.stage_settings import SftSettings
from llm_assets.stages.adapters import (
    load_trainable,
    merged,
    refuse_quantized,
    refuse_settings,
)
from llm_assets.stages.context import Metric, StageContext, StageResult, with_ends
from llm_assets.stages.encoding import (
    Counts,
    Example,
    count_metrics,
    count_rows,
    encode_conversations,
    read_rows,
)
from llm_assets.stages.fine_tuning import fine_tune
from llm_assets.stages.generation import (
    Answer,
    divergence,
    free_texts,
    generate,
    nll_of_each,
    to_device,
)
from llm_assets.stages.judging import (
    NUM_SAMPLES,
    Question,
    answer_metrics,
    by_kind,
    instruction_questions,
    sample_rows,
)
from llm_assets.stages.quiet import quiet_libraries, release_memory
from llm_assets.stages.training import (
    TrainingLog,
    load_model,
    load_tokenizer,
    num_parameters,
    save_model,
)

_GAP_ROWS = 400
# What the incoming model writes of its own accord, to see what is forgotten of it.
_FREE_TEXTS, _FREE_TOKENS = 64, 48
# These would undo or bypass the encoding that is counted here.
_NO_EFFECT = ("chat_template_path", "completion_only_loss", "dataset_kwargs", "dataset_text_field")


@dataclass(frozen=True, kw_only=True)
class _Rows:
    train: list[Example]
    held_out: list[Example]
    counts: dict[str, Counts]
    questions: list[Question]
    answer_bytes: int


def run(context: StageContext) -> StageResult:
    """Fine-tune, store, and measure what was stored on the held-out rows."""
    settings: SftSettings = context.config
    refuse_quantized(settings.lora, where=context.stage)
    refuse_settings(context, _NO_EFFECT, why="the stage encodes and counts the rows itself")
    quiet_libraries()
    source = context.inputs["midtrained_checkpoint"].path
    tokenizer = load_tokenizer(source)
    rows = _read(context, tokenizer)
    model = to_device(load_trainable(source, tokenizer, settings.lora))
    context.progress.say("answers before the training")
    shown = _spread(rows.questions)
    before = generate(
        model, tokenizer, [q.prompt for q in shown], max_new_tokens=settings.eval_max_new_tokens
    )
    context.progress.say(f"fine-tuning on {len(rows.train)} conversations")
    log = _train(context, model, tokenizer, rows.train)
    del model
    release_memory()
    return _measure(context, log, rows, list(zip(shown, before, strict=True)))


def _train(
    context: StageContext, model: Any, tokenizer: Any, examples: Sequence[Example]
) -> TrainingLog:
    lora = context.config.lora
    log, trained = fine_tune(context, model, tokenizer, examples, lora)
    source = context.inputs["midtrained_checkpoint"].path
    plain = merged(trained, lora, lambda: load_model(source), context.scratch)
    save_model(plain, tokenizer, context.out)
    return log


def _read(context: StageContext, tokenizer: Any) -> _Rows:
    """Both splits, encoded; what was cut or left out is said."""
    settings: SftSettings = context.config
    folder = context.inputs["instructions"].path
    encoded: dict[str, list[Example]] = {}
    counts: dict[str, Counts] = {}
    held_out_rows: list[dict[str, Any]] = []
    for split in ("train", "held_out"):
        read = read_rows(folder / f"{split}.jsonl")
        encoded[split], counts[split] = encode_conversations(
            tokenizer,
            read,
            max_length=settings.max_length,
            too_long=settings.too_long,
            where=f"instructions/{split}.jsonl",
            supervise="answers"
            if settings.extra.get("assistant_only_loss", True)
            else "everything",
        )
        context.progress.say(counts[split].sentence(f"instructions, {split}"))
        if split == "held_out":
            held_out_rows = read
    _check_ends(tokenizer, encoded["train"], source=context.inputs["midtrained_checkpoint"].path)
    return _Rows(
        train=encoded["train"],
        held_out=encoded["held_out"],
        counts=counts,
        questions=instruction_questions(
            held_out_rows, limit=settings.eval_prompts, seed=context.seed
        ),
        answer_bytes=_supervised_bytes(tokenizer, encoded["held_out"]),
    )


def _check_ends(tokenizer: Any, examples: Sequence[Example], *, source: Path) -> None:
    """ModelError when no answer ends with a supervised eos: the model would never stop."""
    if not any(tokenizer.eos_token_id in example.labels for example in examples):
        raise ModelError(
            where=str(source),
            found=f"no answer is trained to end with the eos token {tokenizer.eos_token!r}",
            rule="the token that ends a turn is the tokenizer's eos, and counts in the loss",
            remedy="set eos_token to the token that ends a turn, and put it inside the template's "
            "{% generation %} block",
        )


def _measure(
    context: StageContext,
    log: TrainingLog,
    rows: _Rows,
    before: list[tuple[Question, Answer]],
) -> StageResult:
    """Metrics of the stored weights, read back from `context.out`."""
    settings: SftSettings = context.config
    context.progress.say("measuring on held-out conversations")
    out: Path = context.out
    model, tokenizer = to_device(load_model(out)), load_tokenizer(out)
    losses = _losses(model, tokenizer, rows)
    source = context.inputs["midtrained_checkpoint"].path
    forgotten = forgetting(to_device(load_model(source)), model, tokenizer, seed=context.seed)
    questions = rows.questions
    answers = generate(
        model, tokenizer, [q.prompt for q in questions], max_new_tokens=settings.eval_max_new_tokens
    )
    metrics = {
        **losses,
        **forgotten,
        **count_metrics(rows.counts),
        "tokens_per_s": Metric(value=log.tokens_per_s),
        **answer_metrics(questions, answers),
    }
    chosen = {id(question): answer for question, answer in zip(questions, answers, strict=True)}
    shown = [question for question, _ in before]
    return StageResult(
        metrics=metrics,
        metadata={"num_parameters": num_parameters(model)},
        series=log.series,
        samples=sample_rows(shown, [a for _, a in before], [chosen[id(q)] for q in shown]),
        tables={
            **log.tables,
            "rows": count_rows(rows.counts),
            "answers_by_kind": by_kind(questions, after=answers),
        },
        tokens=log.tokens,
    )


def _losses(model: Any, tokenizer: Any, rows: _Rows) -> dict[str, Metric]:
    """Loss a token on held-out rows and on as many rows of the training, and the gap between."""
    found = []
    for examples in (rows.held_out, rows.train[:_GAP_ROWS]):
        nats = nll_of_each(model, examples, pad_token_id=tokenizer.pad_token_id)
        counts = [example.num_supervised for example in examples]
        count = sum(counts)
        loss = sum(nats) / max(1, count)
        interval = Interval(math.nan, math.nan)
        if count and math.isfinite(loss):
            interval = ratio_interval(nats, counts)
        found.append((loss, interval, count))
    (held_out, interval, count), (seen, seen_interval, seen_count) = found
    scale = count / math.log(2) / max(1, rows.answer_bytes)
    bits = Interval(interval.low * scale, interval.high * scale)
    gap = difference(held_out, interval, seen, seen_interval)
    return {
        **with_ends("held_out_loss", held_out, interval, count),
        "train_loss": Metric(value=seen, n=seen_count),
        **with_ends("train_held_out_gap", held_out - seen, gap, count),
        **with_ends("held_out_bits_per_byte", held_out * scale, bits, rows.answer_bytes),
    }


def forgetting(before: Any, after: Any, tokenizer: Any, *, seed: int) -> dict[str, Metric]:
    """`forgetting_per_token`: what the incoming model writes of its own accord costs the fine-tuned
    one so many nats a token more: KL(before || after), on texts sampled from `before`.

    It asks for no data, so it holds for an imported base as well.
    """
    texts = free_texts(before, tokenizer, _FREE_TEXTS, max_new_tokens=_FREE_TOKENS, seed=seed)
    found = divergence(before, after, texts, pad_token_id=tokenizer.pad_token_id)
    interval = ratio_interval(found.sequences, [len(text.ids) for text in texts])
    return with_ends("forgetting_per_token", found.per_token, interval, found.num_tokens)


def _spread(questions: list[Question]) -> list[Question]:
    step = max(1, len(questions) // NUM_SAMPLES)
    return questions[::step][:NUM_SAMPLES]


def _supervised_bytes(tokenizer: Any, examples: Sequence[Example]) -> int:
    """UTF-8 bytes of the text that the loss is taken on, special tokens left out."""
    kept = [
        [token for token, label in zip(e.input_ids[1:], e.labels[1:], strict=True) if label >= 0]
        for e in examples
    ]
    texts = tokenizer.batch_decode(kept, skip_special_tokens=True)
    return sum(len(text.encode()) for text in texts)
