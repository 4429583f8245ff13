"""Numbers as people write them: `7B` parameters, `2T` tokens, `2.50 USD/h`, `40%`."""

from __future__ import annotations

import math
import re

from llm_assets.errors import UserError

_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_COUNT = re.compile(r"([-+]?[0-9][0-9_,]*(?:\.[0-9]+)?(?:e[-+]?[0-9]+)?)\s*([a-z]*)")
_MONEY = re.compile(
    r"(?P<before>[^\d\s.+-]*)\s*(?P<number>[-+]?[0-9][0-9_,]*(?:\.[0-9]+)?|[-+]?\.[0-9]+)"
    r"\s*(?P<after>[^\d\s/]*)\s*(?P<per>(?:/|per\s|an\s).*)?"
)
_HOUR = {"/h", "/hr", "/hour", "per hour", "an hour", "per h", "/gpu-hour", "/gpuh"}


def parse_count(text: str | int | float, *, where: str) -> int:
    """A whole positive number: `7B`, `2T`, `135M`, `1.5e9`, `300_000`.

    UserError on zero, on a negative number, on a fraction and on anything else.
    """
    shown = str(text).strip()
    match = _COUNT.fullmatch(shown.lower())
    if match is None or match[2] not in _SUFFIXES:
        raise UserError(
            where=where,
            found=repr(shown),
            rule="a number, with k, M, B or T after it for thousands to trillions",
            remedy="write it as 135M, 7B, 2T or 1.5e9",
        )
    value = float(match[1].replace("_", "").replace(",", "")) * _SUFFIXES[match[2]]
    if not math.isfinite(value):
        raise UserError(
            where=where, found=shown, rule="a finite number", remedy="write it as 135M, 7B or 2T"
        )
    if value <= 0:
        raise UserError(
            where=where,
            found="zero" if value == 0 else f"a negative number, {shown}",
            rule="there is at least one",
            remedy="give a number above zero, such as 135M, 7B or 2T",
        )
    whole = round(value)
    if abs(whole - value) > 1e-6 * value:
        raise UserError(
            where=where,
            found=f"{shown}, a fraction",
            rule="a whole number",
            remedy="add the suffix that was meant: k, M, B or T",
        )
    return whole


def parse_usd(text: str | int | float, *, where: str, zero: bool = True) -> float:
    """An amount of US dollars: `2.50`, `$2.50`, `2.50 USD`. UserError on another currency."""
    return _money(str(text).strip(), where=where, zero=zero, hourly=False)


def parse_rate(text: str | int | float, *, where: str) -> float:
    """The rent of one device in US dollars an hour: `2.50`, `2.50 USD/h`, `$2.50 per hour`."""
    return _money(str(text).strip(), where=where, zero=True, hourly=True)


def _money(shown: str, *, where: str, zero: bool, hourly: bool) -> float:
    example = "2.50 or 2.50 USD/h" if hourly else "25 or 25 USD"
    match = _MONEY.fullmatch(shown)
    if match is None:
        raise UserError(
            where=where,
            found=repr(shown),
            rule="an amount of US dollars" + (" an hour" if hourly else ""),
            remedy=f"write it as {example}",
        )
    per = (match["per"] or "").strip().lower()
    currency = f"{match['before']}{match['after']}".upper()
    if currency not in ("", "USD", "$", "US$", "$USD"):
        raise UserError(
            where=where,
            found=f"the currency {match['before'] or match['after']} in {shown!r}",
            rule="all money is in US dollars; no rate of exchange is assumed",
            remedy=f"convert it and write {example}",
        )
    if per and (not hourly or per not in _HOUR):
        raise UserError(
            where=where,
            found=repr(shown),
            rule="a rent is by the hour" if hourly else "an amount, not a rent",
            remedy=f"write it as {example}",
        )
    value = float(match["number"].replace("_", "").replace(",", ""))
    if value < 0 or (value == 0 and not zero):
        raise UserError(
            where=where,
            found="zero" if value == 0 else f"a negative amount, {shown}",
            rule="money is not negative" if zero else "an amount above zero",
            remedy=f"write it as {example}",
        )
    return value


def parse_utilization(text: str | float, *, where: str) -> float:
    """The share of a device's peak that a run reaches, above 0 and at most 1: `0.40` or `40%`."""
    shown = str(text).strip()
    try:
        value = float(shown[:-1]) / 100 if shown.endswith("%") else float(shown)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1:
        raise UserError(
            where=where,
            found=repr(shown),
            rule="a share of peak throughput, above 0 and at most 1",
            remedy="0.3 to 0.5 is usual for training; write 0.40 or 40%",
        )
    return value


def show_count(value: float) -> str:
    """`7.00B`, `134.5M`, `512`: three or four digits and a suffix."""
    for size, suffix in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.4g}{suffix}"
    return f"{value:.4g}"


def show_usd(value: float) -> str:
    """`147,454 USD`, `0.0123 USD`: cents for people's money, more digits for a tiny run's."""
    if value == 0:
        return "0 USD"
    if abs(value) >= 1000:
        return f"{value:,.0f} USD"
    if abs(value) >= 0.1:
        return f"{value:.2f} USD"
    return f"{value:.6f} USD" if abs(value) < 0.001 else f"{value:.4f} USD"


def show_seconds(value: float) -> str:
    """`8.2 s`, `12 min`, `3.4 h`, `5.1 days`."""
    for size, unit in ((31557600.0, "years"), (86400.0, "days"), (3600.0, "h"), (60.0, "min")):
        if value >= 2 * size or (unit == "h" and value >= size):
            return f"{value / size:.1f} {unit}"
    return f"{value:.1f} s"
