"""Joules, where the machine counts them: NVIDIA devices (NVML) and the host's processors (RAPL).

Nothing here is required: a machine that counts nothing gives None, and the ledger says so.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

POWERCAP = Path("/sys/class/powercap")


class EnergyMeter:
    """Joules since it was made, of all devices of the kind that the stage runs on."""

    def __init__(self, *, cpu: bool, powercap: Path = POWERCAP) -> None:
        self._counters = _rapl_counters(powercap) if cpu else _nvml_counters()
        self._last = [read() for read, _ in self._counters]
        self._total = 0.0

    def joules(self) -> float | None:
        """Up to now; None where nothing is counted. Call it at least once a minute: a processor's
        counter starts anew after a while, and one such turn between two calls is noticed."""
        if not self._counters:
            return None
        for place, (read, turn) in enumerate(self._counters):
            with contextlib.suppress(OSError, ValueError):
                now = read()
                step = now - self._last[place]
                self._total += step if step >= 0 else step + turn
                self._last[place] = now
        return self._total


def _rapl_counters(folder: Path) -> list[tuple[Callable[[], float], float]]:
    """Of each processor package: a reader of joules, and where its counter starts anew."""
    counters = []
    for package in sorted(folder.glob("intel-rapl:[0-9]*")):
        if package.name.count(":") != 1:
            continue  # a part of a package, which the package counts already
        with contextlib.suppress(OSError, ValueError):
            reader = _file_reader(package / "energy_uj")
            reader()
            turn = float((package / "max_energy_range_uj").read_text()) / 1e6
            counters.append((reader, turn))
    return counters


def _file_reader(path: Path) -> Callable[[], float]:
    return lambda: float(path.read_text()) / 1e6


def _nvml_counters() -> list[tuple[Callable[[], float], float]]:
    """Of each device: a reader of joules since the driver was loaded, which never starts anew."""
    try:
        nvml: Any = importlib.import_module("pynvml")
        nvml.nvmlInit()
        handles = [
            nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())
        ]
        for handle in handles:
            nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except (ImportError, OSError, RuntimeError, AttributeError):
        return []
    except Exception as error:
        # NVMLError is a plain Exception whose class exists only once pynvml is imported.
        if type(error).__module__.split(".")[0] != "pynvml":
            raise
        return []
    return [(_nvml_reader(nvml, handle), 0.0) for handle in handles]


def _nvml_reader(nvml: Any, handle: Any) -> Callable[[], float]:
    return lambda: float(nvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3
