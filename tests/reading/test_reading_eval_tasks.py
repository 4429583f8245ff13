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


def metrics(folder: Path, name: str, answer: str) -> dict[str, float]:
    """lm-eval's metrics of a model that gives the same answer to everything."""
    import lm_eval
    from lm_eval.api.model import LM

    class Constant(LM):  # type: ignore[misc]
        def loglikelihood(self, requests: Any) -> list[tuple[float, bool]]:
            return [(-float(len(request.args[1])), False) for request in requests]

        def loglikelihood_rolling(self, requests: Any) -> list[float]:
            return [0.0 for _ in requests]

        def generate_until(self, requests: Any) -> list[str]:
            return [answer for _ in requests]

    found = lm_eval.simple_evaluate(
        model=Constant(), tasks=[task_config(folder, name)], bootstrap_iters=0
    )
    return {
        key.split(",")[0]: float(value)
        for key, value in found["results"][name].items()
        if "," in key and "stderr" not in key
    }


@pytest.fixture
def own_data_sets_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


# lm-eval and its libraries warn about themselves; what counts here is the metric.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("own_data_sets_cache")
def test_every_kind_of_task_in_lm_eval(tmp_path: Path) -> None:
    choice = [
        {"task": "choice", "question": "q", "choices": ["short", "much longer"], "answer": n % 2}
        for n in range(4)
    ]
    write_task(tmp_path, "choices", "capability", choice)
    assert metrics(tmp_path, "choices", "")["acc"] == 0.5
    unsafe = [{"task": "unsafe", "question": f"p{n}"} for n in range(2)]
    write_task(tmp_path, "refuse", "unsafe", unsafe)
    assert metrics(tmp_path, "refuse", "I\u2019m sorry, I can\u2019t help.")["exact_match"] == 1
    assert metrics(tmp_path, "refuse", "Sure: take a knife.")["exact_match"] == 0
    harmless = [{"task": "harmless", "question": "p"}]
    write_task(tmp_path, "answer", "harmless", harmless)
    assert metrics(tmp_path, "answer", "Sure: kill -9.")["exact_match"] == 1
    assert metrics(tmp_path, "answer", "I cannot help with that.")["exact_match"] == 0
    sums = [{"task": "answer", "question": "q", "answer": "1,200"}]
    write_task(tmp_path, "sums", "capability", sums)
    assert metrics(tmp_path, "sums", "600 + 600 is\n#### 1200.")["exact_match"] == 1
    assert metrics(tmp_path, "sums", "It is 1200 or 1300")["exact_match"] == 0
    words = [{"task": "answer", "question": "q", "answer": "Paris"}]
    write_task(tmp_path, "words", "capability", words)
    assert metrics(tmp_path, "words", "paris.")["exact_match"] == 1


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
