"""Memory that holds the content of one safetensors file, reused from save to save.

Copying into memory that was touched before costs a fourth of copying into fresh memory; and what is
written later is the state of the step at which it was copied, whatever the training does meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import torch

from llm_assets.stages.save_tensors import WIDTHS, all_finite, chunks

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
        self._storage = torch.empty(0, dtype=torch.uint8)
        self._views: dict[str, torch.Tensor] = {}
        self._header = 0

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
        self._views = {}
        self._layout = ()
        self._storage = torch.empty(0, dtype=torch.uint8)
        storage = torch.empty(
            len(prefix) + at, dtype=torch.uint8, pin_memory=torch.cuda.is_available()
        )
        storage.zero_()
        storage[: len(prefix)] = torch.frombuffer(bytearray(prefix), dtype=torch.uint8)
        data = storage[len(prefix) :]
        for name in order:
            start, end = document[name]["data_offsets"]
            view = data[start:end].view(tensors[name].dtype)
            self._views[name] = view.view(tensors[name].shape)
        self._storage, self._header, self._layout = storage, len(prefix), layout

    @torch.no_grad()
    def take(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copy the tensors in. Asynchronous from a GPU: synchronize before the next step."""
        self.prepare(tensors)
        for name, tensor in tensors.items():
            self._views[name].copy_(tensor, non_blocking=True)

    @property
    def content(self) -> memoryview:
        """The whole file."""
        return memoryview(self._storage.numpy())  # type: ignore[arg-type]

    def not_finite(self) -> str:
        """The first tensor that holds NaN or infinity; "" without one."""
        content = self.content[self._header :]
        base = self._storage.data_ptr() + self._header
        for name, dtype, _ in self._layout:
            view = self._views[name]
            start = view.data_ptr() - base
            for at, end in chunks(start, start + view.numel() * view.element_size()):
                if not all_finite(content[at:end], _NAMES[dtype]):
                    return name
        return ""

    def pieces(self, size: int) -> Iterator[memoryview]:
        """The content in pieces of at most `size` bytes."""
        content = self.content
        for at in range(0, len(content), size):
            yield content[at : at + size]
