"""A stage's artifact taken from a checkpoint made elsewhere: `import:` in its block of the recipe.

From a folder with safetensors, a GGUF file, or the Hugging Face hub by name and commit. What is
stored is plain: safetensors, a tokenizer with an end of turn that the chat template really writes,
and a pad token of its own.
"""

from __future__ import annotations

import contextlib
import copy
import io
import os
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from llm_assets.errors import ModelError
from llm_assets.reading.fingerprint import expand
from llm_assets.stage_settings import ImportSettings
from llm_assets.stages.chat_template import CHATML, render_text, turn_end
from llm_assets.stages.context import Metric, StageContext, StageResult
from llm_assets.stages.models import (
    check_pair,
    check_tokenizer,
    load_model,
    num_parameters,
    refuse_pickles,
    sample,
    save_model,
)

PROMPTS = (
    "What is the capital of France?",
    "What is the opposite of hot? Answer in one word.",
    "Say hello.",
)
_MAX_NEW_TOKENS = 64
# Tokens that checkpoints carry without using them; the first that is there pads.
_PADS = ("<|pad|>", "<pad>", "[PAD]", "<|finetune_right_pad_id|>", "<|endoftext|>", "<unk>")
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "merges.txt", "vocab.txt")


def run(context: StageContext) -> StageResult:
    """Load, set the tokens right, store; and see that the model answers and stops."""
    where = f"stages.{context.stage}.import"
    source: ImportSettings = context.config.import_
    if context.stage == "reward_model":
        return _run_reward_model(context, source, where)
    model, tokenizer = _load(context, source, where)
    changes = repair_tokenizer(model, tokenizer, where=where)
    for change in changes:
        context.progress.say(change)
    check_tokenizer(tokenizer, where=where)
    check_pair(model, tokenizer, where=where)
    save_model(model, tokenizer, context.out)
    context.progress.say("asking the imported model")
    texts = [
        render_text(tokenizer, [{"role": "user", "content": prompt}], add_generation_prompt=True)
        for prompt in PROMPTS
    ]
    answers = sample(model, tokenizer, texts, max_new_tokens=_MAX_NEW_TOKENS, special=True)
    stopped = [tokenizer.eos_token in answer for answer in answers]
    return StageResult(
        metrics={
            "num_parameters": Metric(value=num_parameters(model)),
            "stop_rate": Metric(value=sum(stopped) / len(stopped), n=len(stopped)),
        },
        metadata={"num_parameters": num_parameters(model)},
        samples=[
            {"prompt": prompt, "answer": answer}
            for prompt, answer in zip(PROMPTS, answers, strict=True)
        ],
        tables={"changes": [{"change": change} for change in changes]},
    )


def _run_reward_model(context: StageContext, source: ImportSettings, where: str) -> StageResult:
    from llm_assets.stages.rewards import load_reward_model

    folder = _folder(context, source, where)
    if folder.is_file():
        raise ModelError(
            where=where,
            found=str(folder),
            rule="a GGUF file holds a language model; a reward model is a sequence classifier",
            remedy="import a safetensors folder with one label",
        )
    model = load_reward_model(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    check_tokenizer(tokenizer, where=str(folder))
    check_pair(model, tokenizer, where=str(folder))
    save_model(model, tokenizer, context.out)
    return StageResult(
        metrics={"num_parameters": Metric(value=num_parameters(model))},
        metadata={"num_parameters": num_parameters(model)},
    )


def _folder(context: StageContext, source: ImportSettings, where: str) -> Path:
    """The folder or GGUF file that the recipe names; of the hub, a local copy."""
    if source.path is not None:
        base = Path(str(context.lineage.get("recipe_folder", ".")))
        return base / Path(expand(source.path, where=f"{where}.path")).expanduser()
    return _from_hub(str(source.hub), str(source.revision), where)


def _from_hub(name: str, revision: str, where: str) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(_HUB_FILES)))
    except (OSError, ValueError) as error:
        offline = os.environ.get("HF_HUB_OFFLINE", "") not in ("", "0")
        raise ModelError(
            where=f"{where}.hub",
            found=f"{name} at {revision}: {str(error).strip().splitlines()[0]}",
            rule="a hub model is downloaded, or lies in the hub's local cache",
            remedy="unset HF_HUB_OFFLINE, or import a path"
            if offline
            else "check name, revision and network, or import a path",
        ) from error


def _load(context: StageContext, source: ImportSettings, where: str) -> tuple[Any, Any]:
    path = _folder(context, source, where)
    context.progress.say(f"loading {path.name}")
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(
                where=str(path),
                found=f"a {path.suffix or 'plain'} file",
                rule="an imported checkpoint is a safetensors folder or a .gguf file",
                remedy="name the folder that holds config.json and model.safetensors",
            )
        return load_gguf(path)
    # As float32 whatever the file holds: training keeps its weights in float32.
    model = load_model(path)
    if not (path / "tokenizer_config.json").is_file():
        raise ModelError(
            where=str(path),
            found="no tokenizer",
            rule="an imported checkpoint brings its tokenizer",
            remedy="put tokenizer.json and tokenizer_config.json beside the weights",
        )
    refuse_pickles(path)
    return model, AutoTokenizer.from_pretrained(path, local_files_only=True)


def load_gguf(path: Path) -> tuple[Any, Any]:
    """Model in float32 and tokenizer of a GGUF file. ModelError when transformers cannot read it.

    A model loaded from GGUF refuses save_pretrained, so the weights go into a plain one.
    """
    try:
        # Its progress bar cannot be switched off.
        with contextlib.redirect_stderr(io.StringIO()):
            loaded = AutoModelForCausalLM.from_pretrained(
                path.parent, gguf_file=path.name, dtype=torch.float32
            )
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except Exception as error:  # A damaged file shows as struct.error, IndexError, TypeError, ...
        raise ModelError(
            where=str(path),
            found=f"{type(error).__name__}: {(str(error).strip() or 'no reason').splitlines()[0]}",
            rule="the GGUF file holds an architecture that the installed transformers reads",
            remedy="import the safetensors of the same model",
        ) from error
    config = copy.deepcopy(loaded.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.dtype = torch.float32
    model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    return model.eval(), tokenizer


def repair_tokenizer(model: Any, tokenizer: Any, *, where: str) -> list[str]:
    """Set chat template, eos and pad right; gives what was changed, for a person.

    ModelError when there is no chat template and no ChatML tokens to make one of.
    """
    changes = []
    vocabulary = tokenizer.get_vocab()
    if not tokenizer.chat_template:
        if not {"<|im_start|>", "<|im_end|>"} <= vocabulary.keys():
            raise ModelError(
                where=where,
                found="a tokenizer without chat template",
                rule="alignment stages render conversations through the tokenizer's chat template",
                remedy="put a chat_template.jinja beside tokenizer_config.json",
            )
        tokenizer.chat_template = CHATML
        changes.append("no chat template: ChatML, whose tokens it has")
    end = turn_end(tokenizer)
    if end is not None and end != tokenizer.eos_token:
        changes.append(f"eos {tokenizer.eos_token} -> {end}: this is how the template ends a turn")
        tokenizer.eos_token = end
    if tokenizer.pad_token is None or tokenizer.pad_token == tokenizer.eos_token:
        taken = {tokenizer.eos_token, tokenizer.bos_token, "<|im_start|>"}
        pad = next((name for name in _PADS if name in vocabulary and name not in taken), None)
        changes.append(f"pad {tokenizer.pad_token} -> {pad or '<|pad|>, added'}")
        tokenizer.add_special_tokens({"pad_token": pad or "<|pad|>"})
        if len(tokenizer) > model.get_input_embeddings().weight.shape[0]:
            model.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    # A GGUF file does not say how long a text may be; and the clean-up takes spaces away.
    positions = model.config.get_text_config().max_position_embeddings
    tokenizer.model_max_length = min(tokenizer.model_max_length, positions)
    tokenizer.clean_up_tokenization_spaces = False
    return changes
