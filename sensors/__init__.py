"""Dagster sensors and schedules."""

from llm_assets.sensors.schedules import build_schedules

__all__ = ["build_schedules"]
