"""The stages, declared as data, and how a recipe wires them.

`STAGES` is the graph of the design. `wire(recipe)` gives the graph of one recipe: stages that it
switches off hand their input on, an imported base has nothing above it, and a wrong wiring (a
policy where a base checkpoint belongs) is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from llm_assets.errors import RecipeError
from llm_assets.recipe import Recipe
from llm_assets.stage_settings import ImportSettings

CostClass = Literal["cheap", "medium", "expensive"]


@dataclass(frozen=True, kw_only=True)
class Input:
    """One input of a stage: its name is the stage that gives it; `accepts` are artifact types."""

    name: str
    accepts: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One step of the pipeline.

    `module` has `function`; `libraries` are distributions whose version is part of the source hash.
    `parallel`: its training can be shared by several processes. `passes_on`: the input that is
    handed on when the stage is switched off. `data`: the block of the recipe's `data:` that the
    stage reads, for the four data sets. `side_by_side`: stages that the graph lets run at the same
    time share the cores.
    """

    name: str
    number: int
    gives: str
    inputs: tuple[Input, ...] = ()
    cost_class: CostClass = "cheap"
    bit_identical: bool = True
    trains: bool = False
    parallel: bool = False
    module: str = ""
    function: str = "run"
    libraries: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    passes_on: str | None = None
    data: str | None = None
    side_by_side: int = 1
    description: str = ""


_TORCH = ("torch", "transformers", "tokenizers", "safetensors")
_TRAINER = (*_TORCH, "accelerate")
_TRL = (*_TRAINER, "trl", "peft", "datasets")
_LANGUAGE_MODELS = ("sft_checkpoint", "policy")


def _data(name: str, description: str) -> Stage:
    return Stage(
        name=name,
        number=0,
        gives=name,
        module="llm_assets.stages.data",
        function=f"run_{name}",
        kinds=("python",),
        data=name,
        description=description,
    )


_STAGES = (
    _data("corpus", "Documents of the recipe's sources, mixed by weight."),
    _data("instructions", "Conversations for fine-tuning, with a held-out split."),
    _data("preferences", "Pairs of answers with provenance and votes, with a held-out split."),
    _data("evals", "Evaluation tasks in lm-eval's own format; never seen in training."),
    Stage(
        name="vocabulary",
        number=1,
        gives="vocabulary",
        inputs=(Input(name="corpus", accepts=("corpus",)),),
        module="llm_assets.stages.vocabulary",
        libraries=("tokenizers",),
        kinds=("huggingface",),
        description="Byte-level BPE vocabulary and merges.",
    ),
    Stage(
        name="tokenizer",
        number=2,
        gives="tokenizer",
        inputs=(Input(name="vocabulary", accepts=("vocabulary",)),),
        module="llm_assets.stages.tokenizer",
        libraries=("tokenizers", "transformers"),
        kinds=("huggingface",),
        description="Special tokens and chat template around the vocabulary.",
    ),
    Stage(
        name="shards",
        number=3,
        gives="shards",
        inputs=(
            Input(name="corpus", accepts=("corpus",)),
            Input(name="tokenizer", accepts=("tokenizer",)),
        ),
        module="llm_assets.stages.shards",
        libraries=("tokenizers", "transformers", "datasketch", "safetensors"),
        kinds=("huggingface",),
        description="The corpus, deduplicated, tokenized and packed.",
    ),
    Stage(
        name="base_checkpoint",
        number=4,
        gives="checkpoint",
        inputs=(
            Input(name="shards", accepts=("shards",)),
            Input(name="tokenizer", accepts=("tokenizer",)),
        ),
        cost_class="expensive",
        bit_identical=False,
        trains=True,
        parallel=True,
        module="llm_assets.stages.base_checkpoint",
        libraries=_TRAINER,
        kinds=("pytorch", "huggingface"),
        description="The pre-trained or imported base model.",
    ),
    Stage(
        name="midtrained_checkpoint",
        number=5,
        gives="checkpoint",
        inputs=(
            Input(name="base_checkpoint", accepts=("checkpoint",)),
            Input(name="shards", accepts=("shards",)),
        ),
        cost_class="expensive",
        bit_identical=False,
        trains=True,
        parallel=True,
        module="llm_assets.stages.midtrained_checkpoint",
        libraries=_TRAINER,
        kinds=("pytorch", "huggingface"),
        passes_on="base_checkpoint",
        description="The base model after the annealing pass.",
    ),
    Stage(
        name="sft_checkpoint",
        number=6,
        gives="sft_checkpoint",
        inputs=(
            Input(name="midtrained_checkpoint", accepts=("checkpoint",)),
            Input(name="instructions", accepts=("instructions",)),
        ),
        cost_class="medium",
        bit_identical=False,
        trains=True,
        parallel=True,
        module="llm_assets.stages.sft_checkpoint",
        libraries=_TRL,
        kinds=("pytorch", "huggingface"),
        passes_on="midtrained_checkpoint",
        description="Supervised fine-tuning on conversations; the reference of all that follows.",
    ),
    Stage(
        name="reward_model",
        number=7,
        gives="reward_model",
        inputs=(
            Input(name="sft_checkpoint", accepts=("sft_checkpoint",)),
            Input(name="preferences", accepts=("preferences",)),
        ),
        cost_class="medium",
        bit_identical=False,
        trains=True,
        parallel=True,
        module="llm_assets.stages.reward_model",
        libraries=_TRL,
        kinds=("pytorch", "huggingface"),
        side_by_side=2,
        description="Bradley-Terry reward model on the preference pairs.",
    ),
    Stage(
        name="dpo_policy",
        number=8,
        gives="policy",
        inputs=(
            Input(name="sft_checkpoint", accepts=("sft_checkpoint",)),
            Input(name="preferences", accepts=("preferences",)),
        ),
        cost_class="medium",
        bit_identical=False,
        trains=True,
        parallel=True,
        module="llm_assets.stages.dpo_policy",
        libraries=_TRL,
        kinds=("pytorch", "huggingface"),
        passes_on="sft_checkpoint",
        side_by_side=2,
        description="Direct preference optimization from the fine-tuned model.",
    ),
    Stage(
        name="refined_policy",
        number=9,
        gives="policy",
        inputs=(
            Input(name="dpo_policy", accepts=_LANGUAGE_MODELS),
            Input(name="reward_model", accepts=("reward_model",)),
            Input(name="preferences", accepts=("preferences",)),
            # What the answers are compared with, as those of the DPO policy are.
            Input(name="sft_checkpoint", accepts=("sft_checkpoint",)),
        ),
        cost_class="medium",
        bit_identical=False,
        trains=True,
        module="llm_assets.stages.refined_policy",
        libraries=_TRL,
        kinds=("pytorch", "huggingface"),
        passes_on="dpo_policy",
        description="The policy refined against the reward model under a KL penalty.",
    ),
    Stage(
        name="eval_report",
        number=10,
        gives="eval_report",
        inputs=(
            Input(name="refined_policy", accepts=_LANGUAGE_MODELS),
            Input(name="sft_checkpoint", accepts=("sft_checkpoint",)),
            Input(name="evals", accepts=("evals",)),
        ),
        module="llm_assets.stages.eval_report",
        libraries=(*_TORCH, "lm-eval"),
        kinds=("pytorch",),
        description="lm-eval on the policy and its reference, with the KL between them.",
    ),
    Stage(
        name="quantized_weights",
        number=11,
        gives="quantized_weights",
        inputs=(
            Input(name="refined_policy", accepts=_LANGUAGE_MODELS),
            Input(name="instructions", accepts=("instructions",)),
        ),
        bit_identical=False,
        module="llm_assets.stages.quantized_weights",
        libraries=(*_TORCH, "llmcompressor", "compressed-tensors"),
        kinds=("pytorch",),
        passes_on="refined_policy",
        description="GPTQ weights, with the loss against the full weights.",
    ),
    Stage(
        name="inference_server",
        number=12,
        gives="server_spec",
        inputs=(
            Input(name="quantized_weights", accepts=("quantized_weights", *_LANGUAGE_MODELS)),
            Input(name="instructions", accepts=("instructions",)),
        ),
        module="llm_assets.stages.inference_server",
        libraries=(*_TORCH, "compressed-tensors"),
        kinds=("huggingface",),
        description="The server's specification, proven by a live smoke test.",
    ),
    Stage(
        name="release",
        number=13,
        gives="release",
        inputs=(
            Input(name="eval_report", accepts=("eval_report",)),
            Input(name="quantized_weights", accepts=("quantized_weights", *_LANGUAGE_MODELS)),
            Input(name="inference_server", accepts=("server_spec",)),
        ),
        module="llm_assets.stages.release",
        kinds=("python",),
        description="The ship decision and the manifest.",
    ),
)

STAGES: Mapping[str, Stage] = {stage.name: stage for stage in _STAGES}


def _job_stages(first: int) -> tuple[str, ...]:
    """Stages from a number on, and the data sets that they read: a snapshot costs next to
    nothing, and a stage refuses to start below a stale one."""
    chosen = [stage for stage in _STAGES if stage.number >= first]
    data = [stage.name for stage in _STAGES if stage.data]
    read = {entry.name for stage in chosen for entry in stage.inputs}
    return (*(name for name in data if name in read), *(stage.name for stage in chosen))


ALIGNMENT = _job_stages(6)
EVALUATION = _job_stages(10)


@dataclass(frozen=True, kw_only=True)
class Node:
    """A stage in the graph of one recipe. `sources` maps each input name to the stage that really
    gives it: itself, or what a switched-off stage hands on. A pinned or imported stage has none."""

    stage: Stage
    sources: Mapping[str, str]
    pin: str | None = None
    imported: bool = False


def processes_of(recipe: Recipe, name: str) -> int:
    """How many processes the worker of a stage is."""
    if not STAGES[name].parallel:
        return 1
    settings = recipe.stage_block(name)
    trains_here = settings.import_ is None and settings.pin is None
    return recipe.launcher.num_processes if trains_here else 1


def import_of(recipe: Recipe, name: str) -> ImportSettings | None:
    """Where a recipe imports a stage from; None when it does not."""
    found: ImportSettings | None = getattr(getattr(recipe.stages, name, None), "import_", None)
    return found


def stages_off(recipe: Recipe) -> dict[str, str]:
    """Stages that are no part of this recipe's graph, each with the reason."""
    off = {
        name: "switched off in the recipe"
        for name in STAGES
        if name not in recipe.data.__class__.model_fields
        and not getattr(recipe.stages, name).enabled
    }
    if import_of(recipe, "base_checkpoint") is not None:
        for name in ("corpus", "vocabulary", "tokenizer", "shards", "midtrained_checkpoint"):
            off.setdefault(name, "the base is imported, with its tokenizer")
    if "refined_policy" in off:
        off.setdefault("reward_model", "nothing takes it: refined_policy is switched off")
    return off


def wire(recipe: Recipe) -> dict[str, Node]:
    """The graph of one recipe, in an order in which every node stands after its sources.

    RecipeError when a stage would be handed an artifact of a type that it does not take.
    """
    off = stages_off(recipe)
    nodes: dict[str, Node] = {}
    for stage in STAGES.values():
        if stage.name in off:
            continue
        pin = None if stage.data else getattr(recipe.stages, stage.name).pin
        imported = import_of(recipe, stage.name) is not None
        sources = {}
        if pin is None and not imported:
            for entry in stage.inputs:
                giver = _giver(entry.name, off, stage.name, recipe)
                if giver is not None:
                    sources[entry.name] = giver
                    _check_type(stage, entry, STAGES[giver], recipe)
        nodes[stage.name] = Node(stage=stage, sources=sources, pin=pin, imported=imported)
    return nodes


def _giver(name: str, off: Mapping[str, str], taker: str, recipe: Recipe) -> str | None:
    """The stage that gives input `name` of `taker`: None when the taker can do without."""
    current = name
    while current in off:
        onward = STAGES[current].passes_on
        if onward is None:
            if _can_do_without(current, taker, recipe):
                return None
            raise RecipeError(
                where=f"{recipe.path}: stages.{current}",
                found=f"{off[current]}, but {taker} takes it",
                rule=f"{current} hands nothing on, so what takes it must be off too",
                remedy=f"set stages.{taker}.enabled: false as well, or switch {current} on",
            )
        current = onward
    return current


def _can_do_without(name: str, taker: str, recipe: Recipe) -> bool:
    if (name, taker) == ("reward_model", "refined_policy"):
        # Critique and revision uses a reward model only when there is one.
        return recipe.stages.refined_policy.method == "constitutional"
    return (name, taker) == ("inference_server", "release")


def _check_type(stage: Stage, entry: Input, giver: Stage, recipe: Recipe) -> None:
    if giver.gives not in entry.accepts:
        raise RecipeError(
            where=f"{recipe.path}: stages.{stage.name}",
            found=f"input {entry.name} would be the {giver.gives} of {giver.name}",
            rule=f"{stage.name} takes {' or '.join(entry.accepts)} as {entry.name}",
            remedy=f"switch on the stages between {giver.name} and {stage.name}",
        )


def stage_of(step: str) -> str:
    """The stage that a step of a run belongs to: its own, or that of a check of it."""
    return next((name for name in STAGES if step == name or step.startswith(f"{name}_")), step)


def descendants(nodes: Mapping[str, Node], names: set[str]) -> set[str]:
    """`names` and all that stands below them in the graph of a recipe."""
    found = set(names)
    for name, node in nodes.items():
        if found.intersection(node.sources.values()):
            found.add(name)
    return found


def ancestors(nodes: Mapping[str, Node], name: str) -> Iterator[str]:
    """All that stands above `name`, in graph order."""
    wanted = {name}
    for current in reversed(list(nodes)):
        if current in wanted:
            wanted.update(nodes[current].sources.values())
    yield from (current for current in nodes if current in wanted and current != name)
