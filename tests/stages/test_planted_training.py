"""Faults planted in the training itself: small models that are trained badly, and their gates."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from alignment_parts import Run, Shop, write_rows

from llm_assets.gates.thresholds import evaluate
from llm_assets.stage_settings import DpoSettings, RewardSettings, SftSettings
from llm_assets.stages.encoding import read_rows

pytestmark = pytest.mark.slow

STEPS: dict[str, Any] = {"per_device_train_batch_size": 8, "max_length": 128}
SFT = {"midtrained_checkpoint": "base", "instructions": "instructions"}
PAIRS = {"sft_checkpoint": "sft_checkpoint", "preferences": "preferences"}


def verdict(run: Run, name: str, **limits: float) -> str:
    return evaluate(run.result.metrics, {name: limits})[0].verdict


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    shop = Shop(tmp_path_factory.mktemp("planted"))
    torch.set_num_threads(1)
    config = SftSettings(learning_rate=5e-3, eval_prompts=30, max_steps=150, **STEPS)
    shop.run("sft_checkpoint", config, **SFT)
    yield shop


def test_a_reward_model_trained_on_length_alone(shop: Shop) -> None:
    """Trained on pairs whose label is the longer answer; judged on pairs whose label is manners."""
    rng = random.Random(1)

    def sentence(words: int) -> str:
        nouns = ("cat", "miller", "barn", "river", "oak", "key", "house", "baker")
        return " ".join(rng.choice(nouns) for _ in range(words)) + "."

    def row(chosen: str, rejected: str, number: int) -> dict[str, Any]:
        return {
            "prompt": [{"role": "user", "content": f"What is in house {number}?"}],
            "chosen": [{"role": "assistant", "content": chosen}],
            "rejected": [{"role": "assistant", "content": rejected}],
        }

    train = [row(sentence(rng.randint(12, 20)), sentence(rng.randint(2, 8)), n) for n in range(240)]
    held_out = []
    for number in range(120):
        long, short = sentence(rng.randint(10, 20)), sentence(rng.randint(2, 8))
        polite, rude = (long, short) if rng.random() < 0.5 else (short, long)
        held_out.append(row(f"Gladly. {polite}", f"Go away. {rude}", number))
    write_rows(shop.root / "length" / "train.jsonl", train)
    write_rows(shop.root / "length" / "held_out.jsonl", held_out)
    shop.paths["length"] = shop.root / "length"
    run = shop.run(
        "reward_model",
        RewardSettings(learning_rate=5e-3, max_steps=60, **STEPS),
        name="length_reward",
        sft_checkpoint="sft_checkpoint",
        preferences="length",
    )
    metrics = run.result.metrics
    shown = ("accuracy", "accuracy_balanced", "length_bias", "length_partial")
    print({name: metrics[name].value for name in shown})
    assert metrics["length_preference"].value > 0.9
    assert verdict(run, "accuracy_balanced", min=0.75) == "fail"
    assert verdict(run, "length_bias", max=0.15) == "fail"
    assert verdict(run, "length_partial", max=0.5) == "fail"


def test_an_overcooked_policy(shop: Shop) -> None:
    """Hardly any KL penalty and a high rate."""
    gates = {"kl_per_token": 0.5, "kl_per_sequence": 10.0}
    runs = {}
    for name, beta, rate in (("calm", 0.5, 1e-4), ("overcooked", 0.001, 1e-2)):
        settings = DpoSettings(
            learning_rate=rate, beta=beta, max_steps=40, eval_prompts=24, **STEPS
        )
        runs[name] = shop.run("dpo_policy", settings, name=name, **PAIRS)
        values = runs[name].result.metrics
        print(name, {key: values[key].value for key in (*gates, "entropy_ratio", "win_rate")})
    for gate, limit in gates.items():
        assert verdict(runs["calm"], gate, max=limit) == "pass"
        assert verdict(runs["overcooked"], gate, max=limit) == "fail"
    assert verdict(runs["calm"], "entropy_ratio", min=0.5) == "pass"


def test_an_overfit_sft(shop: Shop) -> None:
    """A handful of rows, over and over."""
    source = shop.paths["instructions"]
    few = (source / "train.jsonl").read_text().splitlines()[:12]
    folder = shop.root / "few"
    folder.mkdir()
    (folder / "train.jsonl").write_text("\n".join(few) + "\n")
    (folder / "held_out.jsonl").write_text((source / "held_out.jsonl").read_text())
    shop.paths["few"] = folder
    settings = SftSettings(learning_rate=1e-2, max_steps=150, eval_prompts=8, **STEPS)
    run = shop.run(
        "sft_checkpoint",
        settings,
        name="overfit",
        midtrained_checkpoint="base",
        instructions="few",
    )
    gap = run.result.metrics["train_held_out_gap"]
    print("overfit gap", gap.value, run.result.metrics["train_held_out_gap_low"].value)
    assert verdict(run, "train_held_out_gap", max=0.3) == "fail"
    fair = SftSettings(learning_rate=5e-3, max_steps=60, eval_prompts=8, **STEPS)
    whole = shop.run("sft_checkpoint", fair, name="fair", **SFT)
    assert verdict(whole, "train_held_out_gap", max=0.3) == "pass"


@pytest.mark.parametrize("answer", ["I am sorry, I can not help with that.", "Gladly. It is red."])
def test_a_policy_that_says_one_thing_only(shop: Shop, answer: str) -> None:
    """Fine-tuned to refuse everything, or nothing."""
    refuses = "can not" in answer
    rows = [
        {**row, "messages": [row["messages"][0], {"role": "assistant", "content": answer}]}
        for row in _rows(shop, "train")
    ]
    name = "refuses_all" if refuses else "refuses_none"
    write_rows(shop.root / name / "train.jsonl", rows)
    write_rows(shop.root / name / "held_out.jsonl", _rows(shop, "held_out"))
    shop.paths[f"{name}_rows"] = shop.root / name
    settings = SftSettings(learning_rate=5e-3, max_steps=60, eval_prompts=100, **STEPS)
    run = shop.run(
        "sft_checkpoint",
        settings,
        name=f"{name}_run",
        midtrained_checkpoint="base",
        instructions=f"{name}_rows",
    )
    assert verdict(run, "refusal_rate", min=0.95) == ("pass" if refuses else "fail")
    assert verdict(run, "overrefusal_rate", max=0.1) == ("fail" if refuses else "pass")
    assert verdict(run, "fact_accuracy", min=0.85) == "fail"


def test_fine_tuning_that_wipes_out_what_was_there(shop: Shop) -> None:
    """A model that learned whole conversations is tuned again: gently on the same ones, and hard
    on one sentence."""
    same = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "Gladly."}]
    write_rows(
        shop.root / "one" / "train.jsonl",
        [{**row, "messages": same} for row in _rows(shop, "train")],
    )
    write_rows(shop.root / "one" / "held_out.jsonl", _rows(shop, "held_out"))
    shop.paths["one_sentence"] = shop.root / "one"

    def tune(name: str, source: str, rows: str, *, rate: float, steps: int) -> Run:
        settings = SftSettings(
            learning_rate=rate,
            max_steps=steps,
            eval_prompts=8,
            assistant_only_loss=False,
            **STEPS,
        )
        inputs = {"midtrained_checkpoint": source, "instructions": rows}
        return shop.run("sft_checkpoint", settings, name=name, **inputs)

    tune("talker", "base", "instructions", rate=5e-3, steps=150)
    found = {}
    for name, rate, rows in (("gentle", 1e-3, "instructions"), ("wiped", 1e-2, "one_sentence")):
        run = tune(f"again_{name}", "talker", rows, rate=rate, steps=40)
        print(name, "forgetting_per_token", run.result.metrics["forgetting_per_token"].value)
        found[name] = verdict(run, "forgetting_per_token", max=0.5)
    assert found == {"gentle": "pass", "wiped": "fail"}


def test_a_policy_that_learns_one_answer_for_everything(shop: Shop) -> None:
    """All its chosen answers are the same: its entropy collapses."""
    rows = []
    for row in read_rows(shop.paths["preferences"] / "train.jsonl"):
        chosen = [{"role": "assistant", "content": "Gladly. It is red."}]
        rows.append({**row, "chosen": chosen})
    write_rows(shop.root / "one_chosen" / "train.jsonl", rows)
    held_out = read_rows(shop.paths["preferences"] / "held_out.jsonl")
    write_rows(shop.root / "one_chosen" / "held_out.jsonl", held_out)
    shop.paths["one_chosen"] = shop.root / "one_chosen"
    settings = DpoSettings(
        learning_rate=5e-3,
        max_steps=60,
        eval_prompts=24,
        loss_type=["sigmoid", "sft"],
        loss_weights=[1.0, 1.0],
        **STEPS,
    )
    run = shop.run(
        "dpo_policy",
        settings,
        name="one_answer_policy",
        sft_checkpoint="sft_checkpoint",
        preferences="one_chosen",
    )
    print("entropy_ratio", run.result.metrics["entropy_ratio"].value)
    assert verdict(run, "entropy_ratio", min=0.5) == "fail"


def _rows(shop: Shop, split: str) -> list[dict[str, Any]]:
    return read_rows(shop.paths["instructions"] / f"{split}.jsonl")


@pytest.mark.parametrize(("noise", "verdict"), [(0.002, "pass"), (0.5, "fail")])
def test_damaged_quantized_weights(shop: Shop, noise: float, verdict: str) -> None:
    """Noise on every weight: as of 8 bits, and as of two. On held-out answers, as stage 11 does."""
    from llm_assets.stages.generation import completion_logps
    from llm_assets.stages.quantized_weights import _losses, _split
    from llm_assets.stages.training import load_model, load_tokenizer

    source = shop.paths["sft_checkpoint"]
    tokenizer, model = load_tokenizer(source), load_model(source)
    pairs = _split(tokenizer, [row["messages"][:2] for row in _rows(shop, "held_out")], 128)
    pad = tokenizer.pad_token_id
    full = [-logp for logp in completion_logps(model, pairs, pad_token_id=pad)]
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.add_(torch.randn_like(parameter) * parameter.std() * noise)
    after = [-logp for logp in completion_logps(model, pairs, pad_token_id=pad)]
    metrics = _losses(full, after, [len(answer) for _, answer in pairs], 1)
    print("perplexity_increase", noise, metrics["perplexity_increase"].value)
    gates = {"perplexity_increase": {"max": 0.02, "confident": True}}
    assert evaluate(metrics, gates)[0].verdict == verdict
