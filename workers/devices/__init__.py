"""What a worker asks of a chip. One file per chip; its vendor's SDK is imported inside that file and nowhere else.

A device call is made in the worker's one compute thread, so a device needs no locks. Buffers that a prefill device hands
out are contiguous, little-endian, in the geometry's dtype, and never written again: they go to the wire without a copy.
"""

import importlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

from pipeline.config import Config
from pipeline.geometry import Geometry
from pipeline.model import Model

#: float32 `[vocab]` for one sequence, `[rows, vocab]` for a decode step.
Logits = NDArray[np.float32]

#: on_layer(layer, start, tokens, k, v): K and V `[kv_heads, tokens, head_dim]` of tokens [start, start + tokens).
OnLayer = Callable[[int, int, int, Buffer, Buffer], None]


class Prompt(Protocol):
    """One prompt on its way through a prefill device. Several may be under way; dropping one frees its memory."""

    def advance(self, on_layer: OnLayer, cancelled: Callable[[], bool]) -> Logits | None:
        """One device call: the next chunk. Answers the logits `[vocab]` after the last token, None while chunks remain.

        Each layer's KV is handed out as soon as it is ready. A sliding layer hands out only what a decode step can
        still see: tokens [max(0, P − W + 1), P). Raises Cancelled, between layers, when `cancelled()` says so.
        """
        ...


class PrefillDevice(Protocol):
    geometry: Geometry
    max_tokens: int  # prompt tokens

    def begin(self, tokens: Sequence[int]) -> Prompt: ...


class DecodeDevice(Protocol):
    """Fixed slots. A slot is filled by `insert` for every layer, then `commit` names the token to step from."""

    geometry: Geometry
    slots: int
    max_tokens: int  # prompt and answer together

    def insert(self, slot: int, layer: int, start: int, tokens: int, k: Buffer, v: Buffer) -> None:
        """KV of tokens [start, start + tokens), `[kv_heads, tokens, head_dim]` each. Between steps only."""
        ...

    def begin(self, slot: int, length: int, token: int) -> None:
        """The slot holds `length` tokens; `token`, already sampled, is the next step's input."""
        ...

    def commit(self, slot: int, token: int) -> None:
        """The token that was sampled from the last step: the next step's input."""
        ...

    def step(self) -> Logits:
        """Steps every slot that has begun. Rows of other slots hold nothing of meaning. `[rows, vocab]`, rows ≤ slots."""
        ...

    def evict(self, slot: int) -> None: ...


_MODULES = {"cpu": "torch", "cuda": "torch", "sim": "sim"}


def open_prefill(config: Config, model: Model) -> PrefillDevice:
    """The device that KVR_PREFILL_DEVICE names. Raises DeviceError with one sentence if it cannot work here."""
    device: PrefillDevice = _module(config.prefill_device).open_prefill(config, model)
    return device


def open_decode(config: Config, model: Model) -> DecodeDevice:
    """The device that KVR_DECODE_DEVICE names. Raises DeviceError with one sentence if it cannot work here."""
    device: DecodeDevice = _module(config.decode_device).open_decode(config, model)
    return device


def _module(device: str) -> Any:
    return importlib.import_module(f"workers.devices.{_MODULES[device]}")
