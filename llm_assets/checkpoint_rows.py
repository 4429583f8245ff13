"""The saves of a store as rows: which there are, of what, how they are judged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llm_assets.checkpoints import SaveInfo, best, list_saves
from llm_assets.checkpoints.choosing import Choice, read_choice
from llm_assets.checkpoints.remote import list_copies, rollbacks_of, with_copies
from llm_assets.errors import NotFoundError, RefusedError, message
from llm_assets.graph import STAGES
from llm_assets.planning import make_plan
from llm_assets.recipe import Recipe
from llm_assets.stage_settings import TrainSettings
from llm_assets.store.digest import Identity
from llm_assets.store.protocol import RemoteSaves, Store

DEFAULT_CRITERIA: Mapping[str, str] = {"loss": "min"}


@dataclass(frozen=True, kw_only=True)
class Course:
    """The saves of one identity, newest first, those in the store too. `best` by `criteria`;
    `running`: who trains it; `remote`: where copies of its saves are."""

    identity: Identity
    folder: Path
    stage: str
    pipeline: str
    saves: tuple[SaveInfo, ...]
    best: SaveInfo | None
    choice: Choice | None
    running: str | None
    remote: RemoteSaves | None = None
    criteria: Mapping[str, str] = field(default_factory=dict)

    @property
    def goes_on_from(self) -> SaveInfo | None:
        """What a run would take: the newest healthy full save, or a chosen one in review."""
        for save in self.saves:
            chosen = self.choice is not None and self.choice.step == save.step
            if save.kind == "full" and (
                save.verdict == "healthy" or (chosen and save.verdict == "review")
            ):
                return save
        return None

    def save(self, step: int | None) -> SaveInfo:
        """The save of a step, full before light; without a step what a run would go on from.
        NotFoundError when there is none."""
        if step is None:
            found = self.goes_on_from or (self.saves[0] if self.saves else None)
        else:
            found = next((save for save in self.saves if save.step == step), None)
        if found is not None:
            return found
        what = "no save" if step is None else f"no save of step {step}"
        steps = ", ".join(str(save.step) for save in self.saves) or "none"
        raise NotFoundError(
            message(
                where=str(self.folder),
                found=what,
                rule=f"a step names a save that is there: {steps}",
                remedy="look at `llm-assets checkpoints ls`",
            )
        )

    def as_json(self) -> dict[str, Any]:
        """Plain JSON: the course and a row for each save."""
        return {
            "identity": self.identity,
            "stage": self.stage,
            "pipeline": self.pipeline,
            "folder": str(self.folder),
            "running": self.running,
            "goes_on_from": None if self.goes_on_from is None else self.goes_on_from.step,
            "best": None if self.best is None else self.best.step,
            "criteria": dict(self.criteria),
            "chosen": None
            if self.choice is None
            else {n: getattr(self.choice, n) for n in ("step", "who", "why", "at")},
            "saves": [save_row(save) for save in self.saves],
        }


def save_row(save: SaveInfo) -> dict[str, Any]:
    """One save as plain JSON: lineage, metrics, health, environment."""
    manifest, health = save.manifest, save.health
    row: dict[str, Any] = {
        "name": save.path.name,
        "path": str(save.path),
        "kind": save.kind,
        "step": save.step,
        "places": list(save.places),
        "verdict": save.verdict,
        "reasons": [save.problem] if save.problem else list(health.reasons) if health else [],
    }
    if manifest is not None:
        row |= {
            "created_at": manifest.created_at,
            "tokens": int(manifest.counters.get("tokens", 0)),
            "seconds": float(manifest.counters.get("seconds", 0.0)),
            "size_bytes": manifest.size_bytes,
            "metrics": dict(manifest.metrics),
            "environment": dict(manifest.environment),
            "world_size": manifest.world_size,
            "resumed_from": manifest.lineage.get("resumed_from", 0),
            "lost": list(manifest.lineage.get("lost", [])),
            "stall_s": manifest.stall_s,
            "write_s": manifest.write_s,
        }
    if health is not None:
        row["checked_at"] = health.checked_at
    return row


def find_courses(
    store: Store, *, recipe: Recipe | None = None, stage: str | None = None, prefix: str = ""
) -> list[Course]:
    """The courses of a store that have saves: of a recipe as it stands, of a stage, of identities
    that begin with `prefix`."""
    there = sorted({*store.checkpoint_folders(), *store.remote_identities()})
    if recipe is None:
        wanted = dict.fromkeys(there, "")
    else:
        plans = make_plan(recipe, store).stages
        wanted = {p.identity: n for n, p in plans.items() if p.identity and STAGES[n].trains}
    found = []
    for identity in wanted:
        if identity not in there or not identity.startswith(prefix):
            continue
        course = _course(store, identity, recipe, wanted[identity])
        if (course.saves or course.choice) and stage in (None, course.stage):
            found.append(course)
    return sorted(found, key=lambda course: (course.pipeline, course.stage, course.identity))


def _course(store: Store, identity: Identity, recipe: Recipe | None, stage: str) -> Course:
    folder, remote = store.checkpoints(identity), store.remote_saves(identity)
    saves: tuple[SaveInfo, ...] = tuple(list_saves(folder))
    choice = read_choice(folder)
    if remote is not None:
        rollbacks = rollbacks_of(store, identity)
        saves = tuple(with_copies(saves, list_copies(remote, folder, rollbacks)))
        choice = rollbacks[-1] if rollbacks else choice
    known = next((save.manifest for save in saves if save.manifest is not None), None)
    stage = stage or (known.stage if known else "unknown")
    criteria = DEFAULT_CRITERIA
    if recipe is not None:
        settings = recipe.stage_block(stage)
        if isinstance(settings, TrainSettings) and settings.checkpoint.best_by:
            criteria = settings.checkpoint.best_by
    return Course(
        identity=identity,
        folder=folder,
        stage=stage,
        pipeline=known.pipeline if known else (recipe.pipeline if recipe else "unknown"),
        saves=saves,
        best=best([save for save in saves if save.kind == "full"], criteria),
        choice=choice,
        remote=remote,
        running=store.lease_owner(f"stage/{identity}"),
        criteria=criteria,
    )


def one_course(courses: list[Course]) -> Course:
    """The only course. RefusedError when a selection leaves none or several."""
    if len(courses) == 1:
        return courses[0]
    if not courses:
        raise NotFoundError(
            message(
                where="in-training saves",
                found="none that fits",
                rule="saves are there from the first one of a training until its record stands",
                remedy="`llm-assets checkpoints ls` shows all that there are",
            )
        )
    names = ", ".join(f"{c.pipeline}/{c.stage} {c.identity[:12]}" for c in courses)
    raise RefusedError(
        message(
            where="in-training saves",
            found=f"{len(courses)} trainings: {names}",
            rule="this is done to one training",
            remedy="give --stage with -r, or --identity with its first digits",
        )
    )
