"""The layers of a model on the CPU without transformers' forward: weights fused and packed (`matrices.py`), and between the
matrices the loops of `kernels.py`. Attention is left to those who know where K and V are.

Known are the models of `family.py` as transformers 5 builds them. `unknown` says what of a model is not, and then transformers
computes it. Numbers between the layers are float32 whatever the weights are, so there is less rounding here than there.
"""

import contextlib
import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import Linear

from pipeline.geometry import Geometry
from workers.devices import kernels
from workers.devices.cores import Cores
from workers.devices.family import kinds_of
from workers.devices.matrices import Matrix, Rows, array, drop, packed

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
    """One layer. scale: of its scores."""

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


class Layers:
    """decoder, head: of transformers, and nothing `unknown` about them. They lose their weights: memory holds them once.

    There is memory for a certain number of rows, each a token. Calls take turns in using it.
    """

    def __init__(self, decoder: Any, head: Any, geometry: Geometry, rows: int, cores: Cores) -> None:
        """rows: of a call, at most."""
        hf = decoder.config
        self._dtype: torch.dtype = getattr(torch, geometry.dtype)
        self._cores = cores
        self._rotary = decoder.rotary_emb
        self._head_dim = geometry.head_dim
        self.heads: int = hf.num_attention_heads
        self.blocks = [
            _block(layer, kind, hf, rows, cores) for layer, kind in zip(decoder.layers, kinds_of(hf), strict=True)
        ]
        self._norm = Norm(decoder.norm)
        self._embed = Embedding(decoder.embed_tokens, self._dtype)
        self._head = packed([head], rows, cores)
        self.query: Floats = np.empty((rows, self.heads, geometry.head_dim), np.float32)  # for `attend`, if it wants it
        self._normed = Rows(rows, hf.hidden_size, self._dtype)
        self._attended = Rows(rows, self.heads * geometry.head_dim, self._dtype)
        self.attended = self._attended.array.reshape(self.query.shape)
        self._gated = Rows(rows, hf.intermediate_size, self._dtype)
        _trim()

    def embed(self, tokens: torch.Tensor) -> Floats:
        """tokens: int64 `[rows]`. Answers `[rows, hidden]`."""
        embedded: Floats = self._embed(tokens).numpy()
        return embedded

    def turns(self, positions: torch.Tensor) -> dict[str, tuple[Floats, Floats]]:
        """Kind of layer → RoPE's cosine and sine, `[rows, head_dim]`. positions: int64 `[rows]`."""
        return {kind: self._turn(positions, kind) for kind in {block.kind for block in self.blocks}}

    def _turn(self, positions: torch.Tensor, kind: str) -> tuple[Floats, Floats]:
        kinds = (kind,) if hasattr(self._rotary, "layer_types") else ()
        cos, sin = self._rotary(torch.empty(0, dtype=self._dtype), positions[:, None], *kinds)
        return cos[:, 0].float().numpy(), sin[:, 0].float().numpy()

    def compute(self, block: Block, x: Floats, attend: Callable[[Any], None]) -> None:
        """x `[rows, hidden]` becomes the layer's output. attend(qkv `[rows, heads + 2 × kv_heads, head_dim]`), float32 or the
        bits of the weights' dtype, is to write `attended` `[rows, heads, head_dim]`."""
        count = len(x)
        self._cores.look()
        self._normalize(x, block.before_attention)
        attend(array(block.qkv(self._normed, count)).reshape(count, -1, self._head_dim))
        self._add(x, block.output(self._attended, count), block.after_attention)
        self._normalize(x, block.before_mlp)
        block.gate(array(block.gate_up(self._normed, count)), count, self._gated.array)
        self._add(x, block.down(self._gated, count), block.after_mlp)

    def logits(self, x: Floats) -> torch.Tensor:
        """`[rows, vocab]`, before any cap."""
        self._normalize(x, self._norm)
        return self._head(self._normed, len(x))

    def _normalize(self, x: Floats, norm: Norm) -> None:
        kernels.norm(x, len(x), norm.weight, norm.eps, self._normed.array)

    def _add(self, x: Floats, y: torch.Tensor, norm: Norm) -> None:
        kernels.add(x, array(y), len(x), norm.weight, norm.eps)


def _block(layer: Any, kind: str, hf: Any, rows: int, cores: Cores) -> Block:
    attention, mlp = layer.self_attn, layer.mlp
    sandwich = hasattr(layer, "pre_feedforward_layernorm")  # Gemma: a norm after attention and MLP, too
    normed = hasattr(attention, "q_norm")
    heads = [attention.q_norm] * hf.num_attention_heads + [attention.k_norm] * hf.num_key_value_heads if normed else []
    return Block(
        kind=kind,
        scale=np.float32(attention.scaling),
        before_attention=Norm(layer.input_layernorm),
        qkv=packed([attention.q_proj, attention.k_proj, attention.v_proj], rows, cores),
        heads=Norm(*heads),
        output=packed([attention.o_proj], rows, cores),
        after_attention=Norm(layer.post_attention_layernorm) if sandwich else Norm(),
        before_mlp=Norm(layer.pre_feedforward_layernorm if sandwich else layer.post_attention_layernorm),
        gate_up=packed([mlp.gate_proj, mlp.up_proj], rows, cores),
        gate=GATES[type(mlp.act_fn).__name__],
        down=packed([mlp.down_proj], rows, cores),
        after_mlp=Norm(layer.post_feedforward_layernorm) if sandwich else Norm(),
    )


def _trim() -> None:
    """Between the packed weights lie the plain ones' places; glibc keeps them (145 MB of SmolLM2's in float32) until asked."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
