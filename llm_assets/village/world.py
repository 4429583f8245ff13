"""The village: who lives there, and every fact that can be asked about."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from llm_assets.village import words
from llm_assets.village.randomness import stream

VILLAGER_ATTRIBUTES = ("trade", "house", "pet", "pet_name", "friend", "food", "hobby")
PLACE_ATTRIBUTES = ("village", "river", "market", "tree", "bell", "mayor")
MAX_ADDEND = 9


@dataclass(frozen=True, kw_only=True)
class Fact:
    """One fact. `slots` fills the templates of phrasing.py; `others` are the wrong values."""

    attribute: str
    value: str
    slots: Mapping[str, str]
    others: tuple[str, ...]

    @property
    def key(self) -> str:
        """Stable name, such as `Ada/trade` or `place/river`."""
        return f"{self.slots.get('n', 'place')}/{self.attribute}"


@dataclass(frozen=True, kw_only=True)
class World:
    """Everything that is true in the village."""

    seed: int
    villagers: tuple[Mapping[str, str], ...]
    facts: tuple[Fact, ...]
    place: Mapping[str, str]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all villagers."""
        return tuple(person["n"] for person in self.villagers)

    def fact(self, name: str, attribute: str) -> Fact:
        """The fact of a villager, by name and attribute."""
        return self._by_key[f"{name}/{attribute}"]

    @property
    def _by_key(self) -> dict[str, Fact]:
        cached: dict[str, Fact] | None = self.__dict__.get("_keys")
        if cached is None:
            cached = {fact.key: fact for fact in self.facts}
            self.__dict__["_keys"] = cached
        return cached

    def sums(self) -> list[tuple[int, int]]:
        """Pairs of numbers that are added in the village."""
        numbers = range(1, MAX_ADDEND + 1)
        return [(a, b) for a in numbers for b in numbers]


def _balanced(values: Sequence[str], count: int, rng: random.Random) -> list[str]:
    """`count` values, each used about equally often, in random order."""
    repeated = [values[i % len(values)] for i in range(count)]
    rng.shuffle(repeated)
    return repeated


def _villagers(seed: int, count: int) -> list[dict[str, str]]:
    names = words.name_pool(count)[:count]
    columns = {
        "trade": words.TRADES,
        "house": words.HOUSES,
        "pet": words.PETS,
        "food": words.FOODS,
        "hobby": words.HOBBIES,
    }
    drawn = {key: _balanced(pool, count, stream(seed, key)) for key, pool in columns.items()}
    pet_names = words.pet_name_pool(count)
    stream(seed, "pet_name").shuffle(pet_names)
    circle = list(names)
    stream(seed, "friend").shuffle(circle)
    friend = {name: circle[(i + 1) % count] for i, name in enumerate(circle)}
    return [
        {
            "n": name,
            **{key: column[i] for key, column in drawn.items()},
            "pet_name": pet_names[i],
            "friend": friend[name],
        }
        for i, name in enumerate(names)
    ]


def build_world(seed: int, villagers: int) -> World:
    """The world of a seed with so many villagers."""
    people = _villagers(seed, villagers)
    names = [person["n"] for person in people]
    pick = stream(seed, "place")
    place = {
        "village": pick.choice(words.VILLAGES),
        "river": pick.choice(words.RIVERS),
        "market": pick.choice(words.DAYS),
        "tree": pick.choice(words.TREES),
        "bell": pick.choice(words.BELLS),
        "mayor": pick.choice(names),
    }
    values: dict[str, Sequence[str]] = {
        "trade": words.TRADES,
        "house": words.HOUSES,
        "pet": words.PETS,
        "food": words.FOODS,
        "hobby": words.HOBBIES,
        "pet_name": sorted(person["pet_name"] for person in people),
        "friend": names,
        "village": words.VILLAGES,
        "river": words.RIVERS,
        "market": words.DAYS,
        "tree": words.TREES,
        "bell": words.BELLS,
        "mayor": names,
    }
    facts: list[Fact] = []
    for slots in [*people, place]:
        for attribute in VILLAGER_ATTRIBUTES if "n" in slots else PLACE_ATTRIBUTES:
            value = slots[attribute]
            wrong = [v for v in values[attribute] if v not in (value, slots.get("n"))]
            facts.append(Fact(attribute=attribute, value=value, slots=slots, others=tuple(wrong)))
    return World(
        seed=seed,
        villagers=tuple(people),
        facts=tuple(facts),
        place=place,
    )
