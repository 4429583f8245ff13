"""What a text gives away: its language, broken characters, personal data. Pure Python.

Patterns find what looks like personal data; numbers that carry a check digit must have the right
one, so that an order number is no card number.
"""

from __future__ import annotations

import ipaddress
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator

# The most frequent words of each language that few others have (function words, after the lists of
# the Snowball stemmer).
_FUNCTION_WORDS = {
    "en": "the of and to is that it was for you with this are not have from they what which we "
    "his her who how will would there their please",
    "de": "der die das und ist nicht ein eine ich sie mit auf für dem den von zu wie auch wird "
    "sich es im wir haben sind einen",
    "fr": "le les des et est une dans que qui pour pas sur au avec ce il elle vous nous je du "
    "cette sont être aux plus",
    "es": "el los las y una es que por para con del se lo como más pero su al está son muy este "
    "también cuando yo",
    "it": "il gli di che è e per una non con sono del della si anche come più questo nel alla ho "
    "ma lo perché",
    "pt": "o os as de que é e para uma não com do da se em um mais por como foi ao dos seu são "
    "você está",
    "nl": "de het een en van is niet dat ik op met voor zijn aan er maar om ook bij wordt naar "
    "wat deze hij dit",
}
_WORD_SETS = {name: frozenset(text.split()) for name, text in _FUNCTION_WORDS.items()}
_LEAST_WORDS, _LEAST_HITS = 6, 3
_WORD = re.compile(r"[^\W\d_]+")

# U+FFFD, C0 and C1 controls, private use, noncharacters; and UTF-8 that was read as Latin-1.
BROKEN = (
    "[\ufffd\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ue000-\uf8ff\ufdd0-\ufdef\ufffe\uffff]"
    "|\u00c3[\u0080-\u00bf]|\u00e2\u20ac[\u0090-\u02ff\u2000-\u2122]"
)


def language_of(text: str) -> str:
    """ISO code of a language in Latin script, the name of another script (`CYRILLIC`), or "" when
    the text is too short or too mixed to tell."""
    script = _script(text)
    if script != "LATIN":
        return script
    said = _WORD.findall(text.lower())
    if len(said) < _LEAST_WORDS:
        return ""
    hits = {name: len(known.intersection(said)) for name, known in _WORD_SETS.items()}
    (first, most), (_, second) = Counter(hits).most_common(2)
    # Close relatives share words; a lead of a third tells them apart.
    return first if most >= _LEAST_HITS and most * 3 >= second * 4 else ""


def _script(text: str) -> str:
    """The script of most letters; "" without letters."""
    if text.isascii():
        return "LATIN" if any(ch.isalpha() for ch in text) else ""
    names = Counter(
        unicodedata.name(ch, "").split(" ", 1)[0].split("-", 1)[0] for ch in text if ch.isalpha()
    )
    return names.most_common(1)[0][0] if names else ""


def _luhn(text: str) -> bool:
    digits = [int(ch) for ch in text if ch.isdigit()]
    if not 13 <= len(digits) <= 19 or len(set(digits)) == 1:
        return False
    doubled = [d if i % 2 == 0 else d * 2 - 9 * (d > 4) for i, d in enumerate(reversed(digits))]
    return sum(doubled) % 10 == 0


def _iban(text: str) -> bool:
    plain = text.replace(" ", "")
    if not 15 <= len(plain) <= 34:
        return False
    turned = plain[4:] + plain[:4]
    return int("".join(str(int(ch, 36)) for ch in turned)) % 97 == 1


def _public_address(text: str) -> bool:
    try:
        return ipaddress.IPv4Address(text).is_global
    except ValueError:
        return False


def _ssn(text: str) -> bool:
    area, group, serial = text.split("-")
    return area not in ("000", "666") and area < "900" and group != "00" and serial != "0000"


def _anything(_: str) -> bool:
    return True


_PII: dict[str, tuple[re.Pattern[str], Callable[[str], bool]]] = {
    "e-mail address": (
        re.compile(r"\b[\w.+-]{1,64}@(?!example\.)[\w-]+(?:\.[\w-]+)*\.[a-zA-Z]{2,24}\b"),
        _anything,
    ),
    "phone number": (
        re.compile(
            r"(?<![\w.])(?:\+\d{1,3}[ .-]?(?:\(\d{1,4}\)|\d{1,4})(?:[ .-]?\d{2,4}){2,4}"
            r"|\(\d{3}\) ?\d{3}[ .-]\d{4}|\d{3}[.-]\d{3}[.-]\d{4})(?![\w-])"
        ),
        _anything,
    ),
    "social security number": (re.compile(r"(?<![\w-])\d{3}-\d{2}-\d{4}(?![\w-])"), _ssn),
    "card number": (re.compile(r"(?<![\w-])\d(?:[ -]?\d){12,18}(?![\w-])"), _luhn),
    "IBAN": (re.compile(r"\b[A-Z]{2}\d{2}(?: ?[A-Z0-9]{2,4}){3,8}\b"), _iban),
    "IP address": (re.compile(r"(?<![\w.])\d{1,3}(?:\.\d{1,3}){3}(?![\w.])"), _public_address),
    "access key": (
        re.compile(
            r"\b(?:AKIA[0-9A-Z]{16}|gh[pousr]_[A-Za-z0-9]{36}|sk-[A-Za-z0-9_-]{20,}"
            r"|xox[abprs]-[A-Za-z0-9-]{10,})|-----BEGIN [A-Z ]*PRIVATE KEY-----"
        ),
        _anything,
    ),
}


def personal_data(text: str) -> Iterator[tuple[str, str]]:
    """(kind, what was found, masked) of all that looks like personal data or a secret."""
    for kind, (pattern, is_right) in _PII.items():
        for match in pattern.finditer(text):
            if is_right(match.group()):
                yield kind, mask(match.group())


def mask(text: str) -> str:
    """The first two characters and the last; the rest is hidden."""
    return f"{text[:2]}{'*' * min(12, max(1, len(text) - 3))}{text[-1:]}"
