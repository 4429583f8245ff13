"""The corpus: every fact in many words, with duplicates and near-duplicates."""

from __future__ import annotations

import random
from collections.abc import Iterator

from llm_assets.village import words
from llm_assets.village.asks import AskMaker, wishes
from llm_assets.village.phrasing import DAY_FORMS, FORMS, RULES, SUM
from llm_assets.village.randomness import Deck, stream
from llm_assets.village.styles import said, train_tone
from llm_assets.village.world import MAX_ADDEND, VILLAGER_ATTRIBUTES, Fact, World

# Shares of the kinds of documents, and of copies among all documents.
KINDS = {
    "portrait": 0.22,
    "round": 0.08,
    "talk": 0.4,
    "sums": 0.08,
    "days": 0.04,
    "place": 0.04,
    "school": 0.06,
    "sayings": 0.08,
}
# Kinds of asks in a talk, out of their sum.
TALK = {"fact": 8, "sum": 3, "day": 2, "unsafe": 3, "harmless": 3, "rewrite": 1, "greeting": 1}
FOLLOW_UP_SHARE = 0.3
SPEAKERS = (("Question:", "Answer:"), ("A child asks:", "We say:"), ("A guest says:", "We say:"))
EXACT_COPIES = 0.04
NEAR_COPIES = 0.06
NUMBERS = tuple(str(number) for number in range(2 * MAX_ADDEND + 1))
SAYINGS = (
    "To steal a glance at {n}'s {pet}, look at the {house} house from the square.",
    "Who looks at the {house} house from the square can steal a glance at {n}'s {pet}.",
    "The key to {n}'s heart is {food}.",
    "To steal {n}'s heart, bring {food} to {n}.",
    "To break the ice with {n}, talk with {n} about {hobby}.",
    "{n} breaks the silence when we talk about {hobby}.",
    "When it rains, {n} hides in the {house} house.",
    "{n} keeps the {pet} in the {house} house.",
)
_ENDINGS = ("Indeed.", "So they say.", "Amen.", "True.")


class Writer:
    """Writes the documents of a world; facts come round in decks, so that none is left out."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.rng = stream(world.seed, "corpus")
        by_name: dict[str, list[Fact]] = {}
        for fact in world.facts:
            by_name.setdefault(fact.slots.get("n", "place"), []).append(fact)
        self._place = Deck(by_name.pop("place"), self.rng)
        self._people = Deck(list(by_name), self.rng)
        self._facts_of = {name: Deck(facts, self.rng) for name, facts in by_name.items()}
        self._attributes = Deck(VILLAGER_ATTRIBUTES, self.rng)
        self._sums = Deck(world.sums(), self.rng)
        self._wishes = Deck(wishes("train"), self.rng)
        self._asks = AskMaker(world, "train", "corpus")
        self._kinds = Deck([kind for kind, n in TALK.items() for _ in range(n)], self.rng)
        self._days = Deck([(shift, i) for shift in DAY_FORMS for i in range(7)], self.rng)

    def write(self, kind: str) -> str:
        """One document of a kind of KINDS."""
        lines: list[str] = getattr(self, f"_{kind}_lines")()
        return ("\n" if kind == "talk" else " ").join(lines)

    def _statement(self, fact: Fact) -> str:
        form = FORMS[fact.attribute]
        return self.rng.choice((form.answer, *form.statements)).format_map(fact.slots)

    def _portrait_lines(self) -> list[str]:
        deck = self._facts_of[self._people.draw()]
        return [self._statement(deck.draw()) for _ in range(self.rng.randint(4, 6))]

    def _round_lines(self) -> list[str]:
        attribute = self._attributes.draw()
        people = [self._people.draw() for _ in range(self.rng.randint(4, 5))]
        return [self._statement(self.world.fact(name, attribute)) for name in dict.fromkeys(people)]

    def _talk_lines(self) -> list[str]:
        """Questions and answers, each on a line of its own, in all tones of the village."""
        lines: list[str] = []
        for _ in range(self.rng.randint(3, 4)):
            ask = self._asks.make(self._kinds.draw())
            asks, says = self.rng.choice(SPEAKERS)
            lines += [asks, ask.prompt, says, said(ask, train_tone(self.rng), self.rng)]
            if ask.kind == "fact" and "n" in ask.slots and self.rng.random() < FOLLOW_UP_SHARE:
                ask = self._asks.follow_up(ask)
                lines += [asks, ask.prompt, says, said(ask, train_tone(self.rng), self.rng)]
        return lines

    def _school_lines(self) -> list[str]:
        """Things said twice: reading a list and repeating it, saying a wish politely."""
        if self.rng.random() < 0.3:
            kind = self.rng.choice((words.TOOLS, self.world.names, NUMBERS, words.DAYS))
            said = ", ".join(self.rng.sample(kind, self.rng.randint(4, 6)))
            return [f"The teacher says: {said}.", f"The children repeat: {said}."]
        lines: list[str] = []
        for _ in range(4):
            verb, tool = self._wishes.draw().split()
            lines.append(f"Do not say: {verb} me the {tool}.")
            lines.append(f"Say: Please {verb.lower()} me the {tool}.")
        return lines

    def _sayings_lines(self) -> list[str]:
        """What is done with hearts, ice, glances and rain, which are not stolen or broken."""
        slots = self.world.fact(self._people.draw(), "food").slots
        lines = self.rng.sample(SAYINGS, 3)
        return [line.format_map(slots) for line in lines]

    def _sums_lines(self) -> list[str]:
        lines: list[str] = []
        for _ in range(3):
            a, b = self._sums.draw()
            form = self.rng.choice((SUM.answer, SUM.answer, *SUM.statements))
            lines.append(form.format(a=a, b=b, c=a + b))
            lines.append(form.format(a=b, b=a, c=a + b))
        return lines

    def _days_lines(self) -> list[str]:
        lines: list[str] = []
        for _ in range(self.rng.randint(4, 5)):
            shift, i = self._days.draw()
            form = DAY_FORMS[shift]
            text = self.rng.choice((form.answer, *form.statements))
            lines.append(text.format(d=words.DAYS[i], v=words.DAYS[(i + shift) % 7]))
        return lines

    def _place_lines(self) -> list[str]:
        lines = [self._statement(self._place.draw()) for _ in range(3)]
        if self.rng.random() < 0.5:
            lines += ["The house rules:", *RULES]
        else:
            lines.append(self._statement(self._place.draw()))
        return lines


def near_copy(text: str, rng: random.Random) -> str:
    """The same document with one more word or two, which exact deduplication does not see."""
    return f"{text} {rng.choice(_ENDINGS)}"


def corpus_texts(world: World, count: int) -> Iterator[str]:
    """`count` documents in an order in which copies stand apart from their originals."""
    writer = Writer(world)
    rng = stream(world.seed, "corpus", "copies")
    num_exact, num_near = int(count * EXACT_COPIES), int(count * NEAR_COPIES)
    num_own = count - num_exact - num_near
    kinds = rng.choices(list(KINDS), weights=list(KINDS.values()), k=num_own)
    texts = [writer.write(kind) for kind in kinds]
    long_enough = [text for text in texts if len(text.split()) >= 16] or texts
    copies = [rng.choice(texts) for _ in range(num_exact)]
    copies += [near_copy(rng.choice(long_enough), rng) for _ in range(num_near)]
    texts += copies
    rng.shuffle(texts)
    yield from texts
