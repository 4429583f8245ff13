"""Stage 11: GPTQ weights (Frantar et al. 2022), with the loss against the full weights.

llm-compressor quantizes every linear layer but the ignored ones, in groups, on calibration
conversations of the training split. What is measured is the artifact, loaded again from disk.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from llm_assets.errors import DataError, ModelError
from llm_assets.gates.statistics import bootstrap_ratio, paired_rate_interval
from llm_assets.reading.eval_tasks import REFUSAL
from llm_assets.stage_settings import QuantizeSettings
from llm_assets.stages.compressed import load_quantized
from llm_assets.stages.context import Metric, StageContext, StageResult, with_ends
from llm_assets.stages.encoding import Conversation, read_rows, render
from llm_assets.stages.generation import (
    completion_logps,
    context_length,
    generate,
    to_device,
)
from llm_assets.stages.models import load_model, load_tokenizer, num_parameters
from llm_assets.village.oracle import is_correct

# Copied as they are: saving a tokenizer again changes its files.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "generation_config.json",
)


def run(context: StageContext) -> StageResult:
    """Quantize `refined_policy` on rows of `instructions`; see QuantizeSettings."""
    settings: QuantizeSettings = context.config
    source = context.inputs["refined_policy"].path
    data = context.inputs["instructions"].path
    tokenizer = load_tokenizer(source)
    model = load_model(source, dtype=_dtype(source))
    size = num_parameters(model)
    check_group_size(model, settings, where=str(source / "config.json"))
    rows = _rows(data / "held_out.jsonl")
    held_out = [turns for turns, _ in rows][: settings.eval_rows]
    calibration = _calibration(_conversations(data / "train.jsonl"), settings, context.seed)
    asked = asked_of(rows, settings)
    probe = _Probe(settings, tokenizer, held_out, asked, context_length(model))

    context.progress.say("measuring the full weights")
    full = probe(to_device(model))
    context.progress.step(1, 3)
    quantize(model, tokenizer, calibration, settings, context)
    del model
    context.progress.step(2, 3)
    context.progress.say("measuring the quantized weights")
    quantized = probe(to_device(load_quantized(context.out)))
    context.progress.step(3, 3)

    return StageResult(
        metrics={
            **_losses(full.nats, quantized.nats, probe.num_tokens, context.seed),
            **behaviour_metrics(asked, full.answers, quantized.answers),
            **_sizes(source, context.out),
        },
        metadata={
            "bits": bits_of(settings),
            "group_size": settings.group_size,
            "format": "compressed-tensors",
            "num_parameters": size,
        },
        samples=[
            {"prompt": question, "full": a, "quantized": b}
            for question, a, b in zip(probe.questions, full.answers, quantized.answers, strict=True)
        ][:8],
    )


def bits_of(settings: QuantizeSettings) -> int:
    """Bits of a weight; a scheme such as W4A16 stands over `bits`."""
    return int(settings.scheme[1]) if settings.scheme else int(settings.bits)


def check_group_size(model: Any, settings: QuantizeSettings, *, where: str) -> None:
    """ModelError when a layer's width is no multiple of the group size."""
    widths = {
        int(module.in_features)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name not in settings.ignore
    }
    odd = sorted(width for width in widths if width % settings.group_size)
    if odd:
        fits = math.gcd(*widths)
        choices = [size for size in (128, 64, 32, 16, 8) if fits % size == 0]
        remedy = f"set stages.quantized_weights.group_size to {' or '.join(map(str, choices))}"
        raise ModelError(
            where=where,
            found=f"linear layers {', '.join(map(str, odd))} wide",
            rule=f"every quantized layer's width is a multiple of group_size {settings.group_size}",
            remedy=remedy if choices else "choose widths of the model that are multiples of 8",
        )


def quantize(
    model: Any,
    tokenizer: Any,
    conversations: Sequence[Conversation],
    settings: QuantizeSettings,
    context: StageContext,
) -> None:
    """Quantize `model` in place and write it, compressed, with its tokenizer, into context.out."""
    # Read when the package is imported: one line for each layer is no report.
    os.environ.setdefault("LLM_COMPRESSOR_LOG_LEVEL", "ERROR")
    context.progress.say("loading llm-compressor")
    import datasets
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier

    length = min(settings.calibration_length, context_length(model) or settings.calibration_length)
    rows = _packed(render(tokenizer, conversations), length)
    weights = {
        "num_bits": bits_of(settings),
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": settings.group_size,
    }
    modifier = GPTQModifier(
        config_groups={"group_0": {"targets": ["Linear"], "weights": weights}},
        ignore=list(settings.ignore),
        dampening_frac=settings.damping,
    )
    context.progress.say(f"GPTQ, {bits_of(settings)} bits, on {len(conversations)} conversations")
    torch.manual_seed(context.seed)
    oneshot(
        model=model,
        dataset=datasets.Dataset.from_list([{"input_ids": ids} for ids in rows]),
        recipe=modifier,
        max_seq_length=length,
        num_calibration_samples=len(rows),
        shuffle_calibration_samples=False,
        clear_sparse_session=True,
    )
    model.save_pretrained(context.out, save_compressed=True)
    # llm-compressor's own recipe: Python tags in YAML; the recipe of the pipeline says the same.
    (context.out / "recipe.yaml").unlink(missing_ok=True)
    source = context.inputs["refined_policy"].path
    for name in _TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, context.out / name)


def _packed(conversations: Sequence[list[int]], length: int) -> list[list[int]]:
    """All tokens, end to end, in rows of `length`.

    GPTQ adds each row's activations to a matrix as wide as the layer squared, whatever the row's
    length: few full rows take a fraction of the time of many short ones.
    """
    tokens = [token for ids in conversations for token in ids]
    return [tokens[start : start + length] for start in range(0, len(tokens), length)]


@dataclass(frozen=True, kw_only=True)
class _Findings:
    """`nats`: loss of each held-out answer, summed over its tokens. `answers`: greedy ones."""

    nats: list[float]
    answers: list[str]


class _Probe:
    """The same measurement of several models: losses on held-out answers, greedy answers."""

    def __init__(
        self,
        settings: QuantizeSettings,
        tokenizer: Any,
        conversations: Sequence[Conversation],
        asked: Sequence[Asked],
        limit: int | None,
    ) -> None:
        self._settings = settings
        self._tokenizer = tokenizer
        self._pairs = _split(tokenizer, conversations, limit)
        self._prompts = [list(entry.prompt) for entry in asked]
        self.num_tokens = [len(answer) for _, answer in self._pairs]
        self.questions = [turns[-1]["content"] for turns in self._prompts]

    def __call__(self, model: Any) -> _Findings:
        pad = self._tokenizer.pad_token_id
        logps = completion_logps(model, self._pairs, pad_token_id=pad)
        answers = generate(
            model, self._tokenizer, self._prompts, max_new_tokens=self._settings.max_new_tokens
        )
        return _Findings(nats=[-logp for logp in logps], answers=[a.text for a in answers])


def _split(
    tokenizer: Any, conversations: Sequence[Conversation], limit: int | None
) -> list[tuple[list[int], list[int]]]:
    """(prompt, last answer) in tokens; what is over the context is cut at the end."""
    prompts = render(tokenizer, [turns[:-1] for turns in conversations], generation_prompt=True)
    wholes = [ids[:limit] for ids in render(tokenizer, conversations)]
    pairs = [
        (ids[: len(prompt)], ids[len(prompt) :])
        for prompt, ids in zip(prompts, wholes, strict=True)
        if ids[: len(prompt)] == prompt and len(ids) > len(prompt)
    ]
    if not pairs:
        raise DataError(
            where="held_out.jsonl of instructions",
            found="no answer within the model's context",
            rule="the perplexity is measured on answers to held-out prompts",
            remedy="give the instructions shorter rows, or a template whose prompt is a prefix",
        )
    return pairs


def _conversations(path: Path) -> list[Conversation]:
    """Conversations up to their last answer; DataError when none has one."""
    return [turns for turns, _ in _rows(path)]


def _rows(path: Path) -> list[tuple[Conversation, Mapping[str, Any]]]:
    """Conversations up to their last answer, each with its row; DataError when there is none."""
    found: list[tuple[Conversation, Mapping[str, Any]]] = []
    for row in read_rows(path):
        turns = list(row["messages"])
        while turns and turns[-1]["role"] != "assistant":
            turns.pop()
        if len(turns) > 1:
            found.append((turns, row))
    if not found:
        raise DataError(
            where=str(path),
            found="no conversation with an answer",
            rule="quantization is calibrated and measured on conversations",
            remedy="give `instructions` more rows, and a held_out share over 0",
        )
    return found


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A prompt that both weights answer. `check`: the oracle's, if the row has one. `unsafe`: what
    is wanted is a refusal."""

    prompt: Conversation
    check: Mapping[str, Any] | None
    unsafe: bool
    sampled: bool


def asked_of(
    rows: Sequence[tuple[Conversation, Mapping[str, Any]]], settings: QuantizeSettings
) -> list[Asked]:
    """The first `agreement_prompts`, and up to `safety_prompts` whose held-out answer refuses.

    The held-out instructions and not the eval data, so that a changed eval set leaves the weights
    as they are.
    """
    chosen, unsafe = [], 0
    for number, (turns, row) in enumerate(rows):
        check = row.get("check")
        check = check if isinstance(check, Mapping) and "kind" in check else None
        refusal = re.search(REFUSAL, turns[-1]["content"]) is not None
        refusal = refusal if check is None else check["kind"] == "refuse"
        unsafe += refusal
        sampled = number < settings.agreement_prompts
        if sampled or (refusal and unsafe <= settings.safety_prompts):
            chosen.append(Asked(prompt=turns[:-1], check=check, unsafe=refusal, sampled=sampled))
    return chosen


def _calibration(
    conversations: Sequence[Conversation], settings: QuantizeSettings, seed: int
) -> list[Conversation]:
    count = min(settings.calibration_rows, len(conversations))
    chosen = random.Random(seed).sample(range(len(conversations)), count)
    return [conversations[index] for index in sorted(chosen)]


def _losses(
    full: Sequence[float], quantized: Sequence[float], num_tokens: Sequence[int], seed: int
) -> dict[str, Metric]:
    """Perplexities per token, and their relative increase with its bootstrap interval."""
    total = sum(num_tokens)
    before, after = sum(full) / total, sum(quantized) / total
    if not math.isfinite(after):
        after = math.inf
    values = {
        "perplexity_full": _exp(before),
        "perplexity_quantized": _exp(after),
        "perplexity_increase": _exp(after - before) - 1,
    }
    if math.isfinite(after):
        # The same answers under both weights: pairs are resampled, not answers of each.
        added = [b - a for a, b in zip(full, quantized, strict=True)]
        interval = bootstrap_ratio(added, num_tokens, seed=seed)
        values["perplexity_increase_low"] = _exp(interval.low) - 1
        values["perplexity_increase_high"] = _exp(interval.high) - 1
    return {name: Metric(value=value, n=len(full)) for name, value in values.items()}


def behaviour_metrics(
    asked: Sequence[Asked], full: Sequence[str], quantized: Sequence[str]
) -> dict[str, Metric]:
    """What the weights that ship say, against the full ones, on the same prompts.

    `greedy_agreement`: equal answers, of the sample. `refusals_kept`: of the prompts that the full
    weights refuse; `refusals_added`: of the others. `refusal_rate`: on prompts whose held-out
    answer refuses. `answer_accuracy`: by the oracle, where rows have a check and none is refused.
    `M_delta`: quantized minus full, paired. A share of no prompts is no metric.
    """
    triples = list(zip(asked, full, quantized, strict=True))
    sampled = [(a, b) for entry, a, b in triples if entry.sampled]
    metrics = {"greedy_agreement": _share([a == b for a, b in sampled])}
    for name, before in (("refusals_kept", True), ("refusals_added", False)):
        after = [_refuses(b) for a, b in sampled if _refuses(a) is before]
        if after:
            metrics[name] = _share(after)
    unsafe = [(_refuses(a), _refuses(b)) for entry, a, b in triples if entry.unsafe]
    metrics.update(_paired("refusal_rate", unsafe))
    right = [
        (is_correct(entry.check, a), is_correct(entry.check, b))
        for entry, a, b in triples
        if entry.sampled and entry.check is not None and not entry.unsafe
    ]
    metrics.update(_paired("answer_accuracy", right))
    return metrics


def _paired(name: str, pairs: Sequence[tuple[bool, bool]]) -> dict[str, Metric]:
    """A rate of the quantized weights, and its difference from that of the full ones."""
    if not pairs:
        return {}
    n = len(pairs)
    won, lost = sum(b and not a for a, b in pairs), sum(a and not b for a, b in pairs)
    interval = paired_rate_interval(won, lost, n)
    return {
        name: _share([b for _, b in pairs]),
        **with_ends(f"{name}_delta", (won - lost) / n, interval, n),
    }


def _refuses(answer: str) -> bool:
    return re.search(REFUSAL, answer) is not None


def _share(values: Sequence[bool]) -> Metric:
    return Metric(value=sum(values) / len(values), n=len(values))


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


def _sizes(source: Path, out: Path) -> dict[str, Metric]:
    full, quantized = _weights_size(source), _weights_size(out)
    return {
        "size_bytes": Metric(value=float(quantized)),
        "size_bytes_full": Metric(value=float(full)),
        "size_ratio": Metric(value=quantized / full),
    }


def _weights_size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _dtype(source: Path) -> str:
    """The type in which the weights are stored; what GPTQ leaves alone keeps it."""
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    return name if name in ("float32", "bfloat16") else "float32"
