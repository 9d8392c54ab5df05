"""Slots on ATOM: static blocks, own block tables, one step for all rows.

Slot s owns the blocks [s·n, (s + 1)·n), n blocks to a sequence, and window s of every sliding layer. A compiled decode graph
steps all its rows, and a row that idles writes, too: at position 0 of its own empty slot, or of a block that is no slot's.
Nothing is imported while a step runs: the worker makes all device calls in one thread.
"""

import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from typing_extensions import Buffer

from pipeline.config import Config
from pipeline.errors import DeviceError
from pipeline.model import Model
from workers.chips import Chips
from workers.devices import Logits, at_their_slots
from workers.devices.atom.caches import Caches, GraphRoute, Piece, PrivateRoute, Route, Span, caches_of
from workers.devices.atom.compiled import import_runtimes
from workers.devices.family import FULL, geometry, tensor_over, text_config, use_threads
from workers.digest import model_digest

log = logging.getLogger(__name__)


class AtomDecode:
    def __init__(self, config: Config, model: Model, loaded: Any, chips: Chips) -> None:
        """loaded: the vendor's model object. chips: kept, for the locks are theirs."""
        use_threads(config.decode_threads)
        hf = text_config(model, config)
        self._rbln = loaded.rbln_config
        self._loaded = loaded
        self._chips = chips
        self._vocabulary = int(hf.vocab_size)
        self._wire = torch.float32 if config.dtype == "float32" else torch.bfloat16
        self.geometry = geometry(hf, self._wire, model_digest(model.directory, config))
        self.max_tokens = config.context
        self._caches = caches_of(self._rbln)
        self._kind = {layer: caches for caches in self._caches for layer in caches.layers}
        self._check_shape(config)
        self._tables, owned = self._block_tables()
        self.slots = min(owned, config.slots)
        if self.slots < config.slots:
            log.warning("%d slots: the compiled model has no more", self.slots, extra={"action": "fewer_slots"})
        self._length = [0] * self.slots  # tokens in the cache; 0: idle
        self._input = [0] * self.slots
        self._arriving: dict[int, dict[int, list[Piece]]] = {}  # slot → layer → pieces, until the slot begins
        self.figures: dict[str, str | int] = {
            "chips": ",".join(map(str, chips.numbers)),
            "overflows": 0,
            "local_fallbacks": 0,
        }
        self.route = self._open_route(config)
        self._spoiled: set[int] = set()  # slots in which something may be no number
        self.figures["kv_import"] = self.route.name if self.route else "none"

    @property
    def edges(self) -> list[int]:
        """Lengths at which a new block begins, or a window is full."""
        return [caches.width for caches in self._caches]

    def insert(self, slot: int, layer: int, start: int, tokens: int, k: Buffer, v: Buffer) -> None:
        if self._length[slot]:
            raise DeviceError(f"slot {slot} is in use")
        if self.route is None:
            raise DeviceError("this worker found no way to import a KV cache at its start")
        window = self.geometry.layers[layer].window
        if not 0 <= start < start + tokens <= self.max_tokens or (window and tokens > window):
            raise DeviceError(f"tokens {start} to {start + tokens} do not fit layer {layer} of a slot")
        heads, dim = self.geometry.kv_heads, self.geometry.head_dim
        for buffer in (k, v):
            if memoryview(buffer).nbytes != tokens * self.geometry.token_bytes:
                raise DeviceError(
                    f"{memoryview(buffer).nbytes} bytes for {tokens} tokens of {self.geometry.token_bytes}"
                )
        key, value = (tensor_over(buffer, self._wire).view(heads, tokens, dim) for buffer in (k, v))
        for tensor in (key, value):
            self._check_range(tensor, layer)
        self._arriving.setdefault(slot, defaultdict(list))[layer].append(Piece(start, tokens, (key, value)))

    def begin(self, slot: int, length: int, token: int) -> None:
        """Only here the KV cache goes to the chip: block by block, and a block takes all layers at once."""
        if not 0 < length < self.max_tokens:
            raise DeviceError(f"{length} tokens leave no room to step in a slot of {self.max_tokens}")
        self._check_tokens([token])
        pieces = self._arriving.pop(slot, None)
        if pieces is None:
            raise DeviceError(f"slot {slot} was not filled")
        if pieces:
            self._clean(slot)
            self._write(self.route, slot, length, pieces)
        self._length[slot], self._input[slot] = length, token

    def refill(self, slot: int, tokens: Sequence[int]) -> None:
        """By the vendor's prefill graph, or, where that would let tokens see later ones, by stepping through the prompt."""
        if self._length[slot]:
            raise DeviceError(f"slot {slot} is in use")
        self._check_tokens(tokens)
        if len(tokens) >= self.max_tokens:
            raise DeviceError(f"{len(tokens)} tokens leave no room to step in a slot of {self.max_tokens}")
        self._clean(slot)
        chunk = self._rbln.prefill_chunk_size
        padded = -(-len(tokens) // chunk) * chunk
        overhangs = padded > self._rbln.max_seq_len  # it would write into other slots' blocks
        if overhangs or self._rbln.use_bidirectional_prefill:  # optimum-rbln 0.12 compiles Gemma-3's text model so
            self._step_through(slot, tokens)
        else:
            local = torch.tensor([slot], dtype=torch.int16) if self._rbln.use_local_attention else None
            self._loaded.prefill_decoder(
                input_ids=torch.tensor([list(tokens)]),
                cache_position=torch.arange(len(tokens), dtype=torch.int32)[None],
                batch_idx=slot,
                block_tables=self._tables[slot] if self._rbln.use_global_attention else None,
                local_block_tables=local,
            )
        self._arriving[slot] = {}  # nothing is left to import
        self.figures["local_fallbacks"] = int(self.figures["local_fallbacks"]) + 1

    def _step_through(self, slot: int, tokens: Sequence[int]) -> None:
        if 1 not in self._loaded.decoders:
            raise DeviceError(
                "only a decode graph of batch 1 could prefill this, and the model was compiled without one"
            )
        for position, token in enumerate(tokens):
            self._run([slot], [token], [position])

    def commit(self, slot: int, token: int) -> None:
        self._check_tokens([token])
        self._input[slot] = token

    def step(self) -> Logits:
        # longest first: graphs for the next generation of chips insist on it, and to others it is all the same
        active = sorted(
            (slot for slot in range(self.slots) if self._length[slot]), key=lambda slot: -self._length[slot]
        )
        lengths = [self._length[slot] for slot in active]
        if not active or lengths[0] >= self.max_tokens:
            raise DeviceError(f"a step needs a slot that has begun, and none with all its {self.max_tokens} tokens")
        logits = self._run(active, [self._input[slot] for slot in active], lengths)
        for slot, row in zip(active, logits, strict=True):
            self._length[slot] += 1
            if not np.isfinite(row).all():
                self._spoiled.add(slot)
        return at_their_slots(logits, active)

    def evict(self, slot: int) -> None:
        self._arriving.pop(slot, None)
        self._length[slot] = self._input[slot] = 0

    # Running

    def _run(self, active: Sequence[int], tokens: Sequence[int], positions: Sequence[int]) -> Logits:
        """One step of the smallest decode graph with room for the active slots. `[active, vocab]`."""
        size = min(size for size in self._loaded.decoders if size >= len(active))
        begun = {slot for slot, length in enumerate(self._length) if length}
        idle = [row for row in range(len(self._tables)) if row not in begun and row not in active]
        rows = [*active, *idle][:size]
        unused = [0] * (size - len(active))
        at = torch.tensor([*positions, *unused], dtype=torch.int32)[:, None]
        answer = self._loaded.decoders[size](
            input_ids=torch.tensor([*tokens, *unused])[:, None],
            cache_position=at,
            block_tables=self._tables[rows] if self._rbln.use_global_attention else None,
            local_block_tables=torch.tensor(rows, dtype=torch.int16)[:, None]
            if self._rbln.use_local_attention
            else None,
            attention_mask=self._mask(at) if self._rbln.use_attention_mask else None,
            position_ids=at if self._rbln.use_position_ids else None,
        )
        logits: Logits = answer.logits[: len(active), -1].float().numpy()
        return logits

    def _mask(self, at: torch.Tensor) -> torch.Tensor:
        """1 for what a row sees: all up to its own position. `[rows, max_seq_len]`, or as optimum-rbln wants it without ids."""
        seen = (torch.arange(self._rbln.max_seq_len)[None] <= at).to(self._rbln.dtype)
        return seen if self._rbln.use_position_ids else seen[:, None, None]

    def _block_tables(self) -> tuple[torch.Tensor, int]:
        """int16 `[batch, blocks of a sequence]`, and how many rows, from the first, own their blocks."""
        batch, full = self._rbln.batch_size, next((one for one in self._caches if one.kind == FULL), None)
        if full is None:
            return torch.zeros((batch, 1), dtype=torch.int16), batch
        each = self._rbln.max_seq_len // full.width
        owned = min(batch, full.shape[0] // each)
        if owned < batch and full.shape[0] == owned * each:
            owned -= 1  # rows without blocks of their own idle for ever, and must write somewhere
        if owned < 1:
            raise DeviceError(f"the compiled model has {full.shape[0]} KV blocks, a sequence takes {each}")
        tables = torch.full((batch, each), full.shape[0] - 1, dtype=torch.int16)
        tables[:owned] = torch.arange(owned * each, dtype=torch.int16).view(owned, each)
        return tables, owned

    # Importing

    def _write(self, route: Route, slot: int, length: int, pieces: dict[int, list[Piece]]) -> None:
        for caches in self._caches:
            for layer in caches.layers:
                next_token = self.geometry.layers[layer].first_token(length)
                for piece in pieces[layer]:
                    if piece.start == next_token:
                        next_token += piece.tokens
                if next_token != length:
                    raise DeviceError(
                        f"layer {layer} of slot {slot} lacks some of the tokens up to {length}: {next_token} came"
                    )
        for caches in self._caches:
            route.write(caches, self._spans(caches, slot, length), pieces)

    def _clean(self, slot: int) -> None:
        """A mask does not hide from a sum what is no number: 0 × NaN is NaN."""
        if slot in self._spoiled:
            if self.route is None:
                raise DeviceError(f"slot {slot} holds what is no number, and without a route nothing can clean it")
            for caches in self._caches:
                self.route.clean(caches, self._tables[slot].tolist() if caches.kind == FULL else [slot])
            self._spoiled.discard(slot)

    def _spans(self, caches: Caches, slot: int, length: int) -> list[Span]:
        """Where the tokens of a slot lie."""
        if caches.kind != FULL:
            rows = min(length, caches.width)
            return [Span(slot, length - rows, rows)]
        firsts = range(0, length, caches.width)
        blocks = self._tables[slot, : len(firsts)].tolist()
        return [Span(b, f, min(caches.width, length - f)) for b, f in zip(blocks, firsts, strict=True)]

    def _open_route(self, config: Config) -> Route | None:
        """The first route that gives back what it was told to write. None only where KVR_FALLBACK=local can do without."""
        self._run([], [], [])  # the private calls may end the process before a first step
        reasons = []
        for name in ("graph", "private") if config.atom_import == "auto" else (config.atom_import,):
            try:
                route = self.make_route(name)
                self.self_test(route)
            except Exception as error:  # the vendor's may raise anything
                reasons.append(f"{name}: {error}")
            else:
                return route
        reason = "; ".join(reasons)
        if config.fallback != "local":
            raise DeviceError(
                f"no way to import a KV cache into ATOM ({reason}); KVR_FALLBACK=local would prefill there"
            )
        log.error("every job will be prefilled on ATOM again (%s)", reason, extra={"action": "no_import"})
        return None

    def make_route(self, name: str) -> Route:
        """graph or private. Raises DeviceError if the compiled model, or the runtime, does not have it."""
        if name == GraphRoute.name:
            return GraphRoute(import_runtimes(self._loaded), self._caches)
        return PrivateRoute(self._loaded.decoders[min(self._loaded.decoders)].runtime, self._caches)

    def self_test(self, route: Route) -> None:
        """Writes rubbish into the first and the last slot, over the edge of a block and of a window, and reads it back.

        Then a step of the vendor's own graph must be seen through the route: both must mean the same memory.
        """
        for caches in self._caches:
            for slot in range(self.slots):  # what was there before us may be no numbers
                route.clean(caches, self._tables[slot].tolist() if caches.kind == FULL else [slot])
        edges = [caches.width + 3 for caches in self._caches if caches.width + 3 < self.max_tokens]
        length = max(edges, default=self.max_tokens // 2)
        written: dict[int, dict[int, list[Piece]]] = {}
        for slot in sorted({0, self.slots - 1}):
            pieces = written[slot] = {}
            for layer, shape in enumerate(self.geometry.layers):
                first = shape.first_token(length)
                size = (2, self.geometry.kv_heads, length - first, self.geometry.head_dim)
                k, v = torch.randn(size).to(self._wire)
                pieces[layer] = [Piece(first, length - first, (k, v))]
            self._write(route, slot, length, pieces)
        for slot, pieces in written.items():
            self._compare(route, slot, length, pieces)
        before = {slot: [kv for _, _, *kv in self.read(route, slot, length + 1)] for slot in written}
        tokens = [1] * len(written)  # 0 is often padding, of which K and V are zeros, too
        self._run(list(written), tokens, [length] * len(written))
        for slot, pieces in written.items():
            for (layer, first, *after), old in zip(self.read(route, slot, length + 1), before[slot], strict=True):
                for name, found, was, wrote in zip("KV", after, old, pieces[layer][0].kv, strict=True):
                    if torch.equal(found[:, -1], was[:, -1]):
                        raise DeviceError(f"a step does not write {name} of layer {layer} where this route reads")
                    kept = wrote[:, first - pieces[layer][0].start :]
                    if not torch.equal(found[:, :-1], kept.to(found.dtype)):
                        raise DeviceError(f"a step changes {name} of layer {layer}, slot {slot}, of earlier tokens")

    def _compare(self, route: Route, slot: int, length: int, pieces: dict[int, list[Piece]]) -> None:
        for layer, _, *read in self.read(route, slot, length):
            for name, found, wanted in zip("KV", read, pieces[layer][0].kv, strict=True):
                if not torch.equal(found, wanted.to(found.dtype)):
                    raise DeviceError(f"{name} of layer {layer}, slot {slot}, is not what was written there")

    def read(self, route: Route, slot: int, length: int) -> Iterator[tuple[int, int, torch.Tensor, torch.Tensor]]:
        """What ATOM holds of a slot's first `length` tokens: (layer, first token, K, V `[kv_heads, tokens, head_dim]`)."""
        for caches in self._caches:
            spans = self._spans(caches, slot, length)
            parts = [route.read(caches, span) for span in spans]
            whole = [torch.cat(tensors, 1) for tensors in zip(*parts, strict=True)]
            for index, layer in enumerate(caches.layers):
                first = self.geometry.layers[layer].first_token(length)
                skip = first - spans[0].first  # the row of a window that no token has
                yield layer, first, whole[2 * index][:, skip:], whole[2 * index + 1][:, skip:]

    # Checking

    def _check_shape(self, config: Config) -> None:
        if len(self._kind) != len(self.geometry.layers):
            raise DeviceError(f"the compiled model has {len(self._kind)} layers, this one {len(self.geometry.layers)}")
        for caches in self._caches:
            if (caches.shape[1], caches.shape[3]) != (self.geometry.kv_heads, self.geometry.head_dim):
                raise DeviceError(f"the compiled model has KV caches {caches.shape}, which are not this model's")
            for layer in caches.layers:
                if (self.geometry.layers[layer].window is None) != (caches.kind == FULL):
                    raise DeviceError(f"layer {layer} is {caches.kind} in the compiled model, and not in this one")
        compiled = geometry(self._loaded.config.get_text_config(), self._wire, self.geometry.model)
        if reason := compiled.mismatch(self.geometry.fingerprint()):
            raise DeviceError(f"the compiled model is another one ({reason.replace('prefill', 'the served model')})")
        windows = {caches.width for caches in self._caches if caches.kind != FULL}
        if windows - {layer.window for layer in self.geometry.layers}:
            raise DeviceError(f"the compiled model has windows of {windows} tokens, which are not this model's")
        if self._rbln.max_seq_len < config.context:
            raise DeviceError(f"KVR_CONTEXT={config.context}: the compiled model holds {self._rbln.max_seq_len} tokens")

    def _check_range(self, tensor: torch.Tensor, layer: int) -> None:
        """What the device's dtype cannot hold would be wrong text, and what is no number spoils the slot."""
        limit = torch.finfo(self._kind[layer].dtype).max
        low, high = (float(edge) for edge in torch.aminmax(tensor))
        if not -limit <= low <= high <= limit:
            self.figures["overflows"] = int(self.figures["overflows"]) + 1
            raise DeviceError(
                f"KV of layer {layer} reaches {low:g} to {high:g}, {self._kind[layer].dtype} holds ±{limit:g}"
            )

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        if not tokens or min(tokens) < 0 or max(tokens) >= self._vocabulary:
            raise DeviceError(f"token ids must be 0 to {self._vocabulary - 1}, and at least one")
