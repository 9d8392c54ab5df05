"""A decode step on the CPU without transformers' forward: one token a row, weights fused and packed for oneDNN, and between the
matrices the loops of `kernels.py`.

Known are the models of `family.py` as transformers 5 builds them. `unknown` says what of a model is not, and then transformers
computes it. Numbers between the layers are float32 whatever the weights are, so there is less rounding here than there.
"""

import contextlib
import ctypes
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import Linear

from pipeline.geometry import Geometry
from workers.devices import kernels
from workers.devices.family import kinds_of
from workers.devices.slots import Batch, LayerSlots

DECODERS = ("LlamaModel", "Qwen2Model", "Qwen3Model", "Gemma3TextModel")
#: What a layer is made of; more norms in some families only.
LINEARS = {
    *(f"self_attn.{name}_proj" for name in ("q", "k", "v", "o")),
    *(f"mlp.{name}_proj" for name in ("gate", "up", "down")),
}
NORMS = {"input_layernorm", "post_attention_layernorm"}
MORE_NORMS = {"self_attn.q_norm", "self_attn.k_norm", "pre_feedforward_layernorm", "post_feedforward_layernorm"}
ACTIVATION = "mlp.act_fn"
GATES = {"SiLUActivation": kernels.gate_silu, "SiLU": kernels.gate_silu, "GELUTanh": kernels.gate_gelu}

THREAD_TOKENS = 500  # of a KV head are enough for another thread: it takes as long as the way to it and back, 40 µs
Floats = NDArray[np.float32]
Ints = NDArray[np.int64]


def unknown(decoder: Any, head: Any, dtype: torch.dtype) -> str | None:
    """What keeps the own forward from a model of transformers, None if nothing does."""
    if type(decoder).__name__ not in DECODERS:
        return f"{type(decoder).__name__} is not known"
    if not torch.backends.mkldnn.is_available():
        return "this build of PyTorch has no oneDNN"
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return "this CPU cannot compute in bfloat16"
    for index, layer in enumerate(decoder.layers):
        parts = {name: part for name, part in layer.named_modules() if not any(part.children())}
        if strange := {*parts} - LINEARS - NORMS - MORE_NORMS - {ACTIVATION} or LINEARS - {*parts}:
            return f"layer {index} differs in {', '.join(sorted(strange))}"
        if strange := {name for name in LINEARS if type(parts[name]) is not Linear}:
            return f"layer {index} has other than plain linear layers: {', '.join(sorted(strange))}"
        if (activation := type(parts[ACTIVATION]).__name__) not in GATES:
            return f"layer {index} has the activation {activation}"
    return None if type(head) is Linear else "the head is no plain linear layer"


class Packed:
    """One linear layer, or several that have the same input, as one."""

    def __init__(self, modules: list[Linear], rows: int) -> None:
        weights = [module.weight for module in modules]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        self._bias = _bias(modules)
        _drop(modules)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, rows)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self._weight, self._bias, "none", [], "")
        return y


class Embedding:
    """The plain rows of the vocabulary; where the head shares them, it has a packed copy beside them.

    In bfloat16 where that loses nothing: most checkpoints are, also where float32 computes.
    """

    def __init__(self, module: Any, dtype: torch.dtype) -> None:
        short = module.weight.to(torch.bfloat16, copy=True)  # the plain one may be a mapping of the whole checkpoint
        self._rows = short if bool((short == module.weight).all()) else module.weight
        self._scale = float(module.embed_scale.to(dtype)) if hasattr(module, "embed_scale") else 1.0  # Gemma's
        _drop([module])

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        """float32 `[rows, hidden]`."""
        return torch.nn.functional.embedding(tokens, self._rows).float().mul_(self._scale)


class Norm:
    """RMSNorm. Gemma's weights stand for 1 + w."""

    def __init__(self, *modules: Any) -> None:
        """Several: of the heads, a row of weights each. None: no norm."""
        weights = [module.weight.float() + ("Gemma" in type(module).__name__) for module in modules]
        stacked = torch.stack(weights) if weights else torch.empty(0, 0)
        self.weights: Floats = stacked.numpy()
        self.weight: Floats = self.weights[0] if weights else self.weights.reshape(-1)
        self.eps = np.float32((getattr(modules[0], "variance_epsilon", None) or modules[0].eps) if modules else 0)
        _drop(modules)


@dataclass(slots=True)
class Block:
    """One layer."""

    width: int
    k: Any
    v: Any
    kind: str
    scale: np.float32
    before_attention: Norm
    qkv: Packed
    heads: Norm
    output: Packed
    after_attention: Norm
    before_mlp: Norm
    gate_up: Packed
    gate: Any
    down: Packed
    after_mlp: Norm


class Rows:
    """Memory for the rows of a step, as Numba and as PyTorch have it."""

    def __init__(self, rows: int, width: int, dtype: torch.dtype) -> None:
        self._tensor = torch.empty(rows, width, dtype=dtype)
        self.array = _array(self._tensor)

    def __getitem__(self, rows: int) -> torch.Tensor:
        """The first so many."""
        return self._tensor[:rows]


class PackedForward:
    """decoder, head: of transformers, and nothing `unknown` about them. They lose their weights: memory holds them once."""

    name = "own"

    @torch.inference_mode()
    def __init__(self, decoder: Any, head: Any, geometry: Geometry, slots: list[LayerSlots], rows: int) -> None:
        """rows: of a step, at most."""
        hf = decoder.config
        self._geometry = geometry
        self._heads: int = hf.num_attention_heads
        self._dtype: torch.dtype = getattr(torch, geometry.dtype)
        self._rotary = decoder.rotary_emb
        self._blocks = [
            _block(layer, held, kind, hf, rows)
            for layer, held, kind in zip(decoder.layers, slots, kinds_of(hf), strict=True)
        ]
        self._norm = Norm(decoder.norm)
        self._embed = Embedding(decoder.embed_tokens, self._dtype)
        self._head = Packed([head], rows)
        self._query = np.empty((rows, self._heads, geometry.head_dim), np.float32)
        self._normed = Rows(rows, hf.hidden_size, self._dtype)
        self._attended = Rows(rows, self._heads * geometry.head_dim, self._dtype)
        self._gated = Rows(rows, hf.intermediate_size, self._dtype)
        self._attend = Attention(geometry, self._query, self._attended)
        self.logits(torch.zeros(1, dtype=torch.int64), Batch([0], [0], torch.device("cpu")))  # compiles the kernels
        _trim()

    def logits(self, tokens: torch.Tensor, batch: Batch) -> torch.Tensor:
        """tokens: int64 `[rows]`. Answers `[rows, vocab]`, before any cap."""
        count = len(tokens)
        embedded = self._embed(tokens)
        x: Floats = embedded.numpy()
        turns = {kind: self._turn(embedded, batch, kind) for kind in {block.kind for block in self._blocks}}
        for block in self._blocks:
            self._normalize(x, block.before_attention)
            qkv = _array(block.qkv(self._normed[count])).reshape(count, -1, self._geometry.head_dim)
            places = batch.places(block.width)
            kernels.turn(
                *(qkv, count, self._heads, *turns[block.kind], block.heads.weights, block.heads.eps),
                *(self._query, block.k, block.v, batch.slots, places.at),
            )
            self._attend(block, batch.slots, places.seen)
            self._add(x, block.output(self._attended[count]), block.after_attention)
            self._normalize(x, block.before_mlp)
            block.gate(_array(block.gate_up(self._normed[count])), count, self._gated.array)
            self._add(x, block.down(self._gated[count]), block.after_mlp)
        self._normalize(x, self._norm)
        return self._head(self._normed[count])

    def _turn(self, x: torch.Tensor, batch: Batch, kind: str) -> tuple[Floats, Floats]:
        """RoPE's cosine and sine, `[rows, head_dim]`."""
        kinds = (kind,) if hasattr(self._rotary, "layer_types") else ()
        cos, sin = self._rotary(x.to(self._dtype), batch.positions[:, None], *kinds)
        return cos[:, 0].float().numpy(), sin[:, 0].float().numpy()

    def _normalize(self, x: Floats, norm: Norm) -> None:
        kernels.norm(x, len(x), norm.weight, norm.eps, self._normed.array)

    def _add(self, x: Floats, y: torch.Tensor, norm: Norm) -> None:
        kernels.add(x, _array(y), len(x), norm.weight, norm.eps)


class Attention:
    """Shared out to threads where there is much to read."""

    def __init__(self, geometry: Geometry, query: Floats, out: Rows) -> None:
        self._query = query
        self._out = out.array.reshape(query.shape)
        self._kv_heads = geometry.kv_heads
        self._threads = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="attention")

    def __call__(self, block: Block, slots: Ints, seen: Ints) -> None:
        def attend(first: int, last: int) -> None:
            kernels.attend(self._query, block.k, block.v, slots, seen, first, last, block.scale, self._out)

        pairs = len(slots) * self._kv_heads
        threads = min(self._threads, pairs, 1 + int(seen.sum()) * self._kv_heads // THREAD_TOKENS)
        bounds = [pairs * number // threads for number in range(threads + 1)]
        others = [self._pool.submit(attend, *part) for part in pairwise(bounds[1:])]
        attend(*bounds[:2])
        for other in others:
            other.result()


def _block(layer: Any, slots: LayerSlots, kind: str, hf: Any, rows: int) -> Block:
    attention, mlp = layer.self_attn, layer.mlp
    sandwich = hasattr(layer, "pre_feedforward_layernorm")  # Gemma: a norm after attention and MLP, too
    normed = hasattr(attention, "q_norm")
    heads = [attention.q_norm] * hf.num_attention_heads + [attention.k_norm] * hf.num_key_value_heads if normed else []
    return Block(
        width=slots.width,
        k=_array(slots.k),
        v=_array(slots.v),
        kind=kind,
        scale=np.float32(attention.scaling),
        before_attention=Norm(layer.input_layernorm),
        qkv=Packed([attention.q_proj, attention.k_proj, attention.v_proj], rows),
        heads=Norm(*heads),
        output=Packed([attention.o_proj], rows),
        after_attention=Norm(layer.post_attention_layernorm) if sandwich else Norm(),
        before_mlp=Norm(layer.pre_feedforward_layernorm if sandwich else layer.post_attention_layernorm),
        gate_up=Packed([mlp.gate_proj, mlp.up_proj], rows),
        gate=GATES[type(mlp.act_fn).__name__],
        down=Packed([mlp.down_proj], rows),
        after_mlp=Norm(layer.post_feedforward_layernorm) if sandwich else Norm(),
    )


def _bias(modules: list[Linear]) -> torch.Tensor | None:
    """Of Qwen2, Q, K and V have one; zeros where only some have."""
    if all(module.bias is None for module in modules):
        return None
    return torch.cat([m.weight.new_zeros(m.out_features) if m.bias is None else m.bias for m in modules])


def _array(tensor: torch.Tensor) -> Any:
    """The same memory; of bfloat16, which NumPy has not, the bits."""
    return (tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _drop(modules: Iterable[Any]) -> None:
    for module in modules:
        module.weight = module.bias = None


def _trim() -> None:
    """Between the packed weights lie the plain ones' places; glibc keeps them (145 MB of SmolLM2's in float32) until asked."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
