from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llm_assets.costs.quantities import (
    parse_count,
    parse_rate,
    parse_usd,
    parse_utilization,
    show_count,
    show_seconds,
    show_usd,
)
from llm_assets.errors import UserError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("7B", 7_000_000_000),
        ("2T", 2_000_000_000_000),
        ("135M", 135_000_000),
        ("135 m", 135_000_000),
        ("1.5e9", 1_500_000_000),
        ("0.5B", 500_000_000),
        ("300_000", 300_000),
        ("300,000", 300_000),
        ("512", 512),
        (512, 512),
        ("4k", 4000),
    ],
)
def test_counts_in_every_form(text: str | int, value: int) -> None:
    assert parse_count(text, where="--params") == value


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0", "zero"),
        ("-7B", "negative"),
        ("", "''"),
        ("seven", "seven"),
        ("7Q", "7Q"),
        ("7BB", "7BB"),
        ("nan", "nan"),
        ("inf", "inf"),
        ("1e999", "finite"),
        ("0.5", "fraction"),
        ("7 B T", "7 B T"),
    ],
)
def test_counts_that_are_none(text: str, said: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_count(text, where="--params")
    assert "--params" in str(caught.value)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "text", ["2.50", "$2.50", "2.50 USD", "USD 2.50", "2.5 usd/h", "$2.50/hour"]
)
def test_rates_in_us_dollars(text: str) -> None:
    assert parse_rate(text, where="--rate") == 2.5


@pytest.mark.parametrize("text", ["2.50 EUR", "€2.50", "2.50 €/h", "CHF 2.50", "2.50 gbp per hour"])
def test_another_currency_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="US dollars"):
        parse_rate(text, where="--rate")


@pytest.mark.parametrize("text", ["-1", "$-2.50", "2.50/day", "cheap", "", "nan", "1e400"])
def test_rates_that_are_none(text: str) -> None:
    with pytest.raises(UserError):
        parse_rate(text, where="--rate")


def test_an_amount_is_no_rent() -> None:
    assert parse_usd("1,500 USD", where="LIMIT") == 1500.0
    with pytest.raises(UserError, match="not a rent"):
        parse_usd("25 USD/h", where="LIMIT")
    with pytest.raises(UserError, match="above zero"):
        parse_usd("0", where="LIMIT", zero=False)


def test_utilization() -> None:
    assert parse_utilization("40%", where="--utilization") == 0.4
    assert parse_utilization("0.40", where="--utilization") == 0.4
    for bad in ("0", "1.2", "40", "-0.1", "much", "nan"):
        with pytest.raises(UserError, match="share of peak"):
            parse_utilization(bad, where="--utilization")


def test_what_people_read() -> None:
    assert [show_count(n) for n in (512, 134_515_008, 7e9, 2e12)] == ["512", "134.5M", "7B", "2T"]
    assert [show_usd(n) for n in (0, 0.0123, 2.5, 147_455.3)] == [
        "0 USD",
        "0.0123 USD",
        "2.50 USD",
        "147,455 USD",
    ]
    assert [show_seconds(n) for n in (8.2, 150, 7200, 4e5)] == [
        "8.2 s",
        "2.5 min",
        "2.0 h",
        "4.6 days",
    ]


@given(st.text(max_size=12))
def test_no_text_breaks_the_parsers(text: str) -> None:
    for parse in (parse_count, parse_rate, parse_usd, parse_utilization):
        try:
            value = parse(text, where="here")
        except UserError as error:
            assert "here" in str(error)
        else:
            assert value >= 0
