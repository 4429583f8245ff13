"""Gates of stages 1 to 3: a tokenizer that loses text, a template whose answers cannot be told."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from llm_assets.stage_settings import TokenizerSettings
from llm_assets.stages import tokenizer
from llm_assets.stages.context import StageContext
from tests.gates.data_parts import failed
from tests.stages.conftest import make_context as make_context
from tests.stages.pretraining_parts import (
    Make,
    make_shards,
    make_tokenizer,
    make_vocabulary,
    write_corpus,
)

GATES = {
    "round_trip": {"min": 1.0},
    "special_tokens": {"min": 1.0},
    "answer_mask": {"min": 1.0},
}
# Earlier answers are written otherwise once another turn follows: no prefix of the whole.
REWRITES = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% if m['role'] == 'assistant' and not loop.last %} (earlier){% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def words(make_context: Make, tmp_path: Path) -> Path:
    return make_vocabulary(make_context, write_corpus(tmp_path / "corpus")).out


def run(make_context: Make, words: Path, template: str) -> StageContext:
    context = make_context(
        "tokenizer",
        TokenizerSettings(chat_template=template),
        inputs={"vocabulary": (words, "vocabulary")},
        name=f"t{len(template)}",
    )
    return context


def test_chatml_passes(make_context: Make, words: Path) -> None:
    result = tokenizer.run(run(make_context, words, "chatml"))
    assert failed(result.metrics, GATES) == set()
    assert all(row["right"] for row in result.tables["answer_mask"])


def test_a_template_that_rewrites_earlier_answers(make_context: Make, words: Path) -> None:
    result = tokenizer.run(run(make_context, words, REWRITES))
    assert failed(result.metrics, GATES) == {"answer_mask"}
    wrong = [row for row in result.tables["answer_mask"] if not row["right"]]
    assert wrong
    assert wrong[0]["learned"] != wrong[0]["wanted"]


def test_a_tokenizer_that_loses_case(make_context: Make, words: Path, tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    whole = make_tokenizer(make_context, words)
    result, _ = make_shards(make_context, corpus, whole, name="good")
    assert failed(result.metrics, {"round_trip": {"min": 1.0}}) == set()
    lossy = tmp_path / "lossy"
    shutil.copytree(whole, lossy)
    document = json.loads((lossy / "tokenizer.json").read_text())
    document["normalizer"] = {"type": "Lowercase"}
    (lossy / "tokenizer.json").write_text(json.dumps(document))
    result, _ = make_shards(make_context, corpus, lossy, name="bad")
    assert failed(result.metrics, {"round_trip": {"min": 1.0}}) == {"round_trip"}
    shown = result.tables["round_trip"][0]
    assert shown["comes_back_as"] == shown["text"].lower() != shown["text"]
