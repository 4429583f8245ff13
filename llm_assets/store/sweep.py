"""How writers and the garbage collector keep out of each other's way.

A writer claims the objects that it relies on, then looks for a sweep; the collector announces its
sweep, then looks for claims. Whichever comes second sees the first: the collector leaves what is
claimed, and a writer whose objects are being swept waits for the end and looks again. A writer
never waits for a sweep of other objects, and the collector never waits for a writer.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator

from llm_assets.errors import ConflictError, NotFoundError, message
from llm_assets.store.backend import Backend, Claim
from llm_assets.store.canonical import seal, unseal
from llm_assets.store.leases import HeldLease, LeaseBook

FOLDER = "gc"
LEASE = "store/gc"
TTL_S = 60.0
WAIT_S = 300.0
WAITED = "a writer that waited for a collection that died"


@contextlib.contextmanager
def relying_on(backend: Backend, keys: Iterable[str]) -> Iterator[Claim]:
    """Claim the objects, wait for a sweep that takes one of them, and give the claim up after.

    What the body finds to exist after the claim, no sweep deletes before it ends.
    """
    claim = backend.claim()
    try:
        rely(backend, claim, list(keys))
        yield claim
    finally:
        claim.close()


def rely(backend: Backend, claim: Claim, keys: list[str]) -> None:
    """Add to a claim, and wait for a sweep that takes one of the objects."""
    if not keys:
        return
    claim.add(keys)
    wanted = set(keys)
    started = time.monotonic()
    while mark := next((mark for mark, swept in sweeps(backend) if wanted & swept), ""):
        if end_abandoned(backend, mark):
            continue
        if time.monotonic() - started > WAIT_S:
            raise ConflictError(
                message(
                    where=backend.where,
                    found=f"garbage collection is deleting objects of this artifact for {WAIT_S} s",
                    rule="an artifact is not stored while its objects are deleted",
                    remedy="look for a stopped `llm-assets store gc`, end it, and try again",
                )
            )
        time.sleep(0.05)


def sweeps(backend: Backend) -> Iterator[tuple[str, set[str]]]:
    """The mark of each announced sweep, and the keys that it may delete."""
    for item in backend.items(FOLDER):
        with contextlib.suppress(NotFoundError):
            yield item.key, {str(key) for key in unseal(backend.read(item.key), item.key)["keys"]}


def announce(backend: Backend, lease: HeldLease, keys: Iterable[str]) -> str:
    """Say which objects a sweep may delete; the mark, to be deleted when it is over."""
    mark = f"{FOLDER}/{lease.token}.json"
    backend.create(mark, seal({"keys": sorted(keys)}, mark), durable=False)
    return mark


def end_abandoned(backend: Backend, mark: str) -> bool:
    """Delete the mark of a sweep that died; False when its collector may be alive.

    The collector's lease is taken for that, so that one that only slept deletes nothing more.
    """
    book = LeaseBook(backend, lambda record: None)
    top = book.top(LEASE)
    if top is not None and top.state == "free":
        # It ended while this looked: the mark went before the lease was given up.
        return True
    lease = book.acquire(LEASE, owner=WAITED, ttl_s=TTL_S)
    if lease is None:
        return False
    backend.delete(mark)
    lease.release()
    return True
