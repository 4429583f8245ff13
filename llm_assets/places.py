"""Where things are on this machine: the project, the store, Dagster's home."""

from __future__ import annotations

import os
from pathlib import Path

_MARKS = ("workspace.yaml", "pyproject.toml", ".git")


def project_folder() -> Path:
    """The nearest folder upward of the current one that looks like a project; else the current."""
    here = Path.cwd()
    for folder in (here, *here.parents):
        if any((folder / mark).exists() for mark in _MARKS):
            return folder
    return here


def home() -> Path:
    """`$LLM_ASSETS_HOME`, or `.llm-assets` in the project: store, work folders, logs."""
    given = os.environ.get("LLM_ASSETS_HOME")
    return Path(given).absolute() if given else project_folder() / ".llm-assets"


def store_url() -> str:
    """`$LLM_ASSETS_STORE` (a folder or s3://bucket/prefix), or `store` in the home."""
    return os.environ.get("LLM_ASSETS_STORE") or str(home() / "store")


def work_folder() -> Path:
    """Where workers build artifacts before they are put."""
    return home() / "work"


def dagster_home() -> Path:
    """`$DAGSTER_HOME`, or `.dagster_home` in the project, with telemetry off."""
    given = os.environ.get("DAGSTER_HOME")
    return Path(given).absolute() if given else project_folder() / ".dagster_home"


def ensure_dagster_home() -> Path:
    """Dagster's home, made with a dagster.yaml when it is new; exported to child processes."""
    folder = dagster_home()
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "dagster.yaml"
    if not config.exists():
        config.write_text(
            "telemetry:\n  enabled: false\n"
            "nux:\n  enabled: false\n"
            "concurrency:\n  pools:\n    default_limit: 2\n    granularity: op\n"
        )
    os.environ["DAGSTER_HOME"] = str(folder)
    return folder
