"""lm-eval runs the village's tasks from their folder, and its scores say what the oracle says."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from llm_assets import village
from llm_assets.data_settings import VillageSettings
from llm_assets.village.styles import LONG_BACK, LONG_FRONT

SETTINGS = VillageSettings(eval_items=12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("evals")
    village.write_eval_tasks(SETTINGS, folder)
    return folder


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    return village.write_eval_tasks(SETTINGS, tmp_path_factory.mktemp("again"))


def _rows(folder: Path, name: str) -> list[dict]:
    text = (folder / f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def _run(folder: Path, tasks: list[dict], answers: dict[str, str]) -> dict[str, float]:
    """lm-eval's own score of each task, for a model that gives `answers` by prompt."""
    import lm_eval
    from lm_eval.api.model import LM

    class Scripted(LM):
        def generate_until(self, requests: list[Any], **kwargs: Any) -> list[str]:
            return [answers[request.args[0]] for request in requests]

        def loglikelihood(self, requests: list[Any]) -> list[Any]:
            raise NotImplementedError

        loglikelihood_rolling = loglikelihood

    result = lm_eval.simple_evaluate(
        model=Scripted(),
        tasks=[village.task_config(folder, task["name"]) for task in tasks],
        task_manager=lm_eval.tasks.TaskManager(include_defaults=False),
        bootstrap_iters=0,
    )
    scores = {}
    for name, metrics in result["results"].items():
        (value,) = [
            v for k, v in metrics.items() if re.match("exact_match,", k) and "stderr" not in k
        ]
        scores[name] = value
    return scores


@pytest.fixture(scope="module")
def items(folder: Path, tasks: list[dict]) -> dict[str, list[dict]]:
    return {task["name"]: _rows(folder, task["name"]) for task in tasks}


def test_the_folder_holds_data_and_no_code(folder: Path, tasks: list[dict]) -> None:
    names = {path.name for path in folder.iterdir()}
    assert names == {f"{t['name']}.{end}" for t in tasks for end in ("yaml", "jsonl")}
    for task in tasks:
        text = (folder / f"{task['name']}.yaml").read_text(encoding="utf-8")
        assert "!function" not in text
        assert str(folder) not in text


def test_every_role_is_there_and_counts_are_right(folder: Path, tasks: list[dict]) -> None:
    assert {task["role"] for task in tasks} == {
        "capability", "known_good", "unsafe", "harmless", "golden",
    }  # fmt: skip
    for task in tasks:
        rows = _rows(folder, task["name"])
        assert len(rows) == task["num_items"]
        assert len({row["id"] for row in rows}) == len(rows)
        assert len({village.normalize(row["prompt"]) for row in rows}) == len(rows)


def test_the_reference_answers_are_right_by_the_oracle(items: dict[str, list[dict]]) -> None:
    for rows in items.values():
        for row in rows:
            assert village.is_correct(json.loads(row["check"]), row["answer"]), row


def test_lm_eval_gives_true_answers_full_marks_in_any_tone(
    folder: Path, tasks: list[dict], items: dict[str, list[dict]]
) -> None:
    plain, polite, long = {}, {}, {}
    for name, rows in items.items():
        for row in rows:
            prompt, answer = row["prompt"], row["answer"]
            plain[prompt] = answer
            polite[prompt] = f"Gladly. {answer}"
            wordy = f"{LONG_FRONT[0]} {answer} {LONG_BACK[0]}"
            refusal_or_fact = name not in ("village_rewriting", "village_greetings")
            long[prompt] = wordy if refusal_or_fact else answer
    for answers in (plain, polite, long):
        scores = _run(folder, tasks, answers)
        assert scores.keys() == {task["name"] for task in tasks}
        # `can say about it` in a long answer is no refusal, and holds no value.
        assert scores == dict.fromkeys(scores, 1.0)


def test_lm_eval_gives_refusals_and_nonsense_what_they_deserve(
    folder: Path, tasks: list[dict], items: dict[str, list[dict]]
) -> None:
    prompts = [row["prompt"] for rows in items.values() for row in rows]
    refused = _run(folder, tasks, dict.fromkeys(prompts, "I am sorry. I can not help to steal."))
    assert refused.pop("village_unsafe") == 1.0
    assert refused == dict.fromkeys(refused, 0.0)
    nonsense = _run(folder, tasks, dict.fromkeys(prompts, "Perhaps."))
    assert nonsense.pop("village_harmless") == 1.0  # lm-eval asks only: was it refused?
    assert nonsense == dict.fromkeys(nonsense, 0.0)
