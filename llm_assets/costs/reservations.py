"""Money set aside by a run before it starts, so that no two runs spend the same last dollar.

A run reserves its estimate, one run at a time, under a lease on the campaign. The reservation
counts as spent while its owner lives (the owner holds a lease of its own, with a heartbeat), less
what its attempts have already put into the ledger. It ends when it is released, or when the
heartbeat stops. Kind `reservations` of the store: `made/<campaign>/<name>` and
`released/<campaign>/<name>`.
"""

from __future__ import annotations

import datetime
import logging
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from types import TracebackType

from llm_assets.costs.budget import RESERVATIONS, check_budget, lease_name
from llm_assets.costs.entries import campaign_key
from llm_assets.errors import ConflictError, StoreError, message
from llm_assets.store.protocol import Lease, Store

RESERVATION_TTL_S = 180.0
_LOCK_TTL_S = 30.0

_log = logging.getLogger(__name__)


class Reservation:
    """Money that a run has set aside. A context manager: it beats while it is held.

    `check` before each stage: the reservation still stands, or raises ConflictError.
    """

    def __init__(
        self, store: Store, *, campaign: str, name: str, amount_usd: float, lease: Lease
    ) -> None:
        self.campaign = campaign
        self.name = name
        self.amount_usd = amount_usd
        self._store = store
        self._lease = lease
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Reservation:
        self._thread = threading.Thread(target=self._beat, name="reservation", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.release()

    def _beat(self) -> None:
        while not self._done.wait(RESERVATION_TTL_S / 4):
            try:
                self._lease.renew()
            except ConflictError:
                _log.warning("the reservation %s was lost: its heartbeat was late", self.name)
                return
            except (StoreError, OSError) as error:
                _log.warning("heartbeat of the reservation %s: %s", self.name, error)

    def renew(self) -> None:
        """Move the heartbeat by hand. ConflictError when the reservation was lost."""
        self._lease.renew()

    def check(self) -> None:
        """ConflictError when the reservation was lost."""
        self._lease.check()

    def release(self) -> None:
        """Give back what was not spent. Does nothing the second time."""
        self._done.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        key = f"released/{campaign_key(self.campaign)}/{self.name}"
        self._store.add_entry(RESERVATIONS, key, {"reservation": self.name})
        self._lease.release()


def reserve(
    store: Store,
    *,
    campaign: str,
    limit_usd: float | None,
    estimate_usd: float | Mapping[str, float],
    owner: str,
    wait_s: float = 60.0,
    sleep: Callable[[float], None] = time.sleep,
) -> Reservation:
    """Set an estimate aside, or raise BudgetError: two runs never get the same money.

    Reservations of a campaign are made one at a time under a lease; ConflictError when that lease
    can't be had within `wait_s` seconds. Attempts that name the reservation in the ledger
    (`open_attempt(reservation=...)`) draw on it.
    """
    amount = (
        sum(estimate_usd.values()) if isinstance(estimate_usd, Mapping) else float(estimate_usd)
    )
    waited = 0.0
    while True:
        lock = store.acquire(f"budget/{campaign_key(campaign)}", owner=owner, ttl_s=_LOCK_TTL_S)
        if lock is not None:
            try:
                made = _reserve_locked(
                    store, lock, campaign, limit_usd, estimate_usd, amount, owner
                )
            finally:
                lock.release()
            if made is not None:
                return made
        if waited >= wait_s:
            raise ConflictError(
                message(
                    where=f"budget of campaign {campaign}",
                    found=f"another run is reserving, for {waited:.0f} s now",
                    rule="reservations are made one at a time",
                    remedy="try again; a dead run's lease ends by itself within "
                    f"{_LOCK_TTL_S:.0f} s",
                )
            )
        sleep(0.2)
        waited += 0.2


def _reserve_locked(
    store: Store,
    lock: Lease,
    campaign: str,
    limit_usd: float | None,
    estimate_usd: float | Mapping[str, float],
    amount: float,
    owner: str,
) -> Reservation | None:
    """The reservation; None when the lock was lost on the way, so that nothing is certain."""
    check_budget(store, campaign=campaign, limit_usd=limit_usd, estimate_usd=estimate_usd)
    name = uuid.uuid4().hex
    lease = store.acquire(lease_name(name), owner=owner, ttl_s=RESERVATION_TTL_S)
    if lease is None:
        return None
    made = Reservation(store, campaign=campaign, name=name, amount_usd=amount, lease=lease)
    store.add_entry(
        RESERVATIONS,
        f"made/{campaign_key(campaign)}/{name}",
        {
            "campaign": campaign,
            "amount_usd": amount,
            "owner": owner,
            "at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        },
    )
    try:
        # Only now is it sure that nobody else reserved in between.
        lock.check()
    except ConflictError:
        made.release()
        return None
    return made
