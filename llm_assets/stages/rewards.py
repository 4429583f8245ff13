"""The reward model: made from a language model, loaded, and asked for scores."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForSequenceClassification, set_seed
from transformers.utils import logging as transformers_logging

from llm_assets.errors import DisagreementError, ModelError
from llm_assets.gates.statistics import wilson
from llm_assets.stage_settings import LoraSettings
from llm_assets.stages.adapters import quantization
from llm_assets.stages.context import Metric
from llm_assets.stages.encoding import Conversation, render
from llm_assets.stages.training import check_model_folder, check_pair, refuse_pickles
from llm_assets.village.oracle import score

_WINDOW = 400
"""Pairs of answers over which the agreement with the oracle is watched."""
_FEWEST = 60
"""With fewer pairs nothing is said."""
_TOKENS = 8192
"""Tokens of one forward pass when scoring."""


def new_reward_model(path: Path, tokenizer: Any, *, seed: int, lora: LoraSettings | None) -> Any:
    """The causal LM of a folder with a fresh head of one score in place of its LM head."""
    config = check_model_folder(path)
    config.num_labels = 1
    config.pad_token_id = tokenizer.pad_token_id
    set_seed(seed)
    level = transformers_logging.get_verbosity()
    # The warning that the score head is new and the LM head unused: both are meant.
    transformers_logging.set_verbosity_error()
    try:
        model = AutoModelForSequenceClassification.from_pretrained(
            path,
            config=config,
            dtype=torch.float32,
            local_files_only=True,
            use_safetensors=True,
            **quantization(lora),
        )
    finally:
        transformers_logging.set_verbosity(level)
    check_pair(model, tokenizer, where=str(path))
    return model


def load_reward_model(path: Path) -> Any:
    """The reward model of an artifact. ModelError when it is none."""
    refuse_pickles(path)
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    names = [str(name) for name in config.architectures or []]
    if config.num_labels != 1 or not any(n.endswith("ForSequenceClassification") for n in names):
        raise ModelError(
            where=str(path / "config.json"),
            found=f"architectures {names}, num_labels {config.num_labels}",
            rule="a reward model is a sequence classifier with one label",
            remedy="wire the reward_model stage's artifact here",
        )
    return AutoModelForSequenceClassification.from_pretrained(
        path, dtype=torch.float32, local_files_only=True, use_safetensors=True
    )


def conversation_rewards(
    model: Any, tokenizer: Any, conversations: Sequence[Conversation]
) -> list[float]:
    """The score of each conversation, its answer included."""
    return rewards(model, render(tokenizer, conversations), pad_token_id=tokenizer.pad_token_id)


def rewards(model: Any, rows: Sequence[Sequence[int]], *, pad_token_id: int) -> list[float]:
    """The score of each row of token ids, in batches of like length, padded on the right."""
    was_training = model.training
    model.eval()
    order = sorted(range(len(rows)), key=lambda index: (len(rows[index]), index))
    scores = [0.0] * len(rows)
    try:
        with torch.inference_mode():
            start = 0
            while start < len(order):
                stop = start + 1
                while stop < len(order) and (stop + 1 - start) * len(rows[order[stop]]) <= _TOKENS:
                    stop += 1
                batch = order[start:stop]
                width = len(rows[batch[-1]])
                ids = torch.full((len(batch), width), pad_token_id)
                mask = torch.zeros((len(batch), width), dtype=torch.long)
                for number, index in enumerate(batch):
                    ids[number, : len(rows[index])] = torch.tensor(rows[index])
                    mask[number, : len(rows[index])] = 1
                output = model(
                    input_ids=ids.to(model.device),
                    attention_mask=mask.to(model.device),
                    use_cache=False,
                )
                for index, value in zip(batch, output.logits[:, 0].tolist(), strict=True):
                    scores[index] = value
                start = stop
    finally:
        model.train(was_training)
    return scores


class RewardFunction:
    """The reward model as a reward function of GRPOTrainer and RLOOTrainer.

    It scores prompt and answer through the chat template. Where a prompt has a check (a column of
    JSON), the oracle's mean score is logged beside it, and how often both order two answers of a
    group alike: a reward that rises while these fall is being gamed. `min_agreement`: the training
    is stopped when that share, over the newest `_WINDOW` pairs, is below it beyond doubt.
    """

    __name__ = "reward_model"

    def __init__(
        self, model: Any, tokenizer: Any, *, group: int, min_agreement: float | None = None
    ) -> None:
        self.model = model
        self.tokenizer = tokenizer
        self.group = group
        self.min_agreement = min_agreement
        self._recent: list[Metric] = []

    def __call__(
        self,
        prompts: Sequence[Conversation],
        completions: Sequence[Conversation],
        check: Sequence[str] = (),
        log_metric: Callable[[str, float], None] | None = None,
        **_: Any,
    ) -> list[float]:
        """One reward a completion; completions of one prompt follow each other."""
        conversations = [[*p, *c] for p, c in zip(prompts, completions, strict=True)]
        scores = conversation_rewards(self.model, self.tokenizer, conversations)
        judged = [json.loads(text) for text in check]
        if log_metric is not None and any(judged):
            oracle = [
                score(one, c[-1]["content"], p[-1]["content"]).total if one else None
                for one, p, c in zip(judged, prompts, completions, strict=True)
            ]
            known = [value for value in oracle if value is not None]
            log_metric("oracle_score", sum(known) / len(known))
            agreement = group_agreement(scores, oracle, group=self.group)
            if agreement is not None:
                log_metric("oracle_agreement", agreement.value)
                self._watch(agreement)
        return scores

    def _watch(self, agreement: Metric) -> None:
        """DisagreementError when even the upper end of the interval is below the limit."""
        if self.min_agreement is None:
            return
        self._recent.append(agreement)
        while sum(m.n or 0 for m in self._recent[1:]) >= _WINDOW:
            self._recent.pop(0)
        n = sum(m.n or 0 for m in self._recent)
        share = sum(m.value * (m.n or 0) for m in self._recent) / n
        if n >= _FEWEST and wilson(share * n, n).high < self.min_agreement:
            raise DisagreementError(
                f"stages.refined_policy: the reward model orders {share:.0%} of {n} pairs of the "
                f"policy's newest answers as the oracle does\n"
                f"  rule: min_reward_agreement {self.min_agreement:g}: below it the policy learns "
                "what the reward model gets wrong\n"
                "  next: raise beta or lower learning_rate, so that the policy stays where the "
                "reward model was trained; or train the reward model on answers of this policy"
            )


def group_agreement(
    scores: Sequence[float], oracle: Sequence[float | None], *, group: int
) -> Metric | None:
    """Share of the pairs within groups, among those that the oracle tells apart, which the scores
    order as it does; a tie of the scores counts half. None without such a pair."""
    right, total = 0.0, 0
    for start in range(0, len(scores), group):
        members = range(start, min(start + group, len(scores)))
        for first, second in itertools.combinations(members, 2):
            a, b = oracle[first], oracle[second]
            if a is None or b is None or a == b:
                continue
            difference = (scores[first] - scores[second]) * (1 if a > b else -1)
            right += 1.0 if difference > 0 else 0.5 if difference == 0 else 0.0
            total += 1
    return Metric(value=right / total, n=total) if total else None
