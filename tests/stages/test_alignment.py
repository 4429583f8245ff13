"""Stages 6 to 9 in turn on the village: real TRL trainings of a few steps."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
from alignment_parts import (
    STAGES,
    STEPS,
    Listener,
    Run,
    Shop,
    assert_sound,
    refine_settings,
    weights_hash,
    write_rows,
)
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from llm_assets.errors import ModelError
from llm_assets.stage_settings import (
    DpoSettings,
    RewardSettings,
    SftSettings,
)
from llm_assets.stages.training import load_model


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    yield Shop(tmp_path_factory.mktemp("alignment"))


@pytest.fixture(scope="module")
def sft(shop: Shop) -> Run:
    # Enough steps that its answers end.
    config = SftSettings(learning_rate=1e-2, eval_prompts=30, **{**STEPS, "max_steps": 40})
    return shop.run(
        "sft_checkpoint", config, midtrained_checkpoint="base", instructions="instructions"
    )


@pytest.fixture(scope="module")
def reward(shop: Shop, sft: Run) -> Run:
    config = RewardSettings(learning_rate=1e-2, **{**STEPS, "max_steps": 12})
    return shop.run(
        "reward_model", config, sft_checkpoint="sft_checkpoint", preferences="preferences"
    )


@pytest.fixture(scope="module")
def dpo(shop: Shop, sft: Run) -> Run:
    config = DpoSettings(learning_rate=5e-3, eval_prompts=16, **STEPS)
    return shop.run(
        "dpo_policy", config, sft_checkpoint="sft_checkpoint", preferences="preferences"
    )


def refine(shop: Shop, name: str, **changes: Any) -> Run:
    return shop.run(
        "refined_policy",
        refine_settings(**changes),
        name=name,
        dpo_policy="dpo_policy",
        reward_model="reward_model",
        preferences="preferences",
    )


def test_sft_learns_and_measures(shop: Shop, sft: Run) -> None:
    assert_sound(sft, "sft_checkpoint")
    losses = [value for _, value in sft.result.series["loss"]]
    assert losses[-1] < losses[0]
    metrics = sft.result.metrics
    assert {
        "held_out_loss",
        "train_held_out_gap",
        "held_out_bits_per_byte",
        "fact_accuracy",
        "refusal_rate",
        "overrefusal_rate",
        "oracle_score",
        "rows_dropped",
        "rows_truncated",
    } <= set(metrics)
    assert metrics["held_out_loss"].value < math.log(512)
    gap = metrics["held_out_loss"].value - metrics["train_loss"].value
    assert metrics["train_held_out_gap"].value == pytest.approx(gap)
    assert {"prompt", "before", "after"} <= set(sft.result.samples[0])
    assert any(line.startswith("instructions, train: ") for line in sft.said)


def test_same_seed_gives_the_same_weights(shop: Shop, sft: Run) -> None:
    again = shop.run(
        "sft_checkpoint",
        sft.context.config,
        name="sft_again",
        midtrained_checkpoint="base",
        instructions="instructions",
    )
    assert weights_hash(again.out) == weights_hash(sft.out) != weights_hash(shop.paths["base"])
    assert again.result.metrics["held_out_loss"] == sft.result.metrics["held_out_loss"]
    assert again.result.samples == sft.result.samples


@pytest.mark.parametrize("stage", ["sft_checkpoint", "dpo_policy", "reward_model"])
def test_lora_is_merged_before_it_is_stored(shop: Shop, sft: Run, reward: Run, stage: str) -> None:
    lora = {"r": 2, "alpha": 16}
    common = {**STEPS, "learning_rate": 1e-2, "lora": lora}
    configs: dict[str, Any] = {
        "sft_checkpoint": lambda: SftSettings(eval_prompts=4, **common),
        "dpo_policy": lambda: DpoSettings(eval_prompts=4, **common),
        "reward_model": lambda: RewardSettings(**common),
    }
    inputs = {"sft_checkpoint": "sft_checkpoint", "preferences": "preferences"}
    if stage == "sft_checkpoint":
        inputs = {"midtrained_checkpoint": "base", "instructions": "instructions"}
    run = shop.run(stage, configs[stage](), name=f"lora_{stage}", **inputs)
    kind = "policy" if stage == "dpo_policy" else stage
    assert_sound(run, kind)
    assert not list(run.out.glob("adapter*"))
    base = shop.paths["base" if stage == "sft_checkpoint" else "sft_checkpoint"]
    before, after = (load_file(path / "model.safetensors") for path in (base, run.out))
    expected = {name: tensor.shape for name, tensor in before.items()}
    if stage == "reward_model":
        plain = load_file(reward.out / "model.safetensors")
        expected = {name: tensor.shape for name, tensor in plain.items()}
    assert {name: tensor.shape for name, tensor in after.items()} == expected
    changed = {name for name, tensor in after.items() if not tensor.equal(before.get(name, tensor))}
    assert any("q_proj" in name for name in changed)
    assert not any("embed_tokens" in name for name in changed)


def test_lora_dpo_starts_at_its_reference(shop: Shop, sft: Run) -> None:
    """With the adapter off as reference, the first step's rewards are zero."""
    config = DpoSettings(learning_rate=1e-2, eval_prompts=4, lora={"r": 2}, **STEPS)
    run = shop.run(
        "dpo_policy",
        config,
        name="lora_start",
        sft_checkpoint="sft_checkpoint",
        preferences="preferences",
    )
    margins = dict(run.result.series["rewards/margins"])
    assert margins[1] == pytest.approx(0.0, abs=1e-5)
    assert margins[4] != 0.0


def test_reward_model_ranks_held_out_pairs(reward: Run) -> None:
    assert_sound(reward, "reward_model")
    metrics = reward.result.metrics
    assert {"accuracy", "margin_mean", "length_correlation", "ece", "oracle_agreement"} <= set(
        metrics
    )
    assert 0 <= metrics["ece"].value <= 0.5
    assert 0.5 < metrics["annotator_agreement"].value <= 1
    vendors = reward.result.tables["by_vendor"]
    assert sum(row["n"] for row in vendors) == metrics["accuracy"].n
    assert sum(row["n"] * row["accuracy"] for row in vendors) == pytest.approx(
        metrics["accuracy"].value * (metrics["accuracy"].n or 0)
    )
    model = AutoModelForSequenceClassification.from_pretrained(reward.out)
    assert model.config.num_labels == 1


def test_the_reward_model_learns_what_the_labels_say(shop: Shop, sft: Run) -> None:
    """Labels that are manners alone, on prompts that differ between the splits."""
    for split, names in (("train", range(40)), ("held_out", range(40, 60))):
        write_rows(
            shop.root / "manners" / f"{split}.jsonl",
            [
                {
                    "prompt": [{"role": "user", "content": f"What is in house {name}?"}],
                    "chosen": [{"role": "assistant", "content": f"Gladly. A cat {name}."}],
                    "rejected": [{"role": "assistant", "content": f"Go away. A cat {name}."}],
                }
                for name in names
            ],
        )
    shop.paths["manners"] = shop.root / "manners"
    run = shop.run(
        "reward_model",
        RewardSettings(learning_rate=1e-2, **{**STEPS, "max_steps": 20}),
        name="manners_reward",
        sft_checkpoint="sft_checkpoint",
        preferences="manners",
    )
    assert run.result.metrics["accuracy"].value > 0.9
    assert run.result.metrics["margin_mean"].value > 0.5


def test_the_fresh_reward_head_comes_from_the_seed(shop: Shop, reward: Run) -> None:
    again = shop.run(
        "reward_model",
        reward.context.config,
        name="reward_again",
        sft_checkpoint="sft_checkpoint",
        preferences="preferences",
    )
    assert weights_hash(again.out) == weights_hash(reward.out)


def test_dpo_moves_away_from_the_reference(shop: Shop, dpo: Run) -> None:
    assert_sound(dpo, "policy")
    metrics = dpo.result.metrics
    assert {
        "reward_accuracy",
        "win_rate",
        "kl_per_token",
        "kl_per_sequence",
        "oracle_score",
        "mean_length",
        "fact_accuracy",
    } <= set(metrics)
    assert metrics["kl_per_token"].value > 0
    assert metrics["kl_per_sequence_low"].value <= metrics["kl_per_sequence"].value
    assert sum(row["questions"] for row in dpo.result.tables["win_rate"]) == metrics["win_rate"].n
    assert dict(dpo.result.series["rewards/margins"])[1] == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize("method", ["grpo", "rloo"])
def test_online_refinement(shop: Shop, dpo: Run, reward: Run, method: str) -> None:
    run = refine(shop, method, method=method)
    assert_sound(run, "policy")
    metrics = run.result.metrics
    assert {"reward_mean", "reward_mean_before", "win_rate", "kl_per_token"} <= set(metrics)
    assert 0 <= metrics["reward_agreement"].value <= 1
    assert metrics["kl_per_token"].value > 0
    series = run.result.series
    assert {"kl", "reward", "oracle_score"} <= set(series)
    assert len(series["reward"]) == 3
    assert weights_hash(run.out) != weights_hash(dpo.out)


def test_online_refinement_with_lora(shop: Shop, dpo: Run, reward: Run) -> None:
    run = refine(shop, "grpo_lora", lora={"r": 2, "alpha": 16}, max_steps=2)
    assert_sound(run, "policy")
    assert load_model(run.out).num_parameters() == load_model(dpo.out).num_parameters()


def test_constitutional_refinement(shop: Shop, dpo: Run, reward: Run) -> None:
    run = refine(
        shop,
        "constitutional",
        method="constitutional",
        constitution=["Be polite.", "Be brief."],
        constitution_prompts=12,
        max_completion_length=40,
        temperature=1.0,
    )
    assert_sound(run, "policy")
    metrics = run.result.metrics
    assert metrics["kept_reward_gain"].value > 0
    assert 0 <= metrics["revision_win_rate"].value <= 1
    revisions = run.result.tables["revisions"]
    assert {row["principle"] for row in revisions} <= {"Be polite.", "Be brief."}
    assert {"prompt", "answer", "critique", "revision", "reward_answer"} <= set(revisions[0])
    assert weights_hash(run.out) != weights_hash(dpo.out)


def test_refinement_is_deterministic(shop: Shop, dpo: Run, reward: Run) -> None:
    first, second = (refine(shop, f"same_{i}", max_steps=2) for i in (1, 2))
    assert weights_hash(first.out) == weights_hash(second.out)
    assert first.result.metrics["kl_per_token"] == second.result.metrics["kl_per_token"]


def test_a_setting_of_the_trainer_goes_through(shop: Shop, sft: Run) -> None:
    config = SftSettings(
        learning_rate=5e-3, eval_prompts=2, **{**STEPS, "max_steps": 2}, optim="sgd"
    )
    run = shop.run(
        "sft_checkpoint",
        config,
        name="sgd",
        midtrained_checkpoint="base",
        instructions="instructions",
    )
    assert weights_hash(run.out) != weights_hash(sft.out)
    assert len(run.result.series["loss"]) == 2


def test_refinement_is_measured_against_the_fine_tuned_checkpoint(
    shop: Shop, dpo: Run, reward: Run
) -> None:
    """With `sft_checkpoint` as an input the KL is the one of both stages together."""
    run = shop.run(
        "refined_policy",
        refine_settings(max_steps=1, learning_rate=1e-4),
        name="against_sft",
        dpo_policy="dpo_policy",
        reward_model="reward_model",
        preferences="preferences",
        sft_checkpoint="sft_checkpoint",
    )
    metrics = run.result.metrics
    assert metrics["kl_per_token_to_input"].value < metrics["kl_per_token"].value
    assert metrics["win_rate_over_input"].n == metrics["win_rate"].n


class Stopped(Exception):
    """A crash in the middle of a training."""


class StopsAt(Listener):
    """A Progress that crashes the stage at a step."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def step(self, step: int, total: int, **metrics: Any) -> None:
        if step == self.at:
            raise Stopped


@pytest.mark.parametrize("stage", ["sft_checkpoint", "dpo_policy", "refined_policy"])
def test_a_stage_that_crashed_goes_on_to_the_same_weights(
    shop: Shop, dpo: Run, reward: Run, stage: str
) -> None:
    saves = {"checkpoint": {"every_steps": 2, "every_minutes": None}}
    steps = {**STEPS, "learning_rate": 5e-3, "eval_prompts": 2, **saves}
    pairs = {"sft_checkpoint": "sft_checkpoint", "preferences": "preferences"}
    config, inputs = {
        "sft_checkpoint": (
            SftSettings(**steps),
            {"midtrained_checkpoint": "base", "instructions": "instructions"},
        ),
        "dpo_policy": (DpoSettings(lora={"r": 2, "dropout": 0.1}, **steps), pairs),
        "refined_policy": (
            refine_settings(max_steps=4, **saves),
            {
                "dpo_policy": "dpo_policy",
                "reward_model": "reward_model",
                "preferences": "preferences",
            },
        ),
    }[stage]
    whole = shop.run(stage, config, name=f"whole_{stage}", **inputs)
    folders = {name: shop.root / f"crashed_{stage}" / name for name in ("out", "checkpoints")}
    for folder in folders.values():
        folder.mkdir(parents=True)
    crashing = dataclasses.replace(whole.context, progress=StopsAt(3), **folders)
    with pytest.raises(Stopped):
        STAGES[stage].run(crashing)
    assert not list(folders["out"].iterdir())
    again = dataclasses.replace(whole.context, progress=Listener(), **folders)
    result = STAGES[stage].run(again)
    assert "goes on from save-00000002" in again.progress.lines  # type: ignore[attr-defined]
    assert weights_hash(folders["out"]) == weights_hash(whole.out)
    assert result.series["loss"] == whole.result.series["loss"]


def test_bfloat16_keeps_float32_weights(shop: Shop, sft: Run) -> None:
    config = DpoSettings(learning_rate=5e-3, eval_prompts=4, precision="bfloat16", **STEPS)
    run = shop.run(
        "dpo_policy",
        config,
        name="bfloat16",
        sft_checkpoint="sft_checkpoint",
        preferences="preferences",
    )
    assert_sound(run, "policy")
    weights = load_file(run.out / "model.safetensors")
    assert {str(tensor.dtype) for tensor in weights.values()} == {"torch.float32"}


def test_a_reward_model_of_the_wrong_kind_is_refused(shop: Shop, dpo: Run) -> None:
    with pytest.raises(ModelError, match="a reward model is a sequence classifier"):
        shop.run(
            "refined_policy",
            refine_settings(),
            name="wrong_reward",
            dpo_policy="dpo_policy",
            reward_model="dpo_policy",
            preferences="preferences",
        )


def test_real_rows_without_checks_have_no_oracle_metrics(shop: Shop, sft: Run) -> None:
    source = shop.paths["preferences"]
    for split in ("train", "held_out"):
        rows = [json.loads(line) for line in (source / f"{split}.jsonl").read_text().splitlines()]
        bare = [{side: row[side] for side in ("prompt", "chosen", "rejected")} for row in rows]
        write_rows(shop.root / "bare" / f"{split}.jsonl", bare[:40])
    shop.paths["bare"] = shop.root / "bare"
    run = shop.run(
        "dpo_policy",
        DpoSettings(learning_rate=5e-3, eval_prompts=4, **{**STEPS, "max_steps": 1}),
        name="bare_dpo",
        sft_checkpoint="sft_checkpoint",
        preferences="bare",
    )
    assert_sound(run, "policy")
    assert "kl_per_token" in run.result.metrics
    assert not {"win_rate", "oracle_score", "fact_accuracy"} & set(run.result.metrics)
    again = shop.run(
        "reward_model",
        RewardSettings(learning_rate=1e-2, **{**STEPS, "max_steps": 1}),
        name="bare_reward",
        sft_checkpoint="sft_checkpoint",
        preferences="bare",
    )
    assert not {"oracle_agreement", "annotator_agreement"} & set(again.result.metrics)
    assert again.result.tables["by_vendor"] == []
