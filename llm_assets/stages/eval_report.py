"""Stage 10: lm-eval on the policy and its reference, and the KL between them.

Writes report.json (every answer, scores, intervals, tests) and report.html (one page to read). Both
are functions of the weights, the eval data and the recipe: no time, no path, no host.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from llm_assets import village
from llm_assets.errors import DataError, ModelError
from llm_assets.gates.statistics import bootstrap_mean
from llm_assets.stage_settings import EvalSettings
from llm_assets.stages.context import StageContext, StageResult
from llm_assets.stages.eval_page import render_page
from llm_assets.stages.eval_scoring import Item, TaskItems, build_report, items_of, metrics_of
from llm_assets.stages.eval_tasks import first_prompts, read_tasks
from llm_assets.stages.generation import context_length, divergence, generate, to_device
from llm_assets.stages.models import check_pair, load_model, load_tokenizer, num_parameters

# lm-eval's own tasks, by name in the recipe, count as this.
_NAMED_ROLE = "capability"
_FEWSHOT_SEED = 1234


def run(context: StageContext) -> StageResult:
    """Compare `refined_policy` with `sft_checkpoint` on `evals`; see EvalSettings."""
    settings: EvalSettings = context.config
    folder = context.inputs["evals"].path
    tasks = read_tasks(folder)
    policy_input, reference_input = (
        context.inputs["refined_policy"],
        context.inputs["sft_checkpoint"],
    )
    # Without any alignment stage the policy is the reference itself.
    same = policy_input.artifact == reference_input.artifact
    tokenizer, policy = _load(policy_input.path, settings.max_new_tokens)
    reference_tokenizer, reference = tokenizer, policy
    if not same:
        reference_tokenizer, reference = _load(reference_input.path, settings.max_new_tokens)
    steps = 2 if same else 3

    context.progress.say(f"lm-eval on the policy: {len(tasks) + len(settings.tasks)} tasks")
    found = {"policy": answers_of(policy, tokenizer, tasks, context)}
    context.progress.step(1, steps)
    if not same:
        context.progress.say("lm-eval on the reference")
        found["reference"] = answers_of(reference, reference_tokenizer, tasks, context)
        context.progress.step(2, steps)
    context.progress.say("KL of the policy to the reference")
    prompts = first_prompts(folder, tasks, settings.kl_prompts)
    kl = _kl(policy, reference, tokenizer, prompts, context)
    report = build_report(
        _paired(found["policy"], found.get("reference", found["policy"])),
        models={
            "policy": {
                "artifact": policy_input.artifact,
                "num_parameters": num_parameters(policy),
            },
            "reference": {
                "artifact": reference_input.artifact,
                "num_parameters": num_parameters(reference),
            },
        },
        settings={
            "limit": settings.limit,
            "tasks": list(settings.tasks),
            "max_new_tokens": settings.max_new_tokens,
            "kl_prompts": settings.kl_prompts,
        },
        kl=kl,
        seed=context.seed,
    )
    _write(context.out, report)
    context.progress.step(steps, steps)
    return StageResult(
        metrics=metrics_of(report),
        metadata={"num_tasks": len(report["tasks"]), "num_items": _num_items(report)},
        samples=_samples(report),
        tables=_tables(report),
    )


def answers_of(
    model: Any, tokenizer: Any, tasks: Sequence[Mapping[str, Any]], context: StageContext
) -> dict[str, tuple[str, str, list[Item]]]:
    """Task name to (role, metric, items), by lm-eval with the chat template, greedy."""
    # lm-eval announces each step at this level; what matters comes through the progress.
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    from lm_eval.evaluator import evaluate
    from lm_eval.models.huggingface import HFLM

    settings: EvalSettings = context.config
    loaded = _load_tasks(tasks, context)
    roles = {task["name"]: task["role"] for task in tasks}
    torch.manual_seed(context.seed)
    lm = HFLM(
        pretrained=model,
        tokenizer=tokenizer,
        batch_size=settings.batch_size,
        device=str(model.device),
        max_length=context_length(model),
    )
    results = evaluate(
        lm=lm,
        task_dict=loaded,
        limit=settings.limit,
        bootstrap_iters=0,
        log_samples=True,
        apply_chat_template=True,
        fewshot_as_multiturn=True,
    )
    found = {}
    for name, samples in results["samples"].items():
        role = roles.get(name, _NAMED_ROLE)
        metric, items = items_of(samples, role)
        found[name] = (role, metric, items)
    return found


def _load_tasks(tasks: Sequence[Mapping[str, Any]], context: StageContext) -> Any:
    """lm-eval's task objects, set to this recipe's number of tokens and to their own few-shot."""
    import datasets
    from lm_eval.tasks import TaskManager

    settings: EvalSettings = context.config
    folder = context.inputs["evals"].path
    configs: list[Any] = []
    for task in tasks:
        config = village.task_config(folder, task["name"])
        # Its own cache: the user's may be read-only, or hold a file of the same name.
        config["dataset_kwargs"]["cache_dir"] = str(context.scratch / "datasets")
        configs.append(config)
    datasets.disable_progress_bars()
    manager = TaskManager(include_defaults=bool(settings.tasks))
    _check_names(settings.tasks, manager)
    loaded = manager.load([*configs, *settings.tasks])
    for task_object in loaded["tasks"].values():
        if task_object.get_config("num_fewshot") is None:
            task_object.set_config(key="num_fewshot", value=0)
        if task_object.get_config("output_type") == "generate_until":
            limit = {"max_gen_toks": settings.max_new_tokens}
            task_object.set_config(key="generation_kwargs", value=limit, update=True)
        task_object.set_fewshot_seed(seed=_FEWSHOT_SEED)
    return loaded


def _check_names(names: Sequence[str], manager: Any) -> None:
    unknown = [name for name in names if name not in manager.all_tasks]
    if unknown:
        raise DataError(
            where="stages.eval_report.tasks",
            found=f"no lm-eval task {', '.join(unknown)}",
            rule="a task is one of lm-eval's own, by name",
            remedy="see `lm-eval ls tasks`, or put the items into data.evals",
        )


def _load(path: Path, max_new_tokens: int) -> tuple[Any, Any]:
    tokenizer = load_tokenizer(path)
    model = load_model(path)
    check_pair(model, tokenizer, where=str(path))
    limit = context_length(model)
    if limit is not None and max_new_tokens >= limit:
        raise ModelError(
            where="stages.eval_report.max_new_tokens",
            found=f"{max_new_tokens}, and a model that reads {limit} tokens",
            rule="a question and its answer fit into the model's context",
            remedy=f"set max_new_tokens well below {limit}",
        )
    return tokenizer, to_device(model).eval()


def _kl(
    policy: Any,
    reference: Any,
    tokenizer: Any,
    prompts: Sequence[str],
    context: StageContext,
) -> dict[str, Any]:
    settings: EvalSettings = context.config
    answers = generate(
        policy,
        tokenizer,
        [[{"role": "user", "content": prompt}] for prompt in prompts],
        max_new_tokens=settings.max_new_tokens,
        temperature=1.0,
        seed=context.seed,
    )
    found = divergence(policy, reference, answers, pad_token_id=tokenizer.pad_token_id)
    interval = bootstrap_mean(found.sequences, seed=context.seed)
    return {
        "per_token": found.per_token,
        "per_sequence": found.per_sequence,
        "low": interval.low,
        "high": interval.high,
        "entropy": found.entropy,
        "num_tokens": found.num_tokens,
        "num_prompts": len(answers),
    }


def _paired(
    policy: Mapping[str, tuple[str, str, list[Item]]],
    reference: Mapping[str, tuple[str, str, list[Item]]],
) -> list[TaskItems]:
    return [
        TaskItems(name=name, role=role, metric=metric, policy=items, reference=reference[name][2])
        for name, (role, metric, items) in policy.items()
    ]


def _write(out: Path, report: Mapping[str, Any]) -> None:
    text = json.dumps(report, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
    (out / "report.json").write_bytes(text.encode("utf-8"))
    (out / "report.html").write_bytes(render_page(report).encode("utf-8"))


def _num_items(report: Mapping[str, Any]) -> int:
    return sum(task["num_items"] for task in report["tasks"])


def _samples(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The first item of each task."""
    return [
        {
            "task": name,
            "prompt": rows[0]["prompt"],
            "reference": rows[0]["reference"]["answer"],
            "policy": rows[0]["policy"]["answer"],
        }
        for name, rows in report["items"].items()
        if rows
    ]


def _tables(report: Mapping[str, Any]) -> dict[str, list[dict[str, Any]]]:
    tasks = [
        {
            "task": task["name"],
            "role": task["role"],
            "metric": task["metric"],
            "items": task["num_items"],
            "policy": task["policy"]["value"],
            "reference": task["reference"]["value"],
            "delta": task["delta"],
            "won": task["won"],
            "lost": task["lost"],
            "p": task["p_value"],
        }
        for task in report["tasks"]
    ]
    regressions = [
        {
            "task": row["task"],
            "prompt": row["prompt"],
            "target": row["target"],
            "reference": row["reference"]["answer"],
            "policy": row["policy"]["answer"],
        }
        for row in report["regressions"][:50]
    ]
    return {"tasks": tasks, "regressions": regressions}
