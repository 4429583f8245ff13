"""The process that runs one stage: `python -m llm_assets.worker`.

Under Dagster it is launched with Pipes; by hand it takes `--job FILE`. It takes the lease on the
identity, fetches and verifies the inputs, runs the stage, validates and puts the artifact, and adds
the record. The record is the commit: a process that ends without one has failed, whatever its exit
code. Of several processes (group.py) the first does all that; the others only train.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from llm_assets.artifacts import check_artifact
from llm_assets.compatibility import MODEL_TYPES
from llm_assets.errors import ConflictError, LlmAssetsError, StoreError
from llm_assets.graph import STAGES, Stage
from llm_assets.group import (
    END,
    GO,
    SilentProgress,
    end_with_launcher,
    first_word,
    is_lost_process,
    lost_process_text,
    tell_others,
    use_own_device,
)
from llm_assets.identity import Source
from llm_assets.interruption import Interruption, Terminated
from llm_assets.jobs import StageJob
from llm_assets.places import work_folder
from llm_assets.process_names import process_name
from llm_assets.ranks import PartDone, rank, world_size
from llm_assets.reporting import Reporter
from llm_assets.reverifying import record_probe
from llm_assets.save_copies import copies_for
from llm_assets.spending import Spending, follow_spending
from llm_assets.stage_job import checked_source, record_of, stage_context, stage_entry_point
from llm_assets.stages.context import StageResult
from llm_assets.store import open_store
from llm_assets.store.digest import ArtifactHash, Identity
from llm_assets.store.protocol import Lease, Record, Store
from llm_assets.telemetry import StageSpan, stage_span
from llm_assets.worker_codes import BUSY, INTERRUPTED, LOST_PROCESS

LEASE_TTL_S = 60.0


_INTERRUPTION = Interruption(grace_s=float(os.environ.get("LLM_ASSETS_GRACE_S", "15")))
"""Of this process: a training saves before it ends."""


@contextlib.contextmanager
def _heartbeat(lease: Lease) -> Iterator[None]:
    """Renew the lease while the stage runs; end the process when somebody took it over."""
    done = threading.Event()

    def beat() -> None:
        while not done.wait(LEASE_TTL_S / 4):
            try:
                lease.renew()
            except ConflictError:
                _INTERRUPTION.end_at_once()
                os.kill(os.getpid(), signal.SIGTERM)
                return
            except LlmAssetsError as error:
                print(f"heartbeat: {error}", file=sys.stderr, flush=True)

    thread = threading.Thread(target=beat, name="lease-heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(timeout=5)
        lease.release()


def run_job(job: StageJob, store: Store, reporter: Reporter) -> int:
    """Run one stage to its record. 0 when the record stands, BUSY when another worker is at it."""
    stage = STAGES[job.stage]
    source = checked_source(job, stage)
    identity = Identity.parse(job.identity)
    owner = f"{process_name()}:{uuid.uuid4().hex[:8]}"
    lease = store.acquire(f"stage/{identity}", owner=owner, ttl_s=LEASE_TTL_S)
    if lease is None:
        tell_others(END)
        return BUSY
    with _heartbeat(lease):
        if _is_answered(job, store):
            tell_others(END)
            return 0
        with (
            follow_spending(job, store, reporter) as spending,
            stage_span(job, reporter.say) as span,
            _work_folder(job) as work,
        ):
            record = _run_stage(job, store, stage, source, lease, work, reporter, spending)
            _describe(span, record, store.tree(record.output).metadata)
    return 0


def train_along(job: StageJob, store: Store) -> int:
    """The part of a process that is not the first: the stage's training, nothing else."""
    stage = STAGES[job.stage]
    checked_source(job, stage)
    if first_word() == END:
        return 0
    with _work_folder(job) as work:
        context = stage_context(
            job,
            store,
            work,
            checkpoints=store.checkpoints(Identity.parse(job.identity)),
            progress=SilentProgress(),
            should_stop=lambda: None,
            interruption=_INTERRUPTION,
        )
        with contextlib.suppress(PartDone):
            stage_entry_point(job)(context)
    return 0


def _is_answered(job: StageJob, store: Store) -> bool:
    """Another process made the record while this one was on its way."""
    records = store.records(Identity.parse(job.identity))
    if job.replay:
        records = [r for r in records if r.environment.get("replay") == job.replay]
    else:
        records = records[job.skip_records :]
    return any(store.has(record.output) for record in records)


def _describe(span: StageSpan, record: Record, metadata: Mapping[str, Any]) -> None:
    """What a span says of a stage that ended well."""
    losses = record.series.get("loss", ())
    span.set(
        parameters=metadata.get("num_parameters"),
        tokens=record.tokens,
        flops=record.flops,
        loss=float(losses[-1][1]) if losses else None,
        cost_usd=record.cost_usd,
        wall_s=record.wall_s,
        artifact=record.output,
    )


def _run_stage(
    job: StageJob,
    store: Store,
    stage: Stage,
    source: Source,
    lease: Lease,
    work: Path,
    reporter: Reporter,
    spending: Spending,
) -> Record:
    started = time.monotonic()
    identity = Identity.parse(job.identity)
    checkpoints = store.checkpoints(identity)
    copies = copies_for(store, identity, checkpoints, reporter.say) if stage.trains else None
    context = stage_context(
        job,
        store,
        work,
        checkpoints=checkpoints,
        progress=reporter,
        should_stop=spending.should_stop,
        interruption=_INTERRUPTION,
        copies=copies,
    )
    tell_others(GO)
    result: StageResult = stage_entry_point(job)(context)
    metadata = dict(result.metadata)
    check_artifact(context.out, stage.gives, metadata)
    reporter.say("storing the artifact")
    output = store.put(context.out, type=stage.gives, metadata=metadata)
    wall_s = time.monotonic() - started
    lease.check()
    record = record_of(job, source, stage, result, output, wall_s, reporter.measure_s, spending)
    if stage.gives in MODEL_TYPES:
        _probe(store, output)
    store.add_record(record, lease=lease)
    spending.finished(record.tokens, record.flops)
    # The record stands, so nothing will resume from these saves.
    shutil.rmtree(context.checkpoints, ignore_errors=True)
    if copies is not None:
        copies.clear()
    reporter.say(f"done: {output.short} in {wall_s:.1f} s")
    return record


def _probe(store: Store, output: ArtifactHash) -> None:
    """Keep the fresh checkpoint's number on the fixed batch, to be asked for again later. It is
    read from the store, as every reader will; a number is no reason to lose a training."""
    from llm_assets.stages.probing import probe

    try:
        record_probe(store, output, probe(store.fetch(output)))
    except (StoreError, OSError, ValueError, RuntimeError) as error:
        print(f"no number on the fixed batch: {error}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _work_folder(job: StageJob) -> Iterator[Path]:
    base = work_folder()
    base.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(
        dir=base, prefix=f"{job.stage}-", ignore_cleanup_errors=True
    ) as folder:
        yield Path(folder)


def _main_with(document: Mapping[str, Any], progress: Path | None, log: Any) -> int:
    job = StageJob.from_json(document)
    reporter = Reporter(stage=job.stage, path=progress, log=log, usd_per_hour=job.usd_per_hour)
    code = _guarded(job, reporter)
    if world_size() > 1 and rank() == 0:
        # The launcher has an exit code of its own.
        reporter.ended(code)
        return 0 if code == BUSY else code
    return code


def _guarded(job: StageJob, reporter: Reporter) -> int:
    """The exit code; what went wrong is reported, once."""
    try:
        use_own_device()
        store = open_store(job.store_url)
        return run_job(job, store, reporter) if rank() == 0 else train_along(job, store)
    except Terminated as ended:
        how = f", {ended}" if ended.args else ""
        if rank() == 0:
            reporter.failed("Terminated", f"{job.stage}: stopped by SIGTERM{how}")
        return INTERRUPTED
    except LlmAssetsError as error:
        reporter.failed(type(error).__name__, str(error))
        return 1
    except Exception as error:
        traceback.print_exc()
        if is_lost_process(error):
            reporter.failed(LOST_PROCESS, f"{job.stage}: {lost_process_text(error)}")
        else:
            reporter.failed(type(error).__name__, f"{job.stage}: {type(error).__name__}: {error}")
        return 1


def main() -> int:
    """Entry point of the worker process."""
    parser = argparse.ArgumentParser(prog="python -m llm_assets.worker", description=__doc__)
    parser.add_argument("--job", type=Path, help="a job file; without it, Dagster Pipes")
    parser.add_argument("--progress", type=Path, help="append progress as JSON lines to this file")
    arguments = parser.parse_args()
    _INTERRUPTION.install()
    end_with_launcher(_INTERRUPTION)
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if arguments.job is not None:
        document = json.loads(arguments.job.read_text())
        return _main_with(document, arguments.progress, print)
    from dagster_pipes import (
        PipesDefaultContextLoader,
        PipesEnvVarParamsLoader,
        open_dagster_pipes,
    )

    if rank() > 0:
        # Only the first process writes messages.
        params = PipesEnvVarParamsLoader().load_context_params()  # type: ignore[no-untyped-call]
        with PipesDefaultContextLoader().load_context(params) as context:
            return _main_with((context["extras"] or {})["job"], arguments.progress, print)
    with open_dagster_pipes() as pipes:
        return _main_with(pipes.extras["job"], arguments.progress, pipes.log.info)


if __name__ == "__main__":
    sys.exit(main())
