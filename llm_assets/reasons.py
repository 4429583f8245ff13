"""Why a stage is stale, as texts for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from llm_assets.identity import Source, changed_keys
from llm_assets.store.protocol import Record


def code_reasons(previous: Record, source: Source) -> list[str]:
    """Modules and libraries that are not those of an earlier record."""
    reasons = []
    for module in sorted({*previous.modules, *source.modules}):
        if previous.modules.get(module) != source.modules.get(module):
            reasons.append(f"code changed: {module}")
    for library in sorted({*previous.libraries, *source.libraries}):
        before, now = previous.libraries.get(library), source.libraries.get(library)
        if before != now:
            reasons.append(f"library changed: {library} {before} → {now}")
    return reasons


def own_reasons(
    previous: Record | None, source: Source, part: Mapping[str, Any], seed: int
) -> list[str]:
    """Why a stage itself is stale, whatever its inputs: no record, code, libraries or recipe."""
    if previous is None:
        return ["no record"]
    reasons = code_reasons(previous, source)
    for key, before, now in changed_keys(previous.recipe, part):
        reasons.append(f"recipe changed: {key} from {before!r} to {now!r}")
    if previous.seed != seed:
        reasons.append(f"recipe changed: seed from {previous.seed} to {seed}")
    return reasons


def input_reasons(previous: Record | None, inputs: Mapping[str, str]) -> list[str]:
    """Inputs that are not those of the newest record."""
    if previous is None:
        return []
    return [
        f"input changed: {name}"
        for name in sorted({*previous.inputs, *inputs})
        if previous.inputs.get(name) != inputs.get(name) and not name.startswith("all.")
    ]
