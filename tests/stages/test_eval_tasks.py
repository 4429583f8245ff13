"""The prompts of the eval data."""

from __future__ import annotations

import json

from llm_assets.stages.eval_tasks import first_prompts


def test_first_prompts_take_each_task_in_turn_and_none_twice(tmp_path):
    for name, prompts in (("a", ["1", "2", "3"]), ("b", ["4"]), ("c", ["1", "5"])):
        rows = "".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts)
        (tmp_path / f"{name}.jsonl").write_text(rows)
    tasks = [{"name": "a"}, {"name": "b"}, {"name": "c"}]
    assert first_prompts(tmp_path, tasks, 4) == ["1", "4", "2", "5"]
    assert first_prompts(tmp_path, tasks, 99) == ["1", "4", "2", "5", "3"]
