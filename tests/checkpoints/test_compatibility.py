"""What is compared before a checkpoint feeds a stage or replaces another one."""

import json
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[1] / "stages"))

import tiny_chat

from llm_assets.compatibility import check_inputs, differences, profile_of
from llm_assets.errors import ModelError
from llm_assets.stages.context import StageInput
from llm_assets.stages.models import num_parameters


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_chat.save_chat_model(tmp_path_factory.mktemp("models") / "one", width=16)


def aspects(found: Path, wanted: Path) -> dict[str, str]:
    return {d.aspect: d.migration for d in differences(profile_of(found), profile_of(wanted))}


def variant(folder: Path, target: Path) -> Path:
    target.mkdir()
    for path in folder.iterdir():
        (target / path.name).write_bytes(path.read_bytes())
    return target


def test_the_same_has_no_differences(folder: Path, tmp_path: Path) -> None:
    assert aspects(folder, variant(folder, tmp_path / "b")) == {}
    tokenizer = tiny_chat.make_tokenizer()
    model = tiny_chat.make_model(tokenizer, width=16)
    assert profile_of(folder).num_parameters == num_parameters(model)
    assert profile_of(folder).num_tokens == len(tokenizer)


def test_renamed_layers_are_renamed_back(folder: Path, tmp_path: Path) -> None:
    other = variant(folder, tmp_path / "b")
    weights = {f"module.{n}": t for n, t in load_file(folder / "model.safetensors").items()}
    save_file(weights, other / "model.safetensors")
    assert "take the prefix 'module.' away" in aspects(other, folder)["layer names"]


def test_other_types_are_cast(folder: Path, tmp_path: Path) -> None:
    other = variant(folder, tmp_path / "b")
    weights = {n: t.bfloat16() for n, t in load_file(folder / "model.safetensors").items()}
    save_file(weights, other / "model.safetensors")
    assert "cast" in aspects(other, folder)["types"]


def test_template_and_tokenizer_are_compared(folder: Path, tmp_path: Path) -> None:
    other = variant(folder, tmp_path / "b")
    (other / "chat_template.jinja").write_text("{{ messages }}")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    names = list(tokenizer["model"]["vocab"])
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary[names[-1]], vocabulary[names[-2]] = vocabulary[names[-2]], vocabulary[names[-1]]
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    found = aspects(other, folder)
    assert set(found) == {"chat template", "tokenizer"}
    assert "the same ids mean other tokens" in found["tokenizer"]


def test_optimizers_are_compared(tmp_path: Path) -> None:
    for name, decay in (("a", 0.1), ("b", 0.0)):
        (tmp_path / name).mkdir()
        groups = [{"lr": 1.0, "betas": [0.9, 0.999], "weight_decay": decay, "params": [0]}]
        (tmp_path / name / "loop.json").write_text(json.dumps({"param_groups": groups}))
    assert list(aspects(tmp_path / "a", tmp_path / "b")) == ["optimizer configuration"]


def feed(*folders: Path) -> None:
    inputs = {
        f"input{n}": StageInput(path=path, type="policy", artifact="x")
        for n, path in enumerate(folders)
    }
    check_inputs("test/refined_policy", inputs)


def test_inputs_fit_themselves_and_each_other(folder: Path, tmp_path: Path) -> None:
    feed(folder, variant(folder, tmp_path / "same"))
    other = variant(folder, tmp_path / "b")
    (other / "chat_template.jinja").write_text("{{ messages }}")
    with pytest.raises(ModelError, match="chat template"):
        feed(folder, other)
    other = variant(folder, tmp_path / "c")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3}))
    with pytest.raises(ModelError, match="layers: 2, expected 3"):
        feed(other)
    other = variant(folder, tmp_path / "d")
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][:100].clone()
    save_file(weights, other / "model.safetensors")
    with pytest.raises(ModelError, match="embedding rows: 100"):
        feed(other)
