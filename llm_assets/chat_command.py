"""`llm-assets chat`: talk to a served model over HTTP, as its users will."""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import click

from llm_assets.errors import NotFoundError, ServerError, UserError
from llm_assets.openai_client import Answer
from llm_assets.places import store_url
from llm_assets.recipe import load_recipe
from llm_assets.serving import RunningServer, ServerSpec, make_spec, spec_of, start_server
from llm_assets.store import open_store
from llm_assets.store.digest import ArtifactHash
from llm_assets.store.protocol import Store

_LANGUAGE_MODELS = ("checkpoint", "sft_checkpoint", "policy", "quantized_weights")
_MAX_TOKENS = 256
_SHORTEST_PREFIX = 6
_HELP = "/new  a fresh conversation\n/quit  end (as Ctrl-D and Ctrl-C do)"


@click.command()
@click.option("-r", "--recipe", "recipe_path", default="tiny", help="A path, or a packaged name.")
@click.option(
    "--artifact",
    metavar="HASH",
    help="A server spec or a language model in the store; a prefix does. Default: the server that "
    "the recipe's pipeline proved last.",
)
@click.option("--once", metavar="QUESTION", help="Print the answer and end.")
@click.option("--system", metavar="TEXT", help="A system message before the conversation.")
@click.option("--max-tokens", type=click.IntRange(min=1), help="Of one answer.")
@click.option("--temperature", type=click.FloatRange(min=0), help="0, the default: greedy.")
@click.option("--startup-timeout", type=click.FloatRange(min=1), default=120.0, show_default=True)
def chat(
    recipe_path: str,
    artifact: str | None,
    once: str | None,
    system: str | None,
    max_tokens: int | None,
    temperature: float | None,
    startup_timeout: float,
) -> int:
    """Start the server of a pipeline and talk to it; it ends with the chat."""
    store = open_store(store_url(), create=False)
    if artifact is None:
        spec = _newest_spec(store, load_recipe(recipe_path).pipeline)
    else:
        spec = _spec_of_artifact(store, _find(store, artifact))
    weights = store.fetch(ArtifactHash.parse(spec.weights))
    click.echo(f"starting {spec.model} ({spec.engine}) …", err=True)
    with (
        tempfile.TemporaryDirectory(prefix="llm-assets-chat-") as scratch,
        start_server(spec, weights, Path(scratch), timeout_s=startup_timeout) as server,
    ):
        talk = Conversation(server, system=system, max_tokens=max_tokens, temperature=temperature)
        if once is not None:
            talk.ask(once, on_text=_write)
            click.echo()
            return 0
        return _loop(talk)


class Conversation:
    """Turns that are sent again with each question, as many of the last ones as fit."""

    def __init__(
        self,
        server: RunningServer,
        *,
        system: str | None = None,
        max_tokens: int | None = None,
        temperature: float | None = None,
    ) -> None:
        self._server = server
        self._system = [{"role": "system", "content": system}] if system else []
        self._max_tokens = max_tokens or int(server.spec.defaults.get("max_tokens", _MAX_TOKENS))
        self._temperature = temperature
        self._turns: list[tuple[str, str, int]] = []

    def ask(self, question: str, on_text: Callable[[str], object] | None = None) -> Answer:
        """The model's answer, kept for the next question."""
        self._make_room(question)
        before = sum(tokens for _, _, tokens in self._turns)
        messages = list(self._system)
        for asked, answered, _ in self._turns:
            messages.append({"role": "user", "content": asked})
            messages.append({"role": "assistant", "content": answered})
        messages.append({"role": "user", "content": question})
        answer = self._server.ask(
            messages,
            max_tokens=self._max_tokens,
            temperature=self._temperature,
            on_text=on_text,
        )
        whole = (answer.prompt_tokens or len(question)) + answer.num_tokens
        self._turns.append((question, answer.text, max(0, whole - before)))
        return answer

    @property
    def alive(self) -> bool:
        """The server runs."""
        return self._server.alive()

    def forget(self) -> None:
        """Start a fresh conversation."""
        self._turns.clear()

    def _make_room(self, question: str) -> None:
        """Drop the oldest turns that would not fit into the model's context."""
        context = self._server.spec.context_length
        if context is None:
            return
        # Few tokens are shorter than two characters.
        room = context - self._max_tokens - len(question) // 2
        while self._turns and sum(tokens for _, _, tokens in self._turns) > room:
            self._turns.pop(0)


def _loop(talk: Conversation) -> int:
    """Questions from standard input until it ends."""
    person = sys.stdin.isatty()
    if person:
        # Line editing and history, where Python has it.
        with contextlib.suppress(ImportError):
            importlib.import_module("readline")
        click.echo("Ask something. /new starts afresh, Ctrl-D ends.", err=True)
    try:
        while True:
            question = input("> " if person else "").strip()
            if question in ("/quit", "/exit"):
                return 0
            if question == "/new":
                talk.forget()
            elif question == "/help":
                click.echo(_HELP, err=True)
            elif question:
                _answer(talk, question)
    except (EOFError, KeyboardInterrupt):
        # The ordinary ways to end a chat.
        if person:
            click.echo(err=True)
        return 0


def _answer(talk: Conversation, question: str) -> None:
    try:
        talk.ask(question, on_text=_write)
        click.echo()
    except ServerError as error:
        if not talk.alive:
            raise
        click.echo(f"error: {error}", err=True)


def _write(text: str) -> None:
    click.echo(text, nl=False)
    sys.stdout.flush()


def _newest_spec(store: Store, pipeline: str) -> ServerSpec:
    """The spec of the newest record of the pipeline's inference server."""
    records = [
        record
        for record in store.all_records()
        if record.stage == "inference_server" and record.pipeline == pipeline
    ]
    if not records:
        raise NotFoundError(
            f"{store.url}: no proven server of the pipeline {pipeline}\n"
            "  rule: chat starts a server that the stage inference_server proved\n"
            f"  next: llm-assets run -r {pipeline}, or name a model with --artifact HASH"
        )
    newest = max(records, key=lambda record: (record.created_at, str(record.output)))
    return spec_of(store.fetch(newest.output) / "server.json")


def _find(store: Store, given: str) -> ArtifactHash:
    """The artifact of a hash or of the beginning of one."""
    prefix = given.strip().lower()
    if len(prefix) < _SHORTEST_PREFIX:
        raise UserError(
            where="--artifact",
            found=repr(given),
            rule=f"an artifact is named by its hash or by at least {_SHORTEST_PREFIX} digits of it",
            remedy="copy the hash from the report card or the UI",
        )
    found = [artifact for artifact in store.artifacts() if str(artifact).startswith(prefix)]
    if len(found) != 1:
        raise NotFoundError(
            f"{store.url}: {len(found) or 'no'} artifacts begin with {prefix}\n"
            "  rule: a hash, or a beginning that only one artifact has\n"
            "  next: give more of the hash, or check that this is the right store"
        )
    return found[0]


def _spec_of_artifact(store: Store, artifact: ArtifactHash) -> ServerSpec:
    kind = store.tree(artifact).type
    if kind == "server_spec":
        return spec_of(store.fetch(artifact) / "server.json")
    if kind not in _LANGUAGE_MODELS:
        raise UserError(
            where=f"--artifact {artifact}",
            found=f"a {kind}",
            rule=f"chat takes a server_spec, or one of {', '.join(_LANGUAGE_MODELS)}",
            remedy="copy the hash of the inference server or of a model",
        )
    config = json.loads((store.fetch(artifact) / "config.json").read_bytes())
    return make_spec(
        engine="transformers",
        weights=str(artifact),
        max_tokens=_MAX_TOKENS,
        context_length=config.get("max_position_embeddings"),
    )
