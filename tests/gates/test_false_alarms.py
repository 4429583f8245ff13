"""How often the gates of the tiny recipe stop clean data and its tokens: 20 villages of other seeds.

python -m pytest -m slow -s tests/gates/test_false_alarms.py
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from llm_assets.gates import contamination, drift, labels, suites
from llm_assets.gates.thresholds import evaluate
from llm_assets.recipe import load_recipe
from llm_assets.stages import shards, tokenizer, vocabulary
from tests.gates.data_parts import data, evals, of_village, settings
from tests.stages.conftest import make_context as make_context
from tests.stages.pretraining_parts import Make

SEEDS = range(100, 120)
DRIFT = ("length_drift", "vocabulary_drift", "source_drift")


def tokenized(make_context: Make, corpus: Path, seed: int) -> dict[str, Mapping[str, Any]]:
    """Metrics of stages 1 to 3 with the settings of tiny."""
    stages = load_recipe("tiny").stages
    inputs = {"corpus": (corpus, "corpus")}
    found = {}
    for name, module in (("vocabulary", vocabulary), ("tokenizer", tokenizer), ("shards", shards)):
        settings = getattr(stages, name)
        context = make_context(name, settings, inputs=inputs, seed=seed, name=f"{name}-{seed}")
        found[name] = module.run(context).metrics
        inputs[name] = (context.out, name)
    return found


@pytest.mark.slow
def test_clean_villages_pass(tmp_path: Path, make_context: Make) -> None:
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
        found.update(tokenized(make_context, folder / "corpus", seed))
        for kind, metrics in found.items():
            for result in evaluate(metrics, gates[kind]):
                if result.blocks:
                    print(seed, kind, result.name, result.why)
                alarms[f"{kind}.{result.name}"] += result.blocks
    print(json.dumps(dict(sorted(alarms.items())), indent=1))
    assert not +alarms
