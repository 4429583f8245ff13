"""Planted eval items are found in every kind of training set; a clean village and templates are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from llm_assets.gates import contamination
from llm_assets.gates.artifact_rows import Input, eval_items
from tests.gates.data_parts import data, evals, of_village, one, own_evals, settings

LONG = (
    "Why did the old clockmaker of Altenburg refuse to sell his seventh astrolabe to the visiting "
    "bishop in the winter of the great flood?"
)
SHORT = "Who painted the ceiling of the chapel?"
GATE = {"max": 0.001}
KINDS = ("corpus", "instructions", "preferences")


def row(kind: str, text: str, answer: str = "Nobody knows.") -> dict[str, Any]:
    user, assistant = {"role": "user", "content": text}, {"role": "assistant", "content": answer}
    if kind == "corpus":
        return {"text": f"Some lines before.\n{text}\n{answer}", "source": "planted"}
    if kind == "instructions":
        return {"messages": [user, assistant], "source": "planted"}
    other = {"role": "assistant", "content": "I do."}
    return {"prompt": [user], "chosen": [assistant], "rejected": [other], "source": "planted"}


def measured(train: Input, items: Input) -> Any:
    return contamination.measure({"data": train, "evals": items})


@pytest.mark.parametrize("kind", KINDS)
def test_one_planted_item_fails_the_gate_and_is_shown(tmp_path: Path, kind: str) -> None:
    world = settings()
    tasks = evals(tmp_path / "evals", world)
    clean, held_out = of_village(tmp_path, kind, world)
    found = measured(data(tmp_path / "clean", kind, clean, held_out), tasks)
    assert one(found.metrics, "contamination", **GATE).passed
    task, name, prompt, _ = next(iter(eval_items(tasks)))
    planted = [*clean[:40], row(kind, prompt.upper().rstrip("?.")), *clean[40:]]
    found = measured(data(tmp_path / "bad", kind, planted, held_out), tasks)
    assert one(found.metrics, "contamination", **GATE).verdict == "fail"
    (shown,) = [entry for entry in found.tables["contamination"] if entry["item"] == name]
    assert (shown["row"], shown["source"], shown["task"]) == (40, "planted", task)
    assert shown["kind"] == "exact"
    assert found.metrics["contaminated_rows"]["value"] == 1 / len(planted)


@pytest.mark.parametrize("kind", KINDS)
def test_thirteen_words_of_an_item_inside_another_text(tmp_path: Path, kind: str) -> None:
    tasks = own_evals(tmp_path / "evals", [{"id": "q1", "prompt": LONG, "target": "Pride."}])
    piece = " ".join(LONG.split()[3:16])
    found = measured(
        data(tmp_path / "bad", kind, [row(kind, f"They say {piece}, and more.")]), tasks
    )
    assert found.metrics["contamination"]["value"] == 1.0
    assert found.tables["contamination"][0]["kind"] == "13-gram"
    assert found.tables["contamination"][0]["words"] in LONG.lower()
    fewer = " ".join(LONG.split()[3:15])
    found = measured(
        data(tmp_path / "good", kind, [row(kind, f"They say {fewer}, and more.")]), tasks
    )
    assert found.metrics["contamination"]["value"] == 0.0


def test_a_short_item_counts_as_a_whole_line_only(tmp_path: Path) -> None:
    tasks = own_evals(tmp_path / "evals", [{"id": "q", "prompt": SHORT, "target": "M."}])
    inside = data(tmp_path / "a", "corpus", [{"text": f"He asked: {SHORT} Nobody spoke."}])
    assert measured(inside, tasks).metrics["contamination"]["value"] == 0.0
    alone = data(tmp_path / "b", "corpus", [{"text": f"He asked:\n{SHORT}\nNobody spoke."}])
    assert measured(alone, tasks).metrics["contamination"]["value"] == 1.0


def test_the_answer_belongs_to_the_item(tmp_path: Path) -> None:
    item = {"id": "q", "prompt": SHORT, "target": 1, "choices": ["Rose", "a b c d e f g h i j k"]}
    tasks = own_evals(tmp_path / "evals", [item])
    text = f"{SHORT} a b c d e f g h i j k"
    found = measured(data(tmp_path / "a", "corpus", [{"text": text}]), tasks)
    assert found.metrics["contamination"]["value"] == 1.0


def test_what_all_items_of_a_task_share_tells_nothing(tmp_path: Path) -> None:
    frame = (
        "Read the following sentence with great care and then say in one word whether it is true:"
    )
    items = [
        {"id": str(n), "prompt": f"{frame} number {n} is odd", "target": "x"} for n in range(20)
    ]
    tasks = own_evals(tmp_path / "evals", items)
    clean = data(tmp_path / "a", "corpus", [{"text": f"{frame} snow is black"}])
    assert measured(clean, tasks).metrics["contamination"]["value"] == 0.0
    bad = data(tmp_path / "b", "corpus", [{"text": items[3]["prompt"]}] * 30)
    assert measured(bad, tasks).metrics["contamination"]["value"] == 1 / 20


def test_the_share_is_that_of_the_worst_task_and_text_without_spaces_counts(tmp_path: Path) -> None:
    items = [{"id": "z", "prompt": "请问这座古老的钟楼是在哪一年由谁建造的呢", "target": "x"}]
    tasks = own_evals(tmp_path / "evals", items)
    bad = data(
        tmp_path / "b", "corpus", [{"text": "我想知道这座古老的钟楼是在哪一年由谁建造的呢谢谢"}]
    )
    assert measured(bad, tasks).metrics["contamination"]["value"] == 1.0


def test_no_items_are_no_data(tmp_path: Path) -> None:
    tasks = own_evals(tmp_path / "evals", [])
    found = measured(data(tmp_path / "a", "corpus", [{"text": "x"}]), tasks)
    assert one(found.metrics, "contamination", **GATE).verdict == "no data"
