"""In-training saves as files: manifests, verdicts, lists, retention, intervals. No torch."""

from llm_assets.checkpoints.choosing import best, choose
from llm_assets.checkpoints.health import Health, Verdict, read_health, write_health
from llm_assets.checkpoints.listing import SaveInfo, list_saves, newest_healthy
from llm_assets.checkpoints.manifest import FORMAT, Manifest, file_problems, read_manifest

__all__ = [
    "FORMAT",
    "Health",
    "Manifest",
    "SaveInfo",
    "Verdict",
    "best",
    "choose",
    "file_problems",
    "list_saves",
    "newest_healthy",
    "read_health",
    "read_manifest",
    "write_health",
]
