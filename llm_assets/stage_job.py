"""A stage's job made ready to run: code checked, inputs fetched, settings built; and its record."""

from __future__ import annotations

import datetime
import importlib
import json
import os
import platform
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

from llm_assets.compatibility import check_inputs
from llm_assets.errors import LlmAssetsError
from llm_assets.graph import STAGES, Stage
from llm_assets.identity import Source, source_of
from llm_assets.interruption import Interruption
from llm_assets.jobs import PROCESSES, StageJob
from llm_assets.ranks import world_size
from llm_assets.save_copies import SaveCopies
from llm_assets.spending import Spending
from llm_assets.stages.context import Progress, StageContext, StageInput, StageResult
from llm_assets.store.digest import ArtifactHash, Identity
from llm_assets.store.protocol import Record, Store


def checked_source(job: StageJob, stage: Stage) -> Source:
    """The code on disk; LlmAssetsError when it is not the code that was planned."""
    module = "llm_assets.stages.importing" if job.imported else stage.module
    source = source_of(module, stage.libraries)
    if source.hash != job.source_hash:
        raise LlmAssetsError(
            f"{job.pipeline}/{job.stage}: the code on disk is not the code that was planned\n"
            f"  rule: the source hash is computed in the process that executes\n"
            f"  next: reload the definitions and start the run again"
        )
    return source


def _config_of(job: StageJob, stage: Stage) -> Any:
    """The stage's settings, built again from the job's plain JSON."""
    if stage.data:
        from llm_assets.data_settings import DataSettings

        return DataSettings.model_validate_json(json.dumps(job.config))
    from llm_assets.stage_settings import StageBlocks

    document = json.dumps({job.stage: job.config})
    return getattr(StageBlocks.model_validate_json(document), job.stage)


def stage_entry_point(job: StageJob) -> Any:
    """The function that runs the stage."""
    stage = STAGES[job.stage]
    if job.imported:
        return importlib.import_module("llm_assets.stages.importing").run
    return getattr(importlib.import_module(stage.module), stage.function)


def _fetch_inputs(job: StageJob, store: Store) -> dict[str, StageInput]:
    inputs = {}
    for name, entry in job.inputs.items():
        artifact = ArtifactHash.parse(entry["artifact"])
        tree = store.tree(artifact)
        inputs[name] = StageInput(
            path=store.fetch(artifact), type=tree.type, artifact=artifact, metadata=tree.metadata
        )
    return inputs


def stage_context(
    job: StageJob,
    store: Store,
    work: Path,
    *,
    checkpoints: Path,
    progress: Progress,
    should_stop: Callable[[], str | None],
    interruption: Interruption,
    copies: SaveCopies | None = None,
) -> StageContext:
    """What the stage of a job is given: inputs fetched, verified and compared, folders in `work`
    made."""
    progress.say("fetching inputs")
    inputs = _fetch_inputs(job, store)
    check_inputs(f"{job.pipeline}/{job.stage}", inputs)
    context = StageContext(
        stage=job.stage,
        pipeline=job.pipeline,
        config=_config_of(job, STAGES[job.stage]),
        seed=job.seed,
        inputs=inputs,
        out=work / "out",
        scratch=work / "scratch",
        checkpoints=checkpoints,
        progress=progress,
        lineage=job.lineage,
        should_stop=should_stop,
        identity=job.identity,
        environment=_environment(job),
        interruption=interruption,
        copies=copies,
    )
    context.out.mkdir()
    context.scratch.mkdir()
    return context


def _environment(job: StageJob) -> dict[str, str]:
    replay = {"replay": job.replay} if job.replay else {}
    return {
        **replay,
        PROCESSES: str(world_size()),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "host": socket.gethostname(),
        "cpus": str(os.cpu_count()),
        "threads": os.environ.get("OMP_NUM_THREADS", ""),
    }


def record_of(
    job: StageJob,
    source: Source,
    stage: Stage,
    result: StageResult,
    output: ArtifactHash,
    wall_s: float,
    measure_s: float,
    spending: Spending,
) -> Record:
    """What the store keeps of a stage that ended well."""
    return Record(
        identity=Identity.parse(job.identity),
        stage=job.stage,
        pipeline=job.pipeline,
        output=output,
        type=stage.gives,
        source_hash=source.hash,
        recipe=job.recipe_part,
        seed=job.seed,
        inputs=job.identity_inputs,
        metrics={
            name: {"value": float(metric.value), "n": metric.n}
            for name, metric in result.metrics.items()
        },
        cost_usd=wall_s / 3600 * job.usd_per_hour * job.devices,
        wall_s=wall_s,
        measure_s=measure_s,
        created_at=datetime.datetime.now(datetime.UTC).isoformat(),
        run_id=job.run_id,
        tokens=result.tokens,
        flops=result.flops or spending.flops_of(result.tokens),
        device=spending.device,
        modules=source.modules,
        libraries=source.libraries,
        environment={**_environment(job), **spending.resumed()},
        series={name: [list(point) for point in line] for name, line in result.series.items()},
        samples=tuple(result.samples),
        tables={name: list(rows) for name, rows in result.tables.items()},
    )
