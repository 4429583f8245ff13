"""How often to save: the interval that loses the least time, by Young and Daly."""

from __future__ import annotations

import math

FIRST_S = 60.0
"""Before a save was measured, an automatic interval is this long."""
_SHORTEST_IN_COSTS = 10.0


def daly_interval_s(save_s: float, mtbf_s: float) -> float:
    """Seconds between saves that cost `save_s` each, when something fails each `mtbf_s` on average.

    Daly 2006, "A higher order estimate of the optimum checkpoint interval", equation 37; its first
    term is Young's sqrt(2 save_s mtbf_s).
    """
    if save_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = save_s / (2 * mtbf_s)
    return math.sqrt(2 * save_s * mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - save_s


def automatic_interval_s(stall_s: float, write_s: float, mtbf_s: float) -> float:
    """Between two saves of which each stops the training for `stall_s` and is written within
    `write_s` beside it. Never so short that saves follow each other at once."""
    return max(daly_interval_s(stall_s, mtbf_s), write_s, _SHORTEST_IN_COSTS * stall_s)
