"""In-training saves: every damage is detected, the save before is taken, nothing half is visible."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from toy import Printer, toy_settings, train_toy

from llm_assets.checkpoints import SaveInfo, choose, list_saves, newest_healthy
from llm_assets.checkpoints.manifest import FULL_FILES, body_hash, file_hash
from llm_assets.checkpoints.retention import remove_old
from llm_assets.errors import SaveError
from llm_assets.stage_settings import CheckpointSettings
from llm_assets.stages.resuming import Source, find_source
from llm_assets.stages.save_checks import loss_spike, validate

FILES = (*FULL_FILES, "manifest.json")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training folder with the saves of steps 3 and 6, and the light ones of 2 and 4."""
    root = tmp_path_factory.mktemp("saves")
    checkpoint = {"every_steps": 3, "every_minutes": None, "light_every_steps": 2}
    train_toy(root, Printer(), settings=toy_settings(max_steps=7, checkpoint=checkpoint))
    return root


@pytest.fixture
def saves(trained: Path, tmp_path: Path) -> Path:
    """A copy of them that a test may damage."""
    return Path(shutil.copytree(trained / "checkpoints", tmp_path / "checkpoints"))


def full(folder: Path) -> list[SaveInfo]:
    return list_saves(folder, "full")


def find(
    folder: Path,
    said: list[str] | None = None,
    *,
    identity: str = "",
    world_size: int = 1,
    **settings: Any,
) -> Source | None:
    return find_source(
        folder,
        identity=identity,
        world_size=world_size,
        settings=CheckpointSettings(**settings),
        say=(said if said is not None else []).append,
    )


def damage(path: Path, how: str, other: Path) -> None:
    if how == "truncated":
        path.write_bytes(path.read_bytes()[:-5])
    elif how == "emptied":
        path.write_bytes(b"")
    elif how == "flipped":
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(bytes(content))
    elif how == "removed":
        path.unlink()
    else:
        path.write_bytes(other.read_bytes())


def reseal(save: Path, **changes: Any) -> None:
    """Change a save's manifest and its files' hashes, as a writer with a fault would have."""
    document = json.loads((save / "manifest.json").read_text()) | changes
    document["files"] = {
        name: {"size_bytes": (save / name).stat().st_size, "sha256": file_hash(save / name)}
        for name in document["files"]
    }
    document["sha256"] = body_hash(document)
    (save / "manifest.json").write_text(json.dumps(document))


@pytest.mark.parametrize("how", ["truncated", "emptied", "flipped", "removed", "swapped"])
@pytest.mark.parametrize("name", FILES)
def test_damage_is_found_and_the_save_before_is_taken(saves: Path, name: str, how: str) -> None:
    newest, older = (save.path for save in full(saves))
    damage(newest / name, how, older / name)
    assert validate(newest, write=False).verdict == "corrupt"
    said: list[str] = []
    taken = find(saves, said)
    assert taken is not None
    assert taken.path == older
    assert len(said) == 1
    assert newest.name in said[0]
    # A damaged manifest may name any file; a damaged file names itself.
    assert name == "manifest.json" or name in said[0]
    # What was passed over lies aside, for a person to look at.
    assert list(saves.glob(f"set-aside/*/{newest.name}"))


@pytest.mark.parametrize("how", ["truncated", "emptied", "flipped", "removed", "swapped"])
def test_a_damaged_verdict_counts_as_none(saves: Path, how: str) -> None:
    newest, older = (save.path for save in full(saves))
    damage(newest / "health.json", how, older / "health.json")
    assert full(saves)[0].verdict == "unjudged"
    taken = find(saves)
    assert taken is not None
    assert taken.path == newest
    assert full(saves)[0].verdict == "healthy"


def test_a_save_under_another_step_is_refused(saves: Path) -> None:
    newest, older = (save.path for save in full(saves))
    shutil.rmtree(newest)
    shutil.copytree(older, newest)
    assert full(saves)[0].problem == "manifest.json: is of save-00000003"


def test_an_unknown_format_is_refused(saves: Path) -> None:
    newest = full(saves)[0].path
    reseal(newest, format=3)
    assert full(saves)[0].problem == "manifest.json: format 3; this version reads 2"


def _edit(name: str, change: Callable[[Any], None]) -> Callable[[Path], None]:
    def edit(save: Path) -> None:
        document = json.loads((save / name).read_text())
        change(document)
        (save / name).write_text(json.dumps(document))

    return edit


def _edit_tensors(name: str, change: Callable[[Any], None]) -> Callable[[Path], None]:
    def edit(save: Path) -> None:
        tensors = load_file(save / name)
        change(tensors)
        save_file(tensors, save / name)

    return edit


def _first(tensors: dict[str, Any], suffix: str) -> str:
    return next(name for name in sorted(tensors) if name.endswith(suffix))


WRONG: dict[str, tuple[Callable[[Path], None], str]] = {
    "a weight is not finite": (
        _edit_tensors("model.safetensors", lambda t: t["model.norm.weight"].fill_(float("inf"))),
        "model: model.norm.weight holds NaN or infinity",
    ),
    "a weight is missing": (
        _edit_tensors("model.safetensors", lambda t: t.pop("model.norm.weight")),
        "model: 19 tensors, the architecture has 20",
    ),
    "a weight has another type": (
        _edit_tensors(
            "model.safetensors",
            lambda t: t.update({"model.norm.weight": t["model.norm.weight"].bfloat16()}),
        ),
        "model: names, types or shapes",
    ),
    "a moment is not finite": (
        _edit_tensors("optimizer.safetensors", lambda t: t["0.exp_avg"].fill_(float("nan"))),
        "optimizer: 0.exp_avg holds NaN or infinity",
    ),
    "a moment has another shape": (
        _edit_tensors(
            "optimizer.safetensors", lambda t: t.update({"0.exp_avg": t["0.exp_avg"][:-1].clone()})
        ),
        "optimizer: exp_avg of ",
    ),
    "the moments of a parameter are missing": (
        _edit_tensors(
            "optimizer.safetensors",
            lambda t: [t.pop(name) for name in list(t) if name.startswith("0.")],
        ),
        "optimizer: moments of 19 parameters, expected 20",
    ),
    "moments of a later step": (
        _edit_tensors("optimizer.safetensors", lambda t: t["0.step"].fill_(9)),
        "optimizer: moments of steps",
    ),
    "a generator is missing": (
        _edit_tensors("rng.safetensors", lambda t: t.pop("0.python")),
        "generators: no generator 0.python",
    ),
    "the learning rate is not the schedule's": (
        _edit("loop.json", lambda d: d["param_groups"][0].update(lr=0.5)),
        "schedule: the next step has learning rate 0.5",
    ),
    "the schedule stands elsewhere": (
        _edit("loop.json", lambda d: d["scheduler"].update(last_epoch=4)),
        "schedule: the schedule stands at 4, the save at 6",
    ),
    "the next rows are others": (
        _edit("data.json", lambda d: d["next_rows"].reverse()),
        "data: the next rows are not those",
    ),
    "the epoch is another": (
        _edit("data.json", lambda d: d["sampler"].update(seed=99)),
        "data: the order of the rows is not that of the sampler",
    ),
    "the log is of a later step": (
        _edit("trainer_state.json", lambda d: d["log_history"][-1].update(step=9)),
        "state: has logs of step 9",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_content_that_is_wrong_with_right_hashes_is_corrupt(saves: Path, case: str) -> None:
    newest = full(saves)[0].path
    assert validate(newest, write=False).verdict == "healthy"
    make, reason = WRONG[case]
    make(newest)
    reseal(newest)
    health = validate(newest)
    assert health.verdict == "corrupt"
    assert health.reasons[0].startswith(reason)


def test_odd_metrics_are_for_review_and_a_person_may_choose_them(saves: Path) -> None:
    newest, older = (save.path for save in full(saves))
    reseal(newest, metrics={"loss": float("nan")})
    assert validate(newest).reasons == ("metrics: loss is nan",)
    assert full(saves)[0].verdict == "review"
    chosen = saves.parent / "chosen"
    shutil.copytree(saves, chosen)
    taken = find(saves)
    assert taken is not None
    assert taken.path == older
    choose(chosen, 6, "mary", "the log was at fault, the weights are good")
    taken = find(chosen)
    assert taken is not None
    assert taken.path.name == newest.name


def test_a_loss_spike_is_told_from_noise() -> None:
    usual = [2.0 + 0.05 * (-1) ** n for n in range(60)]
    assert loss_spike([*usual, 2.2, 2.1, 2.2, 2.1, 2.2]) == ""
    assert "running median of 2" in loss_spike([*usual, 3.9, 4.1, 4.0, 4.2, 4.4])
    assert loss_spike([9.0, 8.0, 2.0]) == ""


def test_a_save_that_took_far_longer_is_for_review(saves: Path) -> None:
    newest, older = (save.path for save in full(saves))
    for step in (1, 2, 4, 5):
        other = saves / f"save-{step:08d}"
        shutil.copytree(older, other)
        reseal(other, step=step, write_s=0.1)
    reseal(newest, write_s=95.0)
    assert validate(newest).reasons == ("write time: took 95.0 s, the others 0.1 s",)


def test_a_save_of_another_identity_or_number_of_processes_is_never_taken(saves: Path) -> None:
    said: list[str] = []
    with pytest.raises(SaveError, match="saves were published"):
        find(saves, said, identity="another")
    assert "is of identity" in said[0]
    with pytest.raises(SaveError, match="written by 1 processes, here are 2"):
        find(saves, world_size=2)
    assert len(full(saves)) == 2


def test_saves_that_are_gone_are_missed(saves: Path) -> None:
    for save in list_saves(saves):
        shutil.rmtree(save.path)
    with pytest.raises(SaveError, match="saves were published"):
        find(saves)
    choose(saves, 0, "mary", "the disk was replaced")
    assert find(saves) is None


def test_what_an_interrupted_save_left_is_no_save_and_is_removed(saves: Path) -> None:
    shutil.copytree(full(saves)[0].path, saves / ".writing-1-save-00000009")
    taken = find(saves)
    assert taken is not None
    assert taken.path.name == "save-00000006"
    assert not list(saves.glob(".writing-*"))


def test_a_save_holds_the_whole_loop_without_pickle(saves: Path) -> None:
    newest = full(saves)[0]
    assert sorted(path.name for path in newest.path.iterdir()) == sorted([*FILES, "health.json"])
    assert newest.manifest is not None
    assert newest.manifest.counters["tokens"] == 6 * 64
    assert newest.manifest.data["drawn"] == 7 * 4
    assert newest.manifest.metrics["loss"] > 0
    loop = json.loads((newest.path / "loop.json").read_text())
    moments = load_file(newest.path / "optimizer.safetensors")
    assert {name.split(".")[1] for name in moments} == {"exp_avg", "exp_avg_sq", "step"}
    assert len(moments) == 3 * len(loop["parameters"])
    history = json.loads((newest.path / "trainer_state.json").read_text())["log_history"]
    assert [entry["step"] for entry in history] == [1, 2, 3, 4, 5, 6]


def test_light_saves_hold_weights_and_are_not_gone_on_from(saves: Path) -> None:
    light = list_saves(saves, "light")
    assert [save.path.name for save in light] == ["light-00000004", "light-00000002"]
    assert [save.verdict for save in light] == ["light", "light"]
    assert (light[0].path / "model.safetensors").is_file()
    for save in full(saves):
        shutil.rmtree(save.path)
    assert newest_healthy(saves) is None


def test_the_check_runs_in_a_process_without_torch(saves: Path) -> None:
    newest = full(saves)[0].path
    script = (
        "import sys; from llm_assets.stages import save_checks; code = save_checks.main(); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )

    def run() -> tuple[int, Any]:
        done = subprocess.run(
            [sys.executable, "-c", script, str(newest)],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, json.loads(done.stdout or "{}")

    assert run() == (0, {"verdict": "healthy", "reasons": []})
    (newest / "data.json").unlink()
    assert run() == (4, {"verdict": "corrupt", "reasons": ["file data.json: missing"]})


def test_retention_keeps_the_last_the_best_and_each_nth(saves: Path) -> None:
    older = full(saves)[1].path
    losses = {1: 5.0, 2: 1.0, 3: 3.5, 4: 3.0, 5: 4.0, 6: 4.0, 7: 4.5}
    for step, loss in losses.items():
        path = saves / f"save-{step:08d}"
        if not path.exists():
            shutil.copytree(older, path)
        reseal(path, step=step, metrics={"loss": loss})
    for save in full(saves):
        verdict = validate(save.path)
        assert save.step in (3, 6) or verdict.verdict == "corrupt"
    # Only steps 3 and 6 are true to their content; a corrupt one newer than all stays to be seen.
    remove_old(saves, CheckpointSettings(keep=1, keep_best=1, keep_light=1))
    assert [save.path.name for save in list_saves(saves)] == [
        "save-00000007",
        "save-00000006",
        "light-00000004",
        "save-00000003",
    ]
    remove_old(saves, CheckpointSettings(keep=1, keep_every_steps=3))
    assert [save.step for save in full(saves)] == [7, 6, 3]
    remove_old(saves, CheckpointSettings(keep=1))
    assert [save.step for save in full(saves)] == [7, 6]
