"""Answers of a language model in batches, and what two models think of them.

Prompts are sorted by length, padded on the left and answered with a KV cache until the end token.
All functions take models on any device and leave them in the mode in which they were.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig

from llm_assets.stages.encoding import IGNORED, Conversation, Example, Pair, render

# Floats that the logits of one batch may take: 256 MiB of float32.
_LOGITS = 64 * 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a model said: `text` without special tokens; `ids` with the end token, if it came."""

    prompt_ids: list[int]
    ids: list[int]
    text: str
    stopped: bool


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """KL of a policy to a reference, in nats, on answers sampled from the policy.

    `entropy`: of the policy, mean over the tokens. `sequences`: KL of each answer. `entropies` and
    `reference_entropies`: of both models after the same words, summed over each answer.
    """

    per_token: float
    per_sequence: float
    entropy: float
    num_tokens: int
    sequences: list[float]
    entropies: list[float]
    reference_entropies: list[float]


def to_device(model: Any) -> Any:
    """The model on the GPU if there is one; one in 4 bits is there already."""
    if getattr(model, "is_loaded_in_4bit", False) or not torch.cuda.is_available():
        return model
    return model.to("cuda")


@contextmanager
def _evaluating(*models: Any) -> Iterator[None]:
    """Evaluation mode, no gradients; the generators stand afterwards where they stood before."""
    modes = [model.training for model in models]
    for model in models:
        model.eval()
    try:
        with torch.inference_mode(), torch.random.fork_rng():
            yield
    finally:
        for model, mode in zip(models, modes, strict=True):
            model.train(mode)


def context_length(model: Any) -> int | None:
    """Tokens that the model can read, prompt and answer; None when its config does not say."""
    length = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return int(length) if length else None


def generate(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Conversation],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    batch_size: int = 64,
) -> list[Answer]:
    """One answer a prompt: greedy at `temperature` 0, else sampled from the whole distribution.

    A prompt that leaves no room for the answer is cut on the left. The same seed, prompts and
    batch size give the same answers.
    """
    prompt_ids = render(tokenizer, prompts, generation_prompt=True)
    limit = context_length(model)
    if limit is not None:
        room = max(1, limit - max_new_tokens)
        prompt_ids = [ids[-room:] for ids in prompt_ids]
    return _continue(
        model,
        tokenizer,
        prompt_ids,
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        seed=seed,
        batch_size=batch_size,
    )


def free_texts(
    model: Any, tokenizer: Any, count: int, *, max_new_tokens: int, seed: int
) -> list[Answer]:
    """What a model writes of its own accord: sampled at temperature 1 after its first token,
    without a prompt or a template."""
    first = tokenizer.bos_token_id
    first = tokenizer.eos_token_id if first is None else first
    return _continue(
        model,
        tokenizer,
        [[first]] * count,
        max_new_tokens=max_new_tokens,
        temperature=1.0,
        seed=seed,
        batch_size=64,
    )


def _continue(
    model: Any,
    tokenizer: Any,
    prompt_ids: Sequence[list[int]],
    *,
    max_new_tokens: int,
    temperature: float,
    seed: int,
    batch_size: int,
) -> list[Answer]:
    ends = end_tokens(model, tokenizer)
    config = _generation_config(tokenizer, ends, max_new_tokens, temperature)
    order = sorted(range(len(prompt_ids)), key=lambda index: (len(prompt_ids[index]), index))
    answers: dict[int, Answer] = {}
    with _evaluating(model):
        torch.manual_seed(seed)
        for start in range(0, len(order), batch_size):
            indices = order[start : start + batch_size]
            batch = [prompt_ids[index] for index in indices]
            ids, mask = _pad(batch, tokenizer.pad_token_id, left=True, device=model.device)
            output = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)
            for index, row in zip(indices, output[:, ids.shape[1] :].tolist(), strict=True):
                answers[index] = _answer(tokenizer, prompt_ids[index], row, ends)
    return [answers[index] for index in range(len(prompt_ids))]


def end_tokens(model: Any, tokenizer: Any) -> list[int]:
    """Tokens that end an answer: the tokenizer's eos, and what the generation config names."""
    named = model.generation_config.eos_token_id if model.generation_config else None
    others = [] if named is None else named if isinstance(named, list) else [named]
    return [tokenizer.eos_token_id, *(i for i in others if i != tokenizer.eos_token_id)]


def _generation_config(
    tokenizer: Any, ends: list[int], max_new_tokens: int, temperature: float
) -> GenerationConfig:
    sampling = {"temperature": temperature, "top_k": 0, "top_p": 1.0} if temperature > 0 else {}
    return GenerationConfig(
        max_new_tokens=max_new_tokens,
        do_sample=temperature > 0,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=ends,
        use_cache=True,
        disable_compile=True,
        **sampling,
    )


def _answer(tokenizer: Any, prompt_ids: list[int], row: list[int], ends: list[int]) -> Answer:
    stop = next((i for i, token in enumerate(row) if token in ends), None)
    ids = row if stop is None else row[: stop + 1]
    text = tokenizer.decode(ids, skip_special_tokens=True)
    return Answer(prompt_ids=prompt_ids, ids=ids, text=text.strip(), stopped=stop is not None)


def _pad(
    rows: Sequence[Sequence[int]], value: int, *, left: bool = False, device: Any = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids [rows, longest] and their attention mask."""
    width = max(map(len, rows))
    ids = torch.full((len(rows), width), value, dtype=torch.long)
    mask = torch.zeros((len(rows), width), dtype=torch.long)
    for number, row in enumerate(rows):
        part = slice(width - len(row), width) if left else slice(0, len(row))
        ids[number, part] = torch.tensor(row, dtype=torch.long)
        mask[number, part] = 1
    return ids.to(device), mask.to(device)


def _batches(lengths: Sequence[int], vocabulary: int) -> Iterator[list[int]]:
    """Indices in batches of like length whose logits stay under `_LOGITS` floats."""
    tokens = max(256, _LOGITS // max(1, vocabulary))
    order = sorted(range(len(lengths)), key=lambda index: (lengths[index], index))
    batch: list[int] = []
    for index in order:
        if batch and (len(batch) + 1) * lengths[index] > tokens:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _supervised(
    models: Sequence[Any], examples: Sequence[Example], pad_token_id: int
) -> Iterator[tuple[list[int], list[torch.Tensor], torch.Tensor, torch.Tensor]]:
    """For each batch: indices of its examples, log probabilities [tokens, vocabulary] of each model
    at the supervised positions, their labels [tokens], and the row of the batch of each [tokens].
    """
    vocabulary = int(models[0].get_output_embeddings().weight.shape[0])
    for indices in _batches([len(example.input_ids) for example in examples], vocabulary):
        device = models[0].device
        ids, mask = _pad([examples[i].input_ids for i in indices], pad_token_id, device=device)
        labels, _ = _pad([examples[i].labels for i in indices], IGNORED, device=device)
        wanted = labels[:, 1:] != IGNORED
        rows = wanted.nonzero()[:, 0]
        found = []
        for model in models:
            logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
            found.append(torch.log_softmax(logits[wanted].float(), dim=-1))
        yield indices, found, labels[:, 1:][wanted], rows


def nll_of_each(model: Any, examples: Sequence[Example], *, pad_token_id: int) -> list[float]:
    """Negative log likelihood of each example, in nats, summed over its supervised tokens."""
    totals = torch.zeros(len(examples), dtype=torch.float64)
    with _evaluating(model):
        for indices, (logps,), labels, rows in _supervised([model], examples, pad_token_id):
            taken = logps.gather(1, labels[:, None])[:, 0].double().cpu()
            totals.index_add_(0, torch.tensor(indices)[rows.cpu()], -taken)
    return [float(value) for value in totals]


def completion_logps(
    model: Any, pairs: Sequence[tuple[list[int], list[int]]], *, pad_token_id: int
) -> list[float]:
    """Log probability of each completion after its prompt, summed over its tokens, in nats."""
    examples = [_completion(prompt, completion) for prompt, completion in pairs]
    return [-nats for nats in nll_of_each(model, examples, pad_token_id=pad_token_id)]


def preference_margins(model: Any, pairs: Sequence[Pair], *, pad_token_id: int) -> list[float]:
    """Log probability of the chosen minus that of the rejected answer, for each pair."""
    both = [(pair.prompt_ids, pair.chosen_ids) for pair in pairs]
    both += [(pair.prompt_ids, pair.rejected_ids) for pair in pairs]
    logps = completion_logps(model, both, pad_token_id=pad_token_id)
    return [logps[i] - logps[len(pairs) + i] for i in range(len(pairs))]


def divergence(
    policy: Any, reference: Any, answers: Sequence[Answer], *, pad_token_id: int
) -> Divergence:
    """KL(policy || reference) on answers sampled from the policy at temperature 1.

    At each token the KL of the two next-token distributions is summed over the vocabulary, given
    what was sampled before. Its expectation is that of log p_policy - log p_reference, which makes
    the sequence's KL by the chain rule, with less variance (Rao-Blackwell; Amini et al. 2025) and
    never below zero.
    """
    examples = [_completion(answer.prompt_ids, answer.ids) for answer in answers]
    # Of each answer: KL, entropy of the policy, entropy of the reference.
    sums = torch.zeros(len(examples), 3, dtype=torch.float64)
    count = 0
    with _evaluating(policy, reference):
        for indices, (logp, logq), labels, rows in _supervised(
            [policy, reference], examples, pad_token_id
        ):
            probabilities = logp.exp()
            # 0 * -inf where a model rules a token out.
            parts = torch.stack(
                [
                    (p * (a - b)).nan_to_num(nan=0.0).sum(-1)
                    for p, a, b in (
                        (probabilities, logp, logq),
                        (probabilities, logp.new_zeros(()), logp),
                        (logq.exp(), logq.new_zeros(()), logq),
                    )
                ],
                dim=1,
            )
            sums.index_add_(0, torch.tensor(indices)[rows.cpu()], parts.double().cpu())
            count += len(labels)
    sequences, entropies, others = (column.tolist() for column in sums.unbind(1))
    total = sum(sequences)
    return Divergence(
        per_token=total / max(1, count),
        per_sequence=total / max(1, len(sequences)),
        entropy=sum(entropies) / max(1, count),
        num_tokens=count,
        sequences=sequences,
        entropies=entropies,
        reference_entropies=others,
    )


def _completion(prompt_ids: list[int], ids: list[int]) -> Example:
    """Supervised on the completion only."""
    return Example(input_ids=prompt_ids + ids, labels=[IGNORED] * len(prompt_ids) + ids)
