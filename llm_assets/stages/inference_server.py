"""Stage 12: the server's spec, proven by a live smoke test.

The engine is started on the weights as a process of its own, asked over the OpenAI protocol, timed
and stopped. What it answers is compared with generation in process on the same weights. server.json
says how to start it and what it answered; times go into the record only.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from itertools import chain, islice, zip_longest
from pathlib import Path

from llm_assets.openai_client import Answer
from llm_assets.serving import RunningServer, ServerSpec, make_spec, require_engine, start_server
from llm_assets.stage_settings import ServerSettings
from llm_assets.stages.context import Metric, StageContext, StageResult
from llm_assets.stages.encoding import Conversation, read_rows


def run(context: StageContext) -> StageResult:
    """Write the spec of a server of `quantized_weights`, proven; see ServerSettings."""
    settings: ServerSettings = context.config
    require_engine(settings.engine)
    weights = context.inputs["quantized_weights"]
    spec = make_spec(
        engine=settings.engine,
        weights=weights.artifact,
        max_tokens=settings.max_new_tokens,
        context_length=_context_length(weights.path),
    )
    prompts = _prompts(context.inputs["instructions"].path, settings)
    conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]

    context.progress.say(f"starting {settings.engine} on {spec.model}")
    started = time.monotonic()
    with start_server(
        spec, weights.path, context.scratch, timeout_s=settings.startup_timeout_s
    ) as server:
        startup_s = time.monotonic() - started
        context.progress.step(1, 3)
        answers = _ask(server, conversations)
        context.progress.step(2, 3)
    context.progress.say("comparing with generation in process")
    expected = _in_process(weights.path, conversations, settings.max_new_tokens)
    same = [a.text.strip() == text for a, text in zip(answers, expected, strict=True)]
    context.progress.step(3, 3)

    _write(context.out / "server.json", spec, prompts, answers, same)
    total_s = sum(answer.total_s for answer in answers)
    num_tokens = sum(answer.num_tokens for answer in answers)
    n = len(answers)
    return StageResult(
        metrics={
            "answers_agree": Metric(value=sum(same) / n, n=n),
            "answered": Metric(value=sum(bool(a.text.strip()) for a in answers) / n, n=n),
            "stopped": Metric(value=sum(a.finish_reason == "stop" for a in answers) / n, n=n),
            "tokens_per_s": Metric(value=num_tokens / total_s if total_s > 0 else 0.0),
            "first_token_s": Metric(value=sum(a.first_token_s for a in answers) / n, n=n),
            "latency_s": Metric(value=total_s / n, n=n),
            "startup_s": Metric(value=startup_s),
        },
        metadata={"weights": weights.artifact, "engine": settings.engine, "model": spec.model},
        samples=[
            {"prompt": prompt, "served": answer.text.strip(), "in_process": text, "same": agrees}
            for prompt, answer, text, agrees in zip(prompts, answers, expected, same, strict=True)
        ],
        tokens=num_tokens,
    )


def _ask(server: RunningServer, conversations: Sequence[Conversation]) -> list[Answer]:
    """Each question once, at temperature 0, after one that warms the server up."""
    server.ask(conversations[0], temperature=0.0)
    return [server.ask(conversation, temperature=0.0) for conversation in conversations]


def _in_process(path: Path, conversations: Sequence[Conversation], count: int) -> list[str]:
    """Greedy answers of the same weights without a server, one at a time as the server does."""
    # After the server has answered: it starts while nothing else takes the cores.
    from llm_assets.stages.compressed import load_quantized
    from llm_assets.stages.generation import generate, to_device
    from llm_assets.stages.models import load_tokenizer

    model = to_device(load_quantized(path))
    answers = generate(
        model, load_tokenizer(path), conversations, max_new_tokens=count, batch_size=1
    )
    return [answer.text.strip() for answer in answers]


def _prompts(instructions: Path, settings: ServerSettings) -> list[str]:
    """The recipe's questions; without any, held-out ones: the first of each kind, then the second
    of each, and so on."""
    if settings.smoke_prompts:
        return list(settings.smoke_prompts)
    columns: dict[str, list[str]] = {}
    for row in read_rows(instructions / "held_out.jsonl"):
        first = row["messages"][0]
        if first["role"] == "user":
            columns.setdefault(str(row.get("kind", "")), []).append(str(first["content"]))
    turns = chain.from_iterable(zip_longest(*columns.values()))
    distinct = dict.fromkeys(prompt for prompt in turns if prompt is not None)
    return list(islice(distinct, settings.num_smoke_prompts))


def _context_length(path: Path) -> int | None:
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    length = config.get("max_position_embeddings")
    return length if isinstance(length, int) else None


def _write(
    path: Path,
    spec: ServerSpec,
    prompts: Sequence[str],
    answers: Sequence[Answer],
    same: Sequence[bool],
) -> None:
    document = {
        **spec.as_dict(),
        "smoke_test": {
            "temperature": 0.0,
            "max_tokens": spec.defaults["max_tokens"],
            "answers": [
                {
                    "prompt": prompt,
                    "answer": answer.text.strip(),
                    "num_tokens": answer.num_tokens,
                    "finish_reason": answer.finish_reason,
                    "same_in_process": agrees,
                }
                for prompt, answer, agrees in zip(prompts, answers, same, strict=True)
            ],
        },
    }
    text = json.dumps(document, indent=2, ensure_ascii=False, sort_keys=True) + "\n"
    path.write_bytes(text.encode("utf-8"))
