"""The shape of a model's KV cache, and the sentence that says why two workers cannot be a pair.

Canonical layout: per layer, K and V each ``[kv_heads, tokens, head_dim]``, after RoPE, little-endian, contiguous.
"""

from dataclasses import asdict, dataclass
from reprlib import repr as short  # of what a stranger sent: bounded in length and depth
from typing import Any

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """window: tokens that a sliding layer sees (itself included), None for full attention. rope: its parameters."""

    window: int | None = None
    rope: str = ""

    def first_token(self, length: int) -> int:
        """The earliest of `length` cached tokens that the next one can still see: max(0, length − window + 1)."""
        return 0 if self.window is None else max(0, length - self.window + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """model: digest of weights and tokenizer. dtype: of the KV cache on the wire."""

    model: str
    kv_heads: int
    head_dim: int
    dtype: str
    layers: tuple[Layer, ...]

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's K (or V) in one layer."""
        return self.kv_heads * self.head_dim * ITEM_BYTES[self.dtype]

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's whole KV cache, as if no layer had a window."""
        return 2 * len(self.layers) * self.token_bytes

    def fingerprint(self) -> dict[str, Any]:
        """Plain values for the OPEN frame."""
        return asdict(self)

    def mismatch(self, other: dict[str, Any]) -> str | None:
        """Why a sender with that fingerprint must not feed this worker, or None if it may."""
        mine = self.fingerprint()
        for name in ("model", "kv_heads", "head_dim", "dtype"):
            if other.get(name) != mine[name]:
                return f"{name} differs: prefill has {short(other.get(name))}, decode has {mine[name]!r}"
        theirs = other.get("layers")
        if not isinstance(theirs, list | tuple) or len(theirs) != len(self.layers):
            count = len(theirs) if isinstance(theirs, list | tuple) else "none"
            return f"layers differ: prefill has {count}, decode has {len(self.layers)}"
        for index, (their_layer, my_layer) in enumerate(zip(theirs, mine["layers"], strict=True)):
            if their_layer != my_layer:
                return f"layer {index} differs: prefill has {short(their_layer)}, decode has {my_layer!r}"
        return None
