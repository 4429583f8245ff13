"""Private Dagster imports, each with the public way that is missing.

- `dagster_event_sequence_for_step`, `ExecuteRunWithPlanIterable`, `InstanceConcurrencyContext`,
  `PlanExecutionContextManager`: an executor that runs steps on threads of the run's process.
  Dagster has an in-process executor (one step at a time) and a multiprocess one (a fresh
  interpreter for each step: about 3 s each). Our heavy work runs in workers anyway, so threads that
  wait for them are enough. No public base for that exists.
- `capture_interrupts`, `pop_captured_interrupt`: how Dagster's own commands and executors turn a
  signal into the end of a run.
- `CachingStaleStatusResolver`, `LoadingContextForTest`: see `stale_statuses`.
- `free_concurrency_slots_for_run`: see `free_slots`.
- `InstanceConcurrencyContext.claim`: see `_Slots`.
- `wipe_input_asset_version_info`: see `forget_input_version`.
- `DagsterAssetCheckFailedError`: see `is_failed_check`.
"""

import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from dagster import (
    AssetKey,
    DagsterEvent,
    DagsterExecutionInterruptedError,
    DagsterRunStatus,
    Executor,
)
from dagster._core.definitions.data_version import CachingStaleStatusResolver
from dagster._core.errors import DagsterAssetCheckFailedError
from dagster._core.events import EngineEventData
from dagster._core.execution.api import ExecuteRunWithPlanIterable
from dagster._core.execution.context_creation_job import PlanExecutionContextManager
from dagster._core.execution.plan.execute_plan import dagster_event_sequence_for_step
from dagster._core.execution.plan.instance_concurrency_context import InstanceConcurrencyContext
from dagster._core.execution.retries import RetryMode
from dagster._core.loader import LoadingContextForTest
from dagster._utils.interrupts import capture_interrupts, pop_captured_interrupt

__all__ = [
    "SlotFree",
    "ThreadExecutor",
    "cancelled",
    "capture_interrupts",
    "forget_input_version",
    "free_slots",
    "is_failed_check",
    "stale_statuses",
]

_CANCELLED: dict[str, threading.Event] = {}
_DONE = object()

SlotFree = Callable[[AssetKey, Any, Mapping[str, str]], bool]
"""(asset, resources, tags of the run): the asset's step needs no slot of its pool now."""


def cancelled(run_id: str) -> bool:
    """The run was told to stop: whoever waits for a worker in one of its steps must end it."""
    event = _CANCELLED.get(run_id)
    return event is not None and event.is_set()


class ThreadExecutor(Executor):
    """Runs the steps of a run on threads of the run's process, as many at a time as it is told."""

    def __init__(
        self, retries: RetryMode, max_concurrent: int, slot_free: SlotFree | None = None
    ) -> None:
        self._retries = retries
        self._max_concurrent = max_concurrent
        self._slot_free = slot_free

    @property
    def retries(self) -> RetryMode:
        """How retries are handled."""
        return self._retries

    def execute(self, plan_context: Any, execution_plan: Any) -> Iterator[DagsterEvent]:
        """Run the plan to its end; yields events as they happen."""
        yield DagsterEvent.engine_event(
            plan_context,
            f"Executing steps on up to {self._max_concurrent} threads",
            event_specific_data=EngineEventData(),
        )
        yield from iter(
            ExecuteRunWithPlanIterable(
                execution_plan=plan_context.execution_plan,
                iterator=self._iterate,
                execution_context_manager=PlanExecutionContextManager(
                    job=plan_context.job,
                    retry_mode=plan_context.retry_mode,
                    execution_plan=plan_context.execution_plan,
                    run_config=plan_context.run_config,
                    dagster_run=plan_context.dagster_run,
                    instance=plan_context.instance,
                    raise_on_error=plan_context.raise_on_error,
                    output_capture=plan_context.output_capture,
                ),
            )
        )

    def _iterate(self, job_context: Any, execution_plan: Any) -> Iterator[DagsterEvent]:
        run_id = job_context.run_id
        _CANCELLED[run_id] = threading.Event()
        events: queue.Queue[tuple[str, object, Any]] = queue.Queue()
        try:
            with (
                _Slots(job_context, execution_plan, self._slot_free) as slots,
                execution_plan.start(
                    retry_mode=job_context.retry_mode,
                    max_concurrent=self._max_concurrent,
                    instance_concurrency_context=slots,
                ) as active,
                ThreadPoolExecutor(self._max_concurrent, thread_name_prefix="step") as pool,
            ):
                try:
                    yield from self._drive(job_context, active, pool, events)
                except BaseException:
                    # Leaving the pool waits for its threads, so tell them to end their workers.
                    _CANCELLED[run_id].set()
                    raise
        finally:
            _CANCELLED.pop(run_id, None)
            free_slots(job_context.instance, run_id)

    def _drive(
        self, job_context: Any, active: Any, pool: ThreadPoolExecutor, events: Any
    ) -> Iterator[DagsterEvent]:
        # Key to its newest attempt: a retry may start before the end of the attempt
        # that asked for it was seen here.
        running: dict[str, object] = {}
        while not active.is_complete or running:
            for step in active.get_steps_to_execute(limit=self._max_concurrent - len(running)):
                context = job_context.for_step(step, active.get_known_state())
                mark = object()
                running[step.key] = mark
                pool.submit(_run_step, context, step.key, mark, events)
            yield from active.concurrency_event_iterator(job_context)
            try:
                key, mark, event = events.get(timeout=0.2)
            except queue.Empty:
                if pop_captured_interrupt():
                    _mark_cancelling(job_context)
                    raise DagsterExecutionInterruptedError() from None
                continue
            if event is _DONE:
                if running.get(key) is mark:
                    del running[key]
                    active.verify_complete(job_context, key)
            elif isinstance(event, BaseException):
                raise event
            else:
                yield event
                active.handle_event(event)
                continue
            yield from active.plan_events_iterator(job_context)


class _Slots(InstanceConcurrencyContext):
    """Claims of pool slots, of which some steps need none.

    Dagster claims a slot for every step of a pooled asset before its body runs. A hit does no work,
    and would stand in line behind a run that trains. Asked again at each new try: what waits for a
    slot may have become a hit meanwhile.
    """

    def __init__(self, job_context: Any, plan: Any, slot_free: SlotFree | None) -> None:
        super().__init__(job_context.instance, job_context.dagster_run)
        self._job_context = job_context
        self._plan = plan
        self._slot_free = slot_free

    def claim(self, concurrency_key: str, step_key: str, step_priority: int = 0) -> bool:
        """Whether the step may start."""
        waits = step_key in self._pending_claims
        if waits and time.time() <= self._pending_timeouts[step_key]:
            return False
        if self._needs_none(step_key):
            if waits:
                self._instance.event_log_storage.free_concurrency_slot_for_step(
                    self._run_id, step_key
                )
                self._pending_claims.remove(step_key)
            return True
        return super().claim(concurrency_key, step_key, step_priority)

    def _needs_none(self, step_key: str) -> bool:
        if self._slot_free is None:
            return False
        node = self._plan.get_step_by_key(step_key).node_handle
        layer = self._job_context.job_def.asset_layer
        keys = layer.get_selected_entity_keys_for_node(node)
        assets = [key for key in keys if isinstance(key, AssetKey)]
        resources = self._job_context.scoped_resources_builder.build({"store"})
        tags = self._job_context.dagster_run.tags
        return bool(assets) and all(self._slot_free(key, resources, tags) for key in assets)


def free_slots(instance: Any, run_id: str) -> None:
    """Give back the pool slots that a run holds. Dagster frees a slot when its step ends; the steps
    of an interrupted or killed run never do, and the next run would wait for them for ever."""
    if instance.event_log_storage.supports_global_concurrency_limits:
        instance.event_log_storage.free_concurrency_slots_for_run(run_id)


def _mark_cancelling(job_context: Any) -> None:
    """A run that a person interrupted is cancelled; unmarked, Dagster calls it failed."""
    run = job_context.instance.get_run_by_id(job_context.run_id)
    if run is not None and run.status is DagsterRunStatus.STARTED:
        job_context.instance.report_run_canceling(run, "Interrupted.")


def _run_step(context: Any, key: str, mark: object, events: Any) -> None:
    """One attempt of a step on a thread: its events, then its end."""
    try:
        for event in dagster_event_sequence_for_step(context):
            events.put((key, mark, event))
    except BaseException as error:
        events.put((key, mark, error))
    else:
        events.put((key, mark, _DONE))


def forget_input_version(context: Any, key: Any) -> None:
    """Make Dagster read an input's data version again: it was observed inside this step, after
    Dagster had read it. No public way."""
    context.get_step_execution_context().wipe_input_asset_version_info(key)


def stale_statuses(instance: Any, defs: Any) -> dict[Any, str]:
    """Dagster's own staleness of every asset: FRESH, STALE or MISSING. Only its web server offers
    it."""
    graph = defs.resolve_asset_graph()
    resolver = CachingStaleStatusResolver(instance, graph, LoadingContextForTest(instance))
    return {key: resolver.get_status(key).value for key in graph.get_all_asset_keys()}


def is_failed_check(error: Any) -> bool:
    """A step ran to its end, and a blocking check of its asset failed. `error`: as an event has
    it, serialized."""
    return bool(error.cls_name == DagsterAssetCheckFailedError.__name__)
