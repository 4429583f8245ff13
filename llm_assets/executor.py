"""The executor of all jobs: steps on threads of the run's process, workers as processes."""

from typing import Any

from dagster import ExecutorDefinition, Field, InitExecutorContext, Int, executor
from dagster._core.execution.retries import RetryMode

from llm_assets.compat import SlotFree, ThreadExecutor


def build_executor(slot_free: SlotFree | None = None) -> ExecutorDefinition:
    """The executor. `slot_free`: which assets of a pool start without one of its slots now."""

    @executor(
        name="threads",
        config_schema={
            "max_concurrent": Field(
                Int, default_value=2, description="Steps that run at the same time."
            )
        },
    )
    def thread_executor(context: InitExecutorContext) -> Any:
        """Steps wait for worker processes; threads are enough for that, and start at once."""
        limit = int(str(context.executor_config["max_concurrent"]))
        return ThreadExecutor(RetryMode.ENABLED, limit, slot_free)

    return thread_executor
