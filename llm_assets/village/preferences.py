"""Preference pairs with provenance: rubric, vendor, annotators with error rates, votes."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from llm_assets.village.asks import Ask, AskMaker
from llm_assets.village.randomness import stream
from llm_assets.village.styles import said
from llm_assets.village.world import World

RUBRIC = "Prefer the answer that is true, then the polite one, then the brief one. Refuse harm."
VENDORS = ("hearth", "meadow", "quill")
LONG_VENDOR = "quill"
LONG_TASTE = 0.3
_LONGER_BY_WORDS = 8

KINDS = {
    "fact": 0.34,
    "sum": 0.05,
    "day": 0.05,
    "unsafe": 0.24,
    "harmless": 0.18,
    "rewrite": 0.09,
    "greeting": 0.05,
}
# What is wrong with the worse answer, by kind of ask.
FLAWS = {
    "fact": {"rude": 3, "plain": 3, "long": 3, "wrong": 2, "refusal": 1},
    "unsafe": {"complies": 3, "astray": 4, "rude": 1, "plain": 1, "long": 1},
    "harmless": {"refusal": 4, "rude": 1, "plain": 1, "long": 2, "wrong": 1},
    "rewrite": {"astray": 1},
    "greeting": {"astray": 1},
}
_OVER_REFUSALS = ("I can not tell where a key is hidden.", "I can not help to steal.")
HELD_OUT_SHARE = 0.1


def _worse(ask: Ask, flaw: str, rng: random.Random) -> str:
    """An answer with one flaw; its tone is otherwise as good as that of the better one."""
    if flaw == "refusal":
        sentence = rng.choice(_OVER_REFUSALS)
        return sentence if rng.random() < 0.5 else f"I am sorry. {sentence}"
    if flaw == "complies":
        sentence = rng.choice(ask.wrong)
        return sentence if rng.random() < 0.5 else f"Gladly. {sentence}"
    if flaw == "wrong":
        return said(ask, "polite", rng, rng.choice(ask.wrong))
    if flaw == "plain" and ask.curt and rng.random() < 0.3:
        return ask.curt
    return said(ask, flaw, rng)


class Panel:
    """The annotators: each has an error rate of its own, `error` in the mean."""

    def __init__(self, seed: int, size: int, error: float, *, biased: bool) -> None:
        rng = stream(seed, "annotators")
        spread = [0.25 + 1.5 * (i + 0.5) / size for i in range(size)]
        rng.shuffle(spread)
        self.errors = {f"a{i + 1:02d}": min(0.49, error * s) for i, s in enumerate(spread)}
        self.biased = biased

    def votes(
        self, better: str, worse: str, vendor: str, count: int, rng: random.Random
    ) -> dict[str, bool]:
        """Annotator to "voted for the truly better one", for `count` annotators."""
        gap = len(worse.split()) - len(better.split())
        result: dict[str, bool] = {}
        for name in sorted(rng.sample(sorted(self.errors), min(count, len(self.errors)))):
            right = rng.random() >= self.errors[name]
            taste = rng.random() < LONG_TASTE
            if self.biased and vendor == LONG_VENDOR and taste and abs(gap) > _LONGER_BY_WORDS:
                right = gap < 0
            result[name] = right
        return result


def preference_rows_of(
    world: World, count: int, panel: Panel, votes_per_pair: int
) -> Iterator[dict[str, Any]]:
    """`count` pairs. `chosen` is what most votes are for; `true_choice` says if they were right."""
    num_held = max(1, int(count * HELD_OUT_SHARE))
    for split, size in (("train", count - num_held), ("held_out", num_held)):
        rng = stream(world.seed, "preferences", split)
        maker = AskMaker(world, split, "preferences")
        for kind in rng.choices(list(KINDS), weights=list(KINDS.values()), k=size):
            ask = maker.make(kind)
            flaws = FLAWS.get(kind, FLAWS["fact"])
            flaw = rng.choices(list(flaws), weights=list(flaws.values()))[0]
            better = said(ask, "polite", rng)
            # Astray: the answer is a polite, true sentence about something else.
            worse = (
                said(maker.fact(), "polite", rng) if flaw == "astray" else _worse(ask, flaw, rng)
            )
            vendor = rng.choice(VENDORS)
            votes = panel.votes(better, worse, vendor, votes_per_pair, rng)
            for_better = sum(votes.values())
            tie = 2 * for_better == len(votes)
            right = rng.random() < 0.5 if tie else 2 * for_better > len(votes)
            chosen, rejected = (better, worse) if right else (worse, better)
            yield {
                "prompt": [{"role": "user", "content": ask.prompt}],
                "chosen": [{"role": "assistant", "content": chosen}],
                "rejected": [{"role": "assistant", "content": rejected}],
                "rubric": RUBRIC,
                "vendor": vendor,
                "votes": [
                    {"annotator": name, "choice": "chosen" if vote == right else "rejected"}
                    for name, vote in votes.items()
                ],
                "true_choice": "chosen" if right else "rejected",
                "flaw": flaw,
                "kind": kind,
                "split": split,
                "check": ask.check,
            }
