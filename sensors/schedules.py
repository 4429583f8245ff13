"""Schedules: off until somebody switches them on in the UI."""

from collections.abc import Mapping
from typing import Any

from dagster import DefaultScheduleStatus, ScheduleDefinition


def build_schedules(pipeline: str, jobs: Mapping[str, Any]) -> list[ScheduleDefinition]:
    """The weekly alignment of one pipeline: Mondays, 03:00."""
    return [
        ScheduleDefinition(
            name=f"{pipeline}_weekly_alignment",
            job=jobs[f"{pipeline}_alignment"],
            cron_schedule="0 3 * * 1",
            default_status=DefaultScheduleStatus.STOPPED,
            description="Fine-tuning to release on whatever changed during the week.",
        )
    ]
