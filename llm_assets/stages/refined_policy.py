"""Stage 9: the policy refined against the reward model.

Takes `dpo_policy` (or what was handed on in its place), `reward_model` and `preferences`, of which
it uses the prompts; gives a `policy`. With the input `sft_checkpoint` too, that is what it is
measured against, so that its KL is the one of all alignment stages together.

Methods: `grpo` (Shao et al. 2024) and `rloo` (Ahmadian et al. 2024) through TRL's trainers, with a
KL penalty to the policy that came in; or `constitutional` (Bai et al. 2022): critique and revision,
the better answers by the reward model, fine-tuning on these.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer, SFTConfig

from llm_assets.errors import DataError, RecipeError
from llm_assets.gates.statistics import mean_interval
from llm_assets.stage_settings import RefineSettings
from llm_assets.stages.adapters import (
    adapter_config,
    load_trainable,
    merged,
    refuse_quantized,
    refuse_settings,
)
from llm_assets.stages.constitution import Revised, revise, revision_examples
from llm_assets.stages.context import Metric, StageContext, StageResult, with_ends
from llm_assets.stages.encoding import Counts, count_metrics, count_rows, read_rows, render
from llm_assets.stages.fine_tuning import fine_tune
from llm_assets.stages.generation import Answer, to_device
from llm_assets.stages.judging import Question, mean, oracle_scores, preference_questions
from llm_assets.stages.measuring import measure_policy, measure_step
from llm_assets.stages.quiet import quiet_libraries, release_memory
from llm_assets.stages.rewards import (
    RewardFunction,
    conversation_rewards,
    group_agreement,
    load_reward_model,
)
from llm_assets.stages.training import (
    TrainingLog,
    load_model,
    load_tokenizer,
    num_parameters,
    run_training,
    save_model,
    training_arguments,
)

_NO_EFFECT = ("sync_ref_model", "remove_unused_columns", "reward_weights")
_CONFIGS: Mapping[str, Any] = {
    "grpo": GRPOConfig,
    "rloo": RLOOConfig,
    "constitutional": SFTConfig,
}


@dataclass(frozen=True, kw_only=True)
class _Trained:
    log: TrainingLog
    metrics: Mapping[str, Metric]
    tables: Mapping[str, Sequence[Mapping[str, Any]]]


def run(context: StageContext) -> StageResult:
    """Refine, store, and measure what was stored."""
    settings: RefineSettings = context.config
    check_settings(context)
    quiet_libraries()
    source = context.inputs["dpo_policy"].path
    tokenizer = load_tokenizer(source)
    judge = to_device(load_reward_model(context.inputs["reward_model"].path))
    judge_tokenizer = load_tokenizer(context.inputs["reward_model"].path)
    train, held_out, counts = _questions(context, tokenizer)
    _check_judge(settings, train)
    if settings.method == "constitutional":
        trained = _constitutional(context, tokenizer, judge, judge_tokenizer, train)
    else:
        trained = _online(context, tokenizer, judge, judge_tokenizer, train)
    release_memory()
    return _measure(context, trained, tokenizer, judge, judge_tokenizer, held_out, counts)


def check_settings(context: StageContext) -> None:
    """RecipeError for a setting that the chosen method cannot take."""
    settings: RefineSettings = context.config
    refuse_quantized(settings.lora, where=context.stage)
    refuse_settings(context, _NO_EFFECT, why="one reward model and a fixed reference")
    known = {field.name for field in dataclasses.fields(_CONFIGS[settings.method])}
    others = [name for name in settings.extra if name not in known]
    refuse_settings(context, others, why=f"method {settings.method} has no such setting")
    if settings.method == "constitutional":
        if settings.min_reward_agreement is not None:
            raise RecipeError(
                where=f"{context.stage}.min_reward_agreement",
                found="method constitutional",
                rule="the reward model is watched while answers are sampled in training",
                remedy="remove it, or take method grpo or rloo",
            )
        if not settings.constitution:
            raise RecipeError(
                where=f"{context.stage}.constitution",
                found="an empty list",
                rule="method constitutional revises answers by at least one principle",
                remedy="write principles, or take method grpo or rloo",
            )
        return
    batch = settings.per_device_train_batch_size * settings.extra.get(
        "steps_per_generation", settings.gradient_accumulation_steps
    )
    batch = int(settings.extra.get("generation_batch_size", batch))
    if batch % settings.num_generations:
        raise RecipeError(
            where=f"{context.stage}.num_generations",
            found=f"{settings.num_generations} answers a prompt, {batch} answers a generation",
            rule="a generation holds whole groups: its batch is a multiple of num_generations",
            remedy="set per_device_train_batch_size to a multiple of num_generations",
        )


def _check_judge(settings: RefineSettings, train: Sequence[Question]) -> None:
    """DataError when the reward model is to be watched and nothing can judge."""
    if settings.min_reward_agreement is None or any(q.check is not None for q in train):
        return
    raise DataError(
        where="stages.refined_policy.min_reward_agreement",
        found="no prompt of the preferences has a `check`",
        rule="the judge is the oracle, and it judges answers by the `check` of their row",
        remedy="give rows a check, as the village does, or remove the setting",
    )


def _questions(
    context: StageContext, tokenizer: Any
) -> tuple[list[Question], list[Question], dict[str, Counts]]:
    """Prompts of both splits, each once; those over `max_length` with an answer are left out."""
    settings: RefineSettings = context.config
    folder = context.inputs["preferences"].path
    found: dict[str, list[Question]] = {}
    counts: dict[str, Counts] = {}
    for split in ("train", "held_out"):
        rows = read_rows(folder / f"{split}.jsonl")
        limit = settings.eval_prompts if split == "held_out" else len(rows)
        questions = preference_questions(rows, limit=max(1, limit), seed=context.seed)
        lengths = render(tokenizer, [q.prompt for q in questions], generation_prompt=True)
        room = settings.max_length - settings.max_completion_length
        counts[split] = Counts(rows=len(questions))
        found[split] = []
        for question, ids in zip(questions, lengths, strict=True):
            if len(ids) <= room:
                found[split].append(question)
            else:
                counts[split].drop("prompt too long")
        if not found[split]:
            raise counts[split].nothing_left(f"preferences/{split}.jsonl", room)
        context.progress.say(counts[split].sentence(f"prompts, {split}"))
    return found["train"], found["held_out"], counts


def _measure(
    context: StageContext,
    trained: _Trained,
    tokenizer: Any,
    judge: Any,
    judge_tokenizer: Any,
    questions: list[Question],
    counts: dict[str, Counts],
) -> StageResult:
    """The stored policy against the fine-tuned checkpoint, or else the policy that came in."""
    settings: RefineSettings = context.config
    length = settings.eval_max_new_tokens
    policy = to_device(load_model(context.out))
    incoming = to_device(load_model(context.inputs["dpo_policy"].path))
    sft = context.inputs.get("sft_checkpoint")
    reference = incoming if sft is None else to_device(load_model(sft.path))
    measured = measure_policy(
        context, policy, reference, tokenizer, questions, max_new_tokens=length
    )
    step: dict[str, Metric] = {}
    before = measured.before
    if sft is not None:
        step, before = measure_step(
            policy, incoming, tokenizer, questions, measured, max_new_tokens=length
        )

    rewards = _reward_metrics(
        judge, judge_tokenizer, questions, (before, measured.after, measured.sampled)
    )
    return StageResult(
        metrics={
            **rewards,
            **measured.metrics,
            **step,
            **trained.metrics,
            **count_metrics(counts),
            "tokens_per_s": Metric(value=trained.log.tokens_per_s),
        },
        metadata={"num_parameters": num_parameters(policy)},
        series=trained.log.series,
        samples=measured.samples,
        tables={
            **measured.tables,
            **trained.tables,
            **trained.log.tables,
            "rows": count_rows(counts),
        },
        tokens=trained.log.tokens,
    )


def _reward_metrics(
    judge: Any,
    judge_tokenizer: Any,
    questions: Sequence[Question],
    sets: tuple[Sequence[Answer], Sequence[Answer], Sequence[Answer]],
) -> dict[str, Metric]:
    """Mean rewards of the greedy answers before and after, `reward_agreement` and hacking.

    `reward_agreement` is the share of the pairs among a question's three answers (before, after,
    sampled), of those that the oracle tells apart, which the reward model orders as the oracle
    does: the reward model judged on what the policy says now. `reward_judge_gap`: the reward
    model's win rate of `after` over `before` minus the oracle's on the same answers: over 0 the
    reward went up where the judge saw nothing better.
    """
    asked = [question for question in questions for _ in sets]
    answers = [answer for answers in zip(*sets, strict=True) for answer in answers]
    scores = conversation_rewards(
        judge,
        judge_tokenizer,
        [
            [*q.prompt, {"role": "assistant", "content": a.text}]
            for q, a in zip(asked, answers, strict=True)
        ],
    )
    metrics = {
        "reward_mean_before": mean(scores[:: len(sets)]),
        "reward_mean": mean(scores[1 :: len(sets)]),
    }
    oracle = oracle_scores(asked, [answer.text for answer in answers])
    agreement = group_agreement(scores, oracle, group=len(sets))
    gaps = [
        _won(scores[start], scores[start + 1]) - _won(first, second)
        for start in range(0, len(scores), len(sets))
        if (first := oracle[start]) is not None and (second := oracle[start + 1]) is not None
    ]
    if gaps:
        gap = sum(gaps) / len(gaps)
        metrics.update(with_ends("reward_judge_gap", gap, mean_interval(gaps), len(gaps)))
    return metrics if agreement is None else {**metrics, "reward_agreement": agreement}


def _won(before: float, after: float) -> float:
    return 1.0 if after > before + 1e-9 else 0.0 if after < before - 1e-9 else 0.5


def _online(
    context: StageContext, tokenizer: Any, judge: Any, judge_tokenizer: Any, train: list[Question]
) -> _Trained:
    """GRPO or RLOO: answers sampled from the policy, scored by the reward model."""
    settings: RefineSettings = context.config
    source = context.inputs["dpo_policy"].path
    trainer_class = GRPOTrainer if settings.method == "grpo" else RLOOTrainer
    reward = RewardFunction(
        judge,
        judge_tokenizer,
        group=settings.num_generations,
        min_agreement=settings.min_reward_agreement,
    )
    context.progress.say(
        f"{settings.method} on {len(train)} prompts, {settings.num_generations} answers each, "
        f"beta {settings.beta:g}"
    )
    trainer = trainer_class(
        model=load_trainable(source, tokenizer, settings.lora),
        reward_funcs=reward,
        args=training_arguments(
            _CONFIGS[settings.method], context, remove_unused_columns=False, log_completions=False
        ),
        # JSON, since checks of different kinds have different keys.
        train_dataset=Dataset.from_list(
            [{"prompt": q.prompt, "check": json.dumps(q.check)} for q in train]
        ),
        processing_class=tokenizer,
        peft_config=adapter_config(settings.lora),
    )
    log = run_training(context, trainer)
    trained = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False)
    _store(context, trained, tokenizer, source)
    return _Trained(log=log, metrics={}, tables={})


def _constitutional(
    context: StageContext, tokenizer: Any, judge: Any, judge_tokenizer: Any, train: list[Question]
) -> _Trained:
    """Critique and revision, then fine-tuning on the answers that the reward model prefers."""
    settings: RefineSettings = context.config
    source = context.inputs["dpo_policy"].path
    model = to_device(load_trainable(source, tokenizer, settings.lora))
    revised: Revised = revise(context, model, tokenizer, judge, judge_tokenizer, train)
    examples = revision_examples(context, tokenizer, revised)
    context.progress.say(f"fine-tuning on {len(examples)} answers")
    log, trained = fine_tune(context, model, tokenizer, examples, settings.lora)
    _store(context, trained, tokenizer, source)
    return _Trained(log=log, metrics=revised.metrics, tables={"revisions": revised.rows})


def _store(context: StageContext, trained: Any, tokenizer: Any, source: Path) -> None:
    lora = context.config.lora
    plain = merged(trained, lora, lambda: load_model(source), context.scratch)
    save_model(plain, tokenizer, context.out)
