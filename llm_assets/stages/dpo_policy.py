"""Stage 8: direct preference optimization (Rafailov et al. 2023), with TRL's DPOTrainer.

Takes `sft_checkpoint` (or what was handed on in its place) and `preferences`; gives a `policy`. The
reference is the checkpoint's weights; under LoRA it is the model with its adapter switched off.
"""

from __future__ import annotations

from typing import Any

from datasets import Dataset
from trl import DPOConfig, DPOTrainer

from llm_assets.stage_settings import DpoSettings
from llm_assets.stages.adapters import (
    adapter_config,
    load_trainable,
    merged,
    refuse_quantized,
    refuse_settings,
)
from llm_assets.stages.batching import in_like_lengths
from llm_assets.stages.context import Metric, StageContext, StageResult
from llm_assets.stages.encoding import Pair, count_metrics, count_rows, read_pairs
from llm_assets.stages.generation import preference_margins, to_device
from llm_assets.stages.judging import mean, preference_questions
from llm_assets.stages.measuring import measure_policy
from llm_assets.stages.quiet import quiet_libraries, release_memory
from llm_assets.stages.training import (
    TrainingLog,
    load_model,
    load_tokenizer,
    num_parameters,
    run_training,
    save_model,
    training_arguments,
)

_NO_EFFECT = ("pad_token", "sync_ref_model")


def run(context: StageContext) -> StageResult:
    """Train, store, and compare what was stored with the reference on held-out prompts."""
    settings: DpoSettings = context.config
    refuse_quantized(settings.lora, where=context.stage)
    refuse_settings(context, _NO_EFFECT, why="the reference is the fine-tuned checkpoint, fixed")
    quiet_libraries()
    source = context.inputs["sft_checkpoint"].path
    tokenizer = load_tokenizer(source)
    pairs, counts = read_pairs(context, tokenizer)
    context.progress.say(f"DPO on {len(pairs['train'])} pairs, beta {settings.beta:g}")
    log = _train(context, tokenizer, pairs["train"])
    release_memory()
    # Both read back from disk: what is measured is what is stored, and neither runs in the
    # trainer's autocast.
    policy, reference = to_device(load_model(context.out)), to_device(load_model(source))
    held_out = pairs["held_out"]
    measured = measure_policy(
        context,
        policy,
        reference,
        tokenizer,
        preference_questions(
            [pair.row for pair in held_out], limit=settings.eval_prompts, seed=context.seed
        ),
        max_new_tokens=settings.eval_max_new_tokens,
    )
    return StageResult(
        metrics={
            **_implicit_rewards(policy, reference, held_out, tokenizer, settings.beta),
            **measured.metrics,
            **count_metrics(counts),
            "tokens_per_s": Metric(value=log.tokens_per_s),
        },
        metadata={"num_parameters": num_parameters(policy)},
        series=log.series,
        samples=measured.samples,
        tables={
            **log.tables,
            **measured.tables,
            "rows": count_rows(counts),
        },
        tokens=log.tokens,
    )


def _train(context: StageContext, tokenizer: Any, pairs: list[Pair]) -> TrainingLog:
    settings: DpoSettings = context.config
    source = context.inputs["sft_checkpoint"].path
    sides = ("prompt", "chosen", "rejected")
    rows = [{side: list(pair.row[side]) for side in sides} for pair in pairs]
    arguments = training_arguments(DPOConfig, context)
    dataset = in_like_lengths(
        Dataset.from_list(rows),
        arguments,
        [max(len(pair.chosen), len(pair.rejected)) for pair in pairs],
        batch=settings.per_device_train_batch_size,
        chosen="train_sampling_strategy" in settings.extra,
    )
    trainer = DPOTrainer(
        model=load_trainable(source, tokenizer, settings.lora),
        # With an adapter TRL takes the model without it.
        ref_model=None if settings.lora is not None else load_model(source),
        args=arguments,
        train_dataset=dataset,
        processing_class=tokenizer,
        peft_config=adapter_config(settings.lora),
    )
    log = run_training(context, trainer)
    trained = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
    plain = merged(trained, settings.lora, lambda: load_model(source), context.scratch)
    save_model(plain, tokenizer, context.out)
    return log


def _implicit_rewards(
    policy: Any, reference: Any, pairs: list[Pair], tokenizer: Any, beta: float
) -> dict[str, Metric]:
    """DPO's own reward, beta (log p_policy - log p_reference), on held-out pairs."""
    pad = tokenizer.pad_token_id
    ours = preference_margins(policy, pairs, pad_token_id=pad)
    theirs = preference_margins(reference, pairs, pad_token_id=pad)
    margins = [beta * (a - b) for a, b in zip(ours, theirs, strict=True)]
    return {
        "reward_accuracy": mean([1.0 if m > 0 else 0.5 if m == 0 else 0.0 for m in margins]),
        "reward_margin": mean(margins),
    }
