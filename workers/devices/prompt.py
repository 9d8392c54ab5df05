"""Prompts on the CPU without transformers' forward, where bfloat16 can be multiplied by the loop of `bfloat16.py`.

K and V of the prompt so far lie in panels, as weights do: attention is two products for a few tokens and the query heads that
share a KV head, and between them a softmax. What is ahead of those tokens, or behind a window, is hardly computed.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numba
import numpy as np
import torch
from numba import njit, prange

from pipeline.errors import Cancelled, DeviceError
from pipeline.geometry import Geometry
from workers.devices import OnLayer, kernels
from workers.devices.bfloat16 import LANES, is_here, multiply
from workers.devices.compiled import FAST, compiled
from workers.devices.cores import Cores
from workers.devices.kernels import F, exp, put
from workers.devices.layers import Block, Floats, Layers
from workers.devices.matrices import array

ROWS = 24  # of a product, about: each reads K and V from the second cache once


def fit_prompts(geometry: Geometry) -> bool:
    """Else transformers computes them."""
    return geometry.dtype == "bfloat16" and geometry.head_dim % LANES == 0 and is_here()


class PackedPrompts:
    @torch.inference_mode()
    def __init__(self, decoder: Any, head: Any, geometry: Geometry, chunk: int, cores: Cores) -> None:
        """decoder, head: as for `Layers`. chunk: tokens of a call, at most."""
        self.geometry = geometry
        self.chunk = chunk
        self.cores = cores
        self.layers = Layers(decoder, head, geometry, chunk, cores)
        group = self.layers.heads // geometry.kv_heads
        self.queries = array(torch.empty(geometry.kv_heads, chunk, group, geometry.head_dim, dtype=torch.bfloat16))
        for _ in cores.each():  # compiles the kernels
            self.begin([0]).advance(lambda *_: None, bool)

    def begin(self, tokens: Sequence[int]) -> "PackedPrompt":
        return PackedPrompt(self, tokens)


class PackedPrompt:
    """State between chunks."""

    def __init__(self, prompts: PackedPrompts, tokens: Sequence[int]) -> None:
        self._prompts = prompts
        self._tokens = torch.tensor(list(tokens))
        self._done = 0
        self._layers: list[LayerPanels] | None = [
            LayerPanels(prompts, len(tokens), layer.window) for layer in prompts.geometry.layers
        ]

    @torch.inference_mode()
    def advance(self, on_layer: OnLayer, cancelled: Callable[[], bool]) -> torch.Tensor | None:
        """As `Prompt.advance`; the logits are `[1, vocab]`, before any cap."""
        panels, self._layers = self._layers, None  # not put back when the call fails: layers would then disagree
        if panels is None:
            raise DeviceError("this prompt was cancelled, has failed, or is finished")
        layers, geometry, total, start = self._prompts.layers, self._prompts.geometry, len(self._tokens), self._done
        end = self._done = min(start + self._prompts.chunk, total)
        x, turns = layers.embed(self._tokens[start:end]), layers.turns(torch.arange(start, end))
        for index, block in enumerate(layers.blocks):
            if cancelled():
                raise Cancelled

            def attend(qkv: Any, index: int = index, block: Block = block) -> None:
                k, v = panels[index].take(qkv, block, *turns[block.kind], start)
                skip = max(0, geometry.layers[index].first_token(total) - start)
                if skip < len(qkv):
                    on_layer(index, start + skip, len(qkv) - skip, _bytes(k[:, skip:]), _bytes(v[:, skip:]))
                panels[index].attend(len(qkv), block.scale, start)

            layers.compute(block, x, attend)
        if end < total:
            self._layers = panels
            return None
        return layers.logits(x[-1:])


class LayerPanels:
    """K and V of one layer of a prompt.

    keys: `[kv_heads, tokens / 16, head_dim / 2, 16, 2]`; values: `[kv_heads, head_dim / 16, tokens / 2, 16, 2]`. Zeros where no
    token has been, for shares of nothing are multiplied with them.
    """

    def __init__(self, prompts: PackedPrompts, tokens: int, window: int | None) -> None:
        self._prompts = prompts
        self._window = window or tokens
        kv_heads, size = prompts.geometry.kv_heads, prompts.geometry.head_dim
        panels = -(-tokens // LANES)
        shapes = (panels, size // 2, LANES, 2), (size // LANES, panels * LANES // 2, LANES, 2)
        self._keys, self._values = (array(torch.zeros(kv_heads, *shape, dtype=torch.bfloat16)) for shape in shapes)

    def take(self, qkv: Any, block: Block, cos: Floats, sin: Floats, start: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The fresh tokens. Answers their K and V, `[kv_heads, tokens, head_dim]`, which nobody writes again."""
        layers, geometry, count = self._prompts.layers, self._prompts.geometry, len(qkv)
        k, v = (torch.empty(geometry.kv_heads, count, geometry.head_dim, dtype=torch.bfloat16) for _ in "kv")
        kernels.turn(
            *(qkv, count, layers.heads, cos, sin, block.heads.weights, block.heads.eps, layers.query),
            *(array(k[None]), array(v[None]), np.zeros(count, np.int64), np.arange(count)),
        )
        _lay(layers.query, array(k), array(v), start, self._prompts.queries, self._keys, self._values)
        return k, v

    def attend(self, count: int, scale: np.float32, start: int) -> None:
        """Of the fresh tokens, to all that each may see; writes `attended`."""
        some = self._prompts.cores.now
        operands = self._prompts.queries, self._keys, self._values, count, start, self._window, scale
        if some == 1:
            _attend(*operands, 0, 1, self._prompts.layers.attended)
        else:
            numba.set_num_threads(some)
            _attend_together(*operands, some, self._prompts.layers.attended)


@compiled
def _lay(query: Any, k: Any, v: Any, start: int, queries: Any, keys: Any, values: Any) -> None:
    """query: float32 `[tokens, heads, head_dim]`; k, v: `[kv_heads, tokens, head_dim]`; queries: `[kv_heads, tokens, group,
    head_dim]`; keys, values: as of `LayerPanels`."""
    kv_heads, count, size = k.shape
    group = queries.shape[2]
    for head in range(kv_heads):
        for token in range(count):
            for g in range(group):
                for i in range(size):
                    put(queries[head, token, g], i, query[token, head * group + g, i])
            at = start + token
            for i in range(size):
                keys[head, at // LANES, i // 2, at % LANES, i % 2] = k[head, token, i]
                values[head, i // LANES, at // 2, i % LANES, at % 2] = v[head, token, i]


@compiled
def _attend(
    queries: Any,
    keys: Any,
    values: Any,
    count: int,
    start: int,
    window: int,
    scale: Any,
    thread: int,
    threads: int,
    out: Any,
) -> None:
    """One thread's share. out: `[tokens, heads, head_dim]`, of tokens from `start` on."""
    kv_heads, chunk, group, size = queries.shape
    width = keys.shape[1] * LANES  # tokens for which there is memory
    some = max(1, ROWS // group)  # tokens of a product
    scores, shares = np.empty((some * group, width), F), np.empty((some * group, width), np.uint16)
    result, totals = np.empty((some * group, size), F), np.empty(some * group, F)
    blocks = (count + some - 1) // some
    for item in range(thread, blocks * kv_heads, threads):
        head, first = item // blocks, item % blocks * some
        last = min(first + some, count)
        rows = (last - first) * group
        panel = max(0, start + first + 1 - window) // LANES
        panels = (start + last + LANES - 1) // LANES - panel
        multiply(
            keys.ctypes.data + (head * keys.shape[1] + panel) * size * LANES * 2,
            queries.ctypes.data + (head * chunk + first) * group * size * 2,
            scores.ctypes.data,
            *(rows, panels, size // 2, size * LANES * 2, size * 2, width * 4),
        )
        for row in range(rows):
            sees = start + first + row // group + 1
            begin, end = max(0, sees - window) - panel * LANES, sees - panel * LANES
            shares[row, :begin] = 0
            shares[row, end : panels * LANES] = 0
            totals[row] = _soften(scores[row, begin:end], shares[row, begin:end], scale)
        multiply(
            values.ctypes.data + (head * size // LANES * width // 2 + panel * LANES // 2) * LANES * 4,
            shares.ctypes.data,
            result.ctypes.data,
            *(rows, size // LANES, panels * LANES // 2, width * LANES * 2, width * 2, size * 4),
        )
        for row in range(rows):
            for i in range(size):
                put(out[first + row // group, head * group + row % group], i, result[row, i] / totals[row])


@partial(compiled, parallel=True)
def _attend_together(
    queries: Any, keys: Any, values: Any, count: int, start: int, window: int, scale: Any, threads: int, out: Any
) -> None:
    for thread in prange(threads):
        _attend(queries, keys, values, count, start, window, scale, thread, threads, out)


@njit(fastmath=FAST)
def _soften(scores: Any, shares: Any, scale: Any) -> Any:
    """shares: of the scores, 1 for the highest. Answers their sum."""
    top = scores[0]
    for t in range(len(scores)):
        top = max(top, scores[t])
    total = F(0)
    for t in range(len(scores)):
        scores[t] = exp((scores[t] - top) * scale)
        total += scores[t]
    for t in range(len(scores)):
        put(shares, t, scores[t])
    return total


def _bytes(tensor: torch.Tensor) -> memoryview:
    return tensor.contiguous().view(torch.uint8).numpy().data.cast("B")
