"""The money of one stage while its worker runs: the ledger's attempt, and when it must stop."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Iterator

from llm_assets.costs.budget import current_limit, standing
from llm_assets.costs.devices import device_label
from llm_assets.costs.energy import EnergyMeter
from llm_assets.costs.entries import ledger_entries
from llm_assets.costs.ledger import FLUSH_EVERY_S, Attempt, open_attempt
from llm_assets.costs.meter import Meter
from llm_assets.costs.quantities import show_usd
from llm_assets.errors import StoreError
from llm_assets.jobs import RESUMED, StageJob
from llm_assets.reporting import Reporter
from llm_assets.store.protocol import Store

_log = logging.getLogger(__name__)


class Spending:
    """What the running stage has spent, did and may still spend.

    Two limits stop it: that of the stage, with earlier attempts at the same identity counted, and
    what is left of the campaign's budget, which other runs spend too and which is read again with
    every flush of the ledger.
    """

    def __init__(self, job: StageJob, store: Store, attempt: Attempt, already_usd: float) -> None:
        self._job = job
        self._store = store
        self._attempt = attempt
        self._meter = Meter(
            rate_usd_per_hour=job.usd_per_hour,
            devices=job.devices,
            limit_usd=job.stage_limit_usd,
            already_usd=already_usd,
        )
        self._energy = EnergyMeter(cpu=job.device.strip().lower() == "cpu")
        self._first_tokens: int | None = None
        self._may_spend_usd: float | None = None
        self._campaign_usd: float | None = None
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="spending", daemon=True)

    @property
    def device(self) -> str:
        """How the record names what the stage ran on."""
        return device_label(self._job.device, self._job.devices)

    def resumed(self) -> dict[str, str]:
        """For the record: tokens that earlier attempts had trained on before this one went on."""
        return {RESUMED: str(self._first_tokens)} if self._first_tokens else {}

    def flops_of(self, tokens: int) -> float:
        """Operations of `tokens`, by the formulas of costs/work.py; of all that was planned when
        the stage counts no tokens."""
        if tokens <= 0 or self._job.work_tokens <= 0:
            return self._job.work_flops
        return self._job.work_flops * tokens / self._job.work_tokens

    def on_step(self, step: int, tokens: int | None) -> None:
        """A step is done; `tokens` since the training began, also in earlier attempts."""
        if not tokens:
            return
        if self._first_tokens is None:
            # A resumed training counts on from its save; those tokens were paid for before.
            self._first_tokens = round(tokens * (step - 1) / step) if step > 0 else 0
        own = max(0, tokens - self._first_tokens)
        flops = self.flops_of(own) if self._job.work_tokens > 0 else None
        self._attempt.progress(tokens=own, flops=flops)

    def finished(self, tokens: int, flops: float) -> None:
        """The stage ended well; the ledger gets the totals of one that reported no steps."""
        if self._first_tokens is None:
            self._attempt.progress(tokens=tokens, flops=flops)

    def should_stop(self) -> str | None:
        """See StageContext.should_stop."""
        job = self._job
        where = f"{job.pipeline}/{job.stage}"
        if self._meter.over_limit():
            limit = show_usd(job.stage_limit_usd or 0.0)
            return (
                f"{where}: {show_usd(self._meter.spent())} are spent on this stage, earlier "
                f"attempts included, of {limit}\n"
                "  rule: a stage stops at its limit, with a checkpoint\n"
                f"  next: raise budget.stage_limits_usd.{job.stage}, then run again: it goes on"
            )
        allowed = self._may_spend_usd
        if allowed is not None and self._attempt.spent_usd() > allowed:
            limit = show_usd(self._campaign_usd or 0.0)
            return (
                f"{where}: the budget of campaign {job.campaign} is spent, {limit}\n"
                "  rule: a stage stops when the campaign's money is gone, with a checkpoint\n"
                f"  next: `llm-assets budget set USD --campaign {job.campaign} --why ...`, and run "
                "again: it goes on there"
            )
        return None

    def __enter__(self) -> Spending:
        self._look()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self._attempt.progress(energy_j=self._energy.joules())

    def _watch(self) -> None:
        while not self._done.wait(FLUSH_EVERY_S):
            self._look()

    def _look(self) -> None:
        """Flush the ledger, then read what the campaign has left. A store that is away for a while
        is no reason to stop: the next look counts."""
        job, attempt = self._job, self._attempt
        try:
            attempt.progress(energy_j=self._energy.joules())
            attempt.flush()
            limit = current_limit(self._store, job.campaign, None, pipeline=None)
            own = job.reservation or None
            left = standing(self._store, job.campaign, limit, own=own).left_usd
        except (StoreError, OSError) as error:
            _log.warning("spending of %s: not looked up: %s", job.stage, error)
            return
        self._campaign_usd = limit
        # What this attempt has spent is in `left` already.
        self._may_spend_usd = None if left is None else attempt.spent_usd() + left


@contextlib.contextmanager
def follow_spending(job: StageJob, store: Store, reporter: Reporter) -> Iterator[Spending]:
    """The attempt's money stands in the ledger while the stage runs and whatever its end."""
    job = dataclasses.replace(job, campaign=job.campaign or job.pipeline)
    already_usd = earlier_attempts_usd(store, job.campaign, job.identity)
    with open_attempt(
        store,
        run_id=job.run_id,
        stage=job.stage,
        pipeline=job.pipeline,
        campaign=job.campaign,
        identity=job.identity,
        device=job.device,
        devices=job.devices,
        usd_per_hour=job.usd_per_hour,
        estimate_usd=job.estimate_usd,
        reservation=job.reservation,
        flush_every_s=0,  # Spending flushes
    ) as attempt:
        reporter.spending = attempt.spent_usd
        with Spending(job, store, attempt, already_usd) as spending:
            reporter.on_step = spending.on_step
            yield spending


def earlier_attempts_usd(store: Store, campaign: str, identity: str) -> float:
    """What attempts at an identity cost that ended without a record."""
    return sum(
        entry.usage.cost_usd
        for entry in ledger_entries(store, campaign)
        if entry.info.identity == identity and entry.status != "done"
    )
