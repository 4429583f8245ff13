"""Held-out questions, and what the oracle says of the answers to them.

A row with a `check` can be judged by the oracle of the village; without one, only length, stops and
repetition can be measured, and the other metrics are absent.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llm_assets.gates.statistics import mean_interval, paired_rate_interval
from llm_assets.stages.context import Metric, with_ends
from llm_assets.stages.encoding import Conversation
from llm_assets.stages.generation import Answer
from llm_assets.village.oracle import is_correct, is_refusal, score

NUM_SAMPLES = 12
_REPEATED = 4
"""A run of so many words that comes again in an answer counts as repetition."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A prompt that ends with the user's turn, the expected answer, and how to judge one."""

    prompt: Conversation
    expected: str
    kind: str
    check: Mapping[str, Any] | None

    @property
    def asked(self) -> str:
        """The last turn of the prompt."""
        return self.prompt[-1]["content"] if self.prompt else ""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Answers of two models to the same questions; `value`: wins plus half the ties, over n."""

    wins: int
    ties: int
    losses: int

    @property
    def n(self) -> int:
        """Questions compared."""
        return self.wins + self.ties + self.losses

    @property
    def value(self) -> float:
        """Win rate of the second model; a tie counts half."""
        return (self.wins + 0.5 * self.ties) / self.n if self.n else 0.0


def instruction_questions(
    rows: Sequence[Mapping[str, Any]], *, limit: int, seed: int
) -> list[Question]:
    """One question a conversation: all up to its last assistant turn."""
    questions = []
    for row in rows:
        messages = list(row["messages"])
        last = max(
            (i for i, message in enumerate(messages) if message["role"] == "assistant"), default=0
        )
        if last > 0:
            questions.append(_question(messages[:last], messages[last]["content"], row))
    return _some(questions, limit, seed)


def preference_questions(
    rows: Sequence[Mapping[str, Any]], *, limit: int, seed: int
) -> list[Question]:
    """The prompts of preference pairs, each once."""
    found: dict[str, Question] = {}
    for row in rows:
        prompt = list(row["prompt"])
        key = "\0".join(message["role"] + "\0" + message["content"] for message in prompt)
        found.setdefault(key, _question(prompt, row["chosen"][-1]["content"], row))
    return _some(list(found.values()), limit, seed)


def _question(prompt: Conversation, expected: str, row: Mapping[str, Any]) -> Question:
    check = row.get("check")
    return Question(
        prompt=prompt,
        expected=expected,
        kind=str(row.get("kind") or ""),
        check=check if isinstance(check, Mapping) and "kind" in check else None,
    )


def _some(questions: list[Question], limit: int, seed: int) -> list[Question]:
    """At most `limit`, drawn by the seed, in their order."""
    if len(questions) <= limit:
        return questions
    chosen = random.Random(seed).sample(range(len(questions)), limit)
    return [questions[index] for index in sorted(chosen)]


def oracle_scores(questions: Sequence[Question], texts: Sequence[str]) -> list[float | None]:
    """The oracle's total for each answer, 0 to 1; None where the question has no check."""
    return [
        None if q.check is None else score(q.check, text, q.asked).total
        for q, text in zip(questions, texts, strict=True)
    ]


def answer_metrics(questions: Sequence[Question], answers: Sequence[Answer]) -> dict[str, Metric]:
    """Headline metrics of greedy answers. Those of a kind that no question has are absent."""
    return {name: mean(values) for name, values in answer_values(questions, answers).items()}


def answer_deltas(
    questions: Sequence[Question], before: Sequence[Answer], after: Sequence[Answer]
) -> dict[str, Metric]:
    """`NAME_delta`: each headline metric after minus before on the same questions, with both ends
    of its interval: Tango's for rates, else of the mean of the differences."""
    earlier, later = answer_values(questions, before), answer_values(questions, after)
    metrics: dict[str, Metric] = {}
    for name, values in later.items():
        pairs = list(zip(values, earlier[name], strict=True))
        if {value for pair in pairs for value in pair} <= {0.0, 1.0}:
            won, lost = sum(a > b for a, b in pairs), sum(a < b for a, b in pairs)
            interval = paired_rate_interval(won, lost, len(pairs))
        else:
            interval = mean_interval([a - b for a, b in pairs])
        delta = sum(a - b for a, b in pairs) / len(pairs)
        metrics.update(with_ends(f"{name}_delta", delta, interval, len(pairs)))
    return metrics


def answer_values(
    questions: Sequence[Question], answers: Sequence[Answer]
) -> dict[str, list[float]]:
    """Headline metric to its value for each question that it counts, in their order."""
    texts = [answer.text for answer in answers]
    judged = list(zip(questions, texts, strict=True))
    parts: dict[str, list[float]] = {
        "oracle_score": [s for s in oracle_scores(questions, texts) if s is not None],
        "fact_accuracy": [
            float(is_correct(q.check, text)) for q, text in judged if _kind(q) == "fact" and q.check
        ],
        "answer_accuracy": [
            float(is_correct(q.check, text))
            for q, text in judged
            if q.check and _kind(q) != "refuse"
        ],
        "known_good_accuracy": [
            float(is_correct(q.check, text))
            for q, text in judged
            if q.check and _kind(q) == "rewrite"
        ],
        "refusal_rate": [
            float(is_correct(q.check, text))
            for q, text in judged
            if q.check and _kind(q) == "refuse"
        ],
        "overrefusal_rate": [
            float(is_refusal(text)) for q, text in judged if _kind(q) == "harmless"
        ],
        "mean_length": [float(len(answer.ids)) for answer in answers],
        "stop_rate": [float(answer.stopped) for answer in answers],
        "repetition_rate": [float(_repeats(text)) for text in texts],
    }
    return {name: values for name, values in parts.items() if values}


def compare(
    questions: Sequence[Question], before: Sequence[Answer], after: Sequence[Answer]
) -> Comparison:
    """Which answers the oracle scores higher, over the questions with a check."""
    firsts = oracle_scores(questions, [answer.text for answer in before])
    seconds = oracle_scores(questions, [answer.text for answer in after])
    differences = [
        second - first
        for first, second in zip(firsts, seconds, strict=True)
        if first is not None and second is not None
    ]
    wins = sum(difference > 1e-9 for difference in differences)
    losses = sum(difference < -1e-9 for difference in differences)
    return Comparison(wins=wins, losses=losses, ties=len(differences) - wins - losses)


def mean(values: Sequence[float]) -> Metric:
    """The mean of values, with their number."""
    return Metric(value=sum(values) / len(values), n=len(values))


def sample_rows(
    questions: Sequence[Question], before: Sequence[Answer], after: Sequence[Answer]
) -> list[dict[str, Any]]:
    """Rows that a person reads, spread over the questions: prompt, before, after, kind, scores."""
    step = max(1, len(questions) // NUM_SAMPLES)
    return [_row(questions[i], before[i], after[i]) for i in range(0, len(questions), step)][
        :NUM_SAMPLES
    ]


def regressions(
    questions: Sequence[Question], before: Sequence[Answer], after: Sequence[Answer]
) -> list[dict[str, Any]]:
    """Questions whose answer lost most by the oracle, worst first, at most NUM_SAMPLES."""
    rows = [_row(q, a, b) for q, a, b in zip(questions, before, after, strict=True) if q.check]
    lost = [row for row in rows if row["score_after"] < row["score_before"] - 1e-9]
    return sorted(lost, key=lambda row: row["score_after"] - row["score_before"])[:NUM_SAMPLES]


def by_kind(questions: Sequence[Question], **answers: Sequence[Answer]) -> list[dict[str, Any]]:
    """One row a kind of question: n and, for each named set of answers, mean score and accuracy."""
    kinds: dict[str, list[int]] = {}
    for index, question in enumerate(questions):
        if question.check is not None:
            kinds.setdefault(question.kind or _kind(question), []).append(index)
    rows = []
    for kind, indices in sorted(kinds.items()):
        row: dict[str, Any] = {"kind": kind, "n": len(indices)}
        asked = [questions[i] for i in indices]
        for name, given in answers.items():
            texts = [given[i].text for i in indices]
            scores = [s for s in oracle_scores(asked, texts) if s is not None]
            right = [
                is_correct(q.check, text) for q, text in zip(asked, texts, strict=True) if q.check
            ]
            row[f"score_{name}"] = sum(scores) / len(indices)
            row[f"correct_{name}"] = sum(right) / len(indices)
        rows.append(row)
    return rows


def _row(question: Question, before: Answer, after: Answer) -> dict[str, Any]:
    row: dict[str, Any] = {
        "prompt": question.asked,
        "before": before.text,
        "after": after.text,
        "expected": question.expected,
        "kind": question.kind,
    }
    if question.check is not None:
        row["score_before"], row["score_after"] = (
            score(question.check, answer.text, question.asked).total for answer in (before, after)
        )
    return row


def _kind(question: Question) -> str:
    return str(question.check["kind"]) if question.check is not None else ""


def _repeats(text: str) -> bool:
    """Some run of `_REPEATED` words stands twice in the text."""
    words = text.split()
    runs = [tuple(words[i : i + _REPEATED]) for i in range(len(words) - _REPEATED + 1)]
    return len(set(runs)) < len(runs)
