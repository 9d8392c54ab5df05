"""The memory that a decode device's KV caches stand in, and which of its slots are the rows of a step."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import Buffer

from pipeline.config import Config
from pipeline.errors import DeviceError
from pipeline.geometry import Geometry, Layer
from workers.devices.family import tensor_over


class Batch:
    """The rows of one step: which slots, and where in their layers they stand; computed once for all layers."""

    def __init__(self, slots: list[int], lengths: list[int], device: torch.device) -> None:
        self.slots = np.array(slots)
        self.rows = torch.tensor(slots, device=device)
        self.positions = torch.tensor(lengths, device=device)
        self._lengths = np.array(lengths)
        self._places: dict[int, Places] = {}

    def places(self, width: int) -> "Places":
        """In layers that hold `width` tokens a slot."""
        if width not in self._places:
            self._places[width] = Places(
                self._lengths % width, np.minimum(self._lengths + 1, width), self.positions % width
            )
        return self._places[width]


@dataclass(frozen=True, slots=True)
class Places:
    """Of each row: where it writes, how many tokens it then sees, and again where it writes, on the device."""

    at: NDArray[np.int64]
    seen: NDArray[np.int64]
    at_there: torch.Tensor


class LayerSlots:
    """K and V of one layer, `[2, slots, kv_heads, width, head_dim]`. Token p stands at p mod width: a ring, where width is
    the window. In no order in a ring that went round; attention does not mind, for positions are in K already (RoPE).
    """

    def __init__(self, config: Config, geometry: Geometry, layer: Layer, device: torch.device) -> None:
        self.width = min(layer.window or config.context, config.context)
        self._token_bytes = geometry.token_bytes
        shape = (2, config.slots, geometry.kv_heads, self.width, geometry.head_dim)
        self._store = _zeros(shape, getattr(torch, geometry.dtype), device)
        self.k, self.v = self._store

    def insert(self, slot: int, start: int, tokens: int, k: Buffer, v: Buffer) -> None:
        if tokens > self.width:
            raise DeviceError(f"{tokens} tokens for a layer that sees {self.width}")
        at = start % self.width
        before_end = min(tokens, self.width - at)  # the rest goes to the beginning of the ring
        for store, buffer in zip(self._store[:, slot], (k, v), strict=True):
            if memoryview(buffer).nbytes != tokens * self._token_bytes:
                raise DeviceError(f"{memoryview(buffer).nbytes} bytes for {tokens} tokens of {self._token_bytes}")
            fresh = tensor_over(buffer, store.dtype).view(store.shape[0], tokens, store.shape[2])
            store[:, at : at + before_end] = fresh[:, :before_end]
            if before_end < tokens:
                store[:, : tokens - before_end] = fresh[:, before_end:]

    def write(self, batch: Batch, kv: torch.Tensor) -> list[int]:
        """One new token a row: `[rows, 2, kv_heads, head_dim]`. Answers how many tokens each row sees now."""
        places = batch.places(self.width)
        self._store[:, batch.rows, :, places.at_there] = kv
        return places.seen.tolist()


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """On a CPU from calloc, which torch.zeros is not: memory of slots that are never used is never touched."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    rows = np.zeros((*shape[:-1], shape[-1] * dtype.itemsize), dtype=np.uint8)
    return torch.from_numpy(rows).view(dtype)
