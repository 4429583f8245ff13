"""The graph: its shape is the design's, and a recipe's switches rewire it."""

from pathlib import Path

import pytest

from llm_assets.graph import STAGES, ancestors, descendants, wire
from llm_assets.planning import invalidated_by
from llm_assets.recipe import load_recipe
from tests.test_recipe import changed, write

SHAPE = {
    "vocabulary": {"corpus"},
    "tokenizer": {"vocabulary"},
    "shards": {"corpus", "tokenizer"},
    "base_checkpoint": {"shards", "tokenizer"},
    "midtrained_checkpoint": {"base_checkpoint", "shards"},
    "sft_checkpoint": {"midtrained_checkpoint", "instructions"},
    "reward_model": {"sft_checkpoint", "preferences"},
    "dpo_policy": {"sft_checkpoint", "preferences"},
    "refined_policy": {"dpo_policy", "reward_model", "preferences", "sft_checkpoint"},
    "eval_report": {"refined_policy", "sft_checkpoint", "evals"},
    "quantized_weights": {"refined_policy", "instructions"},
    "inference_server": {"quantized_weights", "instructions"},
    "release": {"eval_report", "quantized_weights", "inference_server"},
}


def test_the_graph_is_the_designs() -> None:
    found = {
        name: {entry.name for entry in stage.inputs}
        for name, stage in STAGES.items()
        if stage.inputs
    }
    assert found == SHAPE


def test_every_node_stands_after_its_sources() -> None:
    seen: set[str] = set()
    for name, node in wire(load_recipe("tiny")).items():
        assert set(node.sources.values()) <= seen
        seen.add(name)


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (
            "sft_checkpoint",
            "sft_checkpoint reward_model dpo_policy refined_policy eval_report quantized_weights "
            "inference_server release",
        ),
        ("quantized_weights", "quantized_weights inference_server release"),
        ("evals", "evals eval_report release"),
        ("release", "release"),
    ],
)
def test_what_an_event_invalidates(event: str, expected: str) -> None:
    assert invalidated_by(load_recipe("tiny"), {event}) == expected.split()


def test_a_changed_tokenizer_invalidates_all_after_it() -> None:
    found = set(invalidated_by(load_recipe("tiny"), {"tokenizer"}))
    numbered = {name for name, stage in STAGES.items() if stage.number >= 2}
    assert found == numbered


def test_a_stage_that_is_off_hands_its_input_on(tmp_path: Path) -> None:
    text = changed(
        {
            "stages.midtrained_checkpoint.enabled": False,
            "stages.dpo_policy.enabled": False,
            "stages.quantized_weights.enabled": False,
        }
    )
    nodes = wire(load_recipe(write(tmp_path, text)))
    assert "midtrained_checkpoint" not in nodes
    assert nodes["sft_checkpoint"].sources["midtrained_checkpoint"] == "base_checkpoint"
    assert nodes["refined_policy"].sources["dpo_policy"] == "sft_checkpoint"
    assert nodes["inference_server"].sources["quantized_weights"] == "refined_policy"


def test_without_refinement_nothing_takes_the_reward_model(tmp_path: Path) -> None:
    nodes = wire(load_recipe(write(tmp_path, changed({"stages.refined_policy.enabled": False}))))
    assert "reward_model" not in nodes
    assert nodes["eval_report"].sources["refined_policy"] == "dpo_policy"


def test_an_imported_base_has_nothing_above_it(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    text = changed({"stages.base_checkpoint": {"import": {"path": "model.gguf"}}})
    nodes = wire(load_recipe(write(tmp_path, text)))
    assert not {"vocabulary", "tokenizer", "shards", "corpus", "midtrained_checkpoint"} & set(nodes)
    assert nodes["base_checkpoint"].imported
    assert not nodes["base_checkpoint"].sources
    assert nodes["sft_checkpoint"].sources["midtrained_checkpoint"] == "base_checkpoint"


def test_a_pin_cuts_the_edge(tmp_path: Path) -> None:
    nodes = wire(load_recipe(write(tmp_path, changed({"stages.sft_checkpoint.pin": "a" * 64}))))
    assert not nodes["sft_checkpoint"].sources
    assert "base_checkpoint" not in set(ancestors(nodes, "dpo_policy"))


def test_descendants_of_a_data_set() -> None:
    nodes = wire(load_recipe("tiny"))
    assert "reward_model" in descendants(nodes, {"preferences"})
    assert "sft_checkpoint" not in descendants(nodes, {"preferences"})
