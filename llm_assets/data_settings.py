"""The data part of a recipe: where rows come from and how sources are mixed.

A data stage (`corpus`, `instructions`, `preferences`, `evals`) gets a DataSettings as
`context.config`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from llm_assets.stage_settings import Settings


class VillageSettings(Settings):
    """The embedded world (village/). One world serves all four data sets of a recipe."""

    seed: int = Field(11, ge=0)
    villagers: int = Field(24, ge=4, le=500)
    corpus_documents: int = Field(6000, ge=10)
    instructions: int = Field(4000, ge=10)
    preferences: int = Field(2000, ge=10)
    eval_items: int = Field(200, ge=10, description="Items of each eval task, at the most.")
    annotators: int = Field(9, ge=3)
    annotator_error: float = Field(0.1, ge=0, lt=0.5, description="Mean error rate of a vote.")
    votes_per_pair: int = Field(5, ge=1)
    length_biased_vendor: bool = Field(True, description="One vendor prefers long answers.")


class SourceBase(Settings):
    """Common to all sources."""

    weight: float | None = Field(
        None,
        gt=0,
        description="Share in the mix, relative to the others (1 without it). "
        "Without any weight all rows of all sources are taken.",
    )
    limit: int | None = Field(None, ge=1, description="At most so many rows, by hash order.")


class VillageSource(SourceBase):
    """Rows of the embedded world."""

    source: Literal["village"] = Field("village", alias="from")


class TaskSettings(Settings):
    """How the eval task made of a source is called and what it is for."""

    name: str | None = Field(
        None, pattern="^[a-z][a-z0-9_]*$", description="Default: the form or the file's name."
    )
    role: Literal["capability", "known_good", "golden"] | None = Field(
        None, description="Default: capability. Refusal items say their role themselves."
    )


class FileSource(SourceBase):
    """JSONL, JSON, CSV, TSV, Parquet or plain text, gzip too, by glob; relative to the recipe.

    `${NAME}` and `${NAME:-default}` in `files` are taken from the environment.
    """

    source: Literal["files"] = Field("files", alias="from")
    files: str | list[str] = Field(..., description="Paths or globs.")
    form: str = Field(
        "auto",
        description="Form of the rows: auto, messages, sharegpt, alpaca, prompt_completion, "
        "question_answer, self_instruct, transcript, pairs, text, truthfulqa, multiple_choice, "
        "refusals.",
    )
    columns: dict[str, str] = Field(
        default_factory=dict, description="Our name of a column to the file's name."
    )
    task: TaskSettings | None = Field(None, description="Evals only: name and role of the task.")


class HubSource(SourceBase):
    """A Hugging Face data set by name and commit."""

    source: Literal["hub"] = Field("hub", alias="from")
    name: str
    revision: str = Field(..., description="Commit hash; a branch name is refused.")
    split: str = "train"
    config: str | None = None
    form: str = "auto"
    columns: dict[str, str] = Field(default_factory=dict)
    task: TaskSettings | None = Field(None, description="Evals only: name and role of the task.")


Source = Annotated[VillageSource | FileSource | HubSource, Field(discriminator="source")]


class DataSettings(Settings):
    """One data set: its sources, and how many rows may be unusable."""

    sources: list[Source] = Field(default_factory=list)
    held_out: float = Field(
        0.05, ge=0, lt=1, description="Share held out, by stable hash of the prompt."
    )
    max_dropped: float = Field(
        0.02, ge=0, le=1, description="More dropped rows than this share is an error."
    )
    max_rows: int | None = Field(None, ge=1, description="Rows after mixing, at the most.")
    village: VillageSettings | None = Field(
        None, description="Filled in from the recipe's data.village."
    )

    @property
    def has_village(self) -> bool:
        """One of the sources is the embedded world."""
        return any(isinstance(source, VillageSource) for source in self.sources)


class DataBlocks(Settings):
    """`data:` of a recipe."""

    village: VillageSettings = Field(default_factory=VillageSettings)
    corpus: DataSettings = Field(default_factory=DataSettings)
    instructions: DataSettings = Field(default_factory=DataSettings)
    preferences: DataSettings = Field(default_factory=DataSettings)
    evals: DataSettings = Field(default_factory=DataSettings)
