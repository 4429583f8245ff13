"""lm-eval for real, on two small models of which one knows the answers."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import pytest
from tiny_chat import save_chat_model, write_evals

from llm_assets.artifacts import check_artifact
from llm_assets.errors import DataError, ModelError
from llm_assets.stage_settings import EvalSettings
from llm_assets.stages.context import StageContext, StageResult
from llm_assets.stages.eval_report import run

# lm-eval's imports warn (scikit-learn, sacrebleu, multiprocess), and it leaves a file open.
pytestmark = pytest.mark.filterwarnings("ignore")

Make = Callable[..., StageContext]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {
        "good": save_chat_model(tmp_path_factory.mktemp("good"), steps=150),
        "poor": save_chat_model(tmp_path_factory.mktemp("poor"), steps=12),
    }


@pytest.fixture(scope="module")
def evals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_evals(tmp_path_factory.mktemp("evals"))


@pytest.fixture
def evaluate(make_context: Make, models: dict[str, Path], evals: Path) -> Callable[..., tuple]:
    def make(
        policy: str, reference: str, name: str = "", folder: Path = evals, **settings
    ) -> tuple[StageContext, StageResult]:
        context = make_context(
            "eval_report",
            EvalSettings(**{"max_new_tokens": 16, "kl_prompts": 8, **settings}),
            inputs={
                "refined_policy": (models[policy], "policy", policy * 16),
                "sft_checkpoint": (models[reference], "sft_checkpoint", reference * 16),
                "evals": (folder, "evals", "e" * 64),
            },
            name=name,
        )
        return context, run(context)

    return make


@pytest.fixture
def make_context(make_context: Make) -> Make:
    """The shared one, with artifact hashes of their own: the stage compares them."""
    from dataclasses import replace

    def make(stage, config, *, inputs, name=""):
        context = make_context(
            stage, config, inputs={key: entry[:2] for key, entry in inputs.items()}, name=name
        )
        named = {
            key: replace(entry, artifact=inputs[key][2]) for key, entry in context.inputs.items()
        }
        return replace(context, inputs=named)

    return make


def test_a_policy_that_learned_is_better_than_one_that_did_not(evaluate):
    context, result = evaluate("good", "poor")
    check_artifact(context.out, "eval_report", result.metadata)
    metrics = result.metrics
    # Two tasks of equal weight: all facts right, the choices asked in a form it never saw.
    assert metrics["capability"].value >= 0.7
    assert metrics["capability"].n == 12
    assert metrics["capability_reference"].value < 0.5
    assert metrics["capability_delta"].value == pytest.approx(
        metrics["capability"].value - metrics["capability_reference"].value, abs=2e-6
    )
    low, high = metrics["capability_delta_low"].value, metrics["capability_delta_high"].value
    assert low < metrics["capability_delta"].value < high
    # It was never taught to refuse: both rates say so.
    assert metrics["refusal_rate"].value == 0.0
    assert metrics["overrefusal_rate"].value == 0.0
    assert metrics["overrefusal_rate"].n == 1
    assert metrics["kl_per_token"].value > 0.1
    assert metrics["kl_per_sequence"].value > metrics["kl_per_token"].value
    assert metrics["regression_rate"].value == metrics["num_regressions"].value / 14
    assert metrics["oracle_win_rate"].value > 0.5


def test_the_report_holds_every_answer(evaluate):
    context, _ = evaluate("good", "poor")
    report = json.loads((context.out / "report.json").read_text())
    facts = report["items"]["facts"]
    assert [row["policy"]["answer"] for row in facts[:2]] == ["Anna is a baker.", "Bob is a smith."]
    assert [row["target"] for row in facts[:2]] == ["baker", "smith"]
    choices = report["items"]["choices"]
    assert choices[2]["target"] == "Carl is a sailor."
    for row in choices:
        assert re.fullmatch(r"\w+ is a (baker|smith|sailor)\.", row["policy"]["answer"])
        assert row["policy"]["passed"] == (row["policy"]["answer"] == row["target"])
    tasks = {task["name"]: task for task in report["tasks"]}
    assert tasks["choices"]["metric"] == "acc"
    assert tasks["facts"]["metric"] == "correct"
    assert tasks["unsafe"]["metric"] == "refused"
    assert tasks["facts"]["num_items"] == 6
    assert tasks["facts"]["policy"]["value"] == 1.0
    assert 0.6 < tasks["facts"]["policy"]["low"] < 0.7


def test_what_was_lost_is_listed_item_by_item(evaluate):
    context, result = evaluate("poor", "good")
    report = json.loads((context.out / "report.json").read_text())
    lost = {row["id"] for row in report["regressions"]}
    assert result.metrics["num_regressions"].value == len(lost) > 0
    assert result.metrics["capability_delta"].value < 0
    facts = report["items"]["facts"]
    assert {row["id"] for row in facts if row["policy"]["passed"] == 0} <= lost
    page = (context.out / "report.html").read_text()
    assert f"Regressions ({len(lost)})" in page
    assert "wanted: baker" in page


def test_the_same_weights_give_the_same_bytes(evaluate):
    first, _ = evaluate("good", "poor", "first")
    second, _ = evaluate("good", "poor", "second")
    for name in ("report.json", "report.html"):
        assert (first.out / name).read_bytes() == (second.out / name).read_bytes()


def test_a_policy_that_is_the_reference_differs_in_nothing(evaluate):
    context, result = evaluate("good", "good")
    assert result.metrics["kl_per_token"].value == pytest.approx(0.0, abs=1e-9)
    assert result.metrics["capability_delta"].value == 0.0
    assert "The policy is the reference itself" in (context.out / "report.html").read_text()


def test_limit_takes_the_first_items(evaluate):
    context, result = evaluate("good", "poor", limit=2)
    assert result.metrics["capability"].n == 4
    assert "on the first 2 items" in (context.out / "report.html").read_text()


class _Page(HTMLParser):
    """Counts what is open at the end, and keeps all attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.tags: set[str] = set()

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        if tag not in ("meta", "br", "circle", "line"):
            self.open.append(tag)
        self.links += [value for key, value in attrs if key in ("src", "href", "srcset")]

    def handle_startendtag(self, tag, attrs):
        self.tags.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_and_loads_nothing(evaluate):
    context, _ = evaluate("good", "poor")
    text = (context.out / "report.html").read_text()
    page = _Page()
    page.feed(text)
    assert page.open == []
    assert {"svg", "table", "details", "style"} <= page.tags
    assert not {"script", "img", "link", "iframe"} & page.tags
    assert all(link.startswith("#") for link in page.links)
    assert "url(" not in text and "@import" not in text
    assert "prefers-color-scheme: dark" in text
    assert not re.search(r"https?://", text)


def test_what_a_model_says_is_text_and_never_markup(evaluate, evals, tmp_path):
    folder = shutil.copytree(evals, tmp_path / "evals")
    rows = [json.loads(line) for line in (folder / "unsafe.jsonl").read_text().splitlines()]
    rows[0]["prompt"] = "<script>alert('x')</script> & \"so\""
    (folder / "unsafe.jsonl").write_text(json.dumps(rows[0]) + "\n")
    context, _ = evaluate("good", "poor", folder=folder, limit=1)
    text = (context.out / "report.html").read_text()
    assert "<script>" not in text
    assert "&lt;script&gt;alert(&#x27;x&#x27;)&lt;/script&gt; &amp; &quot;so&quot;" in text


@pytest.mark.parametrize("text", ["", "[]", "{}", "[1]", '[{"name": "gone", "role": "x"}]'])
def test_a_task_list_that_is_none_is_refused(evaluate, tmp_path, text):
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "tasks.json").write_text(text)
    with pytest.raises(DataError, match=r"tasks\.json lists"):
        evaluate("good", "poor", folder=tmp_path / "odd")


def test_answers_longer_than_the_context_are_refused(evaluate):
    with pytest.raises(ModelError, match=r"128, and a model that reads 128 tokens"):
        evaluate("good", "poor", max_new_tokens=128)


@pytest.mark.slow
def test_an_unknown_task_of_lm_eval_is_refused(evaluate):
    with pytest.raises(DataError, match="no lm-eval task hellaswagg"):
        evaluate("good", "poor", tasks=["hellaswagg"])
