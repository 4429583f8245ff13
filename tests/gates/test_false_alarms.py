"""How often the gates of the tiny recipe stop clean data: 20 villages of other seeds.

python -m pytest -m slow -s tests/gates/test_false_alarms.py
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from llm_assets.gates import contamination, drift, labels, suites
from llm_assets.gates.thresholds import evaluate
from llm_assets.recipe import load_recipe
from tests.gates.data_parts import data, evals, of_village, settings

SEEDS = range(100, 120)
DRIFT = ("length_drift", "vocabulary_drift", "source_drift")


@pytest.mark.slow
def test_clean_villages_pass(tmp_path: Path) -> None:
    gates = load_recipe("tiny").gates
    alarms: Counter[str] = Counter()
    for seed in SEEDS:
        world = settings(
            seed,
            villagers=12,
            corpus_documents=1500,
            instructions=1500,
            preferences=800,
            eval_items=100,
        )
        folder = tmp_path / str(seed)
        tasks = evals(folder / "evals", world)
        found = {"evals": dict(suites.measure({"data": tasks}).metrics)}
        for kind in ("corpus", "instructions", "preferences"):
            train, held_out = of_village(folder, kind, world)
            made = data(folder / kind, kind, train, held_out)
            # Two samples of one world: what production had, and what comes now.
            old, new = (data(folder / f"{kind}-{n}", kind, train[n::2]) for n in (0, 1))
            found[kind] = {
                **suites.measure({"data": made}).metrics,
                **contamination.measure({"data": made, "evals": tasks}).metrics,
                **drift.measure({"data": new, "reference": old}).metrics,
                **(labels.measure({"data": made}).metrics if kind == "preferences" else {}),
            }
        for kind, metrics in found.items():
            for result in evaluate(metrics, gates[kind]):
                if result.blocks:
                    print(seed, kind, result.name, result.why)
                alarms[f"{kind}.{result.name}"] += result.blocks
    print(json.dumps(dict(sorted(alarms.items())), indent=1))
    assert not +alarms
