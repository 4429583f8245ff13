"""Training on encoded conversations with TRL's SFTTrainer, for stage 6 and the constitution."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from datasets import Dataset
from trl import SFTConfig, SFTTrainer

from llm_assets.stage_settings import LoraSettings
from llm_assets.stages.adapters import adapter_config
from llm_assets.stages.batching import in_like_lengths
from llm_assets.stages.context import StageContext
from llm_assets.stages.encoding import Example
from llm_assets.stages.training import TrainingLog, run_training, training_arguments


def fine_tune(
    context: StageContext,
    model: Any,
    tokenizer: Any,
    examples: Sequence[Example],
    lora: LoraSettings | None,
) -> tuple[TrainingLog, Any]:
    """The log of the training, and the trained model, under LoRA with its adapter."""
    extra = context.config.extra
    # Encoded rows need no preparation, which costs seconds; packing does.
    packing = bool(extra.get("packing", False))
    fixed: dict[str, Any] = {"assistant_only_loss": False}
    if not packing:
        fixed["max_length"] = None
    arguments = training_arguments(SFTConfig, context, **fixed)
    dataset = Dataset.from_dict(
        {
            "input_ids": [example.input_ids for example in examples],
            "labels": [example.labels for example in examples],
        }
    )
    # Packing fills its rows by itself.
    chosen = packing or "train_sampling_strategy" in extra
    lengths = [len(example.input_ids) for example in examples]
    trainer = SFTTrainer(
        model=model,
        args=arguments,
        train_dataset=in_like_lengths(
            dataset,
            arguments,
            lengths,
            batch=context.config.per_device_train_batch_size,
            chosen=chosen,
        ),
        processing_class=tokenizer,
        peft_config=adapter_config(lora),
    )
    log = run_training(context, trainer)
    return log, trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
