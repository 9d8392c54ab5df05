"""A decode step on the CPU without transformers' forward: one token a row, weights fused and packed (`matrices.py`), and
between them the loops of `kernels.py`.

Known are the models of `family.py` as transformers 5 builds them. `unknown` says what of a model is not, and then transformers
computes it. Numbers between the layers are float32 whatever the weights are, so there is less rounding here than there.
"""

import contextlib
import ctypes
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import Linear

from pipeline.geometry import Geometry
from workers.devices import kernels
from workers.devices.family import kinds_of
from workers.devices.matrices import Matrix, Rows, array, drop, packed, threads
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

THREAD_TOKENS = 500  # of a KV head are enough for another thread: they take 10 µs and more
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


class Embedding:
    """The plain rows of the vocabulary; where the head shares them, it has a packed copy beside them.

    In bfloat16 where that loses nothing: most checkpoints are, also where float32 computes.
    """

    def __init__(self, module: Any, dtype: torch.dtype) -> None:
        short = module.weight.to(torch.bfloat16, copy=True)  # the plain one may be a mapping of the whole checkpoint
        self._rows = short if bool((short == module.weight).all()) else module.weight
        self._scale = float(module.embed_scale.to(dtype)) if hasattr(module, "embed_scale") else 1.0  # Gemma's
        drop([module])

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
        drop(modules)


@dataclass(slots=True)
class Block:
    """One layer."""

    width: int
    k: Any
    v: Any
    kind: str
    scale: np.float32
    before_attention: Norm
    qkv: Matrix
    heads: Norm
    output: Matrix
    after_attention: Norm
    before_mlp: Norm
    gate_up: Matrix
    gate: Any
    down: Matrix
    after_mlp: Norm


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
        self._head = packed([head], rows)
        self._query = np.empty((rows, self._heads, geometry.head_dim), np.float32)
        self._normed = Rows(rows, hf.hidden_size, self._dtype)
        self._attended = Rows(rows, self._heads * geometry.head_dim, self._dtype)
        self._gated = Rows(rows, hf.intermediate_size, self._dtype)
        self._attend = Attention(geometry, self._query, self._attended)
        self.logits(torch.zeros(1, dtype=torch.int64), Batch([0], [0], torch.device("cpu")))  # compiles the kernels
        self._attend.compile(self._blocks[0])
        _trim()

    def logits(self, tokens: torch.Tensor, batch: Batch) -> torch.Tensor:
        """tokens: int64 `[rows]`. Answers `[rows, vocab]`, before any cap."""
        count = len(tokens)
        embedded = self._embed(tokens)
        x: Floats = embedded.numpy()
        turns = {kind: self._turn(embedded, batch, kind) for kind in {block.kind for block in self._blocks}}
        for block in self._blocks:
            self._normalize(x, block.before_attention)
            qkv = array(block.qkv(self._normed, count)).reshape(count, -1, self._geometry.head_dim)
            places = batch.places(block.width)
            kernels.turn(
                *(qkv, count, self._heads, *turns[block.kind], block.heads.weights, block.heads.eps),
                *(self._query, block.k, block.v, batch.slots, places.at),
            )
            self._attend(block, batch.slots, places.seen)
            self._add(x, block.output(self._attended, count), block.after_attention)
            self._normalize(x, block.before_mlp)
            block.gate(array(block.gate_up(self._normed, count)), count, self._gated.array)
            self._add(x, block.down(self._gated, count), block.after_mlp)
        self._normalize(x, self._norm)
        return self._head(self._normed, count)

    def _turn(self, x: torch.Tensor, batch: Batch, kind: str) -> tuple[Floats, Floats]:
        """RoPE's cosine and sine, `[rows, head_dim]`."""
        kinds = (kind,) if hasattr(self._rotary, "layer_types") else ()
        cos, sin = self._rotary(x.to(self._dtype), batch.positions[:, None], *kinds)
        return cos[:, 0].float().numpy(), sin[:, 0].float().numpy()

    def _normalize(self, x: Floats, norm: Norm) -> None:
        kernels.norm(x, len(x), norm.weight, norm.eps, self._normed.array)

    def _add(self, x: Floats, y: torch.Tensor, norm: Norm) -> None:
        kernels.add(x, array(y), len(x), norm.weight, norm.eps)


class Attention:
    """Shared out to threads where there is much to read."""

    def __init__(self, geometry: Geometry, query: Floats, out: Rows) -> None:
        self._query = query
        self._out = out.array.reshape(query.shape)
        self._kv_heads = geometry.kv_heads
        self._threads = threads()

    def compile(self, block: Block) -> None:
        """What the first long answer would have to wait for."""
        nothing: Ints = np.empty(0, np.int64)
        if self._threads > 1:
            kernels.attend_together(
                self._query, block.k, block.v, nothing, nothing, block.scale, self._out, self._threads
            )

    def __call__(self, block: Block, slots: Ints, seen: Ints) -> None:
        operands = (self._query, block.k, block.v, slots, seen)
        pairs = len(slots) * self._kv_heads
        some = min(self._threads, pairs, 1 + int(seen.sum()) * self._kv_heads // THREAD_TOKENS)
        if some == 1:
            kernels.attend(*operands, 0, pairs, block.scale, self._out)
        else:
            numba.set_num_threads(some)
            kernels.attend_together(*operands, block.scale, self._out, some)


def _block(layer: Any, slots: LayerSlots, kind: str, hf: Any, rows: int) -> Block:
    attention, mlp = layer.self_attn, layer.mlp
    sandwich = hasattr(layer, "pre_feedforward_layernorm")  # Gemma: a norm after attention and MLP, too
    normed = hasattr(attention, "q_norm")
    heads = [attention.q_norm] * hf.num_attention_heads + [attention.k_norm] * hf.num_key_value_heads if normed else []
    return Block(
        width=slots.width,
        k=array(slots.k),
        v=array(slots.v),
        kind=kind,
        scale=np.float32(attention.scaling),
        before_attention=Norm(layer.input_layernorm),
        qkv=packed([attention.q_proj, attention.k_proj, attention.v_proj], rows),
        heads=Norm(*heads),
        output=packed([attention.o_proj], rows),
        after_attention=Norm(layer.post_attention_layernorm) if sandwich else Norm(),
        before_mlp=Norm(layer.pre_feedforward_layernorm if sandwich else layer.post_attention_layernorm),
        gate_up=packed([mlp.gate_proj, mlp.up_proj], rows),
        gate=GATES[type(mlp.act_fn).__name__],
        down=packed([mlp.down_proj], rows),
        after_mlp=Norm(layer.post_feedforward_layernorm) if sandwich else Norm(),
    )


def _trim() -> None:
    """Between the packed weights lie the plain ones' places; glibc keeps them (145 MB of SmolLM2's in float32) until asked."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
