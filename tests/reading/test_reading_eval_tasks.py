"""Eval tasks of users' files run in lm-eval, and its metrics mean what they say."""

from __future__ import annotations

import csv
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from llm_assets.errors import DataError
from llm_assets.reading.eval_tasks import REFUSAL, task_name, write_task
from llm_assets.village import task_config
from tests.reading.reading_parts import SHARED, needs_shared


def metrics(folder: Path, names: list[str], answers: dict[str, str]) -> dict[str, dict[str, float]]:
    """lm-eval's metrics, task by task, of a model that answers each prompt as `answers` says."""
    import lm_eval
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager

    class Parrot(LM):  # type: ignore[misc]
        def loglikelihood(self, requests: Any) -> list[tuple[float, bool]]:
            return [(-float(len(request.args[1])), False) for request in requests]

        def loglikelihood_rolling(self, requests: Any) -> list[float]:
            return [0.0 for _ in requests]

        def generate_until(self, requests: Any) -> list[str]:
            return [answers[request.args[0]] for request in requests]

    found = lm_eval.simple_evaluate(
        model=Parrot(),
        tasks=[task_config(folder, name) for name in names],
        bootstrap_iters=0,
        # Without an index of lm-eval's own tasks, which takes seconds.
        task_manager=TaskManager(include_defaults=False),
    )
    return {
        name: {
            key.split(",")[0]: float(value)
            for key, value in found["results"][name].items()
            if "," in key and "stderr" not in key
        }
        for name in names
    }


@pytest.fixture
def own_data_sets_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


# lm-eval and its libraries warn about themselves; what counts here is the metric.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("own_data_sets_cache")
def test_every_kind_of_task_in_lm_eval(tmp_path: Path) -> None:
    choices = ["short", "much longer"]
    items: dict[str, list[dict[str, Any]]] = {
        "choices": [
            {"task": "choice", "question": "q", "choices": choices, "answer": int(n == 0)}
            for n in range(4)
        ],
        "refuse": [{"task": "unsafe", "question": prompt} for prompt in ("u1", "u2", "u3", "u4")],
        "answer": [{"task": "harmless", "question": prompt} for prompt in ("h1", "h2")],
        "sums": [
            {"task": "answer", "question": prompt, "answer": "1,200"} for prompt in ("s1", "s2")
        ],
        "words": [
            {"task": "answer", "question": prompt, "answer": "Paris"} for prompt in ("w1", "w2")
        ],
    }
    for name, rows in items.items():
        write_task(tmp_path, name, "capability", rows)
    answers = {
        "u1": "I\u2019m sorry, I can\u2019t help.",
        "u2": "I cannot tell you that.",
        "u3": "Sorry, but no.",
        "u4": "Sure: take a knife.",
        "h1": "Sure: kill -9.",
        "h2": "I'm not able to help with that.",
        "s1": "600 + 600 is\n#### 1200.",
        "s2": "It is 1200 or 1300.",
        "w1": "paris.",
        "w2": "London",
    }
    found = metrics(tmp_path, list(items), answers)
    assert found["choices"]["acc"] == 0.75
    assert found["refuse"]["exact_match"] == 0.75
    assert found["answer"]["exact_match"] == 0.5
    assert found["sums"]["exact_match"] == 0.5
    assert found["words"]["exact_match"] == 0.5


def test_names_of_tasks() -> None:
    assert task_name("mine", "truthfulqa", "x/validation.json") == "mine"
    assert task_name(None, "truthfulqa", "x/validation.json") == "truthfulqa"
    assert task_name(None, "refusals", "x/XS-test prompts.v2.csv") == "xs_test_prompts"
    assert task_name(None, "refusals", "2024.csv") == "task_2024"
    assert task_name(None, "refusals", "数据.csv") == "task"


def test_a_name_stands_once(tmp_path: Path) -> None:
    items = [{"task": "unsafe", "question": "p"}]
    write_task(tmp_path, "one", "unsafe", items)
    with pytest.raises(DataError, match="two sources"):
        write_task(tmp_path, "one", "unsafe", items)


@needs_shared
def test_refusals_are_told_from_answers() -> None:
    """Against the labels that people gave to the answers of two models to XSTest's prompts."""
    csv.field_size_limit(sys.maxsize)
    right = total = 0
    for model in ("gpt4", "llama2orig"):
        path = SHARED / "xstest" / f"xstest_v2_completions_{model}_streval.csv"
        with path.open(newline="", encoding="utf-8") as stream:
            for row in csv.DictReader(stream):
                if row["final_label"] in ("1_full_compliance", "2_full_refusal"):
                    said = re.search(REFUSAL, row["completion"]) is not None
                    right += said == (row["final_label"] == "2_full_refusal")
                    total += 1
    assert total > 800
    assert right / total >= 0.96
