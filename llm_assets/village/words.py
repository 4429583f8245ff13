"""The words of the village. Pools are disjoint, so that one word answers one kind of question."""

from __future__ import annotations

from collections.abc import Sequence

NAMES = (
    "Ada", "Bram", "Cora", "Dirk", "Elsa", "Finn", "Greta", "Hugo", "Ines", "Joris", "Kira",
    "Lars", "Mona", "Nils", "Olga", "Pia", "Quinn", "Rosa", "Sven", "Tilda", "Ulla", "Viktor",
    "Wanda", "Yara", "Anton", "Berta", "Casper", "Dora", "Emil", "Flora", "Gustav", "Hanna",
    "Ivo", "Jana", "Klaus", "Lotte", "Magnus", "Nora", "Otto", "Petra", "Rufus", "Selma", "Tobias",
    "Ursula", "Vera", "Willem", "Xenia", "Zora",
)  # fmt: skip
PET_NAMES = (
    "Pepper", "Biscuit", "Shadow", "Clover", "Button", "Ginger", "Patch", "Socks", "Muffin",
    "Bramble", "Thistle", "Whisker", "Pebble", "Nutmeg", "Sprout", "Cinder", "Tuft", "Marble",
    "Acorn", "Dusty", "Comet", "Velvet", "Truffle", "Pickle", "Sparrow", "Mitten", "Bumble",
    "Juniper", "Feather", "Waffle", "Domino", "Poppy",
)  # fmt: skip
TRADES = (
    "baker", "smith", "miller", "weaver", "potter", "shepherd", "carpenter", "tailor", "cobbler",
    "farmer", "teacher", "doctor",
)  # fmt: skip
HOUSES = ("red", "blue", "green", "yellow", "white", "brown", "pink", "grey")
PETS = ("cat", "dog", "goat", "rabbit", "pony", "duck", "hen", "parrot")
FOODS = (
    "plums", "cherries", "bread", "soup", "cheese", "honey", "pears", "beans", "nuts", "pie",
    "carrots", "mushrooms",
)  # fmt: skip
HOBBIES = (
    "fishing", "singing", "dancing", "reading", "chess", "painting", "swimming", "running",
    "juggling", "sailing",
)  # fmt: skip
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
VILLAGES = ("Alderbrook", "Fernhollow", "Mossbridge", "Willowford")
RIVERS = ("Wend", "Lorn", "Tamble", "Isk")
TREES = ("oak", "birch", "elm", "maple")
BELLS = ("six", "seven", "eight", "nine")
TOOLS = ("lamp", "rope", "ladder", "basket", "hammer", "bucket", "blanket", "saw")
LOOT = ("purse", "coins", "silver", "ring", "wagon", "horse", "clock", "boots")

_ONSETS = (
    "Bal", "Cor", "Dar", "Fen", "Gal", "Hol", "Jor", "Kel", "Lum", "Mar", "Nor", "Ost", "Per",
    "Ril", "Sol", "Tor", "Ver", "Wil", "Yol", "Zan",
)  # fmt: skip
_NAME_ENDS = (
    "a", "an", "bert", "da", "do", "ek", "el", "en", "gar", "ia", "ik", "ina", "is", "ka", "lin",
    "mo", "na", "nin", "o", "on", "ric", "sa", "ta", "us", "win",
)  # fmt: skip
_PET_ENDS = (
    "bee", "berry", "bit", "bud", "by", "cap", "chi", "dew", "dle", "fluff", "foot", "gle", "jam",
    "kin", "let", "my", "nub", "paw", "pip", "puff", "py", "tail", "tip", "toe", "zy",
)  # fmt: skip


def pool(curated: Sequence[str], ends: Sequence[str], size: int) -> list[str]:
    """The curated words, and made-up ones behind them where more are needed."""
    made = (onset + end for end in ends for onset in _ONSETS)
    words = list(dict.fromkeys([*curated, *made]))
    return words[: max(size, len(curated))]


def name_pool(size: int) -> list[str]:
    """Names of villagers, at least `size`."""
    return pool(NAMES, _NAME_ENDS, size)


def pet_name_pool(size: int) -> list[str]:
    """Names of pets, at least `size`, none of them a villager's."""
    return pool(PET_NAMES, _PET_ENDS, size)
