from __future__ import annotations

import pytest

from llm_assets.costs.devices import (
    DEVICES,
    device_label,
    find_device,
    local_memory_gib,
    parse_label,
)
from llm_assets.errors import UserError


def test_every_device_has_a_peak_a_memory_and_a_source() -> None:
    for device in DEVICES.values():
        assert device.peak_tflops > 0
        assert len(device.source) > 20
        assert device.is_cpu or (device.memory_gib or 0) > 0


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("H100", 989.0),
        ("h100-sxm", 989.0),
        ("NVIDIA H100 SXM5", 989.0),
        ("H100 PCIe", 756.0),
        ("H200", 989.0),
        ("A100", 312.0),
        ("A100-40GB", 312.0),
        ("L4", 121.0),
        ("L40S", 362.0),
        ("B200", 2250.0),
        ("MI300X", 1307.4),
        ("TPU v4", 275.0),
        ("tpu-v5e", 197.0),
        ("TPU_v5p", 459.0),
        ("RTX 4090", 165.2),
    ],
)
def test_peaks_by_any_spelling(name: str, peak: float) -> None:
    assert find_device(name).peak_tflops == peak


def test_an_unknown_device_names_the_close_ones() -> None:
    with pytest.raises(UserError) as caught:
        find_device("H10O", where="--device")
    assert "did you mean" in str(caught.value)
    assert "h100-sxm" in str(caught.value)
    with pytest.raises(UserError, match="unknown device ''"):
        find_device("")


def test_the_recipe_overrides_the_table() -> None:
    device = find_device("H100", peak_tflops=700.0, memory_gib=40.0)
    assert (device.peak_tflops, device.memory_gib) == (700.0, 40.0)
    own = find_device("Trainium2", peak_tflops=667.0)
    assert (own.name, own.memory_gib) == ("trainium2", None)
    with pytest.raises(UserError, match="above zero"):
        find_device("H100", peak_tflops=-1.0)


def test_labels_go_there_and_back() -> None:
    assert parse_label(device_label("h100-sxm", 8)) == ("h100-sxm", 8)
    assert parse_label(device_label("cpu", 1)) == ("cpu", 1)
    assert parse_label("H100") == ("h100-sxm", 1)
    assert parse_label("") == ("", 0)
    assert parse_label("own thing") == ("own thing", 1)


def test_this_machine_has_memory() -> None:
    found = local_memory_gib()
    assert found is not None and found > 0.1
