"""The position of a training in its data: rows drawn, their order, and the rows that come next.

The sampler of the training's own data loader is watched, so what is saved is what was drawn, and
what a resumed training draws is compared with it before it takes a step.
"""

from __future__ import annotations

import hashlib
import random
from array import array
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

_ROWS_LOOKED_AT = 8


class WatchedSampler:
    """A sampler that gives what the one inside gives, and remembers it until it is counted."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.pending: deque[int] = deque()
        self.order = hashlib.sha256()
        self.drawn = 0

    def __iter__(self) -> Iterator[int]:
        self.pending.clear()
        self.order = hashlib.sha256()
        self.drawn = 0
        for row in self._inner:
            self.pending.append(int(row))
            yield row

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def settle(self, drawn: int) -> list[int]:
        """Count rows up to `drawn` of this epoch as drawn; gives those that are new."""
        rows = [self.pending.popleft() for _ in range(min(drawn - self.drawn, len(self.pending)))]
        self.order.update(array("q", rows).tobytes())
        self.drawn += len(rows)
        return rows


class DataPosition:
    """Watches the data of one training."""

    def __init__(self, loader: Any, *, accumulation: int, world_size: int) -> None:
        self._accumulation = accumulation
        self._world_size = world_size
        self._sampler: WatchedSampler | None = None
        self._kind, self._seed = "none", None
        self._batch_rows, self._num_rows = 0, 0
        self._steps_per_epoch = max(1, -(-len(loader) // accumulation)) if _sized(loader) else 0
        holder: Any = getattr(loader, "batch_sampler", None)
        while hasattr(holder, "batch_sampler"):
            holder = holder.batch_sampler
        if holder is not None and hasattr(holder, "sampler") and hasattr(holder, "batch_size"):
            inner = holder.sampler
            if not isinstance(inner, WatchedSampler):
                inner = holder.sampler = WatchedSampler(inner)
            self._sampler = inner
            self._kind = type(inner._inner).__name__
            seed = getattr(inner._inner, "initial_seed", None)
            self._seed = int(seed) if seed is not None else None
            self._batch_rows = int(holder.batch_size)
            self._num_rows = len(loader.dataset)
        self.fingerprint = _fingerprint(loader.dataset) if self._num_rows else ""
        self._epoch_start: dict[str, torch.Tensor] = {}

    def epoch_begins(self, restored: dict[str, torch.Tensor] | None) -> None:
        """Note the generators from which the order of this epoch is drawn, or put them back."""
        inner = getattr(self._sampler, "generator", None)
        if restored is not None:
            put_generators(restored)
            if inner is not None and "sampler" in restored:
                inner.set_state(restored["sampler"])
        self._epoch_start = generators()
        if inner is not None:
            self._epoch_start["sampler"] = inner.get_state()

    @property
    def epoch_start(self) -> dict[str, torch.Tensor]:
        """Generators at the start of the epoch."""
        return self._epoch_start

    def at(self, step: int) -> dict[str, Any]:
        """The position after `step` steps, whose next batches are drawn. Call it at every step."""
        steps_per_epoch = self._steps_per_epoch or max(1, step)
        epoch, steps = divmod(step, steps_per_epoch)
        position: dict[str, Any] = {
            "epoch": epoch,
            "steps": steps,
            "steps_per_epoch": steps_per_epoch,
            "num_rows": self._num_rows,
            "rows_sha256": self.fingerprint,
            "sampler": {"kind": self._kind, "seed": self._seed},
            "drawn": 0,
            "order_sha256": "",
            "next_rows": [],
        }
        if self._sampler is not None:
            a_step = self._accumulation * self._batch_rows * self._world_size
            self._sampler.settle(steps * a_step)
            position["next_rows"] = self._sampler.settle((steps + 1) * a_step)
            position["drawn"] = self._sampler.drawn
            position["order_sha256"] = self._sampler.order.hexdigest()
        return position


POSITION_SUMMARY = ("epoch", "steps", "drawn", "num_rows", "rows_sha256", "order_sha256")
"""What the manifest says of the position."""


def generators() -> dict[str, torch.Tensor]:
    """The states of all generators of this process, as tensors."""
    _kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    version, internal, next_gauss = random.getstate()
    states = {
        "torch": torch.get_rng_state(),
        "python": _doubles(
            [version, *internal, float("nan") if next_gauss is None else next_gauss]
        ),
        "numpy": _doubles([*keys, position, has_gauss, gauss]),
    }
    if torch.cuda.is_available():
        for index, state in enumerate(torch.cuda.get_rng_state_all()):
            states[f"cuda{index}"] = state
    return states


def put_generators(states: dict[str, torch.Tensor]) -> None:
    """Put all generators of this process back."""
    version, *internal, gauss = states["python"].tolist()
    random.setstate(
        (int(version), tuple(int(word) for word in internal), None if gauss != gauss else gauss)
    )
    *keys, position, has_gauss, cached = states["numpy"].tolist()
    words = np.array(keys, dtype=np.uint32)
    np.random.set_state(("MT19937", words, int(position), int(has_gauss), cached))
    torch.set_rng_state(states["torch"])
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            if f"cuda{index}" in states:
                torch.cuda.set_rng_state(states[f"cuda{index}"], index)


def _doubles(values: list[Any]) -> torch.Tensor:
    # Words of 32 bits and a double all fit a double exactly.
    return torch.tensor([float(value) for value in values], dtype=torch.float64)


def _sized(loader: Any) -> bool:
    try:
        len(loader)
    except TypeError:
        return False
    return True


def _fingerprint(dataset: Any) -> str:
    """SHA-256 over the number of rows and the content of a few; reading draws nothing."""
    before = generators()
    digest = hashlib.sha256(str(len(dataset)).encode())
    last = len(dataset) - 1
    places = {round(last * part / (_ROWS_LOOKED_AT - 1)) for part in range(_ROWS_LOOKED_AT)}
    for index in sorted(places):
        _feed(digest, dataset[index])
    put_generators(before)
    return digest.hexdigest()


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for key in sorted(value):
            digest.update(str(key).encode())
            _feed(digest, value[key])
    elif isinstance(value, list | tuple):
        digest.update(f"[{len(value)}".encode())
        for entry in value:
            _feed(digest, entry)
    else:
        digest.update(f"{type(value).__name__} {value}".encode())
