"""The ledger's documents and how they are read.

An attempt is one try at one stage. While it runs it writes numbered *segments*, at least one a
minute, each with what was spent since the one before: the sum of the segments is the attempt. So a
process that is killed leaves all but its last half minute in the ledger. When the attempt ends, its
*total* is written, with a status; failed and cancelled attempts cost too.

Keys of the kind `ledger`, with the campaign's name percent-encoded:

    open/<campaign>/<attempt>             who runs what, on what, at which rent
    segment/<campaign>/<attempt>/<n>      usage since segment n - 1
    total/<campaign>/<attempt>            the sum, the status, and the sum of each day (UTC)

A reader takes the totals, and adds up segments only for attempts that have no total yet. An attempt
without a total is `running`, or `lost` when its newest segment is older than three minutes.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any
from urllib.parse import quote

from llm_assets.costs.devices import find_device
from llm_assets.errors import DamagedError, UserError, message
from llm_assets.store.protocol import Store

KIND = "ledger"
FORMAT = 1
LOST_AFTER_S = 180.0
_LONGEST_KEY = 200


@dataclass(frozen=True, kw_only=True)
class Usage:
    """What was used: wall seconds, hours of all devices together, USD, tokens, operations, joules.

    `energy_j` is None where the machine does not count it.
    """

    seconds: float = 0.0
    gpu_hours: float = 0.0
    cost_usd: float = 0.0
    tokens: int = 0
    flops: float = 0.0
    energy_j: float | None = None

    def __add__(self, other: Usage) -> Usage:
        energies = [part for part in (self.energy_j, other.energy_j) if part is not None]
        return Usage(
            seconds=self.seconds + other.seconds,
            gpu_hours=self.gpu_hours + other.gpu_hours,
            cost_usd=self.cost_usd + other.cost_usd,
            tokens=self.tokens + other.tokens,
            flops=self.flops + other.flops,
            energy_j=sum(energies) if energies else None,
        )

    def as_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}


def total_usage(parts: Iterable[Usage]) -> Usage:
    """The sum; zeros for none."""
    total = Usage()
    for part in parts:
        total = total + part
    return total


def by_day(segments: Iterable[tuple[str, Usage]]) -> dict[str, Usage]:
    """Segments with their time (UTC, ISO) summed by date. A segment belongs to the day it ends."""
    days: dict[str, Usage] = {}
    for at, part in segments:
        days[at[:10]] = days.get(at[:10], Usage()) + part
    return days


@dataclass(frozen=True, kw_only=True)
class AttemptInfo:
    """One try at one stage: what stands in the ledger before anything is spent."""

    attempt: str
    campaign: str
    pipeline: str
    run_id: str
    stage: str
    identity: str
    device: str
    devices: int
    usd_per_hour: float
    started_at: str
    estimate_usd: float | None = None
    reservation: str = ""

    def as_json(self) -> dict[str, Any]:
        """Plain JSON."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}

    def key(self, part: str) -> str:
        """The key of this attempt's entry."""
        return f"{part}/{campaign_key(self.campaign)}/{self.attempt}"


@dataclass(frozen=True, kw_only=True)
class LedgerEntry:
    """An attempt as the ledger has it. `status`: running, lost, done, failed, cancelled or killed.
    `days` maps a date (UTC, ISO) to what was used on it."""

    info: AttemptInfo
    usage: Usage
    status: str
    ended_at: str
    reason: str = ""
    days: Mapping[str, Usage] = field(default_factory=dict)

    @property
    def utilization(self) -> float | None:
        """Share of the device's peak, over the whole attempt; None without operations or peak."""
        if self.usage.flops <= 0 or self.usage.gpu_hours <= 0:
            return None
        try:
            peak = find_device(self.info.device).peak_tflops * 1e12
        except UserError:
            return None
        return self.usage.flops / (self.usage.gpu_hours * 3600.0 * peak)

    def as_json(self) -> dict[str, Any]:
        """Plain JSON, flat: the attempt, its usage, utilization and status."""
        return {
            **self.info.as_json(),
            **self.usage.as_json(),
            "utilization": self.utilization,
            "status": self.status,
            "ended_at": self.ended_at,
            "reason": self.reason,
        }


def campaign_key(campaign: str) -> str:
    """A campaign's name as one segment of a key. UserError for one that can be none."""
    key = quote(campaign, safe="")
    if not campaign.strip() or len(key) > _LONGEST_KEY:
        raise UserError(
            where="campaign",
            found=f"a name of {len(campaign)} characters" if key else "an empty name",
            rule=f"a campaign has a name, of at most {_LONGEST_KEY} bytes as its key is written",
            remedy="give it a short name",
        )
    return key


def spent_usd(store: Store, campaign: str) -> float:
    """What a campaign has cost so far, with attempts that failed, were cancelled or still run."""
    return sum(entry.usage.cost_usd for entry in ledger_entries(store, campaign))


def ledger_entries(
    store: Store, campaign: str | None = None, *, now: datetime.datetime | None = None
) -> list[LedgerEntry]:
    """One entry for each attempt of a campaign, or of all, by key: so by time within a campaign."""
    prefix = "" if campaign is None else f"{campaign_key(campaign)}/"
    now = now or datetime.datetime.now(datetime.UTC)
    # Opened first, totals second: an attempt that ends in between is then counted once, not never.
    opened = dict(store.entries(KIND, f"open/{prefix}"))
    totals = dict(store.entries(KIND, f"total/{prefix}"))
    found = []
    for key, body in opened.items():
        info = _info_of(body, key)
        total = totals.get(info.key("total"))
        if total is not None:
            found.append(_entry_of_total(info, total))
        else:
            found.append(_entry_of_segments(info, segments_of(store, info), now))
    return found


def segments_of(store: Store, info: AttemptInfo) -> list[tuple[str, Usage]]:
    """The segments of an attempt in order, each with when it ended (UTC, ISO)."""
    prefix = f"{info.key('segment')}/"
    return [(str(body["at"]), usage_of(body, key)) for key, body in store.entries(KIND, prefix)]


def _entry_of_total(info: AttemptInfo, body: Mapping[str, Any]) -> LedgerEntry:
    where = info.key("total")
    return LedgerEntry(
        info=info,
        usage=usage_of(body, where),
        status=str(body["status"]),
        ended_at=str(body["ended_at"]),
        reason=str(body.get("reason", "")),
        days={day: usage_of(part, where) for day, part in body["days"].items()},
    )


def _entry_of_segments(
    info: AttemptInfo, segments: list[tuple[str, Usage]], now: datetime.datetime
) -> LedgerEntry:
    newest = segments[-1][0] if segments else info.started_at
    age_s = (now - datetime.datetime.fromisoformat(newest)).total_seconds()
    return LedgerEntry(
        info=info,
        usage=total_usage(part for _, part in segments),
        status="lost" if age_s > LOST_AFTER_S else "running",
        ended_at=newest,
        days=by_day(segments),
    )


def _checked(body: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    if body.get("format") != FORMAT:
        raise DamagedError(
            message(
                where=f"ledger entry {where}",
                found=f"format {body.get('format')!r}",
                rule=f"this version reads format {FORMAT}",
                remedy="use the version of llm-assets that wrote the entry",
            )
        )
    return body


def _info_of(body: Mapping[str, Any], where: str) -> AttemptInfo:
    known = {entry.name for entry in fields(AttemptInfo)}
    checked = _checked(body, where)
    return AttemptInfo(**{name: value for name, value in checked.items() if name in known})


def usage_of(body: Mapping[str, Any], where: str) -> Usage:
    """The usage that a document holds. DamagedError for a format that this version can't read."""
    if "at" in body or "status" in body:
        _checked(body, where)
    known = {entry.name for entry in fields(Usage)}
    return Usage(**{name: value for name, value in body.items() if name in known})
