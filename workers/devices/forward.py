"""A decode step on the CPU without transformers' forward: one token a row, weights fused and packed for oneDNN.

Known are the models of `family.py` as transformers 5 builds them. `unknown` says what of a model is not, and then transformers
computes it. Numbers between the layers are float32 whatever the weights are, so there is less rounding here than there.
"""

import contextlib
import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Linear

from pipeline.geometry import Geometry
from workers.devices.family import kinds_of
from workers.devices.runs import Attention
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
    """RMSNorm in float32. Gemma's weights stand for 1 + w."""

    def __init__(self, *modules: Any) -> None:
        """Several: of the heads `[heads, head_dim]`, each with the weights of its module."""
        weights = [module.weight.float() + ("Gemma" in type(module).__name__) for module in modules]
        self._weight = weights[0] if len(weights) == 1 else torch.stack(weights)
        self._eps = getattr(modules[0], "variance_epsilon", None) or modules[0].eps
        _drop(modules)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x.float(), x.shape[-1:], eps=self._eps).mul_(self._weight)


@dataclass(slots=True)
class Block:
    """One layer."""

    slots: LayerSlots
    kind: str
    scale: float
    before_attention: Norm
    qkv: Packed
    qk_norm: Norm | None
    output: Packed
    after_attention: Norm | None
    before_mlp: Norm
    gate_up: Packed
    activation: Any
    down: Packed
    after_mlp: Norm | None


class PackedForward:
    """decoder, head: of transformers, and nothing `unknown` about them. They lose their weights: memory holds them once."""

    name = "own"

    @torch.inference_mode()
    def __init__(self, decoder: Any, head: Any, geometry: Geometry, slots: list[LayerSlots], rows: int) -> None:
        """rows: of a step, at most."""
        self._geometry = geometry
        self._dtype: torch.dtype = getattr(torch, geometry.dtype)
        self._rotary = decoder.rotary_emb
        self._blocks = [
            _block(layer, held, kind, decoder.config, rows)
            for layer, held, kind in zip(decoder.layers, slots, kinds_of(decoder.config), strict=True)
        ]
        self._norm = Norm(decoder.norm)
        self._embed = Embedding(decoder.embed_tokens, self._dtype)
        self._head = Packed([head], rows)
        _trim()

    def logits(self, tokens: torch.Tensor, batch: Batch) -> torch.Tensor:
        """tokens: int64 `[rows]`. Answers `[rows, vocab]`, before any cap."""
        x = self._embed(tokens)
        turns = {kind: self._turn(x, batch, kind) for kind in {block.kind for block in self._blocks}}
        attentions = {
            width: Attention(batch, width, self._dtype) for width in {block.slots.width for block in self._blocks}
        }
        for block in self._blocks:
            self._attend(block, x, turns[block.kind], attentions[block.slots.width], batch)
            self._feed(block, x)
        return self._head(self._norm(x).to(self._dtype))

    def _turn(self, x: torch.Tensor, batch: Batch, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
        """RoPE's cosine and sine, `[rows, 1, head_dim]`; the sine as `rotate_half` needs it."""
        kinds = (kind,) if hasattr(self._rotary, "layer_types") else ()
        cos, sin = self._rotary(x.to(self._dtype), batch.positions[:, None], *kinds)
        sin[..., : sin.shape[-1] // 2].neg_()
        return cos, sin

    def _attend(
        self,
        block: Block,
        x: torch.Tensor,
        turn: tuple[torch.Tensor, torch.Tensor],
        attention: Attention,
        batch: Batch,
    ) -> None:
        """Adds to x what the rows' attention says."""
        kv_heads, head_dim = self._geometry.kv_heads, self._geometry.head_dim
        qkv = block.qkv(block.before_attention(x).to(self._dtype)).view(len(x), -1, head_dim)
        q_and_k = qkv[:, :-kv_heads]
        if block.qk_norm is not None:
            q_and_k.copy_(block.qk_norm(q_and_k))
        half_turned = q_and_k.roll(head_dim // 2, -1)
        q_and_k.mul_(turn[0]).addcmul_(half_turned, turn[1])
        block.slots.write(batch, qkv[:, -2 * kv_heads :].view(len(x), 2, kv_heads, head_dim))
        query = qkv[:, : -2 * kv_heads].unflatten(1, (kv_heads, -1))
        y = block.output(attention(block.slots, query, block.scale).flatten(1))
        x.add_(y if block.after_attention is None else block.after_attention(y))

    def _feed(self, block: Block, x: torch.Tensor) -> None:
        """Adds to x what the MLP says."""
        gate, up = block.gate_up(block.before_mlp(x).to(self._dtype)).chunk(2, 1)
        y = block.down(block.activation(gate).mul_(up))
        x.add_(y if block.after_mlp is None else block.after_mlp(y))


def _block(layer: Any, slots: LayerSlots, kind: str, hf: Any, rows: int) -> Block:
    attention, mlp = layer.self_attn, layer.mlp
    sandwich = hasattr(layer, "pre_feedforward_layernorm")  # Gemma: a norm after attention and MLP, too
    heads = (
        [attention.q_norm] * hf.num_attention_heads + [attention.k_norm] * hf.num_key_value_heads
        if hasattr(attention, "q_norm")
        else []
    )
    return Block(
        slots=slots,
        kind=kind,
        scale=attention.scaling,
        before_attention=Norm(layer.input_layernorm),
        qkv=Packed([attention.q_proj, attention.k_proj, attention.v_proj], rows),
        qk_norm=Norm(*heads) if heads else None,
        output=Packed([attention.o_proj], rows),
        after_attention=Norm(layer.post_attention_layernorm) if sandwich else None,
        before_mlp=Norm(layer.pre_feedforward_layernorm if sandwich else layer.post_attention_layernorm),
        gate_up=Packed([mlp.gate_proj, mlp.up_proj], rows),
        activation=mlp.act_fn,
        down=Packed([mlp.down_proj], rows),
        after_mlp=Norm(layer.post_feedforward_layernorm) if sandwich else None,
    )


def _bias(modules: list[Linear]) -> torch.Tensor | None:
    """Of Qwen2, Q, K and V have one; zeros where only some have."""
    if all(module.bias is None for module in modules):
        return None
    return torch.cat([m.weight.new_zeros(m.out_features) if m.bias is None else m.bias for m in modules])


def _drop(modules: Iterable[Any]) -> None:
    for module in modules:
        module.weight = module.bias = None


def _trim() -> None:
    """Between the packed weights lie the plain ones' places; glibc keeps them (145 MB of SmolLM2's in float32) until asked."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
