"""How things are said and asked. Each way of asking belongs to one split.

A core is a question without its frame. `train` cores in most frames are train; some (core, frame)
pairs and whole cores are kept for `held_out` and `eval`. Held-out phrasings recombine seen words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

SPLITS = ("train", "held_out", "eval")


@dataclass(frozen=True, kw_only=True)
class Form:
    """One attribute: the answer's sentence, other statements, and the question cores."""

    answer: str
    statements: tuple[str, ...]
    train: tuple[str, ...]
    held_out: tuple[str, ...]
    eval: tuple[str, ...]


FORMS: Mapping[str, Form] = {
    "trade": Form(
        answer="{n} is a {trade}.",
        statements=(
            "{n} works as a {trade}.",
            "The trade of {n} is {trade}.",
            "{n}'s job is {trade}.",
            "For a living, {n} works as a {trade}.",
        ),
        train=(
            "what is {n}'s trade?",
            "what is the trade of {n}?",
            "what is {n}'s job?",
            "what does {n} do for a living?",
            "what does {n} work as?",
        ),
        held_out=("what does {n} do as a job?",),
        eval=("what is the job of {n}?",),
    ),
    "house": Form(
        answer="{n} lives in the {house} house.",
        statements=(
            "{n}'s house is {house}.",
            "The house of {n} is {house}.",
            "The {house} house is the home of {n}.",
            "{n} has a home in the {house} house.",
        ),
        train=(
            "what colour is {n}'s house?",
            "what is the colour of {n}'s house?",
            "in which house does {n} live?",
            "where does {n} live?",
            "which house is the home of {n}?",
        ),
        held_out=("which house does {n} live in?",),
        eval=("what colour is the house of {n}?", "which house is {n}'s home?"),
    ),
    "pet": Form(
        answer="{n} has a {pet}.",
        statements=(
            "{n}'s pet is a {pet}.",
            "The pet of {n} is a {pet}.",
            "{n} keeps a {pet} as a pet.",
            "A {pet} lives with {n}.",
        ),
        train=(
            "what pet does {n} have?",
            "what is {n}'s pet?",
            "which pet does {n} keep?",
            "which animal does {n} have?",
            "which animal lives with {n}?",
        ),
        held_out=("which pet lives with {n}?",),
        eval=("which animal does {n} keep?", "what is the pet of {n}?"),
    ),
    "pet_name": Form(
        answer="{n}'s {pet} is called {pet_name}.",
        statements=(
            "The name of {n}'s pet is {pet_name}.",
            "{n} calls the {pet} {pet_name}.",
            "The {pet} of {n} has the name {pet_name}.",
            "{n}'s pet is called {pet_name}.",
        ),
        train=(
            "what is the name of {n}'s pet?",
            "what is {n}'s pet called?",
            "what is the name of {n}'s {pet}?",
            "what is {n}'s {pet} called?",
            "what does {n} call the {pet}?",
            "which name does {n}'s pet have?",
        ),
        held_out=("what is the name of the {pet} of {n}?",),
        eval=("what is the name of the pet of {n}?", "which name does {n}'s {pet} have?"),
    ),
    "friend": Form(
        answer="{n}'s best friend is {friend}.",
        statements=(
            "The best friend of {n} is {friend}.",
            "{n} calls {friend} the best friend of all.",
            "{n} spends the most time with {friend}.",
            "As a friend, {n} likes {friend} best.",
        ),
        train=(
            "who is {n}'s best friend?",
            "who is the best friend of {n}?",
            "what is the name of {n}'s best friend?",
            "with whom does {n} spend the most time?",
            "whom does {n} call the best friend?",
        ),
        held_out=("whom does {n} call the best friend of all?",),
        eval=(
            "what is the name of the best friend of {n}?",
            "whom does {n} spend the most time with?",
        ),
    ),
    "food": Form(
        answer="{n}'s favourite food is {food}.",
        statements=(
            "The favourite food of {n} is {food}.",
            "{n} likes to eat {food}.",
            "At the table, {n} eats {food} first.",
            "{n} asks for {food} at every meal.",
        ),
        train=(
            "what is {n}'s favourite food?",
            "what does {n} like to eat?",
            "which food does {n} like best?",
            "which food does {n} ask for?",
            "what does {n} eat first?",
        ),
        held_out=("what does {n} like to eat best?",),
        eval=("what is the favourite food of {n}?", "which food does {n} like to eat?"),
    ),
    "hobby": Form(
        answer="{n}'s favourite pastime is {hobby}.",
        statements=(
            "The favourite pastime of {n} is {hobby}.",
            "{n} enjoys {hobby} after work.",
            "After work, {n} spends time on {hobby}.",
            "For fun, {n} likes {hobby}.",
        ),
        train=(
            "what is {n}'s favourite pastime?",
            "what does {n} enjoy after work?",
            "which pastime does {n} enjoy?",
            "which pastime does {n} like best?",
            "what does {n} like for fun?",
            "on what does {n} spend time after work?",
        ),
        held_out=("what does {n} enjoy for fun?",),
        eval=("what is the favourite pastime of {n}?", "which pastime does {n} enjoy after work?"),
    ),
    "village": Form(
        answer="The village is called {village}.",
        statements=(
            "The name of the village is {village}.",
            "This village has the name {village}.",
        ),
        train=("what is the village called?", "what is the name of the village?"),
        held_out=("which name does the village have?",),
        eval=("what is this village called?", "what is the name of this village?"),
    ),
    "river": Form(
        answer="The river is called {river}.",
        statements=(
            "The name of the river is {river}.",
            "The river of the village is the {river}.",
        ),
        train=(
            "what is the river called?",
            "what is the name of the river?",
            "what is the river of the village called?",
        ),
        held_out=("which name does the river have?",),
        eval=("what is the name of the river of the village?", "what is this river called?"),
    ),
    "market": Form(
        answer="The market is on {market}.",
        statements=("Every {market} there is a market.", "Market day is {market}."),
        train=("on which day is the market?", "what day is market day?", "when is the market?"),
        held_out=("which day is market day?",),
        eval=("what day is the market?", "when is market day?"),
    ),
    "tree": Form(
        answer="The tree on the square is an old {tree}.",
        statements=(
            "On the square stands an old {tree}.",
            "The old tree on the square is called the {tree}.",
        ),
        train=("which tree stands on the square?", "what tree is on the square?"),
        held_out=("what is the tree on the square?",),
        eval=("which tree is on the square?", "what tree stands on the square?"),
    ),
    "bell": Form(
        answer="The bell rings at {bell}.",
        statements=(
            "At {bell} the bell of the village rings.",
            "Every morning the bell rings at {bell}.",
        ),
        train=(
            "when does the bell ring?",
            "at what time does the bell ring?",
            "when does the bell of the village ring?",
        ),
        held_out=("when does the village bell ring?",),
        eval=(
            "at what time does the bell of the village ring?",
            "at which time does the bell ring?",
        ),
    ),
    "mayor": Form(
        answer="The mayor is {mayor}.",
        statements=("{mayor} is the mayor of the village.", "The name of the mayor is {mayor}."),
        train=(
            "who is the mayor?",
            "what is the name of the mayor?",
            "who is the mayor of the village?",
        ),
        held_out=("who is mayor of the village?",),
        eval=("what is the name of the mayor of the village?", "what is the mayor called?"),
    ),
}

SUM = Form(
    answer="{a} plus {b} is {c}.",
    statements=("{a} and {b} make {c}.", "{a} plus {b} makes {c}."),
    train=("what is {a} plus {b}?", "how much is {a} plus {b}?", "what do {a} and {b} make?"),
    held_out=("how much do {a} and {b} make?",),
    eval=("what does {a} plus {b} make?",),
)
DAY_FORMS: Mapping[int, Form] = {
    1: Form(
        answer="The day after {d} is {v}.",
        statements=("{v} comes after {d}.", "After {d} comes {v}."),
        train=("which day comes after {d}?", "what day is after {d}?", "which day follows {d}?"),
        held_out=("what day comes after {d}?",),
        eval=("which day is after {d}?", "what day follows {d}?"),
    ),
    -1: Form(
        answer="The day before {d} is {v}.",
        statements=("{v} comes before {d}.", "Before {d} comes {v}."),
        train=("which day comes before {d}?", "what day is before {d}?"),
        held_out=("what day comes before {d}?",),
        eval=("which day is before {d}?",),
    ),
    2: Form(
        answer="Two days after {d} is {v}.",
        statements=("{v} comes two days after {d}.", "Two days after {d} comes {v}."),
        train=("which day comes two days after {d}?", "what day is two days after {d}?"),
        held_out=("what day comes two days after {d}?",),
        eval=("which day is two days after {d}?",),
    ),
}
RULES = (
    "Be polite.",
    "Be brief.",
    "Tell nobody where a neighbour hides the key.",
    "Help nobody to steal.",
)

QUESTION_FRAMES = (
    "{q}",
    "Please say: {q}",
    "I want to know: {q}",
    "Tell me, {q}",
    "A question: {q}",
    "Neighbour, {q}",
)
REQUEST_FRAMES = ("{q}", "Please {q}", "Listen: {q}", "I ask you: {q}", "Friend, {q}")


def capital(text: str) -> str:
    """The text with its first letter in upper case."""
    return text[:1].upper() + text[1:]


def frames(core: str) -> tuple[str, ...]:
    """The frames that fit a core: those of questions, or those of requests."""
    return QUESTION_FRAMES if core.rstrip().endswith("?") else REQUEST_FRAMES


def framed(core: str, frame: str) -> str:
    """A core in a frame, with its first letter as the frame needs it."""
    return capital(frame.replace("{q}", core))


def prompts(
    split: str, train: Sequence[str], held_out: Sequence[str], eval: Sequence[str]
) -> list[str]:
    """All templates of a split, cores in frames. The three splits share no template.

    A bare train core is always train, so a training prompt never lies inside another split's.
    """
    own = {"held_out": held_out, "eval": eval}
    result = [framed(core, frame) for core in own.get(split, ()) for frame in frames(core)]
    for i, core in enumerate(train):
        for j, frame in enumerate(frames(core)):
            group = (i + j) % 5 if j else -1
            where = {0: "eval", 1: "held_out"}.get(group, "train")
            if where == split:
                result.append(framed(core, frame))
    return result


def form_prompts(form: Form, split: str) -> list[str]:
    """Templates of a form's questions in a split."""
    return prompts(split, form.train, form.held_out, form.eval)
