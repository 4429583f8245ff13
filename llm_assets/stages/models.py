"""Models and tokenizers on disk, the same way for every stage: safetensors, never pickle."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

from llm_assets.errors import ModelError

# What matters is reported by the stages; bars and load reports would fill the log.
disable_progress_bar()
set_verbosity_error()

PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")


def refuse_pickles(folder: Path) -> None:
    """ModelError when a folder holds pickle files: they are never loaded."""
    found = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
    if found:
        raise ModelError(
            where=str(folder),
            found=f"pickle files: {', '.join(found)}",
            rule="weights are safetensors; a pickle can run code when it is loaded, so none is",
            remedy="convert the weights to safetensors and remove these files",
        )


def has_safetensors(folder: Path) -> bool:
    """The folder has a model.safetensors, or the index of a sharded one."""
    return (folder / "model.safetensors").is_file() or (
        folder / "model.safetensors.index.json"
    ).is_file()


def check_model_folder(folder: Path) -> Any:
    """The folder's config, when it holds a causal LM in safetensors; ModelError otherwise."""
    if not folder.is_dir():
        raise ModelError(
            where=str(folder),
            found="no such folder",
            rule="a checkpoint is a folder with config.json and model.safetensors",
            remedy="check the path",
        )
    refuse_pickles(folder)
    if not (folder / "config.json").is_file() or not has_safetensors(folder):
        raise ModelError(
            where=str(folder),
            found=f"files: {', '.join(sorted(p.name for p in folder.iterdir())) or 'none'}",
            rule="a checkpoint is a folder with config.json and model.safetensors",
            remedy="save it with save_pretrained, or name the folder that holds these files",
        )
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    except (ValueError, KeyError, OSError) as error:
        raise ModelError(
            where=str(folder / "config.json"),
            found=str(error).splitlines()[0],
            rule="the architecture is one that the installed transformers knows",
            remedy="take a causal language model, or a newer transformers",
        ) from error
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ModelError(
            where=str(folder / "config.json"),
            found=f"model_type {config.model_type}",
            rule="the pipeline trains causal language models",
            remedy="take a decoder-only model, such as Llama, Qwen or SmolLM",
        )
    names = [str(name) for name in config.architectures or []]
    if names and not any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in names):
        raise ModelError(
            where=str(folder / "config.json"),
            found=f"architectures {', '.join(names)}",
            rule="the pipeline trains causal language models",
            remedy="take the checkpoint with the language-model head",
        )
    return config


def load_model(path: Path, *, dtype: str = "float32") -> Any:
    """The causal LM of a folder, weights in `dtype` (`float32` or `bfloat16`), on the CPU.

    ModelError for pickles, another architecture, missing weights or weights of another shape.
    """
    config = check_model_folder(path)
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            path,
            config=config,
            dtype=getattr(torch, dtype),
            local_files_only=True,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # To name them below; nothing is taken that way.
            output_loading_info=True,
        )
    except (RuntimeError, ValueError, OSError, SafetensorError) as error:
        raise ModelError(
            where=str(path),
            found=str(error).splitlines()[0],
            rule="the weights fit the architecture of config.json",
            remedy="take the config.json that belongs to these weights",
        ) from error
    missing = sorted(str(key) for key in info["missing_keys"])
    mismatched = sorted(str(key[0]) for key in info["mismatched_keys"])
    if missing or mismatched:
        raise ModelError(
            where=str(path),
            found="; ".join(
                f"{what}: {', '.join(names[:3])}"
                for what, names in (("missing", missing), ("of another shape", mismatched))
                if names
            ),
            rule="every weight of the architecture is in the file, in its shape",
            remedy="take the config.json that belongs to these weights",
        )
    return model


def load_tokenizer(path: Path, *, chat: bool = True) -> Any:
    """The fast tokenizer of a folder.

    ModelError when it has no eos or no pad, pad equal to eos (turn ends would be masked with the
    padding and never learned), or, with `chat`, no chat template.
    """
    refuse_pickles(path)
    if not (path / "tokenizer.json").is_file():
        raise ModelError(
            where=str(path),
            found="no tokenizer.json",
            rule="a checkpoint carries its fast tokenizer",
            remedy="save the tokenizer beside the model with save_pretrained",
        )
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    check_tokenizer(tokenizer, where=str(path), chat=chat)
    return tokenizer


def check_tokenizer(tokenizer: Any, *, where: str, chat: bool = True) -> None:
    """ModelError unless the tokenizer can be trained with (see `load_tokenizer`)."""
    if tokenizer.eos_token_id is None or tokenizer.pad_token_id is None:
        missing = "eos" if tokenizer.eos_token_id is None else "pad"
        raise ModelError(
            where=where,
            found=f"a tokenizer without {missing} token",
            rule="training needs an eos token to end turns and a pad token to fill batches",
            remedy=f"set {missing}_token in tokenizer_config.json",
        )
    if tokenizer.pad_token_id == tokenizer.eos_token_id:
        raise ModelError(
            where=where,
            found=f"pad token equal to eos token: {tokenizer.eos_token!r}",
            rule="pad and eos differ, or the loss masks the end of turn and the model never stops",
            remedy="set pad_token to an unused special token in tokenizer_config.json",
        )
    if chat and not tokenizer.chat_template:
        raise ModelError(
            where=where,
            found="a tokenizer without chat template",
            rule="alignment stages render conversations through the tokenizer's chat template",
            remedy="put a chat_template.jinja beside tokenizer_config.json",
        )


def check_pair(model: Any, tokenizer: Any, *, where: str) -> None:
    """ModelError when the tokenizer can emit ids that the model's embedding does not have."""
    rows = int(model.get_input_embeddings().weight.shape[0])
    if rows < len(tokenizer):
        raise ModelError(
            where=where,
            found=f"vocabulary of {rows} tokens, tokenizer of {len(tokenizer)}",
            rule="every token of the tokenizer has an embedding",
            remedy="take the tokenizer that belongs to the checkpoint, or resize its embeddings",
        )


def align_tokens(model: Any, tokenizer: Any) -> None:
    """Set eos, pad and bos of the model's and its generation config from the tokenizer."""
    for name in ("eos_token_id", "pad_token_id", "bos_token_id"):
        setattr(model.config, name, getattr(tokenizer, name))
    if model.can_generate():
        model.generation_config = GenerationConfig(
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
            bos_token_id=tokenizer.bos_token_id,
            do_sample=False,
        )


def save_model(model: Any, tokenizer: Any, out: Path) -> None:
    """Write config, generation config, model.safetensors, tokenizer files and chat template."""
    align_tokens(model, tokenizer)
    model.config.use_cache = True
    model.save_pretrained(out)
    # How it was loaded and last used is no part of the tokenizer.
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        backend.no_padding()
        backend.no_truncation()
    for name in ("is_local", "local_files_only", "name_or_path", "gguf_file"):
        tokenizer.init_kwargs.pop(name, None)
    tokenizer.save_pretrained(out)


def num_parameters(model: Any) -> int:
    """Parameters, tied ones once."""
    return sum(parameter.numel() for parameter in model.parameters())


@torch.inference_mode()
def sample(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    *,
    max_new_tokens: int = 32,
    special: bool = False,
) -> list[str]:
    """Greedy continuations of plain prompts, one a prompt; with `special`, special tokens shown."""
    was_training = model.training
    model.eval()
    try:
        texts: list[str] = []
        stops = [tokenizer.eos_token_id]
        if "<|endoftext|>" in tokenizer.get_vocab():
            stops.append(tokenizer.convert_tokens_to_ids("<|endoftext|>"))
        for prompt in prompts:
            ids = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).to(model.device)
            ids.pop("token_type_ids", None)
            output = model.generate(
                **ids,
                max_new_tokens=max_new_tokens,
                do_sample=False,
                eos_token_id=stops,
                pad_token_id=tokenizer.pad_token_id,
            )
            new = output[0, ids["input_ids"].shape[1] :]
            texts.append(tokenizer.decode(new, skip_special_tokens=not special))
        return texts
    finally:
        model.train(was_training)
