"""Stage 7: a Bradley-Terry reward model on preference pairs, with TRL's RewardTrainer.

Takes `sft_checkpoint` (or what was handed on in its place) and `preferences`; gives a
`reward_model`: a sequence classifier with one label that starts from the fine-tuned weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from datasets import Dataset
from trl import RewardConfig, RewardTrainer

from llm_assets.stage_settings import RewardSettings
from llm_assets.stages.adapters import adapter_config, merged, refuse_quantized, refuse_settings
from llm_assets.stages.batching import in_like_lengths
from llm_assets.stages.context import Metric, StageContext, StageResult
from llm_assets.stages.encoding import Pair, count_metrics, count_rows, read_pairs
from llm_assets.stages.generation import to_device
from llm_assets.stages.judging import NUM_SAMPLES, mean
from llm_assets.stages.quiet import quiet_libraries, release_memory
from llm_assets.stages.reward_bias import (
    bias_metrics,
    ceiling_metrics,
    margin_metrics,
    vendor_metrics,
)
from llm_assets.stages.rewards import load_reward_model, new_reward_model, rewards
from llm_assets.stages.training import (
    TrainingLog,
    load_tokenizer,
    num_parameters,
    run_training,
    save_model,
    training_arguments,
)
from llm_assets.village.oracle import score

_BINS = 10
_NO_EFFECT = ("chat_template_path", "eos_token", "pad_token")


def run(context: StageContext) -> StageResult:
    """Train, store, and measure what was stored on the held-out pairs."""
    settings: RewardSettings = context.config
    refuse_quantized(settings.lora, where=context.stage)
    refuse_settings(context, _NO_EFFECT, why="the tokenizer is that of the checkpoint")
    quiet_libraries()
    source = context.inputs["sft_checkpoint"].path
    tokenizer = load_tokenizer(source)
    pairs, counts = read_pairs(context, tokenizer)

    context.progress.say(f"training the reward model on {len(pairs['train'])} pairs")
    log = _train(context, tokenizer, pairs["train"])
    release_memory()
    context.progress.say("measuring on held-out pairs")
    scorer = to_device(load_reward_model(context.out))
    held_out = pairs["held_out"]
    both = [pair.chosen for pair in held_out] + [pair.rejected for pair in held_out]
    scores = rewards(scorer, both, pad_token_id=tokenizer.pad_token_id)
    chosen, rejected = scores[: len(held_out)], scores[len(held_out) :]
    return StageResult(
        metrics={
            **pair_metrics(held_out, chosen, rejected),
            **count_metrics(counts),
            "tokens_per_s": Metric(value=log.tokens_per_s),
        },
        metadata={"num_parameters": num_parameters(scorer)},
        series=log.series,
        samples=_worst(held_out, chosen, rejected),
        tables={
            **log.tables,
            "by_vendor": by_field("vendor", held_out, chosen, rejected),
            "by_flaw": by_field("flaw", held_out, chosen, rejected),
            "margins": _histogram([c - r for c, r in zip(chosen, rejected, strict=True)]),
            "rows": count_rows(counts),
        },
        tokens=log.tokens,
    )


def _train(context: StageContext, tokenizer: Any, pairs: Sequence[Pair]) -> TrainingLog:
    settings: RewardSettings = context.config
    source = context.inputs["sft_checkpoint"].path

    def base() -> Any:
        return new_reward_model(source, tokenizer, seed=context.seed, lora=None)

    # The rows are cut to length already; TRL would look at each again.
    arguments = training_arguments(RewardConfig, context, max_length=None)
    dataset = Dataset.from_dict(
        {
            "chosen_ids": [pair.chosen for pair in pairs],
            "rejected_ids": [pair.rejected for pair in pairs],
        }
    )
    trainer = RewardTrainer(
        model=new_reward_model(source, tokenizer, seed=context.seed, lora=settings.lora),
        args=arguments,
        train_dataset=in_like_lengths(
            dataset,
            arguments,
            [max(len(pair.chosen), len(pair.rejected)) for pair in pairs],
            batch=settings.per_device_train_batch_size,
            chosen="train_sampling_strategy" in settings.extra,
        ),
        processing_class=tokenizer,
        peft_config=adapter_config(settings.lora, task="SEQ_CLS"),
    )
    log = run_training(context, trainer)
    trained = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
    save_model(merged(trained, settings.lora, base, context.scratch), tokenizer, context.out)
    return log


def pair_metrics(
    pairs: Sequence[Pair], chosen: Sequence[float], rejected: Sequence[float]
) -> dict[str, Metric]:
    """Headline metrics of scores on held-out pairs; a tie counts as half right.

    `oracle_agreement`, where rows have a check: share of the pairs, among those that the oracle
    tells apart, which the model orders as it does. The others: see reward_bias.py.
    """
    margins = [c - r for c, r in zip(chosen, rejected, strict=True)]
    accuracy = mean([_right(margin) for margin in margins])
    metrics = {
        "accuracy": accuracy,
        **margin_metrics(margins),
        "ece": Metric(value=expected_calibration_error(margins), n=len(margins)),
        "length_correlation": Metric(
            value=_correlation(
                [*chosen, *rejected],
                [float(len(p.chosen_ids)) for p in pairs]
                + [float(len(p.rejected_ids)) for p in pairs],
            ),
            n=2 * len(pairs),
        ),
        **bias_metrics(pairs, margins),
        **vendor_metrics(pairs, margins),
        **ceiling_metrics(pairs, accuracy.value),
    }
    judged = [
        _right(margin if verdict > 0 else -margin)
        for pair, margin in zip(pairs, margins, strict=True)
        if (verdict := _oracle_margin(pair))
    ]
    if judged:
        metrics["oracle_agreement"] = mean(judged)
    return metrics


def expected_calibration_error(margins: Sequence[float]) -> float:
    """ECE of sigmoid(margin) as the probability that the preferred answer is the chosen one.

    Ten bins of equal width over the confidence 0.5 to 1 (Guo et al. 2017, equation 3).
    """
    bins: list[list[tuple[float, float]]] = [[] for _ in range(_BINS)]
    for margin in margins:
        confidence = 1 / (1 + math.exp(-min(abs(margin), 500.0)))
        place = min(_BINS - 1, int((confidence - 0.5) * 2 * _BINS))
        bins[place].append((confidence, _right(margin)))
    gaps = [abs(sum(c for c, _ in entry) - sum(right for _, right in entry)) for entry in bins]
    return sum(gaps) / len(margins)


def by_field(
    name: str, pairs: Sequence[Pair], chosen: Sequence[float], rejected: Sequence[float]
) -> list[dict[str, Any]]:
    """One row a value of a provenance field: n, accuracy, mean margin, and the longer side's share.

    Empty when no pair has the field.
    """
    groups: dict[str, list[tuple[float, bool]]] = {}
    for pair, c, r in zip(pairs, chosen, rejected, strict=True):
        if pair.row.get(name):
            longer = len(pair.chosen_ids) > len(pair.rejected_ids)
            groups.setdefault(str(pair.row[name]), []).append((c - r, longer))
    return [
        {
            name: value,
            "n": len(entries),
            "accuracy": sum(_right(margin) for margin, _ in entries) / len(entries),
            "margin_mean": sum(margin for margin, _ in entries) / len(entries),
            "chosen_is_longer": sum(longer for _, longer in entries) / len(entries),
        }
        for value, entries in sorted(groups.items())
    ]


def _right(margin: float) -> float:
    return 1.0 if margin > 0 else 0.5 if margin == 0 else 0.0


def _oracle_margin(pair: Pair) -> float:
    """The oracle's score of the chosen answer minus that of the rejected one; 0 without a check."""
    check = pair.row.get("check")
    if not isinstance(check, dict) or "kind" not in check:
        return 0.0
    asked = pair.row["prompt"][-1]["content"]
    good, bad = (
        score(check, pair.row[side][-1]["content"], asked).total for side in ("chosen", "rejected")
    )
    return good - bad


def _correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Pearson's r; 0 when one side does not vary."""
    n = len(first)
    a, b = sum(first) / n, sum(second) / n
    covariance = sum((x - a) * (y - b) for x, y in zip(first, second, strict=True))
    spread = math.sqrt(sum((x - a) ** 2 for x in first) * sum((y - b) ** 2 for y in second))
    return covariance / spread if spread > 0 else 0.0


def _histogram(margins: Sequence[float]) -> list[dict[str, Any]]:
    """The margins in ten bins of equal width."""
    low, high = min(margins), max(margins)
    width = (high - low) / _BINS or 1.0
    counts = [0] * _BINS
    for margin in margins:
        counts[min(_BINS - 1, int((margin - low) / width))] += 1
    return [
        {"from": low + i * width, "to": low + (i + 1) * width, "pairs": count}
        for i, count in enumerate(counts)
    ]


def _worst(
    pairs: Sequence[Pair], chosen: Sequence[float], rejected: Sequence[float]
) -> list[dict[str, Any]]:
    """The pairs that the model orders most wrongly, with their scores."""
    order = sorted(range(len(pairs)), key=lambda i: chosen[i] - rejected[i])
    return [
        {
            "prompt": pairs[i].row["prompt"][-1]["content"],
            "chosen": pairs[i].row["chosen"][-1]["content"],
            "rejected": pairs[i].row["rejected"][-1]["content"],
            "reward_chosen": chosen[i],
            "reward_rejected": rejected[i],
            "vendor": str(pairs[i].row.get("vendor") or ""),
        }
        for i in order[:NUM_SAMPLES]
    ]
