"""The whole pipeline, every stage for real, through Dagster's own command."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml
from dagster import AssetKey, DagsterInstance

from llm_assets.compat import stale_statuses
from llm_assets.graph import STAGES
from llm_assets.places import ensure_dagster_home
from llm_assets.store import open_store

MICRO = Path(__file__).parent / "recipes" / "micro.yaml"

Run = Callable[..., subprocess.CompletedProcess[str]]


class Place:
    """A home of its own, and commands run in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.recipe = folder / "micro.yaml"
        self.recipe.write_text(MICRO.read_text())
        self.environment = {
            **os.environ,
            "LLM_ASSETS_HOME": str(folder / "home"),
            "LLM_ASSETS_RECIPES": str(self.recipe),
            "DAGSTER_HOME": str(folder / "dagster"),
            "HF_HUB_OFFLINE": "1",
        }

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", *command],
            env=self.environment,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=900,
        )

    def materialize(self, select: str = "*") -> subprocess.CompletedProcess[str]:
        return self.run(
            "dagster", "asset", "materialize", "--select", select, "-m", "llm_assets.definitions"
        )

    def statuses(self) -> dict[str, str]:
        planned = self.run("llm_assets.cli", "plan", "-r", str(self.recipe), "--json")
        return {stage["name"]: stage["status"] for stage in json.loads(planned.stdout)["stages"]}

    def change(self, **change: object) -> None:
        """Set dotted keys (`__` for the dot) of the recipe, from the original on."""
        document = yaml.safe_load(MICRO.read_text())
        for dotted, value in change.items():
            place = document
            *above, last = dotted.split("__")
            for key in above:
                place = place.setdefault(key, {})
            place[last] = value
        self.recipe.write_text(yaml.safe_dump(document))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """After one run of the whole graph."""
    made = Place(tmp_path_factory.mktemp("pipeline"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DAGSTER_HOME", made.environment["DAGSTER_HOME"])
        ensure_dagster_home()
        done = made.materialize()
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
        yield made


@pytest.fixture(autouse=True)
def original(place: Place, own_places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place.change()
    monkeypatch.setenv("DAGSTER_HOME", place.environment["DAGSTER_HOME"])


def test_every_stage_has_its_record_and_its_materialization(place: Place) -> None:
    assert set(place.statuses().values()) == {"hit"}
    store = open_store(str(place.folder / "home" / "store"))
    records = {record.stage: record for record in store.all_records()}
    assert set(records) == set(STAGES)
    with DagsterInstance.get() as instance:
        for name, record in records.items():
            event = instance.get_latest_materialization_event(AssetKey(["micro", name]))
            assert event is not None
            made = event.asset_materialization
            assert made is not None
            assert (made.tags or {})["dagster/data_version"] == record.output
            assert made.metadata["outcome"].value == "run"
    for record in records.values():
        assert not store.verify(record.output, deep=True)
    assert (records["release"].metrics["ship"])["value"] == 1


def test_nothing_is_stale_afterwards_for_dagster_too(place: Place) -> None:
    from llm_assets.definitions import build_definitions
    from llm_assets.recipe import load_recipe

    defs = build_definitions([load_recipe(place.recipe)])
    with DagsterInstance.get() as instance:
        found = stale_statuses(instance, defs)
    assert {key.path[-1]: status for key, status in found.items() if status != "FRESH"} == {}


def test_a_second_run_is_all_hits(place: Place) -> None:
    again = place.materialize()
    assert again.returncode == 0
    assert again.stdout.count("launch") == 0
    with DagsterInstance.get() as instance:
        for name in STAGES:
            event = instance.get_latest_materialization_event(AssetKey(["micro", name]))
            assert event is not None
            assert event.asset_materialization is not None
            assert event.asset_materialization.metadata["outcome"].value == "hit"


def test_the_command_says_so_without_dagster(place: Place) -> None:
    script = (
        "import sys; from llm_assets.cli import main; code = main(sys.argv[1:]); "
        "print('dagster' in sys.modules, 'torch' in sys.modules); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "run", "-r", str(place.recipe)],
        env=place.environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "nothing is stale, 17 hits" in done.stdout
    assert done.stdout.endswith("False False\n")
    assert "SHIP" in done.stdout


def test_a_changed_learning_rate_reruns_sft_and_what_is_below(place: Place) -> None:
    place.change(stages__sft_checkpoint__learning_rate=0.0009)
    stale = {name for name, status in place.statuses().items() if status != "hit"}
    assert stale == {name for name, stage in STAGES.items() if stage.number >= 6}


def test_a_failed_gate_stops_the_run_and_every_later_one(place: Place) -> None:
    place.change(gates__sft_checkpoint__held_out_loss={"max": 0.001})
    failed = place.materialize()
    assert failed.returncode != 0
    text = failed.stdout + failed.stderr
    assert "held_out_loss" in text
    # Nothing was trained again for it, and a separate run below the gate does not start.
    stale = {name for name, status in place.statuses().items() if status != "hit"}
    assert stale == {"release"}
    place.change(gates__sft_checkpoint__held_out_loss={"max": 0.001}, stages__dpo_policy__beta=0.2)
    below = place.materialize("micro/dpo_policy")
    assert below.returncode != 0
    assert "gate held_out_loss of sft_checkpoint failed" in below.stdout + below.stderr
    refused = place.run("llm_assets.cli", "run", "-r", str(place.recipe))
    assert refused.returncode == 3
    assert "refused: gate held_out_loss" in refused.stdout


def test_a_release_that_holds_fails_its_own_run(place: Place) -> None:
    place.change(gates__sft_checkpoint__held_out_loss={"max": 0.001})
    held = place.materialize("micro/release")
    assert held.returncode != 0
    report = place.run("llm_assets.cli", "report", "-r", str(place.recipe))
    assert report.returncode == 1
    assert "HOLD" in report.stdout


def test_a_stale_upstream_is_named(place: Place) -> None:
    place.change(stages__sft_checkpoint__learning_rate=0.0008)
    done = place.materialize("micro/eval_report")
    assert done.returncode != 0
    text = done.stdout + done.stderr
    assert "sft_checkpoint, dpo_policy, reward_model, refined_policy" in text or (
        "sft_checkpoint, reward_model, dpo_policy, refined_policy" in text
    )
    assert "--select '+micro/eval_report'" in text


def test_a_worker_error_is_what_people_see(place: Place) -> None:
    place.change(stages__sft_checkpoint__max_length=16)
    done = place.run("llm_assets.cli", "run", "-r", str(place.recipe))
    assert done.returncode == 1
    assert "micro/sft_checkpoint" in done.stdout
    assert "max_length" in done.stdout
    assert "Traceback" not in done.stdout
    assert set(place.statuses().values()) >= {"hit", "run"}
