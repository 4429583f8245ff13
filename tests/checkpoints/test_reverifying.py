"""Stored checkpoints proved again: the number on the fixed batch, damage, drift, and the alarm."""

import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dagster import AssetKey, DagsterInstance, Failure
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[1] / "stages"))

import tiny_chat

from llm_assets.definitions import build_definitions
from llm_assets.planning import make_plan
from llm_assets.recipe import Recipe, load_recipe
from llm_assets.reverifying import record_probe, reverify
from llm_assets.sensors.upkeep import report_drills
from llm_assets.stages.probing import probe
from llm_assets.store import open_store
from llm_assets.store.digest import ArtifactHash
from llm_assets.store.protocol import Store
from tests.simulation import add_record, put_output

MICRO = Path(__file__).parents[1] / "recipes" / "micro.yaml"


@pytest.fixture
def store(own_places: Path) -> Store:
    return open_store(str(own_places / "llm-assets" / "store"))


@pytest.fixture
def recipe() -> Recipe:
    return load_recipe(MICRO)


@pytest.fixture
def stored(store: Store, recipe: Recipe, tmp_path: Path) -> ArtifactHash:
    """A checkpoint with its record and its number."""
    folder = tiny_chat.save_chat_model(tmp_path / "model", width=16)
    artifact = store.put(folder, type="checkpoint", metadata={"num_parameters": 1})
    for name in ("corpus", "vocabulary", "tokenizer", "shards", "base_checkpoint"):
        plan = make_plan(recipe, store)
        output = artifact if name == "base_checkpoint" else put_output(store, name)
        add_record(plan, name, store, output=output)
    record_probe(store, artifact, probe(store.fetch(artifact)))
    return artifact


def test_the_number_depends_on_the_weights(tmp_path: Path) -> None:
    folder = tiny_chat.save_chat_model(tmp_path / "model", width=16)
    first = probe(folder)
    assert probe(folder) == first
    assert first["name"] == "loss" and first["value"] == pytest.approx(5.8, abs=0.5)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] * 3
    save_file(weights, folder / "model.safetensors")
    assert abs(probe(folder)["value"] - first["value"]) > 0.01


def test_the_same_checkpoint_is_the_same(store: Store, stored: ArtifactHash) -> None:
    said: list[str] = []
    (result,) = reverify(store, say=said.append)
    assert (result.verdict, result.artifact) == ("same", stored)
    assert len(said) == 1


def test_drift_alarms(
    store: Store,
    stored: ArtifactHash,
    recipe: Recipe,
    instance: DagsterInstance,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("llm_assets.reverifying.TOLERANCE", -1.0)
    monkeypatch.setattr("llm_assets.reverifying.math.isclose", lambda *a, **k: False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        job = build_definitions([recipe]).resolve_job_def("nightly_verification")
    result = job.execute_in_process(instance=instance, raise_on_error=False)
    assert not result.success
    (seen,) = instance.fetch_observations(AssetKey(["micro", "base_checkpoint"]), limit=5).records
    assert seen.asset_observation is not None
    assert seen.asset_observation.metadata["verdict"].value == "drift"


def test_damage_is_found_and_noted(store: Store, stored: ArtifactHash) -> None:
    blob = next(e.blob for e in store.tree(stored).files if e.path == "model.safetensors")
    path = next(p for p in Path(store.url, "objects").rglob(str(blob)) if p.is_file())
    path.chmod(0o644)
    path.write_bytes(b"x" * path.stat().st_size)
    (result,) = reverify(store, say=lambda text: None)
    assert result.verdict == "damaged"
    assert list(store.entries("damaged", stored))


@pytest.fixture
def instance() -> Iterator[DagsterInstance]:
    with DagsterInstance.ephemeral() as made:
        yield made


class Log:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def info(self, text: str) -> None:
        self.lines.append(text)

    error = info


@pytest.mark.parametrize(
    ("code", "recovered", "fails"), [(0, True, False), (1, False, True), (2, None, True)]
)
def test_drills_that_fail_are_told(code: int, recovered: Any, fails: bool) -> None:
    row = f'{{"name": "crash", "detected": true, "recovered": {str(bool(recovered)).lower()}}}'
    output = "" if recovered is None else f'{{"drills": [{row}]}}'
    log = Log()
    if not fails:
        report_drills(code, output, "", log)
        return
    with pytest.raises(Failure, match=r"crash|no drill"):
        report_drills(code, output, "no drill ran", log)
    assert "drills failed" in log.lines[-1]
