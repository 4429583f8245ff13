"""Stages 6 to 9 in turn on the village: real TRL trainings of a few steps."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from alignment_parts import small_model, small_tokenizer, write_village
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

from llm_assets.artifacts import check_artifact
from llm_assets.errors import RecipeError
from llm_assets.stage_settings import (
    DpoSettings,
    RefineSettings,
    RewardSettings,
    SftSettings,
)
from llm_assets.stages import dpo_policy, refined_policy, reward_model, sft_checkpoint
from llm_assets.stages.context import StageContext, StageInput, StageResult
from llm_assets.stages.training import load_model

STEPS: dict[str, Any] = {"max_steps": 4, "per_device_train_batch_size": 4, "max_length": 128}
STAGES: dict[str, Any] = {
    "sft_checkpoint": sft_checkpoint,
    "reward_model": reward_model,
    "dpo_policy": dpo_policy,
    "refined_policy": refined_policy,
}


class Listener:
    """A Progress that keeps the lines."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def step(self, step: int, total: int, **metrics: Any) -> None:
        """Nothing: the series is looked at."""

    def say(self, text: str) -> None:
        self.lines.append(text)


@dataclass(frozen=True)
class Run:
    """One stage that was run."""

    context: StageContext
    result: StageResult

    @property
    def out(self) -> Path:
        return self.context.out

    @property
    def said(self) -> list[str]:
        return self.context.progress.lines  # type: ignore[attr-defined,no-any-return]


class Shop:
    """Runs stages under one folder, and hands their artifacts on."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.paths = write_village(root / "data")
        rows = (self.paths["instructions"] / "train.jsonl").read_text().splitlines()
        tokenizer = small_tokenizer(rows)
        base = root / "base"
        small_model(tokenizer).save_pretrained(base)
        tokenizer.save_pretrained(base)
        self.paths["base"] = base

    def run(self, stage: str, config: Any, name: str = "", **inputs: str) -> Run:
        """Run a stage; `inputs` maps its input names to earlier names."""
        root = self.root / (name or stage)
        for folder in ("out", "scratch", "checkpoints"):
            (root / folder).mkdir(parents=True)
        context = StageContext(
            stage=stage,
            pipeline="test",
            config=config,
            seed=7,
            inputs={
                key: StageInput(path=self.paths[value], type="", artifact="0" * 64)
                for key, value in inputs.items()
            },
            out=root / "out",
            scratch=root / "scratch",
            checkpoints=root / "checkpoints",
            progress=Listener(),
        )
        result = STAGES[stage].run(context)
        self.paths[name or stage] = context.out
        return Run(context, result)


@pytest.fixture(scope="module")
def shop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shop]:
    yield Shop(tmp_path_factory.mktemp("alignment"))


@pytest.fixture(scope="module")
def sft(shop: Shop) -> Run:
    config = SftSettings(learning_rate=5e-3, eval_prompts=30, **STEPS)
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


def refine_settings(**changes: Any) -> RefineSettings:
    values: dict[str, Any] = {
        "learning_rate": 5e-3,
        "max_steps": 3,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 8,
        "max_length": 128,
        "eval_prompts": 8,
    }
    return RefineSettings(**{**values, **changes})


def refine(shop: Shop, name: str, **changes: Any) -> Run:
    return shop.run(
        "refined_policy",
        refine_settings(**changes),
        name=name,
        dpo_policy="dpo_policy",
        reward_model="reward_model",
        preferences="preferences",
    )


def weights_hash(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def assert_sound(run: Run, type: str) -> None:
    """A whole artifact, finite metrics, a loss at every step, samples with text fields."""
    check_artifact(run.out, type, run.result.metadata)
    for name, metric in run.result.metrics.items():
        assert math.isfinite(metric.value), name
        assert metric.n is None or metric.n > 0, name
    steps = [step for step, _ in run.result.series["loss"]]
    assert steps == list(range(1, steps[-1] + 1))
    assert run.result.tokens > 0
    assert run.result.samples


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
    assert metrics["accuracy"].value > 0.5
    assert 0 <= metrics["ece"].value <= 0.5
    assert 0.5 < metrics["annotator_agreement"].value <= 1
    vendors = reward.result.tables["by_vendor"]
    assert sum(row["n"] for row in vendors) == metrics["accuracy"].n
    assert sum(row["n"] * row["accuracy"] for row in vendors) == pytest.approx(
        metrics["accuracy"].value * (metrics["accuracy"].n or 0)
    )
    model = AutoModelForSequenceClassification.from_pretrained(reward.out)
    assert model.config.num_labels == 1


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


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"num_generations": 3}, "refined_policy.num_generations"),
        ({"method": "constitutional"}, "refined_policy.constitution"),
        ({"method": "rloo", "scale_rewards": "none"}, "refined_policy.scale_rewards"),
        ({"sync_ref_model": True}, "refined_policy.sync_ref_model"),
        ({"lora": {"quantize_base": "nf4"}}, "refined_policy.lora.quantize_base"),
    ],
)
def test_settings_that_cannot_work(
    make_context: Callable[..., StageContext], changes: dict[str, Any], place: str
) -> None:
    context = make_context("refined_policy", refine_settings(**changes))
    with pytest.raises(RecipeError) as caught:
        refined_policy.run(context)
    assert caught.value.where == place


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
