"""A recipe whose base trains next: tokenizer and shards are real and stored, nothing else is."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pretraining_parts import make_shards, make_tokenizer, make_vocabulary, write_corpus

from llm_assets.engine import build_job
from llm_assets.group import SilentProgress
from llm_assets.jobs import StageJob
from llm_assets.planning import make_plan
from llm_assets.recipe import Recipe, load_recipe
from llm_assets.stages.context import StageContext, StageInput
from llm_assets.store import Store, open_store
from llm_assets.store.digest import Identity
from llm_assets.store.protocol import Record
from tests.simulation import add_record, put_output

MICRO = Path(__file__).parents[1] / "recipes" / "micro.yaml"
TWO = {"kind": "accelerate", "num_processes": 2, "retries": {"delay_s": 0.1}}


@dataclass(frozen=True, kw_only=True)
class Parts:
    """A tokenizer and shards."""

    tokenizer: Path
    shards: Path


def make_parts(folder: Path) -> Parts:
    """Both, of a small corpus."""

    def make(
        stage: str,
        config: Any,
        *,
        inputs: dict[str, tuple[Path, str]],
        seed: int = 7,
        name: str = "",
    ) -> StageContext:
        root = folder / (name or stage)
        for place in ("out", "scratch", "checkpoints"):
            (root / place).mkdir(parents=True)
        return StageContext(
            stage=stage,
            pipeline="test",
            config=config,
            seed=seed,
            inputs={
                key: StageInput(path=path, type=type, artifact="0" * 64)
                for key, (path, type) in inputs.items()
            },
            out=root / "out",
            scratch=root / "scratch",
            checkpoints=root / "checkpoints",
            progress=SilentProgress(),
        )

    corpus = write_corpus(folder / "documents")
    reader = make_tokenizer(make, make_vocabulary(make, corpus).out)
    return Parts(tokenizer=reader, shards=make_shards(make, corpus, reader)[1])


@dataclass(frozen=True, kw_only=True)
class BaseRun:
    """A home of its own with a store, and a recipe in it."""

    folder: Path

    @property
    def recipe_path(self) -> Path:
        return self.folder / "recipe.yaml"

    @property
    def recipe(self) -> Recipe:
        return load_recipe(self.recipe_path)

    @property
    def store(self) -> Store:
        return open_store(str(self.folder / "home" / "store"))

    @property
    def environment(self) -> dict[str, str]:
        return {
            **os.environ,
            "LLM_ASSETS_HOME": str(self.folder / "home"),
            "DAGSTER_HOME": str(self.folder / "dagster"),
            "OMP_NUM_THREADS": "1",
        }

    @property
    def identity(self) -> Identity:
        identity = make_plan(self.recipe, self.store).stages["base_checkpoint"].identity
        assert identity is not None
        return Identity.parse(identity)

    @property
    def saves(self) -> Path:
        return self.store.checkpoints(self.identity)

    @property
    def records(self) -> list[Record]:
        return list(self.store.records(self.identity))

    def job(self) -> StageJob:
        """What the worker of the base is told."""
        return build_job(
            make_plan(self.recipe, self.store), "base_checkpoint", self.store, run_id="r"
        )

    def write(self, launcher: dict[str, Any] | None, **base: Any) -> None:
        """The recipe; `base` are settings of the base, beside a gate that lets nothing pass."""
        document = yaml.safe_load(MICRO.read_text())
        for data in ("corpus", "preferences"):
            del document["gates"][data]  # Pretended data have no rows to measure.
        document["gates"]["base_checkpoint"] = {"held_out_loss": {"max": 0.0}}
        document["stages"]["base_checkpoint"].update(base)
        if launcher is not None:
            document["launcher"] = launcher
        self.recipe_path.write_text(yaml.safe_dump(document))

    def fill(self, parts: Parts) -> None:
        """Records for everything above the base."""
        store = self.store
        real = {
            "tokenizer": (parts.tokenizer, "tokenizer", {"num_tokens": 320}),
            "shards": (parts.shards, "shards", {"num_tokens": 1, "sequence_length": 32}),
        }
        for _ in range(20):
            plan = make_plan(self.recipe, store)
            ready = [name for name in plan.rerun if plan.stages[name].identity is not None]
            above = [n for n in ready if n in ("corpus", "vocabulary", "tokenizer", "shards")]
            if not above:
                break
            name = above[0]
            if name in real:
                path, kind, metadata = real[name]
                output = store.put(path, type=kind, metadata=metadata)
            else:
                output = put_output(store, name)
            add_record(plan, name, store, output=output)

    def write_job(self) -> Path:
        """The job as a file, for `llm_assets.worker --job`."""
        path = self.folder / "job.json"
        path.write_text(json.dumps(self.job().as_json()))
        return path


def base_run(
    folder: Path, parts: Parts, launcher: dict[str, Any] | None = None, **base: Any
) -> BaseRun:
    """Ready to run."""
    folder.mkdir(parents=True, exist_ok=True)
    made = BaseRun(folder=folder)
    made.write(launcher, **base)
    made.fill(parts)
    return made
