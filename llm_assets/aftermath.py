"""What a worker that died without a word left behind: its lease, and an attempt in the ledger.

Whoever launched it knows that it is gone. Without this the next attempt would wait until the lease
runs out, and the money of its last half minute would be missing.
"""

from __future__ import annotations

from llm_assets.costs.ledger import close_killed
from llm_assets.errors import StoreError
from llm_assets.planning import Plan
from llm_assets.process_names import is_gone
from llm_assets.store.protocol import Store


def clear_dead(store: Store, plan: Plan, name: str, *, run_id: str) -> None:
    """End the lease of a worker of this machine that is no more, and close its attempt in
    the ledger. Does nothing for a worker that cleared up itself."""
    lease = f"stage/{plan.stages[name].identity}"
    try:
        owner = store.lease_owner(lease)
        if owner is None or not is_gone(owner):
            return
        store.end_lease(lease, owner)
        close_killed(
            store,
            campaign=plan.recipe.campaign,
            run_id=run_id,
            stage=name,
            identity=str(plan.stages[name].identity),
        )
    except (StoreError, OSError):
        return  # the store is away: the lease runs out, and the ledger closes the attempt as lost
