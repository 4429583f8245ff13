"""Intervals and tests against published and independently computed values."""

import math
import random

import pytest

from llm_assets.gates.statistics import (
    Interval,
    bootstrap_mean,
    bootstrap_ratio,
    combined_mean,
    mcnemar_exact,
    paired_bootstrap,
    paired_rate_interval,
    wilson,
)


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [
        # R: prop.test(x, n, correct = FALSE)$conf.int
        (8, 10, 0.4901625, 0.9433178),
        (0, 10, 0.0, 0.2775328),
        (10, 10, 0.7224672, 1.0),
        # Newcombe 1998, table I: 81 of 263, 15 of 148, 1 of 29
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_gives_the_published_interval(successes, n, low, high):
    found = wilson(successes, n)
    assert found.low == pytest.approx(low, abs=6e-5)
    assert found.high == pytest.approx(high, abs=6e-5)


@pytest.mark.parametrize(("successes", "n"), [(0, 0), (-1, 5), (6, 5), (math.nan, 5)])
def test_wilson_refuses_what_is_no_rate(successes, n):
    with pytest.raises(ValueError, match="rate"):
        wilson(successes, n)


def test_wilson_covers_the_true_rate():
    rng = random.Random(3)
    hits = 0
    for _ in range(2000):
        found = wilson(sum(rng.random() < 0.9 for _ in range(50)), 50)
        hits += found.low <= 0.9 <= found.high
    assert 0.93 <= hits / 2000 <= 0.97


def test_mcnemar_counts_discordant_pairs_and_gives_the_exact_p():
    first = [True] * 9 + [False] * 1 + [True] * 20
    second = [False] * 9 + [True] * 1 + [True] * 20
    found = mcnemar_exact(first, second)
    assert (found.won, found.lost) == (9, 1)
    assert found.p_value == pytest.approx(2 * 11 / 1024)
    assert mcnemar_exact(second, first).p_value == found.p_value


def test_mcnemar_without_a_difference_is_one():
    assert mcnemar_exact([True, False], [True, False]).p_value == 1.0
    assert mcnemar_exact([True, False], [False, True]).p_value == 1.0
    assert mcnemar_exact([], []).p_value == 1.0


def test_mcnemar_is_exact_for_many_pairs():
    n = 3000
    found = mcnemar_exact([True] * n, [False] * n)
    assert found.won == n
    assert found.p_value == 0.0 or found.p_value < 1e-300


def test_paired_series_need_one_length():
    with pytest.raises(ValueError, match="one length"):
        mcnemar_exact([True], [])
    with pytest.raises(ValueError, match="one length"):
        paired_bootstrap([1.0], [])


def test_bootstrap_is_seeded_and_close_to_the_normal_interval():
    rng = random.Random(1)
    values = [rng.gauss(2.0, 1.0) for _ in range(400)]
    mean = sum(values) / 400
    found = bootstrap_mean(values, seed=5)
    assert found == bootstrap_mean(values, seed=5)
    assert found != bootstrap_mean(values, seed=6)
    spread = math.sqrt(sum((value - mean) ** 2 for value in values) / 400)
    assert found.low == pytest.approx(mean - 1.96 * spread / 20, abs=0.015)
    assert found.high == pytest.approx(mean + 1.96 * spread / 20, abs=0.015)


def test_bootstrap_stays_the_same_on_every_platform():
    found = bootstrap_mean([0.0, 1.0, 1.0, 0.0, 1.0], seed=0, resamples=200)
    assert (found.low, found.high) == (pytest.approx(0.195), 1.0)


def test_bootstrap_of_equal_values_is_a_point_and_of_none_an_error():
    assert bootstrap_mean([0.5] * 9) == Interval(0.5, 0.5)
    with pytest.raises(ValueError, match="no values"):
        bootstrap_mean([])


def test_paired_bootstrap_sees_a_shift_that_noise_between_items_would_hide():
    rng = random.Random(2)
    reference = [rng.gauss(0, 10) for _ in range(50)]
    policy = [value + 0.5 + rng.gauss(0, 0.1) for value in reference]
    found = paired_bootstrap(policy, reference)
    assert 0.4 < found.low < 0.5 < found.high < 0.6


def _score(won, lost, n, difference):
    """Tango's statistic with the restricted likelihood maximized by brute force."""
    best, share = -math.inf, 0.0
    for step in range(1, 20000):
        losing = step / 20000
        winning = losing + difference
        rest = 1 - losing - winning
        if winning <= 0 or rest <= 0:
            continue
        value = (
            won * math.log(winning) + lost * math.log(losing) + (n - won - lost) * math.log(rest)
        )
        if value > best:
            best, share = value, losing
    variance = n * (2 * share + difference - difference**2)
    return (won - lost - n * difference) / math.sqrt(variance)


@pytest.mark.parametrize(("won", "lost", "n"), [(12, 2, 50), (3, 9, 40), (5, 5, 200), (1, 1, 44)])
def test_paired_rate_interval_ends_where_the_score_is_critical(won, lost, n):
    found = paired_rate_interval(won, lost, n)
    assert _score(won, lost, n, found.low) == pytest.approx(1.96, abs=0.01)
    assert _score(won, lost, n, found.high) == pytest.approx(-1.96, abs=0.01)


def test_no_discordant_pair_leaves_the_doubt_of_n_items():
    small, large = paired_rate_interval(0, 0, 10), paired_rate_interval(0, 0, 1000)
    assert small.low == pytest.approx(-small.high)
    assert small.high == pytest.approx(1.96**2 / (10 + 1.96**2), abs=1e-4)
    assert 0 < large.high < 0.005


def test_paired_rate_interval_covers_the_true_difference():
    rng = random.Random(4)
    hits = 0
    for _ in range(1000):
        draws = [rng.random() for _ in range(80)]
        won = sum(draw < 0.15 for draw in draws)
        lost = sum(draw > 0.95 for draw in draws)
        found = paired_rate_interval(won, lost, 80)
        hits += found.low <= 0.10 <= found.high
    assert 0.92 <= hits / 1000 <= 0.98


def test_paired_rate_interval_refuses_impossible_counts():
    with pytest.raises(ValueError, match="won"):
        paired_rate_interval(3, 3, 5)


def test_bootstrap_ratio_weights_by_the_denominator():
    assert bootstrap_ratio([1.0, 2.0, 4.0], [1, 2, 4]) == Interval(1.0, 1.0)
    rng = random.Random(6)
    tokens = [rng.randint(1, 30) for _ in range(300)]
    nats = [rng.gauss(0.5 * count, count**0.5) for count in tokens]
    found = bootstrap_ratio(nats, tokens, seed=1)
    point = sum(nats) / sum(tokens)
    assert found.low < point < found.high
    # Each token adds variance 1: the error of the ratio is 1 / sqrt(tokens).
    assert found.high - found.low == pytest.approx(2 * 1.96 / math.sqrt(sum(tokens)), rel=0.15)
    with pytest.raises(ValueError, match="denominators"):
        bootstrap_ratio([1.0], [])
    with pytest.raises(ValueError, match="denominator over 0"):
        bootstrap_ratio([1.0], [0])


def test_the_mean_of_one_estimate_keeps_its_interval():
    found = combined_mean([0.8], [Interval(0.49, 0.94)])
    assert (found.low, found.high) == (pytest.approx(0.49), pytest.approx(0.94))


def test_the_mean_of_independent_rates_covers_the_true_mean():
    rng = random.Random(7)
    hits = 0
    for _ in range(1000):
        counts = [(sum(rng.random() < p for _ in range(n)), n) for p, n in ((0.9, 100), (0.6, 20))]
        rates = [won / n for won, n in counts]
        found = combined_mean(rates, [wilson(won, n) for won, n in counts])
        hits += found.low <= 0.75 <= found.high
    assert 0.93 <= hits / 1000 <= 0.975
    with pytest.raises(ValueError, match="at least one"):
        combined_mean([], [])
