"""`llm-assets checkpoints` on real saves of a toy training, and on stored checkpoints."""

import hashlib
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

sys.path.insert(0, str(Path(__file__).parents[1] / "stages"))

import tiny_chat
import toy

from llm_assets import checkpoint_command
from llm_assets.adopting import last_good
from llm_assets.checkpoints import list_saves, read_manifest
from llm_assets.cli import app
from llm_assets.graph import STAGES
from llm_assets.planning import make_plan
from llm_assets.recipe import Recipe, load_recipe
from llm_assets.store import open_store
from llm_assets.store.digest import ArtifactHash, Identity
from llm_assets.store.protocol import Store
from tests.simulation import add_record, put_output
from tests.test_planning import SFT_AND_BELOW
from tests.test_recipe import changed, write

IDENTITY = Identity.parse("ab" * 32)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Saves of steps 3 and 6."""
    root = tmp_path_factory.mktemp("saves")
    toy.train_toy(root, toy.Printer(), settings=toy.toy_settings(max_steps=7))
    return root / "checkpoints"


@pytest.fixture
def store(own_places: Path) -> Store:
    return open_store(str(own_places / "llm-assets" / "store"))


@pytest.fixture
def saves(trained: Path, store: Store) -> Path:
    folder = store.checkpoints(IDENTITY)
    shutil.rmtree(folder)
    return Path(shutil.copytree(trained, folder))


def call(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["checkpoints", *arguments], standalone_mode=False)
    if done.exception is not None:
        return 1, str(done.exception)
    return done.return_value or 0, done.output


def listed(*arguments: str) -> dict[str, Any]:
    code, text = call("ls", "--json", *arguments)
    assert code == 0, text
    (course,) = json.loads(text)["courses"]
    return dict(course)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-9] ^= 1
    path.write_bytes(bytes(content))


def test_ls_and_show_say_what_a_save_is(saves: Path) -> None:
    course = listed("--identity", "abab", "--stage", "base_checkpoint")
    assert (course["pipeline"], course["goes_on_from"], course["running"]) == ("test", 6, None)
    newest, older = course["saves"]
    assert (newest["step"], older["step"]) == (6, 3)
    assert newest["verdict"] == "healthy"
    assert newest["tokens"] == 6 * 4 * 16
    assert newest["metrics"]["loss"] > 0
    assert call("ls", "--stage", "dpo_policy")[1].startswith("no saves")
    _, text = call("ls")
    assert "goes on from here" in text and "best by loss (min)" in text
    code, text = call("show", "--step", "3", "--json")
    shown = json.loads(text)
    assert code == 0
    assert shown["checks"]["optimizer"] == "ok"
    assert set(shown["files"]) >= {"model.safetensors", "data.json"}


def test_verify_finds_damage_and_ls_goes_on_from_the_one_before(saves: Path) -> None:
    assert call("verify")[0] == 0
    flip(saves / "save-00000006" / "optimizer.safetensors")
    code, text = call("verify", "--json")
    assert code == 1
    verdicts = {row["name"]: row["verdict"] for row in json.loads(text)["saves"]}
    assert verdicts == {"save-00000006": "corrupt", "save-00000003": "healthy"}
    assert listed()["goes_on_from"] == 3


def test_a_rollback_is_rehearsed_costed_and_recorded(saves: Path, store: Store) -> None:
    code, text = call("rollback", "--step", "3", "--dry-run", "--json")
    document = json.loads(text)
    assert code == 0
    assert document["rehearsal"]["verdict"] == "healthy" and not document["done"]
    assert document["impact"]["steps"] == 3
    assert document["impact"]["tokens"] == 3 * 4 * 16
    assert listed()["goes_on_from"] == 6

    assert "give --why" in call("rollback", "--step", "3")[1]
    assert call("rollback", "--step", "3", "--why", "the loss jumped", "--who", "ada")[0] == 0
    course = listed()
    assert course["goes_on_from"] == 3
    assert course["chosen"]["why"] == "the loss jumped"
    ((_, body),) = store.entries("rollbacks", f"{IDENTITY}/")
    assert (body["who"], body["impact"]["set_aside"]) == ("ada", ["save-00000006"])
    assert list((saves / "set-aside").glob("*/save-00000006/manifest.json"))

    assert call("rollback", "--restart", "--why", "from the start")[0] == 0
    assert listed()["chosen"]["step"] == 0


def test_a_rollback_refuses_a_corrupt_save_and_a_running_training(
    saves: Path, store: Store
) -> None:
    flip(saves / "save-00000003" / "model.safetensors")
    code, text = call("rollback", "--step", "3", "--why", "x")
    assert code == 1 and "the rehearsal failed" in text
    lease = store.acquire(f"stage/{IDENTITY}", owner="host:1:ab", ttl_s=60)
    assert lease is not None
    code, text = call("rollback", "--step", "6", "--why", "x")
    assert code == 1 and "host:1:ab is at it" in text
    assert [save.step for save in list_saves(saves)] == [6, 3]


def old_format(save: Path) -> None:
    """The save as format 1 had it."""
    manifest = json.loads((save / "manifest.json").read_text())
    loop = json.loads((save / "loop.json").read_text())
    rest = {"rng": {}, "counters": {"step": manifest["step"], "tokens": 7, "seconds": 1.0}}
    kept = {key: loop[key] for key in ("param_groups", "scheduler")}
    (save / "loop.json").write_text(json.dumps({**kept, **rest}))
    for name in ("data.json", "health.json"):
        (save / name).unlink()
    files = {
        path.name: {
            "size_bytes": path.stat().st_size,
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        }
        for path in save.iterdir()
        if path.name != "manifest.json"
    }
    body = {"format": 1, "step": manifest["step"], "files": files}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    sealed = {**body, "sha256": hashlib.sha256(text.encode()).hexdigest()}
    (save / "manifest.json").write_text(json.dumps(sealed))


def test_an_old_save_is_written_anew_and_trains_on(saves: Path, tmp_path: Path) -> None:
    shutil.rmtree(saves / "save-00000003")
    save = saves / "save-00000006"
    old_format(save)
    weights = (save / "model.safetensors").read_bytes()
    assert "format 1" in str(read_manifest(save))
    code, text = call("migrate", "--stage", "base_checkpoint", "--json")
    (row,) = json.loads(text)["migrated"]
    assert (code, row["from"], row["to"]) == (0, 1, 2)
    manifest = read_manifest(save)
    assert not isinstance(manifest, str)
    assert (manifest.step, manifest.identity) == (6, IDENTITY)
    assert (save / "model.safetensors").read_bytes() == weights
    # Nothing of the old one was changed.
    old = saves / "set-aside" / "format-1" / "save-00000006"
    assert json.loads((old / "manifest.json").read_text())["format"] == 1
    assert call("migrate")[1].startswith("nothing to migrate")

    shutil.copytree(saves, tmp_path / "checkpoints")
    settings = toy.toy_settings(
        max_steps=8, checkpoint={"every_steps": None, "every_minutes": None, "partial": "restore"}
    )
    document = json.loads((tmp_path / "checkpoints/save-00000006/manifest.json").read_text())
    document["identity"] = ""  # the toy has none
    reseal(tmp_path / "checkpoints/save-00000006/manifest.json", document)
    _, log = toy.train_toy(tmp_path, toy.Printer(), settings=settings)
    assert (log.resumed_from, log.steps) == (6, 8)
    assert {row["part"] for row in log.lost} == {"data.json", "loop.json", "rng.safetensors"}


def reseal(path: Path, document: dict[str, Any]) -> None:
    document.pop("sha256")
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    document["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    path.write_text(json.dumps(document))


Put = Callable[..., ArtifactHash]


@pytest.fixture
def put(store: Store, tmp_path: Path) -> Put:
    def put(kind: str, *, seed: int, width: int = 16) -> ArtifactHash:
        folder = tiny_chat.save_chat_model(
            tmp_path / f"{kind}-{seed}-{width}", seed=seed, width=width
        )
        return store.put(folder, type=kind, metadata={"num_parameters": 1})

    return put


def run_all(recipe: Recipe, store: Store, put: Put, seed: int, last: str = "") -> None:
    """Bring a recipe up to date (up to the stage `last`); checkpoints are real folders."""
    while True:
        plan = make_plan(recipe, store)
        ready = [name for name in plan.rerun if plan.stages[name].identity is not None]
        if not ready or (last and plan.stages[last].status == "hit"):
            return
        name = ready[0]
        if STAGES[name].gives == "checkpoint":
            output = put("checkpoint", seed=seed)
        else:
            output = put_output(store, f"{name} {plan.stages[name].identity}")
        add_record(
            plan, name, store, output=output, metrics={"held_out_loss": {"value": seed, "n": 1}}
        )


def recipe_at(folder: Path, **change: Any) -> Recipe:
    dotted = {key.replace("__", "."): value for key, value in change.items()}
    return load_recipe(write(folder, changed(dotted)))


@pytest.mark.parametrize("midtraining", [True, False])
def test_a_corrupt_base_is_replaced_by_the_last_good_one(
    store: Store, put: Put, tmp_path: Path, midtraining: bool
) -> None:
    stage = "midtrained_checkpoint" if midtraining else "base_checkpoint"
    switch: dict[str, Any] = (
        {} if midtraining else {"stages__midtrained_checkpoint__enabled": False}
    )
    good = recipe_at(tmp_path, **{f"stages__{stage}__learning_rate": 0.0123}, **switch)
    run_all(good, store, put, seed=1, last=stage)
    before = make_plan(good, store).stages[stage].artifact
    recipe = recipe_at(tmp_path, **switch)
    run_all(recipe, store, put, seed=2)
    plan = make_plan(recipe, store)
    assert plan.complete
    corrupt = plan.stages[stage].artifact
    assert corrupt not in (None, before)
    assert last_good(store, plan, stage) == before

    path = str(tmp_path / "recipe.yaml")
    arguments = ["adopt", "-r", path, "--stage", stage, "--why", "bad weights", "--who", "ada"]
    code, text = call(*arguments, "--json")
    assert code == 0, text
    after = make_plan(recipe, store)
    assert after.stages[stage].status == "hit"
    assert after.stages[stage].artifact == before
    assert after.stages[stage].record is not None
    assert after.stages[stage].record.environment["adopted_by"] == "ada"
    assert json.loads(text)["rerun"] == after.rerun == SFT_AND_BELOW
    assert {STAGES[name].cost_class for name in after.rerun} == {"medium", "cheap"}
    # Going back is a choice too.
    assert call("adopt", str(corrupt), *arguments[1:])[0] == 0
    assert make_plan(recipe, store).complete


def test_a_checkpoint_of_another_architecture_is_not_adopted(
    store: Store, put: Put, tmp_path: Path
) -> None:
    recipe = recipe_at(tmp_path)
    run_all(recipe, store, put, seed=1)
    other = put("checkpoint", seed=1, width=24)
    arguments = ["-r", str(tmp_path / "recipe.yaml"), "--stage", "base_checkpoint", "--why", "x"]
    code, text = call("adopt", str(other), *arguments)
    assert code == 1
    assert "parameter count" in text and "another architecture (hidden_size 24 for 16" in text
    assert make_plan(recipe, store).complete
    assert call("adopt", str(other), *arguments, "--accept-differences")[0] == 0
    assert make_plan(recipe, store).stages["base_checkpoint"].artifact == other
    wrong = put("policy", seed=1)
    assert "gives a checkpoint" in call("adopt", str(wrong), *arguments)[1]


def test_prove_reports_a_save_that_kills_its_process(saves: Path) -> None:
    save = list_saves(saves)[0]
    assert checkpoint_command.prove(save)["verdict"] == "healthy"
