"""Another artifact in the place of the one that a stage gave: chosen by a person, not retrained.

An identity may have several records; the first stays the answer until somebody chooses another.
`adopt` adds a record with the artifact's provenance where there is none yet, and the choice (kind
`choices`, keyed by identity). Every plan reads the choices; what stands below runs again, what
stands above does not.
"""

from __future__ import annotations

import dataclasses
import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from llm_assets.compatibility import Difference, differences, profile_of
from llm_assets.damage import Wholeness
from llm_assets.errors import ConflictError, DamagedError, GuardError, RefusedError, message
from llm_assets.measured import data_behind, data_drift
from llm_assets.planning import CHOICES, Plan, recipe_part
from llm_assets.store.digest import ArtifactHash, Identity
from llm_assets.store.protocol import Record, Store


def compare(store: Store, artifact: ArtifactHash, plan: Plan, stage: str) -> list[Difference]:
    """Where an artifact differs from the newest one of the stage that can still be read."""
    whole = Wholeness(store)
    mine = plan.stages[stage]
    candidates = [mine.artifact, *(r.output for r in _records_of(store, plan, stage))]
    for wanted in candidates:
        if wanted is None or wanted == artifact or whole.problem(wanted):
            continue
        try:
            return differences(profile_of(store.fetch(artifact)), profile_of(store.fetch(wanted)))
        except DamagedError:
            continue
    return []


def drifted(store: Store, artifact: ArtifactHash, plan: Plan, stage: str) -> list[Difference]:
    """How far today's data are from those that an artifact of the stage was trained on: each drift
    gate of the recipe that does not let it through. Nothing for an artifact without a record."""
    for record in _records_of(store, plan, stage):
        if record.output == artifact:
            results = data_drift(plan, store, data_behind(plan.history, record))
            return [
                Difference(
                    aspect=f"data drift, {result.name}",
                    found=result.why,
                    expected="data like today's",
                    migration="train on today's data",
                )
                for result in results
                if result.blocks
            ]
    return []


def _records_of(store: Store, plan: Plan, stage: str) -> Sequence[Record]:
    found = [
        record
        for record in store.all_records()
        if record.stage == stage and record.pipeline == plan.recipe.pipeline
    ]
    return sorted(found, key=lambda record: record.created_at, reverse=True)


def last_good(store: Store, plan: Plan, stage: str) -> ArtifactHash | None:
    """The newest output of the stage that is whole, beside the one that stands now."""
    now = plan.stages[stage].artifact
    for record in _records_of(store, plan, stage):
        if record.output != now and not store.verify(record.output):
            return record.output
    return None


def adopt(
    store: Store,
    plan: Plan,
    stage: str,
    artifact: ArtifactHash,
    *,
    who: str,
    why: str,
    accept: bool = False,
) -> dict[str, Any]:
    """Choose `artifact` as what the stage gives under the recipe as it stands; the choice.

    DamagedError for a damaged artifact; RefusedError for another type, or for differences that
    need a migration (`accept`: take it all the same); GuardError while a process is at the stage.
    """
    mine, node = plan.stages[stage], plan.nodes[stage]
    where = f"{plan.recipe.pipeline}/{stage}"
    if mine.identity is None:
        raise GuardError(
            f"{where}: its inputs are not known yet\n"
            "  rule: an artifact is adopted for one identity\n"
            "  next: run what stands above it first, or pin the artifact in the recipe"
        )
    damage = store.verify(artifact)
    if damage:
        what = "; ".join(f"{entry.path or 'its tree'}: {entry.what}" for entry in damage)
        raise DamagedError(f"{where}: {artifact} is damaged: {what}")
    kind = store.tree(artifact).type
    if kind != node.stage.gives:
        raise RefusedError(
            message(
                where=where,
                found=f"{artifact.short} is a {kind}",
                rule=f"this stage gives a {node.stage.gives}",
                remedy="adopt it for the stage that gives its type",
            )
        )
    wrong = compare(store, artifact, plan, stage) if node.stage.trains else []
    wrong += drifted(store, artifact, plan, stage)
    if wrong and not accept:
        raise RefusedError(
            message(
                where=f"{where}: {artifact.short}",
                found="; ".join(f"{d.aspect}: {d.found}, expected {d.expected}" for d in wrong),
                rule="what stands in for a checkpoint has its parameters, layers, tokenizer and "
                "chat template, and was trained on data like today's",
                remedy="; ".join(d.migration for d in wrong) + "; or --accept-differences",
            )
        )
    lease = store.acquire(f"stage/{mine.identity}", owner=f"adoption, {who}", ttl_s=60)
    if lease is None:
        raise GuardError(f"{where}: {store.lease_owner(f'stage/{mine.identity}')} is at it")
    try:
        identity = Identity.parse(mine.identity)
        if not any(record.output == artifact for record in store.records(identity)):
            store.add_record(_record(store, plan, stage, artifact, who, why), lease=lease)
        return _choose(store, plan, stage, identity, artifact, who, why, wrong)
    finally:
        lease.release()


def _record(
    store: Store, plan: Plan, stage: str, artifact: ArtifactHash, who: str, why: str
) -> Record:
    """The record under the stage's identity: metrics as the artifact's own record has them."""
    mine, source = plan.stages[stage], plan.sources[stage]
    given = [r for r in store.all_records() if r.output == artifact]
    newest = max(given, key=lambda record: record.created_at, default=None)
    provenance = {"adopted_by": who, "adopted_why": why}
    fields: dict[str, Any] = {
        "identity": Identity.parse(str(mine.identity)),
        "stage": stage,
        "pipeline": plan.recipe.pipeline,
        "output": artifact,
        "type": plan.nodes[stage].stage.gives,
        "source_hash": source.hash,
        "recipe": recipe_part(plan.recipe, plan.nodes[stage]),
        "seed": plan.recipe.seed,
        "inputs": dict(mine.inputs),
        "cost_usd": 0.0,
        "wall_s": 0.0,
        "created_at": datetime.datetime.now(datetime.UTC).isoformat(),
        "run_id": "",
        "modules": source.modules,
        "libraries": source.libraries,
    }
    if newest is None:
        return Record(**fields, metrics={}, environment=provenance)
    provenance["adopted_from"] = newest.identity
    return dataclasses.replace(newest, **fields, environment={**newest.environment, **provenance})


def _choose(
    store: Store,
    plan: Plan,
    stage: str,
    identity: Identity,
    artifact: ArtifactHash,
    who: str,
    why: str,
    accepted: Sequence[Difference],
) -> dict[str, Any]:
    before = plan.stages[stage].artifact
    body = {
        "stage": stage,
        "pipeline": plan.recipe.pipeline,
        "identity": identity,
        "artifact": artifact,
        "instead_of": before,
        "num_records": len(store.records(identity)),
        "who": who,
        "why": why,
        "accepted": [difference.text() for difference in accepted],
        "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }
    number = 1 + sum(1 for _ in store.entries(CHOICES, f"{identity}/"))
    while True:
        try:
            store.add_entry(CHOICES, f"{identity}/{number:06d}", body)
            return body
        except ConflictError:
            number += 1


def chosen_of(store: Store, identity: str) -> Mapping[str, Any] | None:
    """The newest choice for an identity."""
    found = None
    for _, body in store.entries(CHOICES, f"{identity}/"):
        found = body
    return found
