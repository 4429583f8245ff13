"""`transformers serve` for real, on quantized weights of a small Llama that knows something."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_chat import Silent, save_chat_model, write_instructions, write_jsonl

from llm_assets.artifacts import check_artifact
from llm_assets.errors import ModelError, ServerError
from llm_assets.openai_client import chat_completion
from llm_assets.serving import spec_of, start_server
from llm_assets.stage_settings import QuantizeSettings, ServerSettings
from llm_assets.stages import inference_server, quantized_weights
from llm_assets.stages.context import StageContext, StageInput, StageResult

# llm-compressor's and compressed-tensors' own imports and module offloading warn.
pytestmark = pytest.mark.filterwarnings("ignore")

WEIGHTS = "ab" * 32


def stage_context(root: Path, config: object, **inputs: StageInput) -> StageContext:
    """A context of its own folder; for fixtures that live longer than one test."""
    for folder in ("out", "scratch", "checkpoints"):
        (root / folder).mkdir(parents=True)
    return StageContext(
        stage=root.name,
        pipeline="test",
        config=config,
        seed=1,
        inputs=inputs,
        out=root / "out",
        scratch=root / "scratch",
        checkpoints=root / "checkpoints",
        progress=Silent(),
    )


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("quantized")
    policy = save_chat_model(root / "policy", steps=150)
    rows = write_instructions(root / "instructions")
    context = stage_context(
        root / "quantized_weights",
        QuantizeSettings(bits=8, group_size=32),
        refined_policy=StageInput(path=policy, type="policy", artifact="0" * 64),
        instructions=StageInput(path=rows, type="instructions", artifact="1" * 64),
    )
    quantized_weights.run(context)
    return context.out


Serve = Callable[..., StageContext]


@pytest.fixture(scope="module")
def serve(quantized: Path, tmp_path_factory: pytest.TempPathFactory) -> Serve:
    root = tmp_path_factory.mktemp("serve")
    rows = write_instructions(root / "instructions")
    instructions = StageInput(path=rows, type="instructions", artifact="2" * 64)

    def make(name: str, weights: Path = quantized, **settings: object) -> StageContext:
        return stage_context(
            root / name,
            ServerSettings(max_new_tokens=16, **settings),
            quantized_weights=StageInput(path=weights, type="quantized_weights", artifact=WEIGHTS),
            instructions=instructions,
        )

    return make


@pytest.fixture(scope="module")
def served(serve: Serve) -> tuple[StageContext, StageResult]:
    context = serve("served")
    return context, inference_server.run(context)


def serving_processes() -> list[str]:
    """Command lines of servers of these tests' weights that run now."""
    listing = subprocess.run(
        ["ps", "-ww", "-eo", "stat,args"], capture_output=True, text=True, check=True
    )
    return [
        line
        for line in listing.stdout.splitlines()
        if f"llm-assets-{WEIGHTS[:12]}" in line and not line.startswith("Z")
    ]


def test_the_served_answers_are_those_of_the_weights(served):
    context, result = served
    check_artifact(context.out, "server_spec", result.metadata)
    assert serving_processes() == []
    assert result.metrics["answers_agree"].value == 1.0
    assert result.metrics["answers_agree"].n == 3
    assert result.metrics["answered"].value == 1.0
    assert result.metrics["stopped"].value >= 0.6
    for name in ("tokens_per_s", "first_token_s", "latency_s", "startup_s"):
        assert result.metrics[name].value > 0
    assert result.metrics["latency_s"].value >= result.metrics["first_token_s"].value

    text = (context.out / "server.json").read_text()
    document = json.loads(text)
    first = document["smoke_test"]["answers"][0]
    assert first["prompt"] == "What does Anna do?"
    assert first["answer"] == "Anna is a baker."
    assert first["same_in_process"] is True
    # Nothing of this run or this machine: the same weights give the same bytes.
    assert document["weights"] == WEIGHTS
    assert str(context.scratch.parent) not in text
    assert '_s"' not in text and "127.0.0.1" not in text


def test_the_spec_starts_the_same_server_again(served, quantized, tmp_path):
    context, _ = served
    spec = spec_of(context.out / "server.json")
    kept = json.loads((context.out / "server.json").read_text())["smoke_test"]["answers"]
    with start_server(spec, quantized, tmp_path) as server:
        for entry in kept:
            answer = server.ask([{"role": "user", "content": entry["prompt"]}])
            assert answer.text.strip() == entry["answer"]
            assert answer.num_tokens == entry["num_tokens"]
        with pytest.raises(ServerError, match=r"status 400: .*pinned"):
            body = {"model": "another", "messages": [{"role": "user", "content": "hello"}]}
            chat_completion(server.host, server.port, body)
    assert serving_processes() == []


def test_weights_that_do_not_load_end_in_an_error_with_the_log(serve, tmp_path):
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "config.json").write_text("{}")
    with pytest.raises(ServerError, match="ended before it answered"):
        inference_server.run(serve("broken", weights=broken))
    assert serving_processes() == []


def test_the_recipes_own_questions_come_first(serve):
    context = serve("own", smoke_prompts=["Who are you?"])
    path = context.inputs["instructions"].path
    assert inference_server._prompts(path, context.config) == ["Who are you?"]


def test_held_out_prompts_come_kind_by_kind(tmp_path):
    rows = [
        {"kind": kind, "messages": [{"role": "user", "content": f"{kind} {number}"}]}
        for kind in ("fact", "sum")
        for number in (1, 2)
    ]
    write_jsonl(tmp_path / "held_out.jsonl", rows)
    prompts = inference_server._prompts(tmp_path, ServerSettings(num_smoke_prompts=3))
    assert prompts == ["fact 1", "sum 1", "fact 2"]


def test_vllm_is_refused_where_it_is_not_installed(serve):
    with pytest.raises(ModelError, match="not installed: vllm"):
        inference_server.run(serve("vllm", engine="vllm"))


_STARTER = """
import sys
from pathlib import Path
from llm_assets.serving import make_spec, start_server
spec = make_spec(engine="transformers", weights=sys.argv[1], max_tokens=8)
server = start_server(spec, Path(sys.argv[2]), Path(sys.argv[3]))
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_cancelled_stage_leaves_no_server(quantized, tmp_path):
    starter = subprocess.Popen(
        [sys.executable, "-c", _STARTER, WEIGHTS, str(quantized), str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert starter.stdout is not None and starter.stdin is not None
    assert starter.stdout.readline() == "ready\n"
    # The guard and the server.
    assert len(serving_processes()) == 2
    # As a launcher cancels a run: the whole process group of the worker at once.
    os.killpg(starter.pid, signal.SIGKILL)
    starter.wait()
    starter.stdin.close()
    starter.stdout.close()
    deadline = time.monotonic() + 20
    while serving_processes() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert serving_processes() == []
