"""What the labels of preference pairs are worth: provenance, votes, agreement, length bias."""

from __future__ import annotations

import hashlib
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from llm_assets.gates.agreement import alpha_interval, krippendorff_alpha
from llm_assets.gates.artifact_rows import Input, Measured, Row, read_rows
from llm_assets.gates.statistics import wilson

_FEW_PAIRS = 30
"""Groups with fewer pairs are shown and do not decide."""
_ROWS_SHOWN = 50
_SIDES = ("chosen", "rejected")


def measure(inputs: Mapping[str, Input]) -> Measured:
    """Of all pairs, held-out ones too.

    `provenance_rate`: pairs with rubric, vendor and at least one vote by a named annotator.
    `votes_per_pair`, `agreement` (Krippendorff's alpha) and `agreement_worst`, the smallest of any
    vendor or rubric. `against_votes_rate`: voted pairs whose chosen answer has the minority.
    `longer_chosen_rate`: of pairs with unequal answers, how often the longer one is chosen.
    `vendor_length_gap`: the largest difference between a vendor's votes for the longer answer and
    all other vendors'.
    """
    data = inputs["data"]
    pairs = [
        row for name in ("train.jsonl", "held_out.jsonl") for row in read_rows(data.path / name)
    ]
    bare = [(number, row) for number, row in enumerate(pairs) if missing_provenance(row)]
    voted = [row for row in pairs if _votes(row)]
    num_votes = sum(len(_votes(row)) for row in voted)
    against = sum(_against(row) for row in voted)
    unequal = [row for row in pairs if _gap(row)]
    longer = sum(_gap(row) > 0 for row in unequal)
    gap, gap_table = vendor_length_gap(voted)
    metrics: dict[str, dict[str, Any]] = {
        "provenance_rate": _rate(len(pairs) - len(bare), len(pairs)),
        "votes_per_pair": {"value": num_votes / len(pairs) if pairs else None, "n": len(pairs)},
        "against_votes_rate": _rate(against, len(voted)),
        "longer_chosen_rate": _rate(longer, len(unequal)),
        **gap,
    }
    agreement, agreement_table = _agreement(voted)
    return Measured(
        metrics=metrics | agreement,
        tables={
            "provenance_rate": [
                {"row": number, "source": row.get("source", ""), "missing": missing_provenance(row)}
                for number, row in bare[:_ROWS_SHOWN]
            ],
            "agreement": agreement_table,
            "agreement_worst": agreement_table,
            "vendor_length_gap": gap_table,
        },
    )


def _rate(count: int, n: int) -> dict[str, Any]:
    return {"value": count / n if n else None, "n": n}


def missing_provenance(row: Row) -> str:
    """What a pair does not say of where its label comes from; "" when it says all."""
    missing = [name for name in ("rubric", "vendor") if not str(row.get(name) or "").strip()]
    if not _votes(row):
        missing.append("votes")
    elif not all(vote.get("annotator") for vote in _votes(row)):
        missing.append("annotators")
    return ", ".join(missing)


def _votes(row: Row) -> Sequence[Mapping[str, Any]]:
    votes = row.get("votes") or ()
    return [vote for vote in votes if vote.get("choice") in _SIDES]


def _text(row: Row, side: str) -> str:
    return "\n".join(turn["content"] for turn in row[side])


def _against(row: Row) -> bool:
    votes = _votes(row)
    num_chosen = sum(1 for vote in votes if vote["choice"] == "chosen")
    return 2 * num_chosen < len(votes)


def _gap(row: Row) -> int:
    """Words of the chosen answer over those of the rejected one."""
    return len(_text(row, "chosen").split()) - len(_text(row, "rejected").split())


def oriented_votes(row: Row) -> list[str]:
    """The votes as choices between a first and a second answer, in an order that does not depend on
    the votes. As they stand, nearly all are for "chosen" by definition: chance alone would seem to
    explain them, and alpha would be near zero among annotators who agree."""
    digests = {
        side: hashlib.sha256(_text(row, side).encode("utf-8", "replace")).digest()
        for side in _SIDES
    }
    first = min(_SIDES, key=digests.__getitem__)
    return ["first" if vote["choice"] == first else "second" for vote in _votes(row)]


def _agreement(voted: Sequence[Row]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    units = [oriented_votes(row) for row in voted]
    groups: dict[tuple[str, str], list[Sequence[str]]] = defaultdict(list)
    for row, unit in zip(voted, units, strict=True):
        for kind in ("vendor", "rubric"):
            groups[kind, str(row.get(kind) or "(none)")].append(unit)
    table: list[dict[str, Any]] = [
        {"group": f"{kind}: {name[:60]}", "pairs": len(found), "alpha": krippendorff_alpha(found)}
        for (kind, name), found in sorted(groups.items())
    ]
    whole = krippendorff_alpha(units)
    table.insert(0, {"group": "all", "pairs": len(units), "alpha": whole})
    metrics: dict[str, Any] = {"agreement": {"value": whole, "n": len(units)}}
    interval = alpha_interval(units)
    if interval is not None:
        metrics["agreement_low"] = {"value": interval.low, "n": len(units)}
        metrics["agreement_high"] = {"value": interval.high, "n": len(units)}
    known = [row for row in table if row["pairs"] >= _FEW_PAIRS and row["alpha"] is not None]
    worst = min(known, key=lambda row: row["alpha"], default=None)
    metrics["agreement_worst"] = {
        "value": worst["alpha"] if worst else None,
        "n": worst["pairs"] if worst else 0,
    }
    for row in table:
        row["alpha"] = None if row["alpha"] is None else round(row["alpha"], 4)
    return metrics, table


def _length_votes(rows: Sequence[Row]) -> Iterator[tuple[str, bool]]:
    """(vendor, the vote is for the longer answer) of every vote on a pair of unequal lengths."""
    for row in rows:
        gap = _gap(row)
        if gap:
            for vote in _votes(row):
                yield str(row.get("vendor") or "(none)"), (vote["choice"] == "chosen") == (gap > 0)


def vendor_length_gap(rows: Sequence[Row]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The largest gap with its interval, and one row a vendor.

    The interval of a difference of two rates is Newcombe's (1998, method 10), from their Wilson
    intervals. With one vendor there is nobody to compare with, and no number.
    """
    longer: dict[str, int] = defaultdict(int)
    count: dict[str, int] = defaultdict(int)
    for vendor, is_longer in _length_votes(rows):
        longer[vendor] += is_longer
        count[vendor] += 1
    whole, seen = sum(count.values()), sum(longer.values())
    table, gaps = [], []
    for vendor in sorted(count):
        n, others = count[vendor], whole - count[vendor]
        p = longer[vendor] / n
        row: dict[str, Any] = {"vendor": vendor, "votes": n, "for_the_longer": round(p, 4)}
        if n >= _FEW_PAIRS and others >= _FEW_PAIRS:
            q = (seen - longer[vendor]) / others
            one, two = wilson(longer[vendor], n), wilson(seen - longer[vendor], others)
            low = p - q - math.hypot(p - one.low, two.high - q)
            high = p - q + math.hypot(one.high - p, q - two.low)
            if p < q:
                low, high = -high, -low
            gaps.append((abs(p - q), low, high, n))
            row["others"] = round(q, 4)
        table.append(row)
    if not gaps:
        return {}, table
    value, low, high, n = max(gaps)
    return {
        "vendor_length_gap": {"value": value, "n": n},
        "vendor_length_gap_low": {"value": low, "n": n},
        "vendor_length_gap_high": {"value": high, "n": n},
    }, table
