"""The embedded village: a small world in which everything can be checked.

Seeded, and the same on every platform. `corpus_documents`, `instruction_rows`, `preference_rows`
and `write_eval_tasks` give the data; the oracle (`score`, `is_correct`, `is_refusal`) judges any
answer by a row's `check`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llm_assets.data_settings import VillageSettings
from llm_assets.village.corpus import corpus_texts
from llm_assets.village.evals import task_config, write_tasks
from llm_assets.village.instructions import instruction_rows_of
from llm_assets.village.oracle import OracleScore, is_correct, is_refusal, normalize, score
from llm_assets.village.preferences import Panel, preference_rows_of
from llm_assets.village.world import World, build_world

__all__ = [
    "OracleScore",
    "World",
    "corpus_documents",
    "instruction_rows",
    "is_correct",
    "is_refusal",
    "normalize",
    "preference_rows",
    "score",
    "task_config",
    "village_world",
    "write_eval_tasks",
]


def village_world(settings: VillageSettings) -> World:
    """Who lives there and what is true."""
    return build_world(settings.seed, settings.villagers)


def corpus_documents(settings: VillageSettings) -> Iterator[dict[str, Any]]:
    """Rows {text, source}: `settings.corpus_documents` documents, copies included."""
    for text in corpus_texts(village_world(settings), settings.corpus_documents):
        yield {"text": text, "source": "village"}


def instruction_rows(settings: VillageSettings) -> Iterator[dict[str, Any]]:
    """Rows {messages, kind, split, check}: `settings.instructions` in all, train first."""
    yield from instruction_rows_of(village_world(settings), settings.instructions)


def preference_rows(settings: VillageSettings) -> Iterator[dict[str, Any]]:
    """Rows {prompt, chosen, rejected, rubric, vendor, votes, true_choice, flaw, kind, split,
    check}: `settings.preferences` in all, train first. A vote's choice is chosen or rejected."""
    panel = Panel(
        settings.seed,
        settings.annotators,
        settings.annotator_error,
        biased=settings.length_biased_vendor,
    )
    yield from preference_rows_of(
        village_world(settings), settings.preferences, panel, settings.votes_per_pair
    )


def write_eval_tasks(settings: VillageSettings, folder: Path) -> list[dict[str, Any]]:
    """Write NAME.yaml and NAME.jsonl of each lm-eval task: rows {name, role, num_items}."""
    return write_tasks(village_world(settings), folder, settings.eval_items)
