"""The recipe: one YAML file that describes one pipeline, validated when the definitions load."""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError, field_validator

from llm_assets.data_settings import DataBlocks
from llm_assets.errors import RecipeError
from llm_assets.stage_settings import Settings, StageBlocks

RECIPES_FOLDER = Path(__file__).parent / "recipes"
DEFAULT_RECIPE = RECIPES_FOLDER / "tiny.yaml"
SCHEMA_PATH = RECIPES_FOLDER / "recipe.schema.json"

_PIPELINE_NAME = re.compile(r"[a-z][a-z0-9_]{0,62}")


class GateSettings(Settings):
    """A numeric threshold on one headline metric of a stage."""

    min: float | None = Field(None, description="Fails below.")
    max: float | None = Field(None, description="Fails above.")
    confident: bool | None = Field(
        None,
        description="Compare the bound of the 95 % interval instead of the point. Without it: true "
        "for a difference from a reference (`_delta` in the metric's name), else false.",
    )


def _us_dollars(value: Any) -> Any:
    """ValueError for money written as a text, such as `2.50 EUR`."""
    if isinstance(value, str):
        raise ValueError("money is a number of US dollars; no rate of exchange is assumed")
    return value


class BudgetSettings(Settings):
    """What may be spent."""

    limit_usd: float = Field(10.0, gt=0, description="Of the whole campaign, USD.")
    campaign: str | None = Field(
        None, min_length=1, description="Several pipelines may share one; default: own."
    )
    stage_limits_usd: dict[str, float] = Field(
        default_factory=dict, description="Stage to USD: training stops there, with a checkpoint."
    )
    hold_over_usd: float = Field(
        1.0, ge=0, description="An expensive stage that only code made stale waits above this."
    )

    _dollars = field_validator("limit_usd", "hold_over_usd", mode="before")(_us_dollars)


class RateSettings(Settings):
    """What a device costs and does."""

    device: str = Field("cpu", description="Name in the device table.")
    devices: int = Field(1, ge=1)
    usd_per_hour: float = Field(..., ge=0, description="Rent of one device, USD an hour.")
    utilization: float | None = Field(
        None, gt=0, le=1, description="Share of peak; measured by earlier records without it."
    )
    peak_tflops: float | None = Field(None, gt=0, description="Overrides the device table.")
    memory_gib: float | None = Field(
        None, gt=0, description="Of one device; overrides the device table, or this machine's."
    )

    _dollars = field_validator("usd_per_hour", mode="before")(_us_dollars)


class ToleranceSettings(Settings):
    """How far headline metrics of a replay may differ, relative to the original."""

    default: float = Field(0.05, ge=0)
    metrics: dict[str, float] = Field(default_factory=dict)


class RetrySettings(Settings):
    """When a stage is tried again after a failure that may pass: a killed or preempted worker, a
    store that was away. The wait doubles from `delay_s` to at most `max_delay_s`."""

    max_retries: int = Field(3, ge=0, description="Beside the first attempt; 0: none.")
    delay_s: float = Field(10.0, ge=0, description="Before the first retry.")
    max_delay_s: float = Field(300.0, ge=0, description="The longest wait, jitter left out.")
    jitter: float = Field(0.25, ge=0, le=1, description="Share of the wait, up or down, by chance.")


class LauncherSettings(Settings):
    """How workers are started."""

    kind: str = Field("local", pattern="^(local|accelerate)$")
    num_processes: int = Field(1, ge=1)
    retries: RetrySettings = Field(default_factory=RetrySettings)


class Recipe(Settings):
    """One pipeline. `path` is where it was read from; it is no part of any identity."""

    pipeline: str = Field(..., description="Lower-case name; the first part of every asset key.")
    description: str = ""
    seed: int = Field(0, ge=0, lt=2**31)
    data: DataBlocks = Field(default_factory=DataBlocks)
    stages: StageBlocks = Field(default_factory=StageBlocks)
    gates: dict[str, dict[str, GateSettings]] = Field(
        default_factory=dict, description="Stage to metric to threshold."
    )
    budget: BudgetSettings = Field(default_factory=BudgetSettings)
    rates: RateSettings = Field(default_factory=lambda: RateSettings(usd_per_hour=0.10))
    tolerance: ToleranceSettings = Field(default_factory=ToleranceSettings)
    launcher: LauncherSettings = Field(default_factory=LauncherSettings)
    owners: list[str] = Field(default_factory=list, description="E-mail, or team:NAME.")
    path: Path = Field(DEFAULT_RECIPE, exclude=True, json_schema_extra={"internal": True})

    @field_validator("pipeline")
    @classmethod
    def _is_a_name(cls, value: str) -> str:
        if not _PIPELINE_NAME.fullmatch(value):
            raise ValueError("a pipeline's name is lower-case letters, digits and _, letter first")
        return value

    @property
    def folder(self) -> Path:
        """What relative paths in the recipe start from."""
        return self.path.parent

    @property
    def campaign(self) -> str:
        """Whose budget it spends."""
        return self.budget.campaign or self.pipeline

    def data_block(self, name: str) -> dict[str, Any]:
        """The settings of one data set as plain JSON, its village filled in when it has one."""
        block = getattr(self.data, name)
        if block.has_village:
            block = block.model_copy(update={"village": self.data.village})
        dumped: dict[str, Any] = block.model_dump(mode="json", by_alias=True)
        return dumped

    def stage_block(self, name: str) -> Any:
        """The settings of one stage."""
        return getattr(self.stages, name)


# libyaml where PyYAML was built with it: ten times faster, and a location may hold many recipes.
_SafeLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _UniqueKeyLoader(_SafeLoader):  # type: ignore[misc]
    """YAML takes the last of two equal keys in silence; a recipe must not."""


def _mapping_without_duplicates(loader: Any, node: yaml.MappingNode) -> dict[Any, Any]:
    loader.flatten_mapping(node)
    seen: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if key in seen:
            raise yaml.constructor.ConstructorError(
                None, None, f"the key {key!r} stands twice", key_node.start_mark
            )
        seen[key] = loader.construct_object(value_node, deep=True)
    return seen


# YAML 1.1 reads 1e-3 as a text; people mean a number.
_UniqueKeyLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+"),
    list("-+0123456789"),
)
_UniqueKeyLoader.add_constructor(
    yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping_without_duplicates
)


def _parse_yaml(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(
            where=str(path),
            found=str(error),
            rule="a recipe is a readable YAML file in UTF-8",
            remedy="check the path, or start from the recipes that come with the package",
        ) from error
    try:
        document = yaml.load(text, Loader=_UniqueKeyLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f":{mark.line + 1}" if mark else ""
        raise RecipeError(
            where=f"{path}{line}",
            found=str(getattr(error, "problem", None) or error),
            rule="a recipe is valid YAML, each key once",
            remedy="mend the line",
        ) from error
    except (RecursionError, ValueError) as error:
        raise RecipeError(
            where=str(path),
            found=str(error) or "nesting too deep",
            rule="a recipe is valid YAML",
            remedy="mend the file",
        ) from error
    if not isinstance(document, Mapping):
        raise RecipeError(
            where=str(path),
            found="an empty file" if document is None else f"a {type(document).__name__}",
            rule="a recipe is a mapping with at least `pipeline:`",
            remedy="start from the recipes that come with the package",
        )
    return document


def load_recipe(path: str | os.PathLike[str]) -> Recipe:
    """Read, validate and cross-check a recipe.

    A bare name such as `tiny` is looked up among the package's recipes. RecipeError names the file,
    the place in it, the rule and the remedy.
    """
    from llm_assets.recipe_rules import check_rules

    found = find_recipe(path)
    document = _parse_yaml(found)
    try:
        recipe = Recipe.model_validate({**document, "path": found})
    except ValidationError as error:
        raise _recipe_error(found, error) from error
    check_rules(recipe)
    return recipe


def find_recipe(path: str | os.PathLike[str]) -> Path:
    """The absolute path of a recipe, given a path or the name of a packaged one."""
    given = Path(path)
    if given.exists():
        return given.resolve()
    packaged = RECIPES_FOLDER / f"{given}.yaml"
    if given.suffix == "" and len(given.parts) == 1 and packaged.exists():
        return packaged.resolve()
    names = sorted(entry.stem for entry in RECIPES_FOLDER.glob("*.yaml"))
    raise RecipeError(
        where=str(path),
        found="no such file",
        rule="a recipe is a path to a YAML file or the name of a packaged recipe",
        remedy=f"packaged recipes: {', '.join(names)}",
    )


def _recipe_error(path: Path, error: ValidationError) -> RecipeError:
    """The first of pydantic's findings, as one error that names the place in the file."""
    findings = error.errors(include_url=False)
    first = findings[0]
    # Tags of a discriminated union stand in `loc` but not in the file.
    place = ".".join(str(part) for part in first["loc"] if part not in ("village", "files", "hub"))
    if first["loc"][:2] == ("data", "village"):
        place = ".".join(str(part) for part in first["loc"])
    remedy = "see the JSON schema beside the packaged recipes"
    found = f"{first['input']!r}"
    if first["type"] == "extra_forbidden":
        found = f"unknown key {first['loc'][-1]!r}"
        close = difflib.get_close_matches(str(first["loc"][-1]), _keys_at(first["loc"][:-1]), n=1)
        remedy = f"did you mean {close[0]!r}?" if close else "remove it"
    elif first["type"] == "missing":
        found = "nothing"
        remedy = f"add the key {first['loc'][-1]!r}"
    if len(found) > 200:
        found = found[:200] + "…"
    more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
    return RecipeError(
        where=f"{path}: {place or '(top)'}",
        found=found + more,
        rule=first["msg"],
        remedy=remedy,
    )


def _keys_at(loc: tuple[int | str, ...]) -> list[str]:
    """Field names of the model at a pydantic location, as far as plain nesting leads."""
    model: Any = Recipe
    for part in loc:
        field = getattr(model, "model_fields", {}).get(part)
        if field is None:
            return []
        model = field.annotation
    fields = getattr(model, "model_fields", {})
    return [field.alias or name for name, field in fields.items()]


def json_schema() -> dict[str, Any]:
    """The JSON schema of a recipe, for editors."""
    schema = Recipe.model_json_schema(by_alias=True)
    schema["properties"].pop("path", None)
    schema["title"] = "llm-assets recipe"
    return schema
