"""The formulas, against counted operations of real tiny models."""

from __future__ import annotations

from typing import Any

import pytest

from llm_assets.costs.devices import find_device
from llm_assets.costs.estimate import (
    attention_flops,
    dpo_flops,
    forward_flops,
    lora_flops,
    online_flops,
    price,
    training_flops,
)
from llm_assets.costs.parameters import Architecture, from_config, lora_parameters
from llm_assets.errors import UserError

SHAPE = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 160,
    "vocab_size": 300,
    "tie_word_embeddings": True,
}
ROWS, LENGTH = 2, 32
TOKENS = ROWS * LENGTH


def test_the_check_value() -> None:
    found = price(
        training_flops(7e9, 2e12),
        device=find_device("H100"),
        utilization=0.40,
        devices=1,
        usd_per_hour=2.50,
    )
    assert found.flops == 8.4e22
    assert found.gpu_hours == pytest.approx(58_982, abs=1)
    assert found.cost_usd == pytest.approx(147_454, abs=2)
    assert found.wall_s == pytest.approx(found.gpu_hours * 3600)


def test_more_devices_take_less_time_for_the_same_money() -> None:
    one, eight = (
        price(1e21, device=find_device("A100"), utilization=0.4, devices=n, usd_per_hour=2.0)
        for n in (1, 8)
    )
    assert eight.wall_s == pytest.approx(one.wall_s / 8)
    assert eight.cost_usd == pytest.approx(one.cost_usd)


@pytest.mark.parametrize(
    "wrong",
    [
        {"utilization": 0.0},
        {"utilization": 1.5},
        {"devices": 0},
        {"usd_per_hour": -1.0},
        {"usd_per_hour": float("nan")},
        {"flops": -1.0},
        {"flops": float("inf")},
    ],
)
def test_numbers_that_make_no_sense(wrong: dict[str, Any]) -> None:
    good: dict[str, Any] = {"flops": 1e12, "utilization": 0.4, "devices": 1, "usd_per_hour": 1.0}
    values = {**good, **wrong}
    with pytest.raises(UserError, match=next(iter(wrong))):
        price(values.pop("flops"), device=find_device("cpu"), **values)


def _model(shape: dict[str, Any], cls: str = "AutoModelForCausalLM") -> Any:
    import transformers

    config = transformers.AutoConfig.for_model(**shape, num_labels=1)
    config._attn_implementation = "eager"
    config._experts_implementation = "eager"  # the fused kernels are not counted
    return getattr(transformers, cls).from_config(config)


def _counted(model: Any, *, backward: bool) -> float:
    """Operations of all matrix multiplications, as PyTorch counts them."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    ids = torch.randint(3, 300, (ROWS, LENGTH))
    counter = FlopCounterMode(display=False)
    with counter, torch.set_grad_enabled(backward):
        logits = model(input_ids=ids).logits
        if backward:
            logits.sum().backward()
    return float(counter.get_total_flops())


@pytest.fixture(scope="module")
def architecture() -> Architecture:
    return from_config(SHAPE)


def _matrices(architecture: Architecture) -> float:
    """Parameters that multiply: all that count in `compute` but the norms."""
    return architecture.compute - architecture.vectors


def test_training_is_6nt_and_forward_2nt(architecture: Architecture) -> None:
    model, n = _model(SHAPE), _matrices(architecture)
    forward = forward_flops(n, TOKENS) + attention_flops(
        architecture, TOKENS, LENGTH, trained=False
    )
    assert _counted(model, backward=False) == pytest.approx(forward, rel=0.01)
    trained = training_flops(n, TOKENS) + attention_flops(
        architecture, TOKENS, LENGTH, trained=True
    )
    assert _counted(model, backward=True) == pytest.approx(trained, rel=0.01)


def test_an_untied_embedding_is_only_looked_up() -> None:
    shape = {**SHAPE, "tie_word_embeddings": False}
    architecture = from_config(shape)
    expected = training_flops(_matrices(architecture), TOKENS) + attention_flops(
        architecture, TOKENS, LENGTH, trained=True
    )
    assert _counted(_model(shape), backward=True) == pytest.approx(expected, rel=0.01)


def test_lora_pays_no_weight_gradients_of_the_frozen_part(architecture: Architecture) -> None:
    from peft import LoraConfig, get_peft_model

    tuned = get_peft_model(
        _model(SHAPE), LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")
    )
    adapters = lora_parameters(architecture, r=4)
    expected = lora_flops(_matrices(architecture), adapters, TOKENS) + attention_flops(
        architecture, TOKENS, LENGTH, trained=True
    )
    # Below the first adapters nothing needs a gradient, so a shallow model counts a little less.
    assert _counted(tuned, backward=True) == pytest.approx(expected, rel=0.06)


def test_a_reward_model_has_no_output_matrix(architecture: Architecture) -> None:
    n = architecture.compute_without_head - architecture.vectors
    expected = training_flops(n, TOKENS) + attention_flops(
        architecture, TOKENS, LENGTH, trained=True
    )
    model = _model({**SHAPE, "pad_token_id": 0}, "AutoModelForSequenceClassification")
    assert _counted(model, backward=True) == pytest.approx(expected, rel=0.01)


def test_mixtures_multiply_only_the_chosen_experts() -> None:
    shape = {
        **SHAPE,
        "model_type": "mixtral",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
    }
    architecture = from_config(shape)
    expected = forward_flops(_matrices(architecture), TOKENS) + attention_flops(
        architecture, TOKENS, LENGTH, trained=False
    )
    assert _counted(_model(shape), backward=False) == pytest.approx(expected, rel=0.02)


def test_dpo_adds_the_reference() -> None:
    assert dpo_flops(10, 100) == {"policy": 6000.0, "reference": 2000.0}
    tuned = dpo_flops(10, 100, adapters=1)
    assert tuned == {"policy": 4.0 * 11 * 100 + 200, "reference": 2000.0}


def test_online_training_generates_scores_and_trains() -> None:
    parts = online_flops(10, reward_parameters=5, prompt_tokens=60, completion_tokens=40)
    assert parts == {
        "generation": 2000.0,
        "reward": 1000.0,
        "policy": 6000.0,
        "reference": 2000.0,
    }
    twice = online_flops(
        10, reward_parameters=5, prompt_tokens=60, completion_tokens=40, reference=False, passes=2
    )
    assert twice == {
        "generation": 2000.0,
        "reward": 1000.0,
        "policy": 12000.0,
        "old policy": 2000.0,
    }


def test_recomputation_counts_only_when_asked_for() -> None:
    assert training_flops(1, 1) == 6
    assert training_flops(1, 1, recompute=True) == 8
