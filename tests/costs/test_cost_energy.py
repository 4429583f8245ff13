from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from llm_assets.costs.energy import EnergyMeter


def package(folder: Path, name: str, microjoules: int) -> Path:
    """A processor's counter as the kernel shows it."""
    path = folder / name
    path.mkdir(parents=True)
    (path / "energy_uj").write_text(f"{microjoules}\n")
    (path / "max_energy_range_uj").write_text("1000000000\n")
    return path


def test_processors_are_summed_and_a_counter_that_starts_anew_is_noticed(tmp_path: Path) -> None:
    first = package(tmp_path, "intel-rapl:0", 990_000_000)
    second = package(tmp_path, "intel-rapl:1", 0)
    package(tmp_path, "intel-rapl:0:0", 5_000_000)  # a part of the first
    meter = EnergyMeter(cpu=True, powercap=tmp_path)
    assert meter.joules() == 0.0
    (first / "energy_uj").write_text("5000000")  # past its end
    (second / "energy_uj").write_text("2000000")
    assert meter.joules() == pytest.approx(15.0 + 2.0)
    (second / "energy_uj").unlink()
    (first / "energy_uj").write_text("6000000")
    assert meter.joules() == pytest.approx(18.0)


def test_a_machine_that_counts_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert EnergyMeter(cpu=True, powercap=tmp_path).joules() is None
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert EnergyMeter(cpu=False).joules() is None


def test_devices_of_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    used = {0: 1_000.0, 1: 0.0}  # millijoules
    fake = types.ModuleType("pynvml")
    fake.nvmlInit = lambda: None  # type: ignore[attr-defined]
    fake.nvmlDeviceGetCount = lambda: 2  # type: ignore[attr-defined]
    fake.nvmlDeviceGetHandleByIndex = lambda number: number  # type: ignore[attr-defined]
    fake.nvmlDeviceGetTotalEnergyConsumption = used.__getitem__  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    meter = EnergyMeter(cpu=False)
    used.update({0: 4_000.0, 1: 500.0})
    assert meter.joules() == pytest.approx(3.5)


def test_a_driver_that_refuses_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = types.ModuleType("pynvml")
    error = type("NVMLError", (Exception,), {"__module__": "pynvml"})

    def refuse() -> None:
        raise error("driver not loaded")

    fake.nvmlInit = refuse  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    assert EnergyMeter(cpu=False).joules() is None
