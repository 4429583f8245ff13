"""Dagster resources: the artifact store and the launcher of workers."""

from llm_assets.resources.launcher import LocalLauncher
from llm_assets.resources.store import StoreResource

__all__ = ["LocalLauncher", "StoreResource"]
