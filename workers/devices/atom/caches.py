"""What lies where in ATOM's memory, and the two routes by which a KV cache that another chip computed gets there.

A full layer has cache tensors `[blocks, kv_heads, block, head_dim]`, a sliding one `[slots, kv_heads, window, head_dim]`,
K and V of layer l under the names past_key_values_{2l} and _{2l + 1}. K is stored after RoPE: the wire's layout, no
transpose. In a window the newest token stands at index min(P, W) − 1, right-aligned; W − 1 tokens come over the wire, so
with P ≥ W index 0 belongs to a token that no step can see any more. It is zeroed.

Route *graph*: two more graphs in the model's compile context, of the vendor's public operators. They move whole blocks.
Route *private*: the runtime's own calls, which no document promises. They move any rows of a block.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from pipeline.errors import DeviceError
from workers.devices.family import FULL, SLIDING

IMPORT, EXPORT = "kv_import_", "kv_export_"  # names of the graphs, before FULL or SLIDING
PRIVATE = ("_update_kv_cache", "_fetch_kv_cache", "_get_kv_cache_size")


@dataclass(frozen=True, slots=True)
class Caches:
    """All layers of one kind, FULL or SLIDING. shape: of each cache tensor, `[blocks, kv_heads, width, head_dim]`."""

    kind: str
    layers: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def width(self) -> int:
        """Tokens that a block holds."""
        return self.shape[2]

    def names(self) -> list[str]:
        """K and V of each layer in turn."""
        return [f"past_key_values_{2 * layer + side}" for layer in self.layers for side in (0, 1)]


@dataclass(frozen=True, slots=True)
class Piece:
    """K and V of tokens [start, start + tokens) of one layer, `[2, kv_heads, tokens, head_dim]` in two tensors."""

    start: int
    tokens: int
    kv: tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Span:
    """The first `rows` rows of a block hold the tokens [first, first + rows)."""

    block: int
    first: int
    rows: int


Pieces = Mapping[int, Sequence[Piece]]  # by layer


class Route(Protocol):
    name: str

    def write(self, caches: Caches, spans: Sequence[Span], pieces: Pieces) -> None:
        """Between steps only, as is `clean`."""
        ...

    def clean(self, caches: Caches, blocks: Sequence[int]) -> None:
        """Whatever is in these blocks, afterwards it is numbers."""
        ...

    def read(self, caches: Caches, span: Span) -> list[torch.Tensor]:
        """K and V of each layer in turn, `[kv_heads, rows, head_dim]`."""
        ...


def caches_of(rbln_config: Any) -> list[Caches]:
    """From the vendor's description of the compiled model."""
    found = []
    for kind in (FULL, SLIDING):
        metas = [meta for meta in rbln_config.cache_metas if meta.layer_type == kind]
        if not metas:
            continue
        shape = tuple(metas[0].shape)
        if kind == FULL:
            shape = (rbln_config.kvcache_num_blocks, *shape[1:])
        layers = tuple(sorted({meta.layer_index for meta in metas}))
        caches = Caches(kind, layers, shape, getattr(torch, metas[0].dtype))
        alike = all((*meta.shape[1:], meta.dtype) == (*metas[0].shape[1:], metas[0].dtype) for meta in metas)
        if not alike or sorted(caches.names()) != sorted(meta.name for meta in metas):
            raise DeviceError("the compiled model's KV cache is not laid out as optimum-rbln 0.12 does it")
        found.append(caches)
    return found


class ImportGraph(torch.nn.Module):
    """(k, v `[layers, kv_heads, width, head_dim]`, block int16 `[1]`, caches…): writes that block of every cache."""

    def forward(
        self, k: torch.Tensor, v: torch.Tensor, block: torch.Tensor, *caches: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        axis = torch.tensor(0, dtype=torch.int16)
        update = torch.ops.rbln_custom_ops.rbln_cache_update
        fresh = [tensor[layer : layer + 1] for layer in range(k.shape[0]) for tensor in (k, v)]
        # answered, for a graph without an answer would be empty to the compiler
        return tuple(update(cache, rows, block[0], axis) for cache, rows in zip(caches, fresh, strict=True))


class ExportGraph(torch.nn.Module):
    """(block int16 `[1]`, caches…): that block of every cache, `[1, kv_heads, width, head_dim]` each."""

    def forward(self, block: torch.Tensor, *caches: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(cache[block.to(torch.int)] for cache in caches)


class GraphRoute:
    name = "graph"

    def __init__(self, runtimes: Mapping[str, Any], caches: Sequence[Caches]) -> None:
        """runtimes: of IMPORT and EXPORT of every kind. Raises DeviceError if some are missing."""
        for name in (prefix + one.kind for one in caches for prefix in (IMPORT, EXPORT)):
            if name not in runtimes:
                raise DeviceError(f"the compiled model has no graph {name}")
        self._runtimes = runtimes
        self._stage = {
            one.kind: [torch.zeros((len(one.layers), *one.shape[1:]), dtype=one.dtype) for _ in "kv"] for one in caches
        }

    def write(self, caches: Caches, spans: Sequence[Span], pieces: Pieces) -> None:
        """What stands beyond a span's rows is of an earlier one: numbers, and no step sees them."""
        for span in spans:
            for index, layer in enumerate(caches.layers):
                for side, stage in enumerate(self._stage[caches.kind]):
                    _place(stage[index], span, pieces[layer], side)
            self._run_import(caches, span.block)

    def clean(self, caches: Caches, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._run_import(caches, block)

    def read(self, caches: Caches, span: Span) -> list[torch.Tensor]:
        return [tensor[0, :, : span.rows] for tensor in self._runtimes[EXPORT + caches.kind](_number(span.block))]

    def _run_import(self, caches: Caches, block: int) -> None:
        self._runtimes[IMPORT + caches.kind](*self._stage[caches.kind], _number(block))


class PrivateRoute:
    name = "private"

    def __init__(self, runtime: Any, caches: Sequence[Caches]) -> None:
        """runtime: of a decode graph, which must have run once: earlier calls are known to end the process."""
        for name in PRIVATE:
            if not hasattr(runtime, name):
                raise DeviceError(f"rebel's runtime has no {name} any more")
        self._runtime = runtime
        self._hosts = {one.kind: self._host(one) for one in caches}

    def write(self, caches: Caches, spans: Sequence[Span], pieces: Pieces) -> None:
        host = self._hosts[caches.kind]
        for index, name in enumerate(caches.names()):
            layer, side = caches.layers[index // 2], index % 2
            for span in spans:
                _place(host[span.block], span, pieces[layer], side)
                self._runtime._update_kv_cache(host, span.block, 0, span.rows, name)

    def clean(self, caches: Caches, blocks: Sequence[int]) -> None:
        for name in caches.names():
            for block in blocks:
                self._runtime._update_kv_cache(self._hosts[caches.kind], block, 0, caches.width, name)

    def read(self, caches: Caches, span: Span) -> list[torch.Tensor]:
        host, answers = self._hosts[caches.kind], []
        for name in caches.names():
            host[span.block].zero_()
            self._runtime._fetch_kv_cache(host, span.block, 0, span.rows, name)
            answers.append(host[span.block, :, : span.rows].clone())
        return answers

    def _host(self, caches: Caches) -> torch.Tensor:
        """Mirrors one whole cache tensor, as the calls want it, aligned to 4 KiB."""
        from rebel.kv_cache import aligned_tensor

        wanted = torch.Size(caches.shape).numel() * caches.dtype.itemsize
        size = self._runtime._get_kv_cache_size(caches.names()[0])
        if size != wanted:
            raise DeviceError(f"a cache tensor takes {size} bytes in rebel's runtime, {wanted} by its shape and dtype")
        memory = aligned_tensor(size // 2, dtype="int16")
        return torch.as_tensor(memory).zero_().view(caches.dtype).view(caches.shape)


def _place(rows: torch.Tensor, span: Span, pieces: Sequence[Piece], side: int) -> None:
    """Into rows `[kv_heads, width, head_dim]` of a block, converted to their dtype; side: 0 for K, 1 for V."""
    came = max(0, pieces[0].start - span.first)
    rows[:, :came] = 0
    for piece in pieces:
        begin, end = max(piece.start, span.first), min(piece.start + piece.tokens, span.first + span.rows)
        if begin < end:
            fresh = piece.kv[side][:, begin - piece.start : end - piece.start]
            rows[:, begin - span.first : end - span.first] = fresh


def _number(block: int) -> torch.Tensor:
    return torch.tensor([block], dtype=torch.int16)
