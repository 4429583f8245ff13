"""What a person decides is signed: who decided and why, in a document that is written once."""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from typing import Any

from llm_assets.errors import ConflictError, UserError
from llm_assets.store.protocol import Store


def check_signed(what: str, **said: str) -> None:
    """UserError unless all is said. `what` was decided, for people; `said`: by option name."""
    for name, value in said.items():
        if not value.strip():
            raise UserError(
                where=f"{what}: {name}",
                found="nothing",
                rule="a decision says who made it and why",
                remedy=f"give --{name}",
            )


def now() -> str:
    """When it was decided: UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def add_once(store: Store, kind: str, key: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Write an entry; the one that stands already when there is one."""
    try:
        store.add_entry(kind, key, body)
    except ConflictError:
        standing = dict(store.entries(kind, key)).get(key)
        if standing is None:
            raise
        return standing
    return body
