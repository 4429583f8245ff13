"""Small real parts for the alignment stages: village rows, a BPE tokenizer, a two-layer Llama."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from llm_assets.artifacts import check_artifact
from llm_assets.data_settings import VillageSettings
from llm_assets.stage_settings import RefineSettings
from llm_assets.stages import dpo_policy, refined_policy, reward_model, sft_checkpoint
from llm_assets.stages.context import StageContext, StageInput, StageResult
from llm_assets.village import instruction_rows, preference_rows

TEMPLATE = (
    "{%- for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' }}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] + '<|im_end|>' }}"
    "{% endgeneration %}{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
PLAIN_TEMPLATE = TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
VILLAGE = VillageSettings(instructions=400, preferences=240, villagers=8)


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """JSONL."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_village(folder: Path) -> dict[str, Path]:
    """`instructions` and `preferences` as the data stages write them."""
    paths = {}
    for name, rows in (
        ("instructions", list(instruction_rows(VILLAGE))),
        ("preferences", list(preference_rows(VILLAGE))),
    ):
        for split in ("train", "held_out"):
            kept = [{**row, "source": "village"} for row in rows if row["split"] == split]
            write_rows(folder / name / f"{split}.jsonl", kept)
        paths[name] = folder / name
    return paths


def small_tokenizer(texts: Iterable[str]) -> Any:
    """Byte-level BPE of at most 512 tokens with ChatML."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=512,
            special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|endoftext|>",
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        model_max_length=128,
    )
    fast.chat_template = TEMPLATE
    return fast


def small_model(tokenizer: Any) -> Any:
    """Two layers, 32 wide, 128 tokens of context."""
    torch.manual_seed(5)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=512,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=128,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=tokenizer.bos_token_id,
        )
    )


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
