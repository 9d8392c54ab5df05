"""A decode step on the CPU without transformers' forward: one token a row, each attending to its slot."""

from typing import Any

import numba
import numpy as np
import torch

from pipeline.geometry import Geometry
from workers.devices import kernels
from workers.devices.cores import Cores
from workers.devices.layers import Block, Floats, Ints, Layers
from workers.devices.matrices import array
from workers.devices.slots import Batch, LayerSlots

THREAD_TOKENS = 500  # of a KV head are enough for another thread: they take 10 µs and more


class PackedForward:
    name = "own"

    @torch.inference_mode()
    def __init__(
        self, decoder: Any, head: Any, geometry: Geometry, slots: list[LayerSlots], rows: int, cores: Cores
    ) -> None:
        """decoder, head: as for `Layers`. rows: of a step, at most."""
        self._layers = Layers(decoder, head, geometry, rows, cores)
        self._slots = [Slots(layer) for layer in slots]
        self._attend = Attention(geometry, self._layers.query, self._layers.attended, cores)
        for _ in cores.each():  # compiles the kernels
            self.logits(torch.zeros(1, dtype=torch.int64), Batch([0], [0], torch.device("cpu")))
        self._attend.compile(self._slots[0])

    def logits(self, tokens: torch.Tensor, batch: Batch) -> torch.Tensor:
        """tokens: int64 `[rows]`. Answers `[rows, vocab]`, before any cap."""
        layers = self._layers
        x, turns = layers.embed(tokens), layers.turns(batch.positions)
        for block, slots in zip(layers.blocks, self._slots, strict=True):
            layers.compute(block, x, lambda qkv, b=block, s=slots: self._attention(qkv, b, s, turns[b.kind], batch))
        return layers.logits(x)

    def _attention(self, qkv: Any, block: Block, slots: "Slots", turn: tuple[Floats, Floats], batch: Batch) -> None:
        places = batch.places(slots.width)
        kernels.turn(
            *(qkv, len(qkv), self._layers.heads, *turn, block.heads.weights, block.heads.eps),
            *(self._layers.query, slots.k, slots.v, batch.slots, places.at),
        )
        self._attend(slots, block.scale, batch.slots, places.seen)


class Slots:
    """Of a layer, as Numba has them."""

    def __init__(self, layer: LayerSlots) -> None:
        self.width, self.k, self.v = layer.width, array(layer.k), array(layer.v)


class Attention:
    """Shared out to threads where there is much to read."""

    def __init__(self, geometry: Geometry, query: Floats, out: Any, cores: Cores) -> None:
        self._query = query
        self._out = out
        self._kv_heads = geometry.kv_heads
        self._cores = cores

    def compile(self, layer: Slots) -> None:
        """What the first long answer would have to wait for."""
        nothing: Ints = np.empty(0, np.int64)
        if self._cores.loops > 1:
            kernels.attend_together(self._query, layer.k, layer.v, nothing, nothing, np.float32(1), self._out, 1)

    def __call__(self, layer: Slots, scale: np.float32, slots: Ints, seen: Ints) -> None:
        operands = (self._query, layer.k, layer.v, slots, seen)
        pairs = len(slots) * self._kv_heads
        some = min(self._cores.now, pairs, 1 + int(seen.sum()) * self._kv_heads // THREAD_TOKENS)
        if some == 1:
            kernels.attend(*operands, 0, pairs, scale, self._out)
        else:
            numba.set_num_threads(some)
            kernels.attend_together(*operands, scale, self._out, some)
