"""The road of the real assets through Dagster, in this process, with workers that only pretend."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from dagster import AssetExecutionContext, AssetsDefinition, DagsterInstance, materialize
from pydantic import Field

from llm_assets import planning
from llm_assets.assets import asset_key, build_assets
from llm_assets.graph import STAGES, Node
from llm_assets.jobs import StageJob
from llm_assets.recipe import Recipe
from llm_assets.reporting import Reporter
from llm_assets.resources.launcher import LocalLauncher, WorkerExit
from llm_assets.resources.store import StoreResource
from llm_assets.store import open_store
from llm_assets.store.digest import Identity
from llm_assets.store.protocol import Record
from llm_assets.worker import run_job
from tests.simulation import PASSING, put_output

_FILES = {"inference_server": {"server": '{"smoke_test": {"answers": []}}'}}
"""What reports read of an artifact."""


class PretendLauncher(LocalLauncher):
    """Adds the record that a worker would, at once. Its output is a function of the identity, or
    of the stage alone for `same_output`; `noise` changes the output of what is not
    bit-identical. `fail` ends without a record; `metrics` are those of every record. The stages in
    `real` run, in this process."""

    fail: list[str] = Field(default_factory=list)
    same_output: list[str] = Field(default_factory=list)
    noise: str = ""
    metrics: dict[str, float] = Field(default_factory=dict)
    real: list[str] = Field(default_factory=list)

    def launch(
        self, context: AssetExecutionContext, job: StageJob, *, side_by_side: int
    ) -> WorkerExit:
        """See Launcher.launch."""
        end = WorkerExit(code=0, error="", kind="", log=Path("pretended.log"))
        if job.stage in self.fail:
            return dataclasses.replace(end, code=1, error="told to fail")
        store = open_store(job.store_url)
        if job.stage in self.real:
            code = run_job(job, store, Reporter(stage=job.stage, path=None, log=context.log.info))
            return dataclasses.replace(end, code=code)
        stage = STAGES[job.stage]
        content = job.stage if job.stage in self.same_output else f"{job.stage} {job.identity}"
        if not stage.bit_identical:
            content += self.noise
        source = planning.node_source(Node(stage=stage, sources={}, imported=job.imported))
        store.add_record(
            Record(
                identity=Identity.parse(job.identity),
                stage=job.stage,
                pipeline=job.pipeline,
                output=put_output(store, content, **_FILES.get(job.stage, {})),
                type=stage.gives,
                source_hash=job.source_hash,
                recipe=job.recipe_part,
                seed=job.seed,
                inputs=job.identity_inputs,
                metrics={
                    **PASSING,
                    **{name: {"value": value, "n": None} for name, value in self.metrics.items()},
                },
                cost_usd=0.0,
                wall_s=1.0,
                created_at=f"2026-01-01T00:00:00.{sum(1 for _ in store.all_records()):06d}+00:00",
                run_id=job.run_id,
                device=job.device,
                modules=source.modules,
                libraries=source.libraries,
                environment={"replay": job.replay} if job.replay else {},
            )
        )
        return end


def take_road(
    recipe: Recipe,
    instance: DagsterInstance,
    *stages: str,
    tags: dict[str, str] | None = None,
    assets: Sequence[AssetsDefinition] | None = None,
    **launcher: Any,
) -> Any:
    """Materialize `stages` (all without any); the result of the run."""
    chosen = [asset_key(recipe, stage) for stage in stages] or None
    return materialize(
        list(build_assets(recipe) if assets is None else assets),
        instance=instance,
        resources={
            "store": StoreResource(url=""),
            "launcher": PretendLauncher(threads=1, grace_s=1.0, **launcher),
        },
        selection=chosen,
        raise_on_error=False,
        tags=tags,
        run_config={"loggers": {"console": {"config": {"log_level": "CRITICAL"}}}},
    )


def outcomes(result: Any) -> dict[str, str]:
    """Stage to hit, run or pinned, of what a run materialized."""
    found = {}
    for event in result.get_asset_materialization_events():
        made = event.step_materialization_data.materialization
        found[made.asset_key.path[-1]] = str(made.metadata["outcome"].value)
    return found
