"""What a prefill device answers for one prompt, kept whole, and how two such answers differ."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

from pipeline.errors import DeviceError
from pipeline.geometry import Geometry
from workers.devices import Logits, PrefillDevice

Rows = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Layer:
    """K and V `[kv_heads, tokens, head_dim]`, of the tokens from `first` on: all, or those that a window still sees."""

    first: int
    k: Rows
    v: Rows


@dataclass(frozen=True, slots=True)
class Prefilled:
    """logits: float32 `[vocab]`, after the last token."""

    tokens: tuple[int, ...]
    layers: tuple[Layer, ...]
    logits: Logits

    @property
    def token(self) -> int:
        """The first token of a greedy answer."""
        return int(self.logits.argmax())

    @classmethod
    def by(cls, device: PrefillDevice, tokens: Sequence[int]) -> "Prefilled":
        """The very calls that a worker makes. Raises DeviceError if pieces are missing, double or out of order."""
        pieces: dict[int, list[tuple[int, Rows, Rows]]] = {}

        def on_layer(layer: int, start: int, count: int, k: Buffer, v: Buffer) -> None:
            rows = (_rows(k, count, device.geometry), _rows(v, count, device.geometry))
            pieces.setdefault(layer, []).append((start, *rows))

        running, logits = device.begin(tokens), None
        while logits is None:
            logits = running.advance(on_layer, bool)
        layers = []
        for index, layer in enumerate(device.geometry.layers):
            first = following = layer.first_token(len(tokens))
            for start, k, _ in pieces.get(index, []):
                if start != following:
                    raise DeviceError(f"layer {index}: tokens from {start} came, from {following} were due")
                following += k.shape[1]
            if following != len(tokens):
                raise DeviceError(f"layer {index}: tokens up to {following} of {len(tokens)} came")
            k, v = (np.concatenate([piece[side] for piece in pieces[index]], axis=1) for side in (1, 2))
            layers.append(Layer(first, k, v))
        return cls(tuple(tokens), tuple(layers), logits)

    def save(self, path: Path) -> None:
        """As .npz, without pickles."""
        named = {f"{side}{index}": getattr(layer, side) for index, layer in enumerate(self.layers) for side in "kv"}
        first = np.array([layer.first for layer in self.layers])
        np.savez(path, tokens=np.array(self.tokens), logits=self.logits, first=first, **named)

    @classmethod
    def load(cls, path: Path) -> "Prefilled":
        with np.load(path, allow_pickle=False) as file:
            layers = [
                Layer(int(first), file[f"k{index}"], file[f"v{index}"]) for index, first in enumerate(file["first"])
            ]
            return cls(tuple(map(int, file["tokens"])), tuple(layers), file["logits"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """largest: of absolute differences. cosine: of the angle between both as vectors; 1 is the same direction."""

    what: str  # "K of layer 3", "logits"
    largest: float
    cosine: float


def differences(a: Prefilled, b: Prefilled) -> list[Difference]:
    """K and V of each layer in turn, then the logits. Raises DeviceError if the two are not of the same prompt and shape."""
    if a.tokens != b.tokens or len(a.layers) != len(b.layers):
        raise DeviceError("these two are not answers to the same prompt by the same model")
    found = []
    for index, (one, other) in enumerate(zip(a.layers, b.layers, strict=True)):
        for name, x, y in (("K", one.k, other.k), ("V", one.v, other.v)):
            if one.first != other.first or x.shape != y.shape:
                raise DeviceError(
                    f"{name} of layer {index}: {x.shape} from token {one.first}, and {y.shape} from {other.first}"
                )
            found.append(_difference(f"{name} of layer {index}", x, y))
    return [*found, _difference("logits", a.logits, b.logits)]


def _difference(what: str, x: Rows, y: Rows) -> Difference:
    x, y = x.ravel().astype(np.float64), y.ravel().astype(np.float64)
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        return Difference(what=what, largest=math.inf, cosine=-1.0)  # what is no number is as wrong as can be
    size = float(np.linalg.norm(x) * np.linalg.norm(y))
    cosine = float(x @ y) / size if size else float(np.array_equal(x, y))
    return Difference(what=what, largest=float(np.abs(x - y).max()), cosine=cosine)


def _rows(buffer: Buffer, tokens: int, geometry: Geometry) -> Rows:
    """float32 `[kv_heads, tokens, head_dim]` of what goes over the wire."""
    raw = memoryview(buffer)
    if geometry.dtype == "bfloat16":  # the upper half of a float32; numpy has no such dtype
        values: Rows = (np.frombuffer(raw, dtype=np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        values = np.frombuffer(raw, dtype=np.dtype(geometry.dtype)).astype(np.float32)
    return values.reshape(geometry.kv_heads, tokens, geometry.head_dim)
