"""``python -m workers checklist pair``: both halves, on one host and without Redis.

Run where the decode device's SDK is. KVR_PREFILL_PYTHON is the prefill worker's Python: it computes prompts on its device and
hands them over the pipe (docs/stdio.md); they are decoded here, and transformers computes the same on the CPU.
"""

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

from typing_extensions import Buffer

from pipeline.config import Config
from pipeline.errors import Cancelled, DeviceError
from pipeline.model import Model
from workers import checklist
from workers.checklist import Check, Failed
from workers.devices import DecodeDevice, open_decode
from workers.piped import PipedPrefill
from workers.validate import CLEAR, Native, fixture

NEW = 16  # tokens compared
SHORT = (24, 100)  # prompts
Piece = tuple[int, int, int, Buffer, Buffer]  # layer, start, tokens, K, V, as a prefill device hands them out


def run(config: Config, model: Model, factory: str) -> int:
    """Prints a line for each check; 1 if one failed. factory: of the prefill device, as for a worker."""
    with ExitStack() as stack:
        return checklist.run(_checks(config, model, factory, stack))


def _checks(config: Config, model: Model, factory: str, stack: ExitStack) -> Iterator[Check]:
    opened: dict[str, Any] = {}

    def open_worker() -> str:
        python = os.environ.get("KVR_PREFILL_PYTHON", sys.executable)
        opened["prefill"] = stack.enter_context(PipedPrefill(python, factory, os.environ))
        return f"{opened['prefill'].device}, in {python}"

    def open_device() -> str:
        opened["decode"] = open_decode(config, model)
        return f"{config.decode_device}, {opened['decode'].slots} slots"

    yield "a prefill worker in its own environment opens its device", open_worker
    yield "the decode device opens here", open_device
    if len(opened) < 2:
        return
    pair = _Pair(opened["prefill"], opened["decode"], model)
    yield "both have the same model, and mean the same by a KV cache", pair.match
    for length in _lengths(config, pair):
        yield (
            f"{length} tokens, prefilled there and decoded here, give transformers' tokens",
            partial(pair.parity, length),
        )
    yield "a KV cache that arrives while others decode changes nothing", pair.neighbours
    yield "a prefill that is cancelled leaves nothing to the next prompt, there or here", pair.cancel
    yield "a prompt that is too long is refused, and the next one is right", pair.oversized


def _lengths(config: Config, pair: "_Pair") -> list[int]:
    """Short ones, and below, at and above each window and each chunk, as far as the context goes."""
    edges = {layer.window for layer in pair.prefill.geometry.layers if layer.window}
    edges |= {int(width) for width in config.rngd_widths.split(",")}
    lengths = {*SHORT, *(edge + more for edge in edges for more in (-1, 0, 1))}
    return sorted(length for length in lengths if 0 < length <= pair.longest)


@dataclass(frozen=True, slots=True)
class _Job:
    """A prompt that was computed there. wanted: transformers' tokens. clear: those that no rounding could have changed."""

    prompt: list[int]
    pieces: list[Piece]
    first: int
    wanted: list[int]
    clear: list[bool]


class _Pair:
    def __init__(self, prefill: PipedPrefill, decode: DecodeDevice, model: Model) -> None:
        self.prefill, self._decode = prefill, decode
        self._native = Native(model, prefill)
        self.longest = min(prefill.max_tokens, decode.max_tokens) - NEW

    def match(self) -> str:
        if reason := self._decode.geometry.mismatch(self.prefill.geometry.fingerprint()):
            raise Failed(reason)
        return f"{len(self.prefill.geometry.layers)} layers in {self.prefill.geometry.dtype}"

    def parity(self, length: int) -> str:
        started = time.monotonic()
        job = self._computed(length)
        computed = time.monotonic() - started
        started = time.monotonic()
        found = self._decoded({0: job})[0]
        step = (time.monotonic() - started) / (NEW - 1)
        return f"{_verdict(job, found)}; {computed:.3f} s there, {1000 * step:.1f} ms a step here"

    def neighbours(self) -> str:
        """A job alone, and then again beside one that comes and goes between its steps."""
        if self._decode.slots == 1:
            return "one slot: it has no neighbours"
        job, other = self._computed(SHORT[0]), self._computed(SHORT[0] + 1)
        alone = self._decoded({0: job})[0]
        beside = self._decoded({0: job, self._decode.slots - 1: other}, comes_at=NEW // 2)
        if alone != beside[0]:
            raise Failed(f"{beside[0]} beside another, {alone} alone")
        return _verdict(other, beside[self._decode.slots - 1])

    def cancel(self) -> str:
        looks = count()
        try:
            self.prefill.begin(self._fixture(self.longest)).advance(
                partial(self._decode.insert, 0), lambda: next(looks) >= 1
            )
        except Cancelled:
            self._decode.evict(0)
            job = self._computed(SHORT[0])
            return _verdict(job, self._decoded({0: job})[0])
        raise Failed("it ran on")

    def oversized(self) -> str:
        try:
            self.prefill.begin(self._fixture(self.prefill.max_tokens + 1)).advance(_ignore, bool)
        except DeviceError:
            job = self._computed(SHORT[0])
            return _verdict(job, self._decoded({0: job})[0])
        raise Failed(f"{self.prefill.max_tokens + 1} tokens were taken")

    def _fixture(self, length: int) -> list[int]:
        return fixture(length, self._native.vocabulary)

    def _computed(self, length: int) -> _Job:
        prompt, pieces = self._fixture(length), list[Piece]()
        logits = self.prefill.begin(prompt).advance(lambda *piece: pieces.append(piece), bool)
        wanted, leads = self._native.answer(prompt, NEW)
        bound = CLEAR[self.prefill.geometry.dtype]
        return _Job(prompt, pieces, int(logits.argmax()), wanted, [lead >= bound for lead in leads])

    def _decoded(self, jobs: dict[int, _Job], comes_at: int = 0) -> dict[int, list[int]]:
        """slot → the tokens that would be chosen, each after transformers' own before it. A slot other than 0 is filled
        before step `comes_at`."""
        chosen = {slot: [job.first] for slot, job in jobs.items()}
        for step in range(NEW - 1):
            for slot, job in jobs.items():
                if step == (comes_at if slot else 0):
                    for piece in job.pieces:
                        self._decode.insert(slot, *piece)
                    self._decode.begin(slot, len(job.prompt), job.wanted[0])
            logits = self._decode.step()
            for slot, job in jobs.items():
                if step >= (comes_at if slot else 0):
                    chosen[slot].append(int(logits[slot].argmax()))
                    self._decode.commit(slot, job.wanted[len(chosen[slot]) - 1])
        for slot in jobs:
            self._decode.evict(slot)
        return chosen


def _verdict(job: _Job, chosen: Sequence[int]) -> str:
    """A token may be another one only where rounding could have changed it. Raises Failed."""
    compared = list(zip(chosen, job.wanted, job.clear, strict=False))
    wrong = [at for at, (ours, theirs, clear) in enumerate(compared) if clear and ours != theirs]
    if wrong:
        raise Failed(
            f"token {wrong[0]} is {compared[wrong[0]][0]}, not {compared[wrong[0]][1]}; {len(wrong)} are wrong"
        )
    if not any(clear for *_, clear in compared):
        raise Failed("every choice was so close that rounding may change it: nothing is proved")
    equal = sum(ours == theirs for ours, theirs, _ in compared)
    return f"{equal} of {len(compared)} tokens equal, {sum(not clear for *_, clear in compared)} too close to tell"


def _ignore(*_: object) -> None:
    """Nobody wants these K and V."""
