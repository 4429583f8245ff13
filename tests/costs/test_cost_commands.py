from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from hand_clock import HandClock

from llm_assets.cli import main
from llm_assets.costs.ledger import open_attempt
from llm_assets.store import Store

QUESTION = {
    "--params": "7B",
    "--tokens": "2T",
    "--device": "H100",
    "--utilization": "0.40",
    "--rate": "2.50",
}


def ask(changes: dict[str, str | None], *more: str) -> int:
    """`estimate` with the check question, changed; None leaves an option out."""
    options = {**QUESTION, **changes}
    arguments = [
        part for name, value in options.items() if value is not None for part in (name, value)
    ]
    return int(main(["estimate", *arguments, *more]))


def test_the_check_value(capsys: pytest.CaptureFixture[str]) -> None:
    assert ask({}, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["flops"] == 8.4e22
    assert found["gpu_hours"] == pytest.approx(58_982, abs=1)
    assert found["cost_usd"] == pytest.approx(147_454, abs=2)
    assert found["wall_s"] == pytest.approx(58_982 * 3600, rel=1e-4)
    assert ask({"--devices": "1024"}) == 0
    text = capsys.readouterr().out
    assert "58,982 device-hours" in text
    assert "2.4 days" in text
    assert "147,455 USD" in text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"--rate": None}, "no rent is assumed"),
        ({"--tokens": None}, "--tokens: nothing"),
        ({"--device": None}, "--device: nothing"),
        ({"--params": None}, "--params: nothing"),
        ({"--tokens": "0"}, "--tokens: zero"),
        ({"--params": "-7B"}, "--params: a negative number"),
        ({"--rate": "-2.5"}, "--rate: a negative amount"),
        ({"--devices": "-1"}, "--devices: a negative number"),
        ({"--device": "H1000"}, "did you mean h100-sxm"),
        ({"--rate": "2.50 EUR"}, "the currency EUR"),
        ({"--utilization": "140%"}, "share of peak"),
        ({"--params": "many"}, "'many'"),
    ],
)
def test_wrong_usage_is_said_and_exits_2(
    changes: dict[str, str | None], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ask(changes, "--json") == 2
    shown = capsys.readouterr()
    assert said in shown.err
    assert shown.out == ""


def test_a_model_s_config_counts_its_parameters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "intermediate_size": 11008,
        "vocab_size": 32000,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert ask({"--params": None, "--config": str(tmp_path)}, "--json") == 0
    assert json.loads(capsys.readouterr().out)["params"] == 6_738_415_616
    assert ask({"--config": str(tmp_path)}) == 2
    assert "both" in capsys.readouterr().err


@pytest.fixture
def spent(store: Store, clock: HandClock, monkeypatch: pytest.MonkeyPatch) -> Store:
    """Two runs of two pipelines over midnight; one stage failed first."""
    monkeypatch.setenv("LLM_ASSETS_STORE", store.url)

    def one(run: str, stage: str, pipeline: str, seconds: float, **more: Any) -> None:
        error = more.pop("error", None)
        try:
            with open_attempt(
                store,
                run_id=run,
                stage=stage,
                pipeline=pipeline,
                campaign="spring",
                identity="i",
                device="h100-sxm",
                devices=1,
                usd_per_hour=3600.0,
                clock=clock,
                flush_every_s=0,
                **more,
            ) as attempt:
                clock.move(seconds)
                attempt.progress(tokens=100, flops=989e12 * seconds / 4)
                if error is not None:
                    raise error
        except ValueError:
            assert error is not None

    one("run-1", "sft_checkpoint", "tiny", 20, error=ValueError("no"), estimate_usd=30.0)
    one("run-1", "sft_checkpoint", "tiny", 40, estimate_usd=30.0)
    one("run-1", "dpo_policy", "tiny", 100)
    one("run-2", "dpo_policy", "big", 5)
    return store


@pytest.mark.parametrize(
    ("by", "expected"),
    [
        ("stage", {"dpo_policy": 105, "sft_checkpoint": 60}),
        ("run", {"run-1": 160, "run-2": 5}),
        ("pipeline", {"tiny": 160, "big": 5}),
        ("campaign", {"spring": 165}),
        ("day", {"2026-03-01": 60, "2026-03-02": 105}),
    ],
)
def test_costs_by_everything(
    spent: Store, by: str, expected: dict[str, float], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["costs", "--by", by, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {row[by]: row["cost_usd"] for row in document["rows"]} == pytest.approx(expected)
    assert document["total"]["cost_usd"] == pytest.approx(165)
    assert document["total"]["attempts"] == 4
    assert main(["costs", "--by", by, "--csv"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert {row[by]: float(row["cost_usd"]) for row in rows} == pytest.approx(expected)
    assert main(["costs", "--by", by]) == 0
    assert "165.00" in capsys.readouterr().out


def test_what_failed_and_what_was_estimated(
    spent: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["costs", "--json", "--pipeline", "tiny"]) == 0
    rows = {row["stage"]: row for row in json.loads(capsys.readouterr().out)["rows"]}
    sft = rows["sft_checkpoint"]
    assert (sft["wasted_usd"], sft["estimate_usd"], sft["attempts"]) == (20, 30, 2)
    assert sft["utilization"] == pytest.approx(0.25)
    assert rows["dpo_policy"]["estimate_usd"] is None
    assert rows["dpo_policy"]["cost_usd"] == pytest.approx(100)


def test_nothing_spent_yet(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LLM_ASSETS_STORE", store.url)
    assert main(["costs"]) == 0
    assert "nothing was spent yet" in capsys.readouterr().out
    assert main(["costs", "--run", "r9", "--pipeline", "tiny"]) == 0
    assert "no attempt of pipeline tiny, run r9" in capsys.readouterr().out
    assert main(["costs", "--csv"]) == 0
    assert capsys.readouterr().out.startswith("stage,attempts,")
    assert main(["costs", "--json", "--csv"]) == 2
    assert main(["costs", "--by", "moon"]) == 2


def test_the_budget_is_shown_and_set(
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("LLM_ASSETS_STORE", store.url)
    recipe = ["-r", "tiny"]
    assert main(["budget", "show", *recipe, "--json"]) == 0
    before = json.loads(capsys.readouterr().out)
    assert before["spent_usd"] == 0
    assert before["left_usd"] == before["limit_usd"] > 0
    assert before["changes"] == []
    assert main(["budget", "set", "123.50", *recipe, "--why", "a longer run", "--who", "ann"]) == 0
    assert "123.50 USD" in capsys.readouterr().out
    assert main(["budget", "show", *recipe, "--json"]) == 0
    after = json.loads(capsys.readouterr().out)
    assert after["limit_usd"] == 123.5
    change = after["changes"][-1]
    assert (change["who"], change["from"], change["to"], change["why"]) == (
        "ann",
        before["limit_usd"],
        123.5,
        "a longer run",
    )
    assert main(["budget", "show", *recipe]) == 0
    assert "ann (command): a longer run" in capsys.readouterr().out
    assert main(["budget", "set", "9", *recipe]) == 2  # no reason
    assert main(["budget", "set", "9 EUR", *recipe, "--why", "x"]) == 2
    capsys.readouterr()
    for limit in ("-5", "nan", "1e400", ""):
        assert main(["budget", "set", limit, *recipe, "--why", "x"]) == 2
        assert "LIMIT: " in capsys.readouterr().err
    for campaign in ("", " ", "a" * 400, "雪" * 100):
        for command in (["budget", "set", "5", "--why", "x"], ["budget", "show"], ["costs"]):
            assert main([*command, "--campaign", campaign]) == 2
            assert "a campaign has a name" in capsys.readouterr().err
    assert main(["budget", "set", "9", *recipe, "--campaign", "other", "--why", "new"]) == 0
    capsys.readouterr()
    assert main(["budget", "show", *recipe, "--campaign", "other", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["limit_usd"] == 9
