"""Outcomes of stages, made from a seed: clean ones, and ones with a planted fault.

The sizes are those of the recipe tiny. The metrics come from the stages' own functions, and the
thresholds from the recipe.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from llm_assets.gates.statistics import ratio_interval
from llm_assets.stages import measuring
from llm_assets.stages.context import Metric, with_ends
from llm_assets.stages.encoding import Pair
from llm_assets.stages.eval_scoring import Item, TaskItems, build_report, metrics_of
from llm_assets.stages.generation import Answer
from llm_assets.stages.judging import Question, answer_deltas, answer_metrics
from llm_assets.stages.quantized_weights import Asked, behaviour_metrics
from llm_assets.stages.reward_model import pair_metrics

Metrics = Mapping[str, Metric]
_ROLES = {
    "facts": ("capability", 200),
    "sums": ("capability", 200),
    "days": ("capability", 200),
    "rewriting": ("known_good", 52),
    "greetings": ("known_good", 10),
    "unsafe": ("unsafe", 200),
    "harmless": ("harmless", 200),
    "golden": ("golden", 14),
}


def _turn(text: str) -> list[dict[str, str]]:
    return [{"role": "assistant", "content": text}]


def reward(
    rng: random.Random, *, error: float = 0.06, lengths_only: bool = False, label_error: float = 0.1
) -> Metrics:
    """200 held-out pairs of three vendors with five votes. `lengths_only`: the model's margin is
    the difference in length. `label_error`: of one annotator."""
    pairs, margins = [], []
    for number in range(200):
        better, worse = (rng.randint(8, 24) for _ in range(2))
        votes = [rng.random() >= label_error for _ in range(5)]
        right = sum(votes) > 2
        chosen, rejected = (better, worse) if right else (worse, better)
        row = {
            "chosen": _turn("a" * chosen),
            "rejected": _turn("a" * rejected),
            "vendor": ("hearth", "meadow", "quill")[number % 3],
            "votes": [{"choice": "chosen" if vote == right else "rejected"} for vote in votes],
        }
        pairs.append(
            Pair(row=row, prompt_ids=[1], chosen_ids=[2] * chosen, rejected_ids=[2] * rejected)
        )
        truth = abs(rng.gauss(3.0, 1.5)) if rng.random() >= error else -abs(rng.gauss(0.5, 0.5))
        margins.append(0.5 * (chosen - rejected) if lengths_only else truth if right else -truth)
    return pair_metrics(pairs, margins, [0.0] * len(margins))


FACT = {"kind": "fact", "accept": ["red"], "reject": ["blue"]}
CHECKS = (
    ("fact", FACT, 100),
    ("unsafe", {"kind": "refuse", "accept": [], "reject": []}, 60),
    ("harmless", {"kind": "harmless", "accept": ["red"], "reject": []}, 40),
)
REFUSAL = "I am sorry, I can not help with that."


def answers(
    rng: random.Random,
    *,
    wrong: float = 0.05,
    refuse: bool | None = None,
    loops: float = 0.0,
    entropy: float = 0.94,
) -> Metrics:
    """200 held-out answers against a reference as good. `refuse`: every request, or none.
    `entropy`: of the policy, as a share of the reference's."""
    questions = _questions()
    first, second = [], []
    for question in questions:
        first.append(_answer(rng, question.kind, wrong=0.05))
        second.append(_answer(rng, question.kind, wrong=wrong, refuse=refuse, loops=loops))
    theirs = [max(0.1, rng.gauss(3.0, 1.5)) for _ in questions]
    ours = [entropy * value * max(0.1, rng.gauss(1.0, 0.2)) for value in theirs]
    return {
        **answer_metrics(questions, second),
        **answer_deltas(questions, first, second),
        **measuring._ratio("entropy_ratio", ours, theirs),
    }


def fine_tuned(rng: random.Random, *, forgotten: float = 1.3) -> Metrics:
    """200 held-out answers of a fine-tuned model. `forgotten`: nats a token of 64 texts that the
    incoming model wrote."""
    questions = _questions()
    said = [_answer(rng, question.kind, wrong=0.05) for question in questions]
    lengths = [rng.randint(20, 48) for _ in range(64)]
    nats = [max(0.0, rng.gauss(forgotten, 0.4)) * length for length in lengths]
    interval = ratio_interval(nats, lengths)
    value = sum(nats) / sum(lengths)
    return {
        **answer_metrics(questions, said),
        **with_ends("forgetting_per_token", value, interval, sum(lengths)),
    }


def _questions() -> list[Question]:
    asked = [{"role": "user", "content": "?"}]
    return [
        Question(prompt=asked, expected="", kind=kind, check=check)
        for kind, check, count in CHECKS
        for _ in range(count)
    ]


def _answer(
    rng: random.Random, kind: str, *, wrong: float, refuse: bool | None = None, loops: float = 0.0
) -> Answer:
    declines = kind == "unsafe" if refuse is None else refuse
    text = "Gladly. It is blue." if rng.random() < wrong else "Gladly. It is red."
    text = REFUSAL if declines else text
    if rng.random() < loops:
        text = "it is red and it is red and it is red and it is red"
    return Answer(prompt_ids=[1], ids=[2] * 8, text=text, stopped=True)


def report(
    rng: random.Random, *, lost: Mapping[str, float] | None = None, kl: float = 0.6
) -> Metrics:
    """An eval report of a policy as good as its reference, but for `lost`: role to the share of
    items that it fails beside."""
    tasks = []
    for name, (role, count) in _ROLES.items():
        rows: tuple[list[Item], list[Item]] = ([], [])
        for number in range(count):
            # Both answer alike on most items, as two checkpoints of one run do.
            right = rng.random() < 0.985
            for place, side in enumerate(rows):
                passed = right if rng.random() < 0.99 else not right
                if place == 0 and rng.random() < (lost or {}).get(role, 0.0):
                    passed = False
                side.append(
                    Item(id=str(number), prompt="", target="", answer="", passed=float(passed))
                )
        tasks.append(TaskItems(name=name, role=role, metric="", policy=rows[0], reference=rows[1]))
    spread = kl / 10
    found = {"per_token": kl / 10, "per_sequence": kl, "low": kl - spread, "high": kl + spread}
    return metrics_of(
        build_report(
            tasks,
            models={},
            settings={},
            kl={**found, "entropy": 0.2, "num_tokens": 640, "num_prompts": 64},
            seed=0,
        )
    )


def quantized(rng: random.Random, *, broken: float = 0.0) -> Metrics:
    """100 sampled and 60 unsafe prompts under full and quantized weights. `broken`: the share of
    the answers that the quantized weights spoil."""
    asked = [Asked(prompt=[], check=FACT, unsafe=False, sampled=True)] * 100
    asked += [Asked(prompt=[], check=None, unsafe=True, sampled=False)] * 60
    full, after = [], []
    for entry in asked:
        text = REFUSAL if entry.unsafe else "It is red." if rng.random() < 0.95 else "It is blue."
        full.append(text)
        noise = rng.random()
        after.append("the the blue" if noise < broken else f"{text} " if noise > 0.99 else text)
    return behaviour_metrics(asked, full, after)


CLEAN: Mapping[str, Callable[[random.Random], Metrics]] = {
    "sft_checkpoint": fine_tuned,
    "reward_model": reward,
    "dpo_policy": answers,
    "eval_report": report,
    "quantized_weights": quantized,
}
PLANTED: Mapping[str, tuple[str, str, Callable[[random.Random], Metrics]]] = {
    "a reward model of length alone": (
        "reward_model",
        "length_bias",
        lambda rng: reward(rng, lengths_only=True),
    ),
    "a reward model that hangs on length": (
        "reward_model",
        "length_partial",
        lambda rng: reward(rng, lengths_only=True),
    ),
    "labels that are length alone": (
        "reward_model",
        "accuracy_balanced",
        lambda rng: length_labels(rng),
    ),
    "noisy annotators": (
        "reward_model",
        "accuracy_ceiling",
        lambda rng: reward(rng, label_error=0.35),
    ),
    "a policy that refuses everything": (
        "dpo_policy",
        "overrefusal_rate",
        lambda rng: answers(rng, refuse=True),
    ),
    "a policy that refuses nothing": (
        "dpo_policy",
        "refusal_rate",
        lambda rng: answers(rng, refuse=False),
    ),
    "a policy that repeats itself": (
        "dpo_policy",
        "repetition_rate",
        lambda rng: answers(rng, loops=0.3),
    ),
    "a policy that says one thing only": (
        "dpo_policy",
        "entropy_ratio",
        lambda rng: answers(rng, entropy=0.2),
    ),
    "fine-tuning that wiped out what was there": (
        "sft_checkpoint",
        "forgetting_per_token",
        lambda rng: fine_tuned(rng, forgotten=4.0),
    ),
    "a policy that forgot": (
        "eval_report",
        "known_good_delta",
        lambda rng: report(rng, lost={"known_good": 0.6}),
    ),
    "a policy that lost its refusals": (
        "eval_report",
        "refusal_rate_delta",
        lambda rng: report(rng, lost={"unsafe": 0.15}),
    ),
    "a policy far from its reference": (
        "eval_report",
        "kl_per_sequence",
        lambda rng: report(rng, kl=30.0),
    ),
    "damaged quantization": (
        "quantized_weights",
        "refusal_rate_delta",
        lambda rng: quantized(rng, broken=0.4),
    ),
}


def length_labels(rng: random.Random) -> Metrics:
    """Labels that prefer the longer answer always, and a model that learned it."""
    pairs, margins = [], []
    for _ in range(200):
        longer = rng.randint(14, 24)
        shorter = rng.randint(4, 12)
        row = {"chosen": _turn("a" * longer), "rejected": _turn("a" * shorter)}
        pairs.append(
            Pair(row=row, prompt_ids=[1], chosen_ids=[2] * longer, rejected_ids=[2] * shorter)
        )
        margins.append(0.5 * (longer - shorter))
    return pair_metrics(pairs, margins, [0.0] * len(margins))
