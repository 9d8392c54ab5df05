"""One KV cache on its way in, as the decode worker sees it: what was promised, what has come, what is missing."""

from collections.abc import Iterator
from dataclasses import dataclass

from pipeline.errors import FrameError
from pipeline.frames import DIGEST, VERSION, Commit, Open, Part
from pipeline.geometry import Geometry


@dataclass(frozen=True, slots=True)
class Block:
    """K and V of one layer, tokens [start, start + tokens), each `[kv_heads, tokens, head_dim]` as raw bytes."""

    layer: int
    start: int
    tokens: int
    k: memoryview
    v: memoryview


class Transfer:
    """Accepts parts in order, per layer and tensor; anything else raises FrameError and the transfer is over."""

    def __init__(self, opened: Open, geometry: Geometry, context: int) -> None:
        if opened.version != VERSION:
            raise FrameError(f"protocol version {opened.version}; this worker speaks {VERSION}")
        if opened.digest != DIGEST:
            raise FrameError(f"digest {opened.digest!r}; this worker checks {DIGEST}")
        if reason := geometry.mismatch(opened.fingerprint):
            raise FrameError(reason)
        if not 0 < opened.tokens < context:
            raise FrameError(f"{opened.tokens} tokens do not fit a context of {context}")
        self.nonce = opened.nonce
        self.job = opened.job
        self.lease = opened.lease
        self.tokens = opened.tokens
        self._geometry = geometry
        self._parts: dict[tuple[int, str], list[tuple[Part, memoryview]]] = {
            (layer, tensor): [] for layer in range(len(geometry.layers)) for tensor in "kv"
        }

    def accept(self, part: Part, tensor: memoryview, digest: bytes) -> None:
        """`digest`: of the receiver's own copy. Raises FrameError if the part is not the expected next one."""
        where = f"layer {part.layer} {part.tensor} from token {part.start}"
        if part.layer >= len(self._geometry.layers):
            raise FrameError(f"{where}: the model has {len(self._geometry.layers)} layers")
        if part.dtype != self._geometry.dtype or part.shape != (
            self._geometry.kv_heads,
            part.tokens,
            self._geometry.head_dim,
        ):
            raise FrameError(f"{where}: {part.dtype} {part.shape} is not this model's layout")
        if part.start != self._expected(part.layer, part.tensor):
            raise FrameError(f"{where}: expected token {self._expected(part.layer, part.tensor)}")
        if part.start + part.tokens > self.tokens:
            raise FrameError(f"{where}: goes beyond the {self.tokens} tokens announced")
        if tensor.nbytes != part.size:
            raise FrameError(f"{where}: {tensor.nbytes} bytes came, {part.size} were announced")
        if digest != part.digest:
            raise FrameError(f"{where}: the digest does not match, bytes changed on the way")
        self._parts[part.layer, part.tensor].append((part, tensor))

    def check_complete(self, commit: Commit) -> None:
        """Raises FrameError unless every byte that was announced is here."""
        if commit.lease != self.lease:
            raise FrameError("COMMIT for another lease than OPEN")
        for layer, tensor in self._parts:
            if (end := self._expected(layer, tensor)) != self.tokens:
                raise FrameError(f"layer {layer} {tensor}: {end} of {self.tokens} tokens came")
        for layer in range(len(self._geometry.layers)):
            k, v = ([part.start for part, _ in self._parts[layer, tensor]] for tensor in "kv")
            if k != v:
                raise FrameError(f"layer {layer}: K and V are cut differently")

    def blocks(self) -> Iterator[Block]:
        """The cache in pieces, for insertion into a slot. Parts of K and V are cut alike by the sender."""
        for layer in range(len(self._geometry.layers)):
            pairs = zip(self._parts[layer, "k"], self._parts[layer, "v"], strict=True)
            for (part, k), (_, v) in pairs:
                yield Block(layer, part.start, part.tokens, k, v)

    def _expected(self, layer: int, tensor: str) -> int:
        parts = self._parts[layer, tensor]
        if parts:
            return parts[-1][0].start + parts[-1][0].tokens
        return self._geometry.layers[layer].first_token(self.tokens)
