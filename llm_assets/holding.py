"""Expensive work that is stale only because of code or libraries waits for somebody's word.

Weeks of training must not start because a helper was renamed or a library bumped. Such a stage is
held: the run refuses before it spends, and says the three ways on: approve that identity once, pin
the last good artifact, or revert. Approvals stand in the store, kind `approvals`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from llm_assets.costs.quantities import show_usd
from llm_assets.signing import add_once, check_signed, now
from llm_assets.store.digest import Identity
from llm_assets.store.protocol import Record, Store

KIND = "approvals"


@dataclass(frozen=True, kw_only=True)
class Hold:
    """Why a stage is held. `last_good`: the record that it would replace. `estimate_usd` is None
    when nobody can tell, which is held too."""

    stage: str
    identity: Identity
    changes: Sequence[str]
    last_good: Record
    estimate_usd: float | None

    def ways(self, recipe: str) -> str:
        """The refusal for people, with what to type. `recipe`: how the recipe is named."""
        cost = "unknown cost" if self.estimate_usd is None else show_usd(self.estimate_usd)
        return (
            f"{self.stage} is held: {'; '.join(self.changes)} ({cost})\n"
            "  rule: an expensive stage that is stale only because of code or libraries waits\n"
            f"  next: approve it once: llm-assets approve {self.stage} --identity {self.identity} "
            f'-r {recipe} --why "..."\n'
            f"        or take the last good artifact: stages.{self.stage}.pin: "
            f"{self.last_good.output}\n"
            f"        or revert: {', '.join(_what(change) for change in self.changes)}"
        )


def _what(change: str) -> str:
    """The module or library of a reason, without "code changed: "."""
    return change.partition(": ")[2] or change


def approval_of(store: Store, identity: str) -> Mapping[str, Any] | None:
    """Who approved an identity, when and why; None when nobody did."""
    for _, body in store.entries(KIND, f"{identity}/"):
        return body
    return None


def approve(
    store: Store, *, stage: str, identity: Identity, pipeline: str, who: str, why: str
) -> Mapping[str, Any]:
    """Record an approval; the one that stands already when there is one."""
    check_signed(f"approval of {stage}", who=who, why=why)
    body = {
        "stage": stage,
        "identity": identity,
        "pipeline": pipeline,
        "who": who,
        "why": why,
        "at": now(),
    }
    return add_once(store, KIND, f"{identity}/{stage}", body)
