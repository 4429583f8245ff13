"""The devices that a recipe can name: peak dense bf16 throughput and memory, with their sources.

Peaks are without sparsity and with accumulation in float32, as the vendor states them. Vendors
print the sparse number first; the dense one is half of it. A recipe overrides the peak with
`rates.peak_tflops`, and so may name a device that is not in the table.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from llm_assets.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Device:
    """One kind of device.

    `peak_tflops`: 10^12 floating-point operations a second, dense bf16. `memory_gib`: of one, None
    when the table can't know it. `is_cpu`: one core of a machine, so that several "devices"
    share one memory and one process.
    """

    name: str
    peak_tflops: float
    memory_gib: float | None
    source: str
    aliases: tuple[str, ...] = ()
    is_cpu: bool = False


_NVIDIA = "https://www.nvidia.com/en-us/data-center"
_TPU = "https://cloud.google.com/tpu/docs"
_AMD = "https://www.amd.com/en/products/accelerators/instinct"
_ADA = (
    "NVIDIA Ada GPU architecture whitepaper, appendix A: "
    "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"
)

_DEVICES = (
    Device(
        name="h100-sxm",
        peak_tflops=989.0,
        memory_gib=80.0,
        source=f"{_NVIDIA}/h100/ datasheet: BF16 1,979 teraFLOPS with sparsity, 80 GB",
        aliases=("h100", "h100-80gb", "h100-sxm5"),
    ),
    Device(
        name="h100-pcie",
        peak_tflops=756.0,
        memory_gib=80.0,
        source=f"{_NVIDIA}/h100/ datasheet: BF16 1,513 teraFLOPS with sparsity, 80 GB",
    ),
    Device(
        name="h100-nvl",
        peak_tflops=835.0,
        memory_gib=94.0,
        source=f"{_NVIDIA}/h100/ datasheet: BF16 1,671 teraFLOPS with sparsity, 94 GB",
    ),
    Device(
        name="h800",
        peak_tflops=989.0,
        memory_gib=80.0,
        source="the compute of H100 SXM with a slower NVLink (400 GB/s), 80 GB; DeepSeek-V3 report",
    ),
    Device(
        name="h200",
        peak_tflops=989.0,
        memory_gib=140.0,
        source=f"{_NVIDIA}/h200/ datasheet: BF16 1,979 teraFLOPS with sparsity, 141 GB",
        aliases=("h200-sxm",),
    ),
    Device(
        name="b200",
        peak_tflops=2250.0,
        memory_gib=179.0,
        source=f"{_NVIDIA}/hgx/ B200: BF16 4.5 petaFLOPS with sparsity, 180 GB",
    ),
    Device(
        name="a100",
        peak_tflops=312.0,
        memory_gib=80.0,
        source=f"{_NVIDIA}/a100/ datasheet: BF16 312 teraFLOPS dense, 80 GB",
        aliases=("a100-80gb", "a100-sxm", "a100-pcie"),
    ),
    Device(
        name="a100-40gb",
        peak_tflops=312.0,
        memory_gib=40.0,
        source=f"{_NVIDIA}/a100/ datasheet: BF16 312 teraFLOPS dense, 40 GB",
    ),
    Device(
        name="a10",
        peak_tflops=125.0,
        memory_gib=24.0,
        source=f"{_NVIDIA}/products/a10-gpu/ datasheet: BF16 125 teraFLOPS dense, 24 GB",
    ),
    Device(
        name="l4",
        peak_tflops=121.0,
        memory_gib=24.0,
        source=f"{_NVIDIA}/l4/ datasheet: BF16 242 teraFLOPS with sparsity, 24 GB",
    ),
    Device(
        name="l40s",
        peak_tflops=362.0,
        memory_gib=48.0,
        source=f"{_NVIDIA}/l40s/ datasheet: BF16 362.05 teraFLOPS dense, 48 GB",
    ),
    Device(
        name="rtx-4090",
        peak_tflops=165.2,
        memory_gib=24.0,
        source=f"{_ADA}: BF16 with FP32 accumulate 165.2 TFLOPS dense, 24 GB",
        aliases=("4090", "geforce-rtx-4090"),
    ),
    Device(
        name="rtx-3090",
        peak_tflops=71.0,
        memory_gib=24.0,
        source="NVIDIA GA102 whitepaper: BF16 with FP32 accumulate 71 TFLOPS dense, 24 GB",
        aliases=("3090", "geforce-rtx-3090"),
    ),
    Device(
        name="mi300x",
        peak_tflops=1307.4,
        memory_gib=192.0,
        source=f"{_AMD}/mi300/mi300x.html: bfloat16 1307.4 TFLOPS dense, 192 GB",
    ),
    Device(
        name="mi250x",
        peak_tflops=383.0,
        memory_gib=128.0,
        source=f"{_AMD}/mi200/mi250x.html: bfloat16 383 TFLOPS dense (two dies), 128 GB",
    ),
    Device(
        name="tpu-v4",
        peak_tflops=275.0,
        memory_gib=32.0,
        source=f"{_TPU}/v4: 275 TFLOPS bf16 a chip, 32 GiB",
        aliases=("v4",),
    ),
    Device(
        name="tpu-v5e",
        peak_tflops=197.0,
        memory_gib=16.0,
        source=f"{_TPU}/v5e: 197 TFLOPS bf16 a chip, 16 GB",
        aliases=("v5e", "tpu-v5-lite"),
    ),
    Device(
        name="tpu-v5p",
        peak_tflops=459.0,
        memory_gib=95.0,
        source=f"{_TPU}/v5p: 459 TFLOPS bf16 a chip, 95 GB",
        aliases=("v5p",),
    ),
    Device(
        name="tpu-v6e",
        peak_tflops=918.0,
        memory_gib=32.0,
        source=f"{_TPU}/v6e: 918 TFLOPS bf16 a chip, 32 GB",
        aliases=("v6e", "trillium"),
    ),
    Device(
        name="cpu",
        peak_tflops=0.1,
        memory_gib=None,
        source="one core, float32: 2 AVX2 fused multiply-adds x 8 lanes x 2 operations x 3 GHz = "
        "96 GFLOP/s; conservative, AVX-512 does up to twice as much",
        aliases=("cpu-core", "core"),
        is_cpu=True,
    ),
)

DEVICES: Mapping[str, Device] = {entry.name: entry for entry in _DEVICES}


def _plain(name: str) -> str:
    """What is left of a name when case, spaces, hyphens and the vendor do not count."""
    return re.sub(r"[^a-z0-9]|nvidia|amd|google|instinct|cloud", "", name.lower())


_BY_PLAIN = {
    _plain(spelling): entry for entry in _DEVICES for spelling in (entry.name, *entry.aliases)
}


def find_device(
    name: str,
    *,
    where: str = "device",
    peak_tflops: float | None = None,
    memory_gib: float | None = None,
) -> Device:
    """The device called `name`, in any spelling; overrides replace the table's numbers.

    UserError with the closest names when the table has none and no peak is given.
    """
    found = _BY_PLAIN.get(_plain(name))
    for what, value in (("peak_tflops", peak_tflops), ("memory_gib", memory_gib)):
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise UserError(
                where=where,
                found=f"{what} {value}",
                rule="throughput and memory are above zero and finite",
                remedy="take the number from the vendor's datasheet",
            )
    if found is None:
        if peak_tflops is not None and name.strip():
            return Device(
                name=name.strip().lower(),
                peak_tflops=peak_tflops,
                memory_gib=memory_gib,
                source="the recipe",
            )
        close = difflib.get_close_matches(_plain(name), _BY_PLAIN, n=3, cutoff=0.5)
        names = list(dict.fromkeys(_BY_PLAIN[entry].name for entry in close))
        hint = f"did you mean {' or '.join(names)}? " if names else ""
        raise UserError(
            where=where,
            found=f"unknown device {name!r}",
            rule="a device is one of the table, or its peak is given",
            remedy=f"{hint}known: {', '.join(DEVICES)}; or give its peak in TFLOP/s",
        )
    changes: dict[str, float] = {}
    if peak_tflops is not None:
        changes["peak_tflops"] = peak_tflops
    if memory_gib is not None:
        changes["memory_gib"] = memory_gib
    if changes:
        found = replace(found, source="the recipe", **changes)  # type: ignore[arg-type]
    return found


def device_label(name: str, count: int) -> str:
    """How a record names what it ran on: `cpu`, `8 x h100-sxm`."""
    return name if count == 1 else f"{count} x {name}"


def parse_label(label: str) -> tuple[str, int]:
    """Name and count of a record's device: the inverse of `device_label`.

    The name is the table's where the table has it; ("", 0) for an empty label.
    """
    match = re.fullmatch(r"\s*(?:([0-9]+)\s*x\s+)?(.*?)\s*", label)
    if match is None or not match[2]:
        return "", 0
    found = _BY_PLAIN.get(_plain(match[2]))
    return (found.name if found else match[2].lower()), int(match[1] or 1)


def local_memory_gib() -> float | None:
    """Memory that a process on this machine may use, its control group's limit included."""
    limits = []
    try:
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (OSError, ValueError, AttributeError):
        return None
    for name in ("memory.max", "memory/memory.limit_in_bytes"):
        path = Path("/sys/fs/cgroup") / name
        if path.is_file():
            text = path.read_text().strip()
            if text.isdigit():
                limits.append(int(text))
    return min(limits) / 2**30
