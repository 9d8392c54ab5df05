"""A prompt through the graphs: chunk by chunk, layer by layer; K and V of a layer go to the host while the next one runs.

A launched graph cannot be stopped. So the tombstone is looked at before each launch, and at most two are under way.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from typing_extensions import Buffer

from pipeline.errors import Cancelled, DeviceError
from pipeline.geometry import Geometry
from workers.chips import Chips
from workers.devices import Logits, OnLayer
from workers.devices.rngd.graphs import Network
from workers.devices.rngd.plan import Chunk, Plan

Tensor = torch.Tensor
Graph = Callable[..., Any]  # of tensors where the executor keeps them
IN_FLIGHT = 2


class Executor(Protocol):
    """Where graphs run: a chip, or a CPU that stands in for it."""

    def load(self, name: str, module: torch.nn.Module, inputs: tuple[Tensor, ...]) -> Graph:
        """Ready to be launched. inputs: examples, on the CPU."""
        ...

    def put(self, tensor: Tensor) -> Tensor:
        """To where graphs read it."""
        ...

    def fetch(self, tensors: Sequence[Tensor]) -> Callable[[], list[Tensor]]:
        """Starts copying to the CPU; the answer waits for it. The tensors must live till then."""
        ...


class RngdPrefill:
    def __init__(
        self,
        network: Network,
        geometry: Geometry,
        executor: Executor,
        plan: Plan,
        *,
        max_tokens: int,
        vocabulary: int,
        progress: Callable[[str, int, int], None],
        chips: Chips | None = None,
    ) -> None:
        """Loads every graph that a prompt of at most max_tokens needs, and the weights. progress(graph, number, how many).
        chips: kept, for the locks are theirs."""
        self.chips = chips
        self.geometry, self.max_tokens = geometry, max_tokens
        self.network, self.executor, self.plan = network, executor, plan
        self._vocabulary = vocabulary
        self.weights = [
            [executor.put(tensor) for tensor in network.weights(index)] for index in range(len(network.layers))
        ]
        self._head_weights = [executor.put(tensor) for tensor in network.head_weights]
        shapes = sorted(
            {
                (kind, width, network.past_length(kind, start, plan.past_lengths))
                for start, width in plan.starts()
                for kind in set(network.kinds)
            }
        )
        self.graphs: dict[tuple[str, int, int], Graph] = {}
        for number, shape in enumerate(shapes):
            progress("layer {} width {} past {}".format(*shape), number, len(shapes) + 1)
            self.graphs[shape] = self._load_layer(*shape)
        progress("head", len(shapes), len(shapes) + 1)
        hidden = torch.zeros((1, 1, network.embed.embedding_dim), dtype=network.dtype)
        self._head = executor.load("head", network.head_graph(), (hidden, *network.head_weights))

    def begin(self, tokens: Sequence[int]) -> "RngdPrompt":
        if not tokens or min(tokens) < 0 or max(tokens) >= self._vocabulary:
            raise DeviceError(f"token ids must be 0 to {self._vocabulary - 1}, and at least one")
        if len(tokens) > self.max_tokens:
            raise DeviceError(f"{len(tokens)} prompt tokens; this device holds {self.max_tokens}")
        return RngdPrompt(self, tokens)

    def logits(self, hidden: Tensor) -> Logits:
        """hidden: `[1, 1, hidden]`, on the CPU. float32 `[vocab]`."""
        (row,) = self.executor.fetch([self._head(self.executor.put(hidden), *self._head_weights)])()
        values: Logits = row.reshape(-1).float().numpy()
        return values

    def _load_layer(self, kind: str, width: int, past: int) -> Graph:
        network = self.network
        index = network.kinds.index(kind)
        h = torch.zeros((1, width, network.embed.embedding_dim), dtype=network.dtype)
        angles = network.angles(kind, h, torch.arange(width)[None])
        mask = network.mask(kind, past, width, past)
        pasts = [torch.zeros(self.past_shape(past), dtype=network.dtype) for _ in "kv"] if past else []
        inputs = (h, *angles, mask, *pasts, *network.weights(index))
        return self.executor.load(f"{kind}-{width}-{past}", network.layer_graph(kind, has_past=bool(past)), inputs)

    def past_shape(self, tokens: int) -> tuple[int, int, int, int]:
        return 1, self.geometry.kv_heads, tokens, self.geometry.head_dim


class RngdPrompt:
    def __init__(self, device: RngdPrefill, tokens: Sequence[int]) -> None:
        self._device = device
        self._tokens = list(tokens)
        self._chunks = deque(device.plan.chunks(len(tokens)))
        self._past: list[list[tuple[Tensor, Tensor]]] = [[] for _ in device.network.layers]  # on the CPU, unpadded

    @torch.inference_mode()
    def advance(self, on_layer: OnLayer, cancelled: Callable[[], bool]) -> Logits | None:
        if not self._chunks:
            raise DeviceError("this prompt was cancelled, has failed, or is finished")
        chunk, others = self._chunks[0], list(self._chunks)[1:]
        self._chunks.clear()  # not put back when the call fails: layers would then disagree
        hidden = self._run(chunk, on_layer, cancelled, is_last=not others)
        self._chunks.extend(others)
        return None if hidden is None else self._device.logits(hidden)

    def _run(self, chunk: Chunk, on_layer: OnLayer, cancelled: Callable[[], bool], *, is_last: bool) -> Tensor | None:
        """One chunk through all layers. Answers the hidden state of its last token, if it is the prompt's last."""
        device, network, executor = self._device, self._device.network, self._device.executor
        ids = self._tokens[chunk.start : chunk.start + chunk.tokens] + [0] * (chunk.width - chunk.tokens)
        embedded = network.embed(torch.tensor([ids])).to(network.dtype)
        shared = {kind: self._inputs(kind, chunk, embedded) for kind in set(network.kinds)}
        h = executor.put(embedded)
        coming: deque[tuple[int, Callable[[], list[Tensor]]]] = deque()
        for layer, kind in enumerate(network.kinds):
            if cancelled():
                raise Cancelled
            past, inputs = shared[kind]
            graph = device.graphs[kind, chunk.width, past]
            h, k, v = graph(h, *inputs, *self._padded_past(layer, past), *device.weights[layer])
            coming.append((layer, executor.fetch([k, v])))
            if len(coming) == IN_FLIGHT:
                self._hand_out(*coming.popleft(), chunk, on_layer)
        while coming:
            self._hand_out(*coming.popleft(), chunk, on_layer)
        if not is_last:
            return None
        (rows,) = executor.fetch([h])()
        return rows.reshape(1, chunk.width, -1)[:, chunk.tokens - 1 : chunk.tokens]

    def _inputs(self, kind: str, chunk: Chunk, embedded: Tensor) -> tuple[int, list[Tensor]]:
        """Length of the past, and what all layers of a kind are told of a chunk: cos, sin, mask."""
        device, network = self._device, self._device.network
        past = network.past_length(kind, chunk.start, device.plan.past_lengths)
        positions = torch.arange(chunk.start, chunk.start + chunk.width)[None]
        cos, sin = network.angles(kind, embedded, positions)
        mask = network.mask(kind, chunk.start, chunk.width, past)
        return past, [device.executor.put(tensor) for tensor in (cos, sin, mask)]

    def _padded_past(self, layer: int, length: int) -> list[Tensor]:
        """K and V of the tokens before the chunk, the newest at the end, zeros before them."""
        if not length:
            return []
        padded = [torch.zeros(self._device.past_shape(length), dtype=self._device.network.dtype) for _ in "kv"]
        for side, target in enumerate(padded):
            end = length
            for pair in reversed(self._past[layer]):
                piece = pair[side]
                rows = min(piece.shape[1], end)
                target[0, :, end - rows : end] = piece[:, piece.shape[1] - rows :]
                end -= rows
        return [self._device.executor.put(tensor) for tensor in padded]

    def _hand_out(self, layer: int, wait: Callable[[], list[Tensor]], chunk: Chunk, on_layer: OnLayer) -> None:
        """The valid tokens of a chunk, and of them what a decode step can still see."""
        shape = self._device.past_shape(chunk.width)
        # reshaped: a graph of one KV head is known to answer [1, tokens, 1, head_dim]
        k, v = (tensor.reshape(shape)[0, :, : chunk.tokens].contiguous() for tensor in wait())
        if self._chunks_follow(chunk):
            self._past[layer].append((k, v))
        skip = max(0, self._device.geometry.layers[layer].first_token(len(self._tokens)) - chunk.start)
        if (count := chunk.tokens - skip) > 0:
            on_layer(layer, chunk.start + skip, count, *(_bytes(tensor[:, skip:]) for tensor in (k, v)))

    def _chunks_follow(self, chunk: Chunk) -> bool:
        return chunk.start + chunk.tokens < len(self._tokens)


def _bytes(tensor: Tensor) -> Buffer:
    view: Buffer = tensor.contiguous().view(torch.uint8).numpy().data.cast("B")
    return view
