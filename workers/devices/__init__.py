"""What a worker asks of a chip. One file per chip; its vendor's SDK is imported inside that file and nowhere else.

A device call is made in the worker's one compute thread, so a device needs no locks. Buffers that a prefill device hands
out are contiguous, little-endian, in the geometry's dtype, and never written again: they go to the wire without a copy.
"""

import importlib
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

from pipeline.config import Config
from pipeline.errors import ConfigError
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
    figures: Mapping[str, str | int]  # what the device counts, and says of itself, for `worker:<id>`

    def insert(self, slot: int, layer: int, start: int, tokens: int, k: Buffer, v: Buffer) -> None:
        """KV of tokens [start, start + tokens), `[kv_heads, tokens, head_dim]` each. Between steps only.

        The buffers stay as they are until `begin`, so a device may wait with its copy till then.
        """
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


@runtime_checkable
class RefillsSlots(Protocol):
    """A decode device that can also compute a prompt: the last resort, for a KV cache that it could not take in."""

    def refill(self, slot: int, tokens: Sequence[int]) -> None:
        """Fills an empty slot with the KV cache of `tokens`, as if it had come over the wire. `begin` follows."""
        ...


#: Which callable `(config, model)` opens a device. A worker's command line may name another one; a request never can.
PREFILL_FACTORIES = {
    "cpu": "workers.devices.torch:open_prefill",
    "cuda": "workers.devices.torch:open_prefill",
    "rngd": "workers.devices.rngd:open_prefill",
    "sim": "workers.devices.sim:open_prefill",
}
DECODE_FACTORIES = {
    "atom": "workers.devices.atom:open_decode",
    "cpu": "workers.devices.torch:open_decode",
    "cuda": "workers.devices.torch:open_decode",
    "sim": "workers.devices.sim:open_decode",
}


def open_prefill(config: Config, model: Model, factory: str = "") -> PrefillDevice:
    """The device that KVR_PREFILL_DEVICE names, or that a factory makes. Raises DeviceError with one sentence if it cannot
    work here, ConfigError if there is no such factory."""
    make = _named(factory) if factory else _import(PREFILL_FACTORIES[config.prefill_device])
    device: PrefillDevice = _open(make, config, model)
    return device


def open_decode(config: Config, model: Model, factory: str = "") -> DecodeDevice:
    """The same for KVR_DECODE_DEVICE."""
    make = _named(factory) if factory else _import(DECODE_FACTORIES[config.decode_device])
    device: DecodeDevice = _open(make, config, model)
    return device


def chips(role: str, config: Config) -> dict[int, str]:
    """Number and name of each chip that a worker of this role could use here. Raises DeviceError if it can use none."""
    device, factories = (
        (config.prefill_device, PREFILL_FACTORIES) if role == "prefill" else (config.decode_device, DECODE_FACTORIES)
    )
    found: dict[int, str] = importlib.import_module(factories[device].partition(":")[0]).chips(device, config)
    return found


def at_their_slots(logits: Logits, slots: Sequence[int]) -> Logits:
    """Row i of `logits` belongs to slots[i]; the answer's rows are numbered by slot."""
    if list(slots) == list(range(len(slots))):
        return logits
    placed = np.zeros((max(slots) + 1, logits.shape[1]), dtype=np.float32)
    placed[list(slots)] = logits
    return placed


def _named(factory: str) -> Any:
    try:
        return _import(factory)
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        remedy = f"must be package.module:callable, to be found on PYTHONPATH ({error})"
        raise ConfigError("--factory", factory, remedy) from error


def _import(factory: str) -> Any:
    module, _, name = factory.partition(":")
    return getattr(importlib.import_module(module), name)


def _open(make: Any, config: Config, model: Model) -> Any:
    device = make(config, model)
    # a vendor's library may have set a native handler; a peer that goes away must be an error, not the end
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    return device
