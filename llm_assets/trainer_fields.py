"""The settings that the installed trainers take, read without importing them.

Importing TRL takes 8 to 10 seconds; parsing the sources of its argument classes takes a few
milliseconds each. So a misspelt setting is an error when the definitions load.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
from functools import cache
from pathlib import Path

from llm_assets.caching import cached_json

# Stage to the chain of argument classes, most derived first: (distribution, file, class).
_TRAINING_ARGUMENTS = ("transformers", "training_args.py", "TrainingArguments")
_TRL_BASE = ("trl", "trainer/base_config.py", "_BaseConfig")
ARGUMENT_CLASSES: dict[str, tuple[tuple[str, str, str], ...]] = {
    "base_checkpoint": (_TRAINING_ARGUMENTS,),
    "midtrained_checkpoint": (_TRAINING_ARGUMENTS,),
    "sft_checkpoint": (
        ("trl", "trainer/sft_config.py", "SFTConfig"),
        _TRL_BASE,
        _TRAINING_ARGUMENTS,
    ),
    "reward_model": (
        ("trl", "trainer/reward_config.py", "RewardConfig"),
        _TRL_BASE,
        _TRAINING_ARGUMENTS,
    ),
    "dpo_policy": (("trl", "trainer/dpo_config.py", "DPOConfig"), _TRL_BASE, _TRAINING_ARGUMENTS),
    "refined_policy": (
        ("trl", "trainer/grpo_config.py", "GRPOConfig"),
        ("trl", "trainer/rloo_config.py", "RLOOConfig"),
        _TRL_BASE,
        _TRAINING_ARGUMENTS,
    ),
}

# Set by the pipeline itself; a recipe that sets them would break resume, identity or reporting.
OWNED = frozenset(
    {
        "output_dir", "seed", "data_seed", "report_to", "push_to_hub", "resume_from_checkpoint",
        "save_strategy", "save_steps", "save_total_limit", "do_train", "do_eval", "do_predict",
        "eval_strategy", "logging_dir", "disable_tqdm", "use_cpu", "bf16", "fp16",
    }
)  # fmt: skip

# Cannot change the result, so they are no part of the identity.
RUNTIME_ONLY = frozenset(
    {
        "logging_steps", "logging_strategy", "logging_first_step", "log_level", "log_level_replica",
        "dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers",
        "dataloader_prefetch_factor", "dataset_num_proc", "run_name", "skip_memory_metrics",
        "include_num_input_tokens_seen", "log_completions", "num_completions_to_print",
    }
)  # fmt: skip


def _fields_in(path: Path, class_name: str) -> list[str]:
    tree = ast.parse(path.read_bytes())
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            return [
                entry.target.id
                for entry in node.body
                if isinstance(entry, ast.AnnAssign)
                and isinstance(entry.target, ast.Name)
                and not entry.target.id.startswith("_")
            ]
    return []


def _class_fields(distribution: str, relative: str, class_name: str) -> list[str]:
    spec = importlib.util.find_spec(distribution)
    if spec is None or not spec.submodule_search_locations:
        return []
    path = Path(spec.submodule_search_locations[0]) / relative
    version = importlib.metadata.version(distribution)
    key = json.dumps(["trainer-fields-1", distribution, version, relative, class_name])
    fields = cached_json(key, lambda: _fields_in(path, class_name) if path.is_file() else [])
    return [str(name) for name in fields]


@cache
def trainer_fields(stage: str) -> frozenset[str]:
    """Names of all settings that the stage's trainer takes; empty when it has none."""
    names: set[str] = set()
    for distribution, relative, class_name in ARGUMENT_CLASSES.get(stage, ()):
        names.update(_class_fields(distribution, relative, class_name))
    return frozenset(names)
