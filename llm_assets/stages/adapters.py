"""LoRA and QLoRA for the training stages, merged into the weights before they are stored."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM

from llm_assets.errors import RecipeError
from llm_assets.stage_settings import LoraSettings
from llm_assets.stages.context import StageContext
from llm_assets.stages.training import check_model_folder, check_pair, load_model

Task = Literal["CAUSAL_LM", "SEQ_CLS"]


def refuse_quantized(lora: LoraSettings | None, *, where: str) -> None:
    """RecipeError for QLoRA on a machine that has no GPU or no bitsandbytes."""
    if lora is None or lora.quantize_base == "none":
        return
    lacks = []
    if not torch.cuda.is_available():
        lacks.append("no GPU")
    if importlib.util.find_spec("bitsandbytes") is None:
        lacks.append("no bitsandbytes")
    if lacks:
        raise RecipeError(
            where=f"{where}.lora.quantize_base",
            found=f"{lora.quantize_base} on a machine with {' and '.join(lacks)}",
            rule="QLoRA trains on a base in 4 bits, which needs bitsandbytes and a GPU",
            remedy="set quantize_base: none (plain LoRA), or run the stage where there is a GPU",
        )


def refuse_settings(context: StageContext, names: Iterable[str], *, why: str) -> None:
    """RecipeError when the block passes a setting through that cannot have its effect here."""
    for name in names:
        if name in context.config.extra:
            raise RecipeError(
                where=f"{context.stage}.{name}",
                found=repr(context.config.extra[name]),
                rule=why,
                remedy=f"remove {name}",
            )


def adapter_config(lora: LoraSettings | None, *, task: Task = "CAUSAL_LM") -> Any:
    """The PEFT config of a recipe's LoRA block; None without one. A reward head trains whole."""
    if lora is None:
        return None
    from peft import LoraConfig

    return LoraConfig(
        task_type=task,
        r=lora.r,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=lora.target_modules,
        modules_to_save=["score"] if task == "SEQ_CLS" else None,
    )


def quantization(lora: LoraSettings | None) -> dict[str, Any]:
    """Further arguments of from_pretrained for the base of a QLoRA; none otherwise."""
    if lora is None or lora.quantize_base == "none":
        return {}
    from transformers import BitsAndBytesConfig

    return {
        "quantization_config": BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=lora.quantize_base,
            bnb_4bit_compute_dtype=torch.bfloat16,
            bnb_4bit_use_double_quant=True,
        ),
        "device_map": {"": 0},
    }


def load_trainable(path: Path, tokenizer: Any, lora: LoraSettings | None) -> Any:
    """The causal LM of a folder, ready for training: float32, or 4 bits under a QLoRA."""
    more = quantization(lora)
    if more:
        config = check_model_folder(path)
        model = AutoModelForCausalLM.from_pretrained(
            path, config=config, local_files_only=True, use_safetensors=True, **more
        )
    else:
        model = load_model(path)
    check_pair(model, tokenizer, where=str(path))
    return model


def merged(model: Any, lora: LoraSettings | None, base: Any, scratch: Path) -> Any:
    """The plain model with the adapter's weights added to its own; a plain model as it is.

    `base`: a function that loads the base in float32. A QLoRA's adapter is added to that one, so
    that the rounding to 4 bits is not stored.
    """
    if lora is None:
        return model
    if lora.quantize_base == "none":
        return model.merge_and_unload(safe_merge=True)
    from peft import PeftModel

    folder = scratch / "adapter"
    model.save_pretrained(folder)
    return PeftModel.from_pretrained(base(), folder).merge_and_unload(safe_merge=True)
