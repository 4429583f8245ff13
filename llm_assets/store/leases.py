"""Leases: numbered write-once documents; taking, taking over and committing exclude each other.

`leases/<name>/<number>.json` says who holds the lease from then on (`held`), that it was given
up (`free`), or that its holder commits a record (`commit`, with the record). The highest number
counts. Each change creates the next number, so of a take-over and a commit only one can happen. The
holder's heartbeat is the time of `<number>.beat`.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from llm_assets.errors import ConflictError, DamagedError, NotFoundError, RefusedError, message
from llm_assets.store.backend import Backend
from llm_assets.store.canonical import seal, unseal
from llm_assets.store.names import decode_name, encode_name

FOLDER = "leases"


@dataclass(frozen=True, kw_only=True)
class LeaseState:
    """The highest document of a lease, and its age in seconds since the last heartbeat."""

    name: str
    number: int
    owner: str
    token: str
    state: str
    ttl_s: float
    age_s: float
    reaches: tuple[str, ...]
    record: Mapping[str, Any] | None

    @property
    def alive(self) -> bool:
        """Held, and its heartbeat is not older than its time to live."""
        return self.state != "free" and self.age_s <= self.ttl_s


class HeldLease:
    """A lease that this process holds. Threads may share it: a heartbeat beside the work."""

    def __init__(self, book: LeaseBook, state: LeaseState) -> None:
        self._book = book
        self._state = state
        self._guard = threading.Lock()
        self.name = state.name
        self.owner = state.owner
        self.token = state.token

    def renew(self) -> None:
        """Move the heartbeat. ConflictError when somebody else took the lease over."""
        with self._guard:
            self._holding()
            self._book.beat(self.name, self._state.number)

    def check(self) -> None:
        """ConflictError when somebody else took the lease over, or it was given up."""
        with self._guard:
            self._holding()

    def release(self) -> None:
        """Give the lease up. Does nothing when it is lost already."""
        with self._guard:
            self._book.append(self._state, state="free")

    def commit(self, record: Mapping[str, Any]) -> None:
        """Announce a record under the lease; ConflictError when the lease is lost.

        After this the record is committed: whoever takes the lease next publishes it first.
        """
        with self._guard:
            following = self._book.append(self._state, state="commit", record=record)
            if following is None:
                raise self._lost()
            self._state = following
            self._holding()

    def _holding(self) -> None:
        top = self._book.top(self.name)
        if top is None or top.token != self._state.token or top.state == "free":
            raise self._lost()
        # A commit whose answer was lost may have moved the number on.
        self._state = top

    def _lost(self) -> ConflictError:
        top = self._book.top(self.name)
        holder = f"{top.owner!r} holds it" if top and top.state != "free" else "it was given up"
        return ConflictError(
            message(
                where=f"lease {self.name}",
                found=f"{holder}, no longer {self.owner!r}",
                rule="a lease is taken over when its heartbeat is older than its time to live, and "
                "the old owner can't commit",
                remedy="look for the record of the new owner",
            )
        )


class LeaseBook:
    """All leases of a store, over its small documents."""

    def __init__(self, backend: Backend, publish: Callable[[Mapping[str, Any]], None]) -> None:
        """`publish` makes a committed record visible; calling it again does nothing."""
        self._backend = backend
        self._publish = publish

    def acquire(
        self, name: str, *, owner: str, ttl_s: float, reaches: Iterable[str] = ()
    ) -> HeldLease | None:
        """Take the lease; None when it is held by a live owner. See the Protocol."""
        if not ttl_s > 0:
            raise RefusedError(f"lease {name}: a time to live of {ttl_s} s is not positive")
        top = self.top(name)
        if top is not None and top.alive:
            return None
        if top is not None and top.record is not None:
            self._publish(top.record)
        wanted = LeaseState(
            name=name,
            number=top.number if top else 0,
            owner=owner,
            token=secrets.token_hex(16),
            state="held",
            ttl_s=float(ttl_s),
            age_s=0.0,
            reaches=tuple(reaches),
            record=None,
        )
        held = self.append(wanted, state="held")
        if held is None:
            return None
        # A process that slept since it read `top` may have created a number that was in use and
        # deleted since. Only the highest number counts.
        newest = self.top(name)
        if newest is None or newest.token != held.token:
            return None
        self._prune(name, held.number)
        return HeldLease(self, held)

    def end(self, name: str, owner: str) -> None:
        """Give up a lease for its owner, which is known to be dead. See the Protocol."""
        top = self.top(name)
        if top is None or top.state == "free" or top.owner != owner:
            return
        if top.record is not None:
            self._publish(top.record)
        self.append(top, state="free")

    def top(self, name: str) -> LeaseState | None:
        """The document that counts; None when the lease was never taken."""
        while True:
            # What a listing shows may be pruned before it is read: then a later one counts.
            with contextlib.suppress(NotFoundError):
                return self._top(name)

    def _top(self, name: str) -> LeaseState | None:
        folder = f"{FOLDER}/{encode_name(name, 'lease')}"
        items = {
            item.key: item for item in self._backend.items(folder) if _number(folder, item.key)
        }
        documents = [key for key in items if key.endswith(".json")]
        if not documents:
            return None
        key = max(documents)
        beat = items.get(key.removesuffix(".json") + ".beat", items[key])
        written = max(beat.modified, items[key].modified)
        return self._parse(name, key, self._backend.now() - written)

    def append(
        self, before: LeaseState, *, state: str, record: Mapping[str, Any] | None = None
    ) -> LeaseState | None:
        """Create the document that follows `before`; None when the number is taken."""
        number = before.number + 1
        body = {
            "name": before.name,
            "number": number,
            "owner": before.owner,
            "token": before.token,
            "ttl_s": before.ttl_s,
            "reaches": list(before.reaches),
            "state": state,
            "record": record,
        }
        key = _key(before.name, number)
        content = seal(body, f"lease {before.name}")
        if self._backend.create(key, content, durable=state == "commit"):
            return _state(body, 0.0)
        # A create whose answer was lost is repeated, and then finds its own document.
        with contextlib.suppress(NotFoundError):
            if self._backend.read(key) == content:
                return _state(body, 0.0)
        return None

    def beat(self, name: str, number: int) -> None:
        """Write the heartbeat of a number."""
        self._backend.replace(_key(name, number).removesuffix(".json") + ".beat", b"")

    def names(self) -> list[str]:
        """Every lease that was ever taken."""
        folders = {
            item.key.removeprefix(f"{FOLDER}/").rpartition("/")[0]
            for item in self._backend.items(FOLDER)
        }
        return sorted(decode_name(folder) for folder in folders if folder)

    def _prune(self, name: str, number: int) -> None:
        folder = f"{FOLDER}/{encode_name(name, 'lease')}"
        for item in self._backend.items(folder):
            if 0 < _number(folder, item.key) < number:
                self._backend.delete(item.key)

    def _parse(self, name: str, key: str, age_s: float) -> LeaseState:
        body = unseal(self._backend.read(key), key)
        try:
            state = _state(body, age_s)
            if state.name == name and _key(name, state.number) == key:
                return state
        except (KeyError, TypeError, ValueError):
            pass
        raise DamagedError(f"{self._backend.where}: {key} is no document of the lease {name}")


def _key(name: str, number: int) -> str:
    return f"{FOLDER}/{encode_name(name, 'lease')}/{number:012d}.json"


def _number(folder: str, key: str) -> int:
    """The number of a document or heartbeat directly in the folder; 0 for anything else."""
    stem = key.removeprefix(folder + "/").partition(".")[0]
    return (
        int(stem) if len(stem) == 12 and stem.isdigit() and "/" not in key[len(folder) + 1 :] else 0
    )


def _state(body: Mapping[str, Any], age_s: float) -> LeaseState:
    return LeaseState(
        name=str(body["name"]),
        number=int(body["number"]),
        owner=str(body["owner"]),
        token=str(body["token"]),
        state=str(body["state"]),
        ttl_s=float(body["ttl_s"]),
        age_s=age_s,
        reaches=tuple(str(entry) for entry in body["reaches"]),
        record=body["record"],
    )
