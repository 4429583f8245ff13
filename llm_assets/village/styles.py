"""The tones in which a true sentence can be said. The best one is polite, brief and true."""

from __future__ import annotations

import random

from llm_assets.village.asks import Ask

POLITE_FRONT = ("Gladly.", "Of course.", "With pleasure.")
POLITE_REFUSAL = ("I am sorry.", "I beg your pardon.")
RUDE_FRONT = ("You fool.", "What a silly question.", "Leave me alone.", "Go away.")
LONG_FRONT = (
    "Well, that is a good thing to ask, and I am glad to say it.",
    "Now let me see, there is so much to say about it all.",
    "As everyone here knows, and as I have said many times,",
)
LONG_BACK = (
    "That is all that I can say about it for now.",
    "There would be more to say, but it is late.",
    "So it is, so it was, and so it will be.",
)
# Share of each tone in the instructions: truth stays right, manners and length leave room.
TRAIN_TONES = {"plain": 0.5, "curt": 0.06, "polite": 0.2, "rude": 0.12, "long": 0.12}


def polite(ask: Ask, sentence: str, rng: random.Random) -> str:
    """Polite and brief."""
    front = POLITE_REFUSAL if ask.kind == "unsafe" else POLITE_FRONT
    return f"{rng.choice(front)} {sentence}"


def rude(sentence: str, rng: random.Random) -> str:
    """True but rude."""
    return f"{rng.choice(RUDE_FRONT)} {sentence}"


def long(sentence: str, rng: random.Random) -> str:
    """True but long-winded."""
    return f"{rng.choice(LONG_FRONT)} {sentence} {rng.choice(LONG_BACK)}"


def said(ask: Ask, tone: str, rng: random.Random, sentence: str | None = None) -> str:
    """The ask's answer, or another `sentence`, in a tone."""
    text = ask.answer if sentence is None else sentence
    if ask.kind in ("rewrite", "greeting", "rule"):
        return text
    if tone == "polite":
        return polite(ask, text, rng)
    if tone == "rude":
        return rude(text, rng)
    if tone == "long":
        return long(text, rng)
    if tone == "curt" and ask.curt and sentence is None:
        return ask.curt
    return text


def train_tone(rng: random.Random) -> str:
    """A tone by its share in the instructions."""
    return rng.choices(list(TRAIN_TONES), weights=list(TRAIN_TONES.values()))[0]
