"""Memory that holds the content of one safetensors file, reused from save to save.

Copying into memory that was touched before costs a fourth of copying into fresh memory; and what is
written later is the state of the step at which it was copied, whatever the training does meanwhile.
The memory is a file without a name, which the process that writes the save maps too.
"""

from __future__ import annotations

import json
import weakref
from collections.abc import Mapping
from typing import Any

import torch

from llm_assets.stages.save_memory import SharedMemory
from llm_assets.stages.save_tensors import WIDTHS

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}

Layout = tuple[tuple[str, torch.dtype, torch.Size], ...]


def dtype_name(tensor: torch.Tensor) -> str:
    """The format's name of a type. ValueError for a type that it does not have."""
    name = _NAMES.get(tensor.dtype)
    if name is None:
        raise ValueError(f"safetensors have no {tensor.dtype}")
    return name


class TensorBuffer:
    """One file's content: `take` copies tensors in, `content` is what is written."""

    def __init__(self) -> None:
        self._layout: Layout = ()
        self._memory = SharedMemory(0)
        self._views: dict[str, torch.Tensor] = {}

    def prepare(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Allocate and touch the memory for tensors of these names, shapes and types."""
        layout = tuple((name, tensor.dtype, tensor.shape) for name, tensor in tensors.items())
        if layout == self._layout:
            return
        # Wide types first, so that every tensor lies at a multiple of its own width.
        order = sorted(tensors, key=lambda name: (-WIDTHS[dtype_name(tensors[name])], name))
        document, at = {}, 0
        for name in order:
            size = tensors[name].numel() * tensors[name].element_size()
            document[name] = {
                "dtype": dtype_name(tensors[name]),
                "shape": list(tensors[name].shape),
                "data_offsets": [at, at + size],
            }
            at += size
        header = json.dumps(document, separators=(",", ":")).encode()
        header += b" " * (-len(header) % 8)
        prefix = len(header).to_bytes(8, "little") + header
        # The memory of before is given back first.
        self._views, self._layout, self._memory = {}, (), SharedMemory(0)
        memory = SharedMemory(len(prefix) + at)
        memory.content[: len(prefix)] = prefix
        storage = torch.frombuffer(memory.content, dtype=torch.uint8)
        if torch.cuda.is_available():
            _pin(memory, storage)
        data = storage[len(prefix) :]
        for name in order:
            start, end = document[name]["data_offsets"]
            view = data[start:end].view(tensors[name].dtype)
            self._views[name] = view.view(tensors[name].shape)
        self._memory, self._layout = memory, layout

    @torch.no_grad()
    def take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy the tensors in. Asynchronous from a GPU: synchronize before the next step."""
        self.prepare(tensors)
        for name, tensor in tensors.items():
            self._views[name].copy_(tensor, non_blocking=True)

    @property
    def content(self) -> memoryview:
        """The whole file."""
        return self._memory.content

    @property
    def descriptor(self) -> int:
        """Of the file without a name, for another process."""
        return self._memory.descriptor


def _pin(memory: SharedMemory, storage: torch.Tensor) -> None:
    """As far as the driver lets us: copies from a GPU are then asynchronous."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    start = storage.data_ptr()
    if int(runtime.cudaHostRegister(start, storage.numel(), 0)) == 0:
        weakref.finalize(memory, runtime.cudaHostUnregister, start)
