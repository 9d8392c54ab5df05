"""The graphs of a prefill, as plain modules of PyTorch: a decoder layer, and the head. What a chip compiles, and any CPU runs.

Shapes are fixed, so a chunk of tokens is padded on the right to the width of its graph, and what was computed before it (its
past) on the left to one of a few lengths. Masks hide both kinds of padding. Weights are inputs: layers of a kind share a graph.
"""

import inspect
from collections.abc import Sequence
from typing import Any

import torch

from workers.devices.family import FULL, SLIDING, kinds_of

Tensor = torch.Tensor


class LayerGraph(torch.nn.Module):
    """(h, cos, sin, mask[, past K, past V], weights…) → (h, K, V).

    h `[1, width, hidden]`; cos, sin `[1, width, head_dim]`; mask `[1, 1, width, past + width]`, added to the scores;
    K, V `[1, kv_heads, width, head_dim]` of the chunk, after RoPE; past ones `[1, kv_heads, past, head_dim]`.
    """

    def __init__(self, layer: torch.nn.Module, *, has_past: bool) -> None:
        super().__init__()
        self._layer = (layer,)  # in a tuple, or its own weights would become part of the graph
        self._names = tuple(name for name, _ in layer.named_parameters())
        self._has_past = has_past
        parameters = inspect.signature(layer.forward).parameters
        # transformers has called it so, from release to release
        self._keyword = next(name for name in ("cache", "past_key_values", "past_key_value") if name in parameters)

    def forward(
        self, h: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, *rest: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        past, weights = (rest[:2], rest[2:]) if self._has_past else ((), rest)
        cache = _Recorder(past)
        answer = torch.func.functional_call(
            self._layer[0],
            dict(zip(self._names, weights, strict=True)),
            (h,),
            {"attention_mask": mask, "position_embeddings": (cos, sin), "use_cache": True, self._keyword: cache},
        )
        h = answer[0] if isinstance(answer, tuple) else answer
        return h, cache.k.contiguous(), cache.v.contiguous()


class HeadGraph(torch.nn.Module):
    """(h `[1, 1, hidden]`, weights…) → logits `[1, 1, vocab]`."""

    def __init__(self, norm: torch.nn.Module, head: torch.nn.Module, softcap: float | None) -> None:
        super().__init__()
        self._parts = (norm, head)
        self._softcap = softcap

    def forward(self, h: Tensor, norm_weight: Tensor, head_weight: Tensor) -> Tensor:
        norm, head = self._parts
        h = torch.func.functional_call(norm, {"weight": norm_weight}, (h,))
        logits = torch.func.functional_call(head, {"weight": head_weight}, (h,))
        return logits if self._softcap is None else torch.tanh(logits / self._softcap) * self._softcap


class _Recorder:
    """What a layer takes for its cache: hands the past out, and keeps what is new."""

    def __init__(self, past: Sequence[Tensor]) -> None:
        self._past = past

    def update(self, k: Tensor, v: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        self.k, self.v = k, v
        if not self._past:
            return k, v
        return torch.cat([self._past[0], k], 2), torch.cat([self._past[1], v], 2)


class Network:
    """transformers' model, taken apart. Embedding, angles and masks are computed on the host."""

    def __init__(self, network: Any) -> None:
        hf = network.config.get_text_config()
        decoder = network.get_decoder()  # of Gemma-3 with images, only the half that reads text
        self.layers: list[torch.nn.Module] = list(decoder.layers)
        self.kinds = kinds_of(hf)
        self.window: int | None = getattr(hf, "sliding_window", None)
        self.embed = decoder.embed_tokens
        self.dtype: torch.dtype = network.dtype
        self.kv_heads: int = hf.num_key_value_heads
        self._rotary = decoder.rotary_emb
        self._norm, self._head = decoder.norm, network.get_output_embeddings()
        self._softcap = getattr(hf, "final_logit_softcapping", None)
        self.head_weights = (self._norm.weight.data, self._head.weight.data)

    def layer_graph(self, kind: str, *, has_past: bool) -> LayerGraph:
        """Of all layers of that kind: they differ in their weights alone."""
        return LayerGraph(self.layers[self.kinds.index(kind)], has_past=has_past).eval()

    def head_graph(self) -> HeadGraph:
        return HeadGraph(self._norm, self._head, self._softcap).eval()

    def weights(self, layer: int) -> list[Tensor]:
        """In the order of `layer_graph`'s inputs."""
        return [parameter.data for parameter in self.layers[layer].parameters()]

    def angles(self, kind: str, h: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin `[1, tokens, head_dim]`; Gemma-3 has other ones for each kind."""
        if "layer_type" in inspect.signature(self._rotary.forward).parameters:
            cos, sin = self._rotary(h, positions, layer_type=kind)
        else:
            cos, sin = self._rotary(h, positions)
        return cos, sin

    def mask(self, kind: str, start: int, width: int, past: int) -> Tensor:
        """0 where a token may look, the dtype's least number where not. `[1, 1, width, past + width]`.

        Query i is token start + i, key j is token start − past + j: padding of the past has negative places, padding of the
        chunk later ones than any token that counts.
        """
        query = torch.arange(start, start + width)[:, None]
        key = torch.arange(start - past, start + width)[None]
        visible = (key >= 0) & (key <= query)
        if kind == SLIDING and self.window is not None:
            visible &= key > query - self.window
        least = torch.finfo(self.dtype).min
        return torch.where(visible, 0.0, least).to(self.dtype)[None, None]

    def past_length(self, kind: str, start: int, lengths: Sequence[int]) -> int:
        """Tokens that the past of a chunk from `start` is padded to. lengths: those that full layers may have."""
        if start == 0:
            return 0
        if kind == FULL or self.window is None:
            return min(length for length in lengths if length >= start)
        return self.window
