"""Estimates against published runs."""

from __future__ import annotations

import pytest
from published_runs import DEEPSEEK_V3, FLOPS, HOURS, LLAMA_3, PublishedFlops, PublishedHours

from llm_assets.costs.devices import find_device
from llm_assets.costs.estimate import (
    DEFAULT_UTILIZATION,
    attention_flops,
    price,
    training_flops,
)
from llm_assets.costs.parameters import from_config


@pytest.mark.parametrize("run", FLOPS, ids=lambda run: run.name)
def test_operations(run: PublishedFlops) -> None:
    # The papers multiply by all parameters, the embedding's too.
    found = training_flops(from_config(run.config).active, run.tokens)
    assert found == pytest.approx(run.flops, rel=run.tolerance)


@pytest.mark.parametrize("run", HOURS, ids=lambda run: run.name)
def test_device_hours(run: PublishedHours) -> None:
    found = price(
        training_flops(from_config(run.config).active, run.tokens, recompute=run.recompute),
        device=find_device(run.device),
        utilization=run.utilization or DEFAULT_UTILIZATION,
        devices=1,
        usd_per_hour=2.0,
    )
    assert found.gpu_hours == pytest.approx(run.hours, rel=run.tolerance)
    # A tolerance is honest when it is not much wider than it must be.
    assert abs(found.gpu_hours - run.hours) / run.hours > run.tolerance / 4


def test_palm_with_its_attention() -> None:
    """Chowdhery et al. 2022, arXiv:2204.02311: 540.35B parameters, 780B tokens of 2048, 118 layers,
    48 heads of 256; 2.56e24 operations with the attention term."""
    from dataclasses import replace

    shape = replace(
        from_config(LLAMA_3["8B"]), num_layers=118, num_heads=48, head_size=256, value_head_size=256
    )
    attention = attention_flops(shape, 780e9, 2048, trained=True)
    plain = training_flops(540.35e9, 780e9)
    assert attention / plain == pytest.approx(0.011, abs=0.001)
    assert plain + attention == pytest.approx(2.56e24, rel=0.01)


def test_deepseek_s_own_price() -> None:
    """5.328 M USD of pre-training at 2 USD an hour: its published hours, priced."""
    found = price(
        training_flops(from_config(DEEPSEEK_V3).active, 14.8e12),
        device=find_device("H800"),
        utilization=DEFAULT_UTILIZATION,
        devices=2048,
        usd_per_hour=2.0,
    )
    assert found.cost_usd == pytest.approx(5.328e6, rel=0.20)
    # "less than two months" on 2,048 devices
    assert found.wall_s < 61 * 86400


def test_utilization_that_the_published_hours_mean() -> None:
    run = next(entry for entry in HOURS if entry.name == "Llama 3.1 405B")
    flops = training_flops(from_config(run.config).active, run.tokens)
    peak = find_device(run.device).peak_tflops * 1e12
    # The paper states 0.38 to 0.43 for the main phase; the hours hold all the rest too.
    assert flops / (run.hours * 3600 * peak) == pytest.approx(0.346, abs=0.005)
