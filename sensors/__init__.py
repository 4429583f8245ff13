"""Dagster sensors and schedules."""

from llm_assets.sensors.failures import build_failure_sensor
from llm_assets.sensors.schedules import build_schedules
from llm_assets.sensors.upkeep import build_upkeep

__all__ = ["build_failure_sensor", "build_schedules", "build_upkeep"]
