"""Critique and revision (Bai et al. 2022, section 3), judged by the reward model.

The policy answers each prompt several times, names what is wrong with an answer by one principle,
and writes it again. Of all answers and revisions to a prompt the one with the highest reward is
kept, when it beats the mean of the plain answers.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llm_assets.errors import DataError
from llm_assets.stage_settings import RefineSettings
from llm_assets.stages.context import Metric, StageContext
from llm_assets.stages.encoding import Conversation, Example, encode_conversations
from llm_assets.stages.generation import Answer, generate
from llm_assets.stages.judging import NUM_SAMPLES, Question, mean
from llm_assets.stages.rewards import conversation_rewards

_BATCH = 64


@dataclass(frozen=True, kw_only=True)
class Draft:
    """One answer, its critique by a principle and its revision, with the rewards of both texts."""

    question: Question
    principle: str
    answer: Answer
    critique: str
    revision: Answer
    reward_answer: float
    reward_revision: float


@dataclass(frozen=True, kw_only=True)
class Revised:
    """What was kept: `conversations` to fine-tune on; `rows` and `metrics` say how it went."""

    conversations: list[Conversation]
    rows: list[dict[str, Any]]
    metrics: dict[str, Metric]


def revise(
    context: StageContext,
    model: Any,
    tokenizer: Any,
    judge: Any,
    judge_tokenizer: Any,
    questions: Sequence[Question],
) -> Revised:
    """Answer, critique, revise and choose. DataError when no answer is better than the others."""
    settings: RefineSettings = context.config
    asked = list(questions)
    random.Random(context.seed).shuffle(asked)
    asked = asked[: settings.constitution_prompts]
    drafts = _drafts(context, model, tokenizer, asked)
    conversations = [
        _with_answer(draft.question.prompt, text)
        for draft in drafts
        for text in (draft.answer.text, draft.revision.text)
    ]
    scores = conversation_rewards(judge, judge_tokenizer, conversations)
    drafts = [
        Draft(**{**vars(d), "reward_answer": first, "reward_revision": second})
        for d, first, second in zip(drafts, scores[::2], scores[1::2], strict=True)
    ]
    return _choose(drafts, group=settings.num_generations)


def revision_examples(context: StageContext, tokenizer: Any, revised: Revised) -> list[Example]:
    """The kept conversations, encoded."""
    examples, counts = encode_conversations(
        tokenizer,
        [{"messages": conversation} for conversation in revised.conversations],
        max_length=context.config.max_length,
        too_long="drop",
        where="kept revisions",
        supervise="last answer",
    )
    if counts.num_dropped:
        context.progress.say(counts.sentence("kept revisions"))
    return examples


def _drafts(
    context: StageContext, model: Any, tokenizer: Any, questions: Sequence[Question]
) -> list[Draft]:
    """All answers with critique and revision, those of one question next to each other."""
    settings: RefineSettings = context.config
    repeated = [question for question in questions for _ in range(settings.num_generations)]
    principles = [
        settings.constitution[i % len(settings.constitution)] for i in range(len(repeated))
    ]

    def ask(prompts: Sequence[Conversation], name: str, temperature: float) -> list[Answer]:
        context.progress.say(f"constitution: {len(prompts)} {name}")
        return generate(
            model,
            tokenizer,
            prompts,
            max_new_tokens=settings.max_completion_length,
            temperature=temperature,
            seed=context.seed,
            batch_size=_BATCH,
        )

    answers = ask([q.prompt for q in repeated], "answers", settings.temperature)
    critiques = [""] * len(repeated)
    said: list[Conversation] = [
        _with_answer(q.prompt, a.text) for q, a in zip(repeated, answers, strict=True)
    ]
    names = [
        {"principle": p, "prompt": q.asked, "answer": a.text}
        for p, q, a in zip(principles, repeated, answers, strict=True)
    ]
    if settings.critique_request:
        prompts = [
            _request(settings.critique_request, values, before)
            for values, before in zip(names, said, strict=True)
        ]
        critiques = [answer.text for answer in ask(prompts, "critiques", 0.0)]
        said = [_with_answer(p, text) for p, text in zip(prompts, critiques, strict=True)]
    prompts = [
        _request(settings.revision_request, {**values, "critique": critique}, before)
        for values, critique, before in zip(names, critiques, said, strict=True)
    ]
    revisions = ask(prompts, "revisions", 0.0)
    return [
        Draft(
            question=question,
            principle=principle,
            answer=answer,
            critique=critique,
            revision=revision,
            reward_answer=0.0,
            reward_revision=0.0,
        )
        for question, principle, answer, critique, revision in zip(
            repeated, principles, answers, critiques, revisions, strict=True
        )
    ]


def _choose(drafts: Sequence[Draft], *, group: int) -> Revised:
    """The best finished answer or revision of each question, when it beats the mean answer."""
    kept: list[Conversation] = []
    gains: list[float] = []
    revisions = 0
    for start in range(0, len(drafts), group):
        members = drafts[start : start + group]
        baseline = sum(draft.reward_answer for draft in members) / len(members)
        candidates = [(d.reward_answer, d.answer, False) for d in members]
        candidates += [(d.reward_revision, d.revision, True) for d in members]
        finished = [entry for entry in candidates if entry[1].stopped and entry[1].text]
        if not finished:
            continue
        reward, best, is_revision = max(finished, key=lambda entry: entry[0])
        if reward > baseline:
            kept.append(_with_answer(members[0].question.prompt, best.text))
            gains.append(reward - baseline)
            revisions += is_revision
    if not kept:
        raise DataError(
            where="refined_policy, method constitutional",
            found=f"none of {len(drafts)} answers and their revisions is finished and better",
            rule="fine-tuning needs answers that the reward model prefers to the mean answer",
            remedy="raise num_generations, temperature or max_completion_length, or take grpo",
        )
    preferred = [float(d.reward_revision > d.reward_answer) for d in drafts]
    return Revised(
        conversations=kept,
        rows=[_row(draft) for draft in drafts[:: max(1, len(drafts) // NUM_SAMPLES)]][:NUM_SAMPLES],
        metrics={
            "revision_win_rate": mean(preferred),
            "kept_share": Metric(value=len(kept) * group / len(drafts), n=len(drafts) // group),
            "revised_share": Metric(value=revisions / len(kept), n=len(kept)),
            "kept_reward_gain": mean(gains),
        },
    )


def _request(request: str, values: Mapping[str, str], before: Conversation) -> Conversation:
    """A request with its names filled in: alone when it quotes the answer, else the next turn."""
    text = request
    for name, value in values.items():
        text = text.replace("{" + name + "}", value)
    turn = {"role": "user", "content": text}
    return [turn] if "{answer}" in request else [*before, turn]


def _with_answer(prompt: Conversation, text: str) -> Conversation:
    return [*prompt, {"role": "assistant", "content": text}]


def _row(draft: Draft) -> dict[str, Any]:
    return {
        "prompt": draft.question.asked,
        "answer": draft.answer.text,
        "principle": draft.principle,
        "critique": draft.critique,
        "revision": draft.revision.text,
        "reward_answer": draft.reward_answer,
        "reward_revision": draft.reward_revision,
    }
