"""Batched answers against single ones, likelihoods and KL against their definitions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from alignment_parts import small_model, small_tokenizer

from llm_assets.stages.encoding import Conversation, Example, Pair
from llm_assets.stages.generation import (
    Answer,
    completion_logps,
    divergence,
    generate,
    nll_of_each,
    preference_margins,
)
from llm_assets.stages.measuring import kl_metrics

WORDS = "who is here? I am here. what is that? that is a cat and a dog on the mat."


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return small_tokenizer([WORDS])


@pytest.fixture(scope="module")
def model(tokenizer: Any) -> Any:
    """Wide initial weights, so that the distributions are far from flat."""
    model = small_model(tokenizer)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)
    return model.train()


def asks(*texts: str) -> list[Conversation]:
    return [[{"role": "user", "content": text}] for text in texts]


def answer(prompt_ids: list[int], ids: list[int]) -> Answer:
    return Answer(prompt_ids=prompt_ids, ids=ids, text="", stopped=False)


PROMPTS = asks("who?", "what is that? " * 3, "a cat and a dog", "here", "who is on the mat?")


def test_padding_and_batching_change_no_greedy_answer(tokenizer: Any, model: Any) -> None:
    together = generate(model, tokenizer, PROMPTS, max_new_tokens=12)
    alone = [generate(model, tokenizer, [p], max_new_tokens=12)[0] for p in PROMPTS]
    assert together == alone
    assert len({a.text for a in together}) > 1
    assert model.training


def test_greedy_answers_are_the_argmax(tokenizer: Any, model: Any) -> None:
    found = generate(model, tokenizer, PROMPTS[:1], max_new_tokens=5)[0]
    ids = list(found.prompt_ids)
    for _ in found.ids:
        with torch.no_grad():
            ids.append(int(model.eval()(torch.tensor([ids])).logits[0, -1].argmax()))
    model.train()
    assert ids == found.prompt_ids + found.ids


def test_an_answer_ends_at_the_end_token(tokenizer: Any, model: Any) -> None:
    found = generate(model, tokenizer, PROMPTS, max_new_tokens=12, temperature=1.0, seed=1)
    longest = max(found, key=lambda a: len(a.ids))
    first = longest.ids[2]
    tokenizer.eos_token = tokenizer.convert_ids_to_tokens(first)
    try:
        again = generate(model, tokenizer, PROMPTS, max_new_tokens=12, temperature=1.0, seed=1)
    finally:
        tokenizer.eos_token = "<|im_end|>"
    ends = {first, tokenizer.eos_token_id}
    stopped = [a for a in again if a.stopped]
    assert any(a.ids[-1] == first for a in stopped)
    assert all(a.ids[-1] in ends and not ends & set(a.ids[:-1]) for a in stopped)
    assert all(not ends & set(a.ids) for a in again if not a.stopped)


def test_samples_depend_on_the_seed_alone(tokenizer: Any, model: Any) -> None:
    def draw(seed: int) -> list[Answer]:
        return generate(
            model, tokenizer, PROMPTS, max_new_tokens=8, temperature=1.0, seed=seed, batch_size=2
        )

    before = torch.get_rng_state()
    assert draw(1) == draw(1) != draw(2)
    assert torch.get_rng_state().equal(before)


def test_a_prompt_over_the_context_is_cut_on_the_left(tokenizer: Any, model: Any) -> None:
    found = generate(model, tokenizer, asks("who is here? " * 100), max_new_tokens=8)[0]
    assert len(found.prompt_ids) == 128 - 8
    assert tokenizer.decode(found.prompt_ids).endswith("<|im_start|>assistant\n")


def test_nll_is_the_models_loss(tokenizer: Any, model: Any) -> None:
    rows = [tokenizer(text)["input_ids"] for text in ("who is here?", "that is a cat on the mat")]
    examples = [Example(input_ids=ids, labels=[-100, *ids[1:]]) for ids in rows]
    found = nll_of_each(model, examples, pad_token_id=tokenizer.pad_token_id)
    for ids, nats in zip(rows, found, strict=True):
        tensor = torch.tensor([ids])
        with torch.no_grad():
            loss = float(model.eval()(tensor, labels=tensor).loss)
        assert nats == pytest.approx(loss * (len(ids) - 1), rel=1e-5)
    model.train()


def test_preference_margin_is_the_difference_of_log_probabilities(
    tokenizer: Any, model: Any
) -> None:
    pair = Pair(row={}, prompt_ids=[5, 6, 7], chosen_ids=[8, 9], rejected_ids=[10])
    with torch.no_grad():
        logps = torch.log_softmax(model.eval()(torch.tensor([[5, 6, 7, 8, 9]])).logits[0], -1)
    model.train()
    chosen = float(logps[2, 8] + logps[3, 9])
    rejected = float(logps[2, 10])
    pad = tokenizer.pad_token_id
    assert completion_logps(model, [([5, 6, 7], [8, 9])], pad_token_id=pad) == pytest.approx(
        [chosen], rel=1e-5
    )
    assert preference_margins(model, [pair], pad_token_id=pad) == pytest.approx(
        [chosen - rejected], rel=1e-5
    )


def test_kl_is_zero_against_itself_and_the_mean_log_ratio_against_another(
    tokenizer: Any, model: Any
) -> None:
    other = small_model(tokenizer)
    pad = tokenizer.pad_token_id
    sampled = generate(
        model, tokenizer, PROMPTS * 160, max_new_tokens=6, temperature=1.0, seed=3, batch_size=400
    )
    same = divergence(model, model, sampled, pad_token_id=pad)
    assert same.per_sequence == pytest.approx(0, abs=1e-6)
    found = divergence(model, other, sampled, pad_token_id=pad)
    pairs = [(a.prompt_ids, a.ids) for a in sampled]
    ratios = [
        p - q
        for p, q in zip(
            completion_logps(model, pairs, pad_token_id=pad),
            completion_logps(other, pairs, pad_token_id=pad),
            strict=True,
        )
    ]
    mean = sum(ratios) / len(ratios)
    error = math.sqrt(sum((r - mean) ** 2 for r in ratios)) / len(ratios)
    assert abs(found.per_sequence - mean) < 4 * error
    assert found.num_tokens == sum(len(a.ids) for a in sampled)
    assert found.per_token == pytest.approx(sum(found.sequences) / found.num_tokens)


def test_the_interval_of_the_kl_narrows_with_more_answers(tokenizer: Any, model: Any) -> None:
    other = small_model(tokenizer)
    widths = []
    for count in (2, 32):
        sampled = generate(
            model, tokenizer, PROMPTS * count, max_new_tokens=6, temperature=1.0, seed=3
        )
        found = divergence(model, other, sampled, pad_token_id=tokenizer.pad_token_id)
        metrics = kl_metrics(found, [len(a.ids) for a in sampled])
        assert (
            metrics["kl_per_token_low"].value
            < metrics["kl_per_token"].value
            < metrics["kl_per_token_high"].value
        )
        widths.append(metrics["kl_per_token_high"].value - metrics["kl_per_token_low"].value)
    assert widths[1] < widths[0] / 2
