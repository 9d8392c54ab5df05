"""``python -m workers checklist atom``: what was inferred without a chip, put to the chip. PASS or FAIL, a line each.

KVR_MODEL is decoded as a worker would do it, with the same settings; transformers computes the same on the CPU.
"""

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import cast

import numpy as np
import torch

from pipeline.config import Config
from pipeline.model import Model
from workers import checklist
from workers.checklist import Check, Failed, unchanged
from workers.devices import open_decode
from workers.devices.atom.caches import Route
from workers.devices.atom.decode import AtomDecode
from workers.devices.atom.vendor import CALLS
from workers.devices.drift import drift
from workers.devices.family import load_weights

NEW = 16  # tokens compared
Cache = list[tuple[int, int, torch.Tensor, torch.Tensor]]  # (layer, first token, K, V `[kv_heads, tokens, head_dim]`)


def run(config: Config, model: Model) -> int:
    """Prints a line for each check; 1 if one failed."""
    # with a fallback, so that it opens without a route, too
    return checklist.run(_checks(replace(config, decode_device="atom", fallback="local"), model))


def _checks(config: Config, model: Model) -> Iterator[Check]:
    yield "the vendor's calls are those that were tested", lambda: unchanged(drift(CALLS), len(CALLS))
    opened: list[AtomDecode] = []
    yield "the model compiles, loads, and takes KV caches in", lambda: _open(config, model, opened)
    if not opened:
        return
    bench = _Bench(config, model, opened[0])
    yield "a write to a peer that has gone is an error, and not the end", _write_to_nobody
    for name in ("graph", "private"):
        yield f"route {name} gives back what it wrote", lambda name=name: bench.route(name)
    for name in ("graph", "private"):
        yield (
            f"route {name} brings ATOM's own KV cache back to the same logits",
            lambda name=name: bench.own_cache(name),
        )
    for length in bench.lengths():
        yield (
            f"transformers' KV cache of {length} tokens decodes to transformers' tokens",
            lambda length=length: bench.parity(length),
        )
    yield "rows that idle, and slots filled meanwhile, change nothing", bench.neighbours
    yield "ATOM's own prefill lets no token see a later one", bench.causality


def _open(config: Config, model: Model, opened: list[AtomDecode]) -> str:
    opened.append(cast(AtomDecode, open_decode(config, model)))
    if opened[0].route is None:
        raise Failed("it takes none; the log says why")
    return ", ".join(f"{name} {value}" for name, value in opened[0].figures.items())


def _write_to_nobody() -> str:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        os.write(writer, b"anybody there?")
    except BrokenPipeError:
        return "so it is"
    finally:
        os.close(writer)
    raise Failed("a pipe without a reader took what was written")


class _Bench:
    """The device, and transformers beside it."""

    def __init__(self, config: Config, model: Model, device: AtomDecode) -> None:
        self._device = device
        self._network = load_weights(model, torch.float32, "eager")
        self._wire = torch.float32 if device.geometry.dtype == "float32" else torch.bfloat16
        self._tokens = torch.randint(
            1,
            self._network.config.get_text_config().vocab_size,
            (config.context,),
            generator=torch.Generator().manual_seed(0),
        ).tolist()

    def lengths(self) -> list[int]:
        """Below, at and above a window and a block, as far as the context goes."""
        edges = {edge + more for edge in set(self._device.edges) for more in (-1, 0, 1)}
        return sorted(length for length in edges | {24, 100} if length + NEW < self._device.max_tokens)

    def route(self, name: str) -> str:
        self._device.self_test(self._device.make_route(name))
        return "equal"

    def own_cache(self, name: str) -> str:
        """Bit for bit: the same cache in the same slot must give the same logits."""
        usual, self._device.route = self._device.route, self._device.make_route(name)
        try:
            return self._own_cache(self._device.route)
        finally:
            self._device.evict(0)
            self._device.route = usual

    def _own_cache(self, route: Route) -> str:
        prompt = self._prompt(40)
        self._device.refill(0, prompt)
        self._device.begin(0, len(prompt), 1)
        wanted = self._device.step()[0]
        self._device.evict(0)
        self._device.refill(0, prompt)
        cache = [
            (layer, first, k.clone(), v.clone()) for layer, first, k, v in self._device.read(route, 0, len(prompt))
        ]
        self._device.evict(0)
        self._fill(0, [(layer, first, torch.zeros_like(k), torch.zeros_like(v)) for layer, first, k, v in cache], 1)
        spoiled = self._device.step()[0]
        self._device.evict(0)
        self._fill(0, cache, 1)
        found = self._device.step()[0]
        self._device.evict(0)
        if np.array_equal(wanted, spoiled):
            raise Failed("a cache of zeros gives the same logits: the route writes where no step reads")
        difference = float(np.abs(wanted - found).max())
        exact = self._wire == torch.float32 or cache[0][2].dtype == self._wire
        if difference > (0 if exact else 0.05 * float(np.abs(wanted).max())):
            raise Failed(f"logits differ by {difference:g}")
        return f"largest difference {difference:g}"

    def parity(self, length: int) -> str:
        prompt = self._prompt(length)
        cache, wanted = self._native(prompt)
        found = self._decode({0: (cache, wanted[0])})[0]
        equal = sum(a == b for a, b in zip(found, wanted, strict=True))
        if found != wanted:
            raise Failed(f"{equal} of {NEW} tokens equal: {found} for {wanted}")
        return f"{NEW} of {NEW} tokens equal"

    def neighbours(self) -> str:
        """A job alone, and then again beside others that come and go between its steps."""
        cache, wanted = self._native(self._prompt(30))
        alone = self._decode({0: (cache, wanted[0])})[0]
        if self._device.slots == 1:
            return "one slot: it has no neighbours"
        other, other_wanted = self._native(self._prompt(50)[::-1])
        beside = self._decode({0: (cache, wanted[0]), self._device.slots - 1: (other, other_wanted[0])}, comes_at=5)[0]
        if alone != beside:
            raise Failed(f"{beside} beside others, {alone} alone")
        return "equal"

    def causality(self) -> str:
        """Changing the last token must leave the K and V of those before it as they were."""
        if (route := self._device.route) is None:
            raise Failed("without a route nothing can be read")
        caches: list[Cache] = []
        for last in (1, 2):
            self._device.refill(0, [*self._prompt(30), last])
            caches.append(
                [(layer, first, k.clone(), v.clone()) for layer, first, k, v in self._device.read(route, 0, 31)]
            )
            self._device.evict(0)
        for (layer, _, *before), (_, _, *after) in zip(*caches, strict=True):
            if any(not torch.equal(a[:, :-1], b[:, :-1]) for a, b in zip(before, after, strict=True)):
                raise Failed(f"layer {layer} changes: KVR_FALLBACK=local would give wrong text")
        return "equal"

    def _prompt(self, length: int) -> list[int]:
        return list(self._tokens[:length])

    def _native(self, prompt: Sequence[int]) -> tuple[Cache, list[int]]:
        """transformers' KV cache of a prompt, and the tokens that follow."""
        ids = torch.tensor([list(prompt)])
        with torch.inference_mode():
            past = self._network(ids, use_cache=True).past_key_values
            out = self._network.generate(ids, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0)
        cache = []
        for index, (layer, shape) in enumerate(zip(past.layers, self._device.geometry.layers, strict=True)):
            first = shape.first_token(len(prompt))
            k, v = (tensor[0, :, first - len(prompt) :] for tensor in (layer.keys, layer.values))
            cache.append((index, first, k, v))
        return cache, out[0, len(prompt) :].tolist()

    def _fill(self, slot: int, cache: Cache, token: int) -> None:
        for layer, first, *tensors in cache:
            k, v = (t.to(self._wire).contiguous().view(torch.uint8).numpy().data.cast("B") for t in tensors)
            self._device.insert(slot, layer, first, tensors[0].shape[1], k, v)
        self._device.begin(slot, cache[0][1] + cache[0][2].shape[1], token)

    def _decode(self, jobs: dict[int, tuple[Cache, int]], comes_at: int = 0) -> dict[int, list[int]]:
        """slot → tokens, the first as given. Slots other than 0 are filled before step `comes_at`, for two steps."""
        answers = {slot: [token] for slot, (_, token) in jobs.items()}
        for step in range(NEW - 1):
            for slot, (cache, token) in jobs.items():
                if step == (comes_at if slot else 0):
                    self._fill(slot, cache, token)
            logits = self._device.step()
            for slot in [slot for slot in jobs if not slot or comes_at <= step < comes_at + 2]:
                answers[slot].append(int(logits[slot].argmax()))
                self._device.commit(slot, answers[slot][-1])
                if slot and step == comes_at + 1:
                    self._device.evict(slot)
        for slot in jobs:
            self._device.evict(slot)
        return answers
