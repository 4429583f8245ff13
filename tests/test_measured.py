"""Measurements on the one road: made once, seen by every gate, refused, overridden, no reference."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dagster import AssetCheckSeverity, DagsterInstance, materialize

from llm_assets.adopting import adopt
from llm_assets.assets import asset_key, build_assets
from llm_assets.engine import check_upstream, failed_gates, gate_results, release_lineage
from llm_assets.errors import GateFailedError, RefusedError, WorkerError
from llm_assets.gates import measurements
from llm_assets.measured import data_behind, data_drift, measure_missing
from llm_assets.overriding import override
from llm_assets.planning import make_plan
from llm_assets.recipe import Recipe, load_recipe
from llm_assets.store import open_store
from llm_assets.store.digest import ArtifactHash, Identity
from llm_assets.store.protocol import Store
from tests.gates.data_parts import data, evals, of_village, settings
from tests.road import PretendLauncher, StoreResource
from tests.simulation import add_record, put_output
from tests.test_recipe import changed, write

GATES: dict[str, Any] = {
    "gates.corpus": {"contamination": {"max": 0.001}, "vocabulary_drift": {"max": 0.25}},
    "gates.instructions": {},
}
KEPT = ("corpus", "instructions", "preferences", "evals", "vocabulary")


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("LLM_ASSETS_STORE", str(tmp_path / "store"))
    return open_store(str(tmp_path / "store"))


def recipe_of(folder: Path, **change: Any) -> Recipe:
    return load_recipe(write(folder, changed({**GATES, **change})))


def put_data(folder: Path, recipe: Recipe, store: Store, *, planted: bool) -> None:
    """Records of real data sets; a planted corpus holds the first item of an eval task."""
    world = settings()
    tasks = evals(folder / "evals", world)
    first = json.loads((folder / "evals" / "village_facts.jsonl").read_text().splitlines()[0])
    for name in KEPT:
        if name == "evals":
            output = store.put(tasks.path, type="evals", metadata={"num_rows": 1})
        elif name == "vocabulary":
            output = put_output(store, "vocabulary")
        else:
            train, held_out = of_village(folder, name, world)
            if planted and name == "corpus":
                train.append({"text": first["prompt"], "source": "planted"})
            made = data(folder / f"{name}-{planted}", name, train, held_out)
            output = store.put(made.path, type=name, metadata={"num_rows": 1})
        add_record(make_plan(recipe, store), name, store, output=output)


def runs_of_the_process(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    ran: list[int] = []
    run = measurements._run
    monkeypatch.setattr(
        measurements, "_run", lambda store, tasks: (ran.append(len(tasks)), run(store, tasks))
    )
    return ran


def test_contamination_stops_what_stands_below(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = runs_of_the_process(monkeypatch)
    recipe = recipe_of(tmp_path)
    put_data(tmp_path, recipe, store, planted=True)
    plan = make_plan(recipe, store)
    verdicts = {result.name: result.verdict for result in gate_results(plan, "corpus", store)}
    assert verdicts == {"contamination": "not measured", "vocabulary_drift": "no reference"}
    with pytest.raises(GateFailedError, match=r"gate contamination of corpus failed"):
        check_upstream(plan, "vocabulary", store)
    (result,) = failed_gates(plan, "corpus", store)
    assert (result.verdict, result.n) == ("fail", 30)
    assert result.table[0]["source"] == "planted"
    # The manifest's checks are the same; what was measured once is found.
    checked = release_lineage(plan, store)["checked"]["corpus"]
    assert checked["contamination"]["value"] == result.value
    assert checked["vocabulary_drift"]["absent"] == "no reference"
    # A threshold is no part of a measurement.
    loose = recipe_of(tmp_path, **{"gates.corpus": {"contamination": {"max": 0.5}}})
    check_upstream(make_plan(loose, store), "vocabulary", store)
    assert ran == [1]
    artifact = plan.stages["corpus"].artifact
    assert artifact is not None
    override(
        store,
        gate="contamination",
        stage="corpus",
        artifact=artifact,
        pipeline=recipe.pipeline,
        reviewer="ann",
        reason="known",
        verdict=result.as_dict(),
    )
    check_upstream(make_plan(recipe, store), "vocabulary", store)


def test_drift_is_against_what_production_was_trained_on(tmp_path: Path, store: Store) -> None:
    recipe = recipe_of(tmp_path, **{"gates.corpus": {"vocabulary_drift": {"max": 0.25}}})
    put_data(tmp_path, recipe, store, planted=False)
    plan = make_plan(recipe, store)
    other, _ = of_village(tmp_path, "corpus", settings())
    strange = [
        {**row, "text": row["text"].replace("the ", "ze ").replace(" is ", " iz ")} for row in other
    ]
    corpus = plan.stages["corpus"].artifact
    old = store.put(
        data(tmp_path / "old", "corpus", strange).path, type="corpus", metadata={"num_rows": 1}
    )

    def promote(artifact: str | None, number: int, expected: ArtifactHash | None) -> ArtifactHash:
        folder = tmp_path / f"release-{number}"
        folder.mkdir()
        body = {"pipeline": "small", "recipe": {}, "stages": {"corpus": {"artifact": artifact}}}
        (folder / "manifest.json").write_text(
            json.dumps(body if artifact else {**body, "stages": {}})
        )
        release = store.put(folder, type="release", metadata={"decision": "SHIP"})
        store.move_ref("small/production", release, expected=expected, who="test", why="test")
        return release

    def verdict() -> str:
        measure_missing(plan, ["corpus"], store)
        (result,) = gate_results(plan, "corpus", store)
        return result.verdict

    assert verdict() == "no reference"
    first = promote(old, 1, None)
    assert verdict() == "fail"
    second = promote(str(corpus), 2, first)
    assert verdict() == "pass"
    promote(None, 3, second)
    assert verdict() == "no reference"
    # Going back to a checkpoint that was trained on the strange corpus.
    record = plan.stages["vocabulary"].record
    assert record is not None
    assert data_behind(store, record) == {"corpus": corpus}
    (result,) = data_drift(plan, store, {"corpus": old})
    assert (result.name, result.verdict) == ("corpus.vocabulary_drift", "fail")
    assert [r.verdict for r in data_drift(plan, store, data_behind(store, record))] == ["pass"]
    folder = tmp_path / "old-words"
    folder.mkdir()
    (folder / "vocab.json").write_text("{}")
    (folder / "merges.txt").write_text("#version: 0.2\n")
    words = store.put(folder, type="vocabulary", metadata={"num_tokens": 1})
    store.add_record(
        replace(record, identity=Identity("b" * 64), output=words, inputs={"corpus": old})
    )
    with pytest.raises(RefusedError, match=r"data drift, corpus\.vocabulary_drift"):
        adopt(store, plan, "vocabulary", words, who="ann", why="test")
    adopt(store, plan, "vocabulary", words, who="ann", why="test", accept=True)


def test_the_check_waits_for_the_evals_and_blocks(tmp_path: Path, store: Store) -> None:
    recipe = recipe_of(tmp_path)
    put_data(tmp_path, recipe, store, planted=True)
    with DagsterInstance.ephemeral() as instance:
        result = materialize(
            build_assets(recipe),
            selection=[asset_key(recipe, name) for name in ("corpus", "evals", "vocabulary")],
            instance=instance,
            resources={"store": StoreResource(url=""), "launcher": PretendLauncher(threads=1)},
            raise_on_error=False,
            run_config={"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}},
        )
    assert not result.success
    checks = {check.check_name: check for check in result.get_asset_check_evaluations()}
    assert not checks["contamination"].passed
    assert checks["contamination"].severity is AssetCheckSeverity.ERROR
    assert "planted" in str(checks["contamination"].metadata["rows"].value)
    # Nothing to compare with is a warning, not a pass.
    assert not checks["vocabulary_drift"].passed
    assert checks["vocabulary_drift"].severity is AssetCheckSeverity.WARN
    made = {event.asset_key.path[-1] for event in result.get_asset_materialization_events()}
    assert made == {"corpus", "evals"}


def test_a_measurement_that_cannot_be_made_is_an_error(tmp_path: Path, store: Store) -> None:
    recipe = recipe_of(tmp_path)
    put_data(tmp_path, recipe, store, planted=False)
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "documents.jsonl").write_text("no JSON\n")
    artifact = store.put(broken, type="corpus", metadata={"num_rows": 1})
    task = measurements.Task(
        measurement=measurements.BY_NAME["contamination"],
        inputs={"data": artifact, "evals": str(make_plan(recipe, store).stages["evals"].artifact)},
    )
    with pytest.raises(WorkerError, match="measuring contamination failed"):
        measurements.make(store, [task])
    assert measurements.find(store, task) is None
