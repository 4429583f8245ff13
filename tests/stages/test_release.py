"""SHIP or HOLD, each reason by name; the manifest says what is needed to replay."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from llm_assets.artifacts import check_artifact
from llm_assets.stage_settings import ReleaseSettings
from llm_assets.stages.context import StageContext, StageInput, StageResult
from llm_assets.stages.release import run

INPUTS = ("eval_report", "quantized_weights", "inference_server")


def lineage() -> dict[str, Any]:
    """A pipeline in which all is well."""
    stages = {
        name: {
            "artifact": letter * 64,
            "identity": letter.upper() * 64,
            "source_hash": "f" * 64,
            "status": "hit",
            "metrics": {},
            "inputs": {},
            "libraries": {"torch": "2.13.0"},
            "cost_usd": 0.25,
            "wall_s": 30.0,
            "run_id": "run-1",
        }
        for name, letter in zip(("sft_checkpoint", *INPUTS), "abcd", strict=True)
    }
    stages["sft_checkpoint"]["metrics"] = {"loss": {"value": 0.5, "n": None}}
    stages["eval_report"]["metrics"] = {
        "capability": {"value": 0.9, "n": 200},
        "refusal_rate": {"value": 0.99, "n": 200},
        "golden_delta": {"value": -0.01, "n": 40},
    }
    return {
        "recipe": {"pipeline": "tiny", "seed": 7, "budget": {"limit_usd": 10.0}},
        "gates": {
            "eval_report": {"capability": {"min": 0.85}, "refusal_rate": {"min": 0.95}},
            "sft_checkpoint": {"loss": {"max": 1.0}},
        },
        "stages": stages,
        "overrides": [],
        "rollback_plan": {"ref": "tiny/production", "to": None},
    }


@pytest.fixture
def decide(make_context: Callable[..., StageContext]) -> Callable[..., tuple]:
    def make(state: dict[str, Any], name: str = "") -> tuple[dict[str, Any], StageResult]:
        context = make_context("release", ReleaseSettings(), name=name)
        inputs = {
            key: StageInput(path=context.out, type=key, artifact=letter * 64)
            for key, letter in zip(INPUTS, "bcd", strict=True)
        }
        result = run(replace(context, inputs=inputs, lineage=state))
        check_artifact(context.out, "release", result.metadata)
        return json.loads((context.out / "manifest.json").read_text()), result

    return make


def test_all_well_ships(decide):
    manifest, result = decide(lineage())
    assert manifest["decision"] == result.metadata["decision"] == "SHIP"
    assert manifest["reasons"] == []
    assert result.metrics["ship"].value == 1.0
    assert result.metrics["num_failed_gates"].value == 0
    assert result.metrics["num_gates"].value == 3
    assert result.metrics["cost_usd"].value == 1.0


def test_the_manifest_holds_the_whole_state(decide):
    state = lineage()
    manifest, _ = decide(state)
    assert manifest["recipe"] == state["recipe"]
    assert manifest["stages"] == state["stages"]
    assert manifest["inputs"] == {
        "eval_report": "b" * 64,
        "inference_server": "d" * 64,
        "quantized_weights": "c" * 64,
    }
    assert manifest["rollback_plan"] == state["rollback_plan"]
    gates = {(gate["stage"], gate["name"]): gate for gate in manifest["gates"]}
    assert set(gates) == {
        ("eval_report", "capability"),
        ("eval_report", "refusal_rate"),
        ("sft_checkpoint", "loss"),
    }
    capability = gates["eval_report", "capability"]
    assert capability["value"] == 0.9
    assert capability["threshold"] == {"min": 0.85}
    assert capability["verdict"] == "pass"


def _fail_capability(state):
    state["stages"]["eval_report"]["metrics"]["capability"]["value"] = 0.5


def _drop_metric(state):
    del state["stages"]["eval_report"]["metrics"]["refusal_rate"]


def _drop_stage(state):
    del state["stages"]["sft_checkpoint"]


def _drop_hash(state):
    state["stages"]["sft_checkpoint"]["source_hash"] = ""


def _other_artifact(state):
    state["stages"]["quantized_weights"]["artifact"] = "e" * 64


def _spend(state):
    state["stages"]["sft_checkpoint"]["cost_usd"] = 11.0


def _no_rollback(state):
    state["rollback_plan"] = None


@pytest.mark.parametrize(
    ("spoil", "reason", "failed"),
    [
        (_fail_capability, "gate eval_report.capability: 0.5 (n = 200) is below min 0.85", 1),
        (_drop_metric, "gate eval_report.refusal_rate: the stage gave no such metric; no gate", 1),
        (_drop_stage, "gate sft_checkpoint.loss: the stage gave no such metric; no gate passes", 1),
        (_drop_hash, "manifest: sft_checkpoint has no source_hash", 0),
        (_other_artifact, f"manifest: the quantized_weights that was taken, {'c' * 64}, is in", 0),
        (_spend, "budget: the stages cost $11.75, the limit is $10.00", 0),
        (_no_rollback, "no rollback plan", 0),
    ],
)
def test_each_fault_holds_and_is_named(decide, spoil, reason, failed):
    state = lineage()
    spoil(state)
    manifest, result = decide(state)
    assert manifest["decision"] == "HOLD"
    assert len(manifest["reasons"]) == 1
    assert manifest["reasons"][0].startswith(reason)
    assert result.metrics["ship"].value == 0.0
    assert result.metrics["num_failed_gates"].value == failed


def test_every_fault_is_a_reason_of_its_own(decide):
    state = lineage()
    for spoil in (_fail_capability, _drop_metric, _spend, _no_rollback):
        spoil(state)
    manifest, result = decide(state)
    assert len(manifest["reasons"]) == 4
    assert result.metrics["num_failed_gates"].value == 2


def _override(**changes):
    return {
        "gate": "capability",
        "artifact": "b" * 64,
        "reviewer": "Ada",
        "reason": "known and accepted",
        **changes,
    }


@pytest.mark.parametrize("gate", ["capability", "eval_report.capability"])
def test_an_override_lets_one_gate_of_one_artifact_through(decide, gate):
    state = lineage()
    _fail_capability(state)
    state["overrides"] = [_override(gate=gate)]
    manifest, result = decide(state)
    assert manifest["decision"] == "SHIP"
    assert len(manifest["warnings"]) == 1
    assert "overridden by Ada: known and accepted" in manifest["warnings"][0]
    assert result.metrics["num_overrides"].value == 1
    assert result.tables["gates"][0]["verdict"] == "overridden"


@pytest.mark.parametrize(
    "change", [{"artifact": "c" * 64}, {"artifact": None}, {"gate": "refusal_rate"}]
)
def test_an_override_of_something_else_changes_nothing(decide, change):
    state = lineage()
    _fail_capability(state)
    state["overrides"] = [_override(**change)]
    manifest, _ = decide(state)
    assert manifest["decision"] == "HOLD"
    assert manifest["warnings"] == []


def test_a_pinned_stage_needs_its_artifact_only(decide):
    state = lineage()
    state["gates"] = {}
    state["stages"]["sft_checkpoint"] = {"artifact": "a" * 64, "status": "pinned"}
    assert decide(state)[0]["decision"] == "SHIP"
    del state["stages"]["sft_checkpoint"]["artifact"]
    assert decide(state, "without")[0]["reasons"] == ["manifest: sft_checkpoint has no artifact"]


def test_too_few_items_for_a_confident_gate_hold(decide):
    state = lineage()
    state["stages"]["eval_report"]["metrics"]["refusal_rate"] = {"value": 1.0, "n": 10}
    state["gates"]["eval_report"]["refusal_rate"] = {"min": 0.95, "confident": True}
    manifest, _ = decide(state)
    assert "too few items to decide" in manifest["reasons"][0]


def test_the_same_lineage_gives_the_same_bytes(decide, tmp_path):
    state = lineage()
    decide(copy.deepcopy(state), "first")
    reordered = dict(reversed(state.items()))
    decide(reordered, "second")
    first, second = (tmp_path / name / "out" / "manifest.json" for name in ("first", "second"))
    assert first.read_bytes() == second.read_bytes()


def test_a_raised_limit_counts(decide):
    state = lineage()
    _spend(state)
    state["limit_usd"] = 20.0
    manifest, _ = decide(state)
    assert manifest["decision"] == "SHIP"


def test_nothing_to_compare_with_ships_with_a_warning(decide):
    state = lineage()
    state["gates"]["sft_checkpoint"] = {"length_drift": {"max": 0.2}}
    state["checked"] = {
        "sft_checkpoint": {
            "length_drift": {"absent": "no reference", "why": "nothing is in production"}
        }
    }
    manifest, result = decide(state)
    assert manifest["decision"] == "SHIP"
    assert manifest["warnings"] == ["gate sft_checkpoint.length_drift: nothing is in production"]
    assert result.metrics["num_overrides"].value == 0
    state["checked"]["sft_checkpoint"]["length_drift"]["absent"] = "not measured"
    assert decide(state, "held")[0]["decision"] == "HOLD"
