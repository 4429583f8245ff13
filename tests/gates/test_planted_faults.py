"""Each gate of the recipe tiny fails on its planted fault, and is silent on clean outcomes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from clean_and_planted import CLEAN, PLANTED, Metrics

from llm_assets.gates.thresholds import GateResult, evaluate
from llm_assets.recipe import load_recipe

SEEDS = range(20)


def verdicts(stage: str, metrics: Metrics) -> dict[str, GateResult]:
    """Of the gates of tiny whose metric these outcomes can have."""
    gates: dict[str, Any] = dict(load_recipe("tiny").gates[stage])
    return {result.name: result for result in evaluate(metrics, gates)}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_caught_on_every_seed(fault: str) -> None:
    stage, gate, make = PLANTED[fault]
    for seed in SEEDS:
        result = verdicts(stage, make(random.Random(seed)))[gate]
        assert result.blocks, (seed, result)


@pytest.mark.parametrize("stage", CLEAN)
def test_clean_outcomes_raise_no_alarm(stage: str) -> None:
    """At most one false alarm over 20 seeds, all gates of the stage taken together."""
    make: Callable[[random.Random], Metrics] = CLEAN[stage]
    alarms = []
    for seed in SEEDS:
        metrics = make(random.Random(seed))
        found = verdicts(stage, metrics)
        alarms += [(seed, r.name, r.why) for r in found.values() if r.blocks and r.name in metrics]
    assert len(alarms) <= 1, alarms


@pytest.mark.parametrize("fault", PLANTED)
def test_the_same_gate_is_silent_without_the_fault(fault: str) -> None:
    stage, gate, _ = PLANTED[fault]
    silent = [not verdicts(stage, CLEAN[stage](random.Random(s)))[gate].blocks for s in SEEDS]
    assert sum(silent) >= len(SEEDS) - 1
