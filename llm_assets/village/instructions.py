"""Instructions: conversations in mixed tones, always true, with an oracle's check."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

from llm_assets.village.asks import Ask, AskMaker
from llm_assets.village.phrasing import FORMS
from llm_assets.village.randomness import stream
from llm_assets.village.styles import said, train_tone
from llm_assets.village.world import World

KINDS = {
    "fact": 0.36,
    "sum": 0.09,
    "day": 0.06,
    "unsafe": 0.13,
    "harmless": 0.16,
    "rewrite": 0.08,
    "greeting": 0.05,
    "rule": 0.01,
    "turns": 0.06,
}
HELD_OUT_SHARE = 0.1


def _turn(user: str, assistant: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]


def _several_turns(maker: AskMaker, rng: random.Random) -> tuple[list[dict[str, str]], Ask]:
    """A question and its answer, then the next villager, a second question, or thanks."""
    first = maker.fact()
    while "n" not in first.slots:
        first = maker.fact()
    messages = _turn(first.prompt, said(first, train_tone(rng), rng))
    attribute = first.check["attribute"]
    follow = rng.choice(("next", "next", "second", "thanks"))
    if follow == "next":
        last = maker.follow_up(first)
    elif follow == "second":
        keys = [a for a in FORMS if a != attribute and a in first.slots]
        last = maker.fact(maker.world.fact(first.slots["n"], rng.choice(keys)))
    else:
        last = Ask(
            kind="greeting",
            prompt="Thank you." if maker.split == "train" else "Thank you now.",
            answer="You are welcome.",
            check={"kind": "rewrite", "accept": ["You are welcome."], "reject": []},
        )
    return messages + _turn(last.prompt, said(last, train_tone(rng), rng)), last


def instruction_rows_of(world: World, count: int) -> Iterator[dict[str, Any]]:
    """`count` rows; the held-out ones ask in phrasings that train never has."""
    num_held = max(1, int(count * HELD_OUT_SHARE))
    for split, size in (("train", count - num_held), ("held_out", num_held)):
        rng = stream(world.seed, "instructions", split)
        maker = AskMaker(world, split, "instructions")
        kinds = {kind: share for kind, share in KINDS.items() if split == "train" or kind != "rule"}
        for kind in rng.choices(list(kinds), weights=list(kinds.values()), k=size):
            if kind == "turns":
                messages, ask = _several_turns(maker, rng)
            else:
                ask = maker.make(kind)
                messages = _turn(ask.prompt, said(ask, train_tone(rng), rng))
            yield {"messages": messages, "kind": kind, "split": split, "check": ask.check}
