"""Measurements on the one road: made once, seen by every gate, refused, overridden, no reference."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dagster import AssetCheckSeverity, DagsterInstance

from llm_assets.adopting import adopt
from llm_assets.cli import main
from llm_assets.engine import check_upstream, failed_gates, gate_results, release_lineage
from llm_assets.errors import GateFailedError, RefusedError, WorkerError
from llm_assets.gates import measurements
from llm_assets.measured import data_behind, data_drift, measure_missing
from llm_assets.overriding import override
from llm_assets.planning import make_plan
from llm_assets.recipe import Recipe, load_recipe
from llm_assets.store.digest import ArtifactHash, Identity
from llm_assets.store.protocol import Record, Store
from tests.gates.data_parts import data, evals, of_village, settings
from tests.road import outcomes, take_road
from tests.simulation import add_record, put_output, simulate
from tests.test_recipe import changed, write

GATES: dict[str, Any] = {
    "gates.corpus": {"contamination": {"max": 0.001}, "vocabulary_drift": {"max": 0.25}},
    "gates.instructions": {},
}
KEPT = ("corpus", "instructions", "preferences", "evals", "vocabulary")


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
    corpus = plan.stages["corpus"].artifact
    old = strange_corpus(tmp_path, store)

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
    assert data_behind(plan.history, record) == {"corpus": corpus}
    (result,) = data_drift(plan, store, {"corpus": old})
    assert (result.name, result.verdict) == ("corpus.vocabulary_drift", "fail")
    assert [r.verdict for r in data_drift(plan, store, data_behind(plan.history, record))] == [
        "pass"
    ]
    words = old_words(tmp_path, store, record, old)
    with pytest.raises(RefusedError, match=r"data drift, corpus\.vocabulary_drift"):
        adopt(store, plan, "vocabulary", words, who="ann", why="test")
    adopt(store, plan, "vocabulary", words, who="ann", why="test", accept=True)


def strange_corpus(folder: Path, store: Store) -> ArtifactHash:
    """A corpus of the village in other words."""
    rows, _ = of_village(folder, "corpus", settings())
    strange = [
        {**row, "text": row["text"].replace("the ", "ze ").replace(" is ", " iz ")} for row in rows
    ]
    made = data(folder / "old", "corpus", strange)
    return store.put(made.path, type="corpus", metadata={"num_rows": 1})


def old_words(folder: Path, store: Store, record: Record, corpus: ArtifactHash) -> ArtifactHash:
    """A vocabulary that was learned on that corpus; `record`: one to write its own after."""
    words = folder / "old-words"
    words.mkdir()
    (words / "vocab.json").write_text("{}")
    (words / "merges.txt").write_text("#version: 0.2\n")
    output = store.put(words, type="vocabulary", metadata={"num_tokens": 1})
    store.add_record(
        replace(record, identity=Identity("b" * 64), output=output, inputs={"corpus": corpus})
    )
    return output


def test_a_pin_is_asked_for_the_drift_of_what_it_was_trained_on(
    tmp_path: Path, store: Store
) -> None:
    gates = {
        "gates.corpus": {"vocabulary_drift": {"max": 0.25}},
        "gates.vocabulary": {"bytes_per_token": {"min": 2.0}},
    }
    recipe = recipe_of(tmp_path, **gates)
    put_data(tmp_path, recipe, store, planted=False)
    record = make_plan(recipe, store).stages["vocabulary"].record
    assert record is not None
    words = old_words(
        tmp_path,
        store,
        replace(record, metrics={"bytes_per_token": {"value": 3.0, "n": None}}),
        strange_corpus(tmp_path, store),
    )
    pinned = recipe_of(tmp_path, **gates, **{"stages.vocabulary": {"pin": str(words)}})
    # What it was made with answers for its own gates.
    plan = make_plan(pinned, store)
    verdicts = {result.name: result.verdict for result in gate_results(plan, "vocabulary", store)}
    assert verdicts == {"bytes_per_token": "pass", "corpus_vocabulary_drift": "not measured"}
    with DagsterInstance.ephemeral() as instance:
        result = take_road(pinned, instance, "corpus", "vocabulary", "tokenizer")
    assert not result.success
    checks = {check.check_name: check for check in result.get_asset_check_evaluations()}
    assert checks["bytes_per_token"].passed
    assert not checks["corpus_vocabulary_drift"].passed
    assert outcomes(result) == {"corpus": "hit", "vocabulary": "pinned"}
    with pytest.raises(GateFailedError, match="gate corpus_vocabulary_drift of vocabulary failed"):
        check_upstream(plan, "tokenizer", store)
    assert set(release_lineage(plan, store)["gates"]["vocabulary"]) == set(verdicts)
    signed = ("--reviewer", "Ada", "--reason", "the old words are fine")
    where = ("--artifact", words[:8], "-r", str(pinned.path))
    assert main(["override", "vocabulary.corpus_vocabulary_drift", *where, *signed]) == 0
    check_upstream(plan, "tokenizer", store)


def test_a_pin_that_was_made_elsewhere_has_nothing_to_show(tmp_path: Path, store: Store) -> None:
    gates = {
        "gates.corpus": {"vocabulary_drift": {"max": 0.25}},
        "gates.vocabulary": {"bytes_per_token": {"min": 2.0}},
    }
    elsewhere = put_output(store, "made elsewhere")
    pinned = recipe_of(tmp_path, **gates, **{"stages.vocabulary": {"pin": str(elsewhere)}})
    plan = make_plan(pinned, store)
    verdicts = {result.name: result.verdict for result in gate_results(plan, "vocabulary", store)}
    assert verdicts == {"bytes_per_token": "no data", "corpus_vocabulary_drift": "no reference"}
    with pytest.raises(GateFailedError, match="gate bytes_per_token of vocabulary failed"):
        check_upstream(plan, "tokenizer", store)


def test_what_a_pin_cuts_off_is_no_part_of_the_release(tmp_path: Path, store: Store) -> None:
    gates = {
        "gates.corpus": {"empty_rate": {"max": 0.0}},
        "gates.sft_checkpoint": {"x": {"min": 0}},
    }
    whole = recipe_of(tmp_path, **gates)
    simulate(whole, store)
    plan = make_plan(whole, store)
    assert {"corpus", "sft_checkpoint"} <= set(release_lineage(plan, store)["gates"])
    pin = {"stages.sft_checkpoint.pin": str(plan.stages["sft_checkpoint"].artifact)}
    cut = release_lineage(make_plan(recipe_of(tmp_path, **gates, **pin), store), store)
    assert "corpus" not in cut["gates"]
    assert "sft_checkpoint" in cut["gates"]
    # Its record says how good it is.
    assert cut["stages"]["sft_checkpoint"]["metrics"]["capability"]["value"] == 1.0


def test_the_check_waits_for_the_evals_and_blocks(tmp_path: Path, store: Store) -> None:
    recipe = recipe_of(tmp_path)
    put_data(tmp_path, recipe, store, planted=True)
    with DagsterInstance.ephemeral() as instance:
        result = take_road(recipe, instance, "corpus", "evals", "vocabulary")
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
