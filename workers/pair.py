"""``python -m workers checklist pair``: both halves, on one host and without Redis.

Run where the decode device's SDK is. KVR_PREFILL_PYTHON is the prefill worker's Python: it computes prompts on its device and
hands them over the pipe (docs/stdio.md); they are decoded here, and transformers computes the same on the CPU.
"""

import os
import statistics
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
from workers.devices import DecodeDevice, Logits, PrefillDevice, open_decode
from workers.piped import PipedPrefill
from workers.validate import CLEAR, Native, fixture, leads

NEW = 16  # tokens compared
TRIES = 10  # of a cancel: a short prompt may be over before it is heard of
SHORT = (24, 100)  # prompts
Piece = tuple[int, int, int, Buffer, Buffer]  # layer, start, tokens, K, V, as a prefill device hands them out


def run(config: Config, model: Model, factory: str) -> int:
    """Prints a line for each check; 1 if one failed. factory: of the prefill device, as for a worker."""
    with ExitStack() as stack:
        return checklist.run(_checks(config, model, factory, stack))


def _checks(config: Config, model: Model, factory: str, stack: ExitStack) -> Iterator[Check]:
    opened: dict[str, Any] = {}

    def open_worker() -> str:
        python = os.environ.get("KVR_PREFILL_PYTHON") or sys.executable
        opened["prefill"] = stack.enter_context(PipedPrefill(python, factory, os.environ))
        return f"{opened['prefill'].device}, in {python}"

    def open_device() -> str:
        opened["decode"] = open_decode(config, model)
        return f"{config.decode_device}, {opened['decode'].slots} slots"

    yield "a prefill worker in its own environment opens its device", open_worker
    yield "the decode device opens here", open_device
    if len(opened) < 2:
        return
    pair = Pair(opened["prefill"], opened["decode"], model)
    yield "both have the same model, and mean the same by a KV cache", pair.match
    for length in _lengths(config, pair):
        yield (
            f"{length} tokens, prefilled there and decoded here, give transformers' tokens",
            partial(pair.parity, length),
        )
    yield "a KV cache that arrives while others decode changes nothing", pair.neighbours
    yield "a prefill that is cancelled leaves nothing to the next prompt, there or here", pair.cancel
    yield "a prompt that is too long is refused, and the next one is right", pair.oversized


def _lengths(config: Config, pair: "Pair") -> list[int]:
    """Short ones; below, at and above each window, chunk and block of either side; the longest."""
    edges = {layer.window for layer in pair.prefill.geometry.layers if layer.window}
    edges |= {
        config.chunk,
        *(int(width) for width in config.rngd_widths.split(",")),
        *getattr(pair.decode, "edges", ()),
    }
    lengths = {*SHORT, pair.longest, *(edge + more for edge in edges for more in (-1, 0, 1))}
    return sorted(length for length in lengths if 0 < length <= pair.longest)


@dataclass(frozen=True, slots=True)
class _Job:
    """A prompt that was computed there, within so many seconds. wanted: transformers' tokens, each chosen from `logits`."""

    prompt: list[int]
    pieces: list[Piece]
    first: int
    seconds: float
    wanted: list[int]
    logits: list[Logits]


class Pair:
    """A prefill device, wherever it is, a decode device here, and transformers beside them."""

    def __init__(self, prefill: PrefillDevice, decode: DecodeDevice, model: Model) -> None:
        self.prefill, self.decode = prefill, decode
        self.longest = min(prefill.max_tokens, decode.max_tokens) - NEW
        self._native = Native(model, prefill)
        self._step_seconds: list[float] = []

    def match(self) -> str:
        if reason := self.decode.geometry.mismatch(self.prefill.geometry.fingerprint()):
            raise Failed(reason)
        return f"{len(self.prefill.geometry.layers)} layers in {self.prefill.geometry.dtype}"

    def parity(self, length: int) -> str:
        job = self._computed(length)
        self._step_seconds.clear()
        said = self._verdict(job, self._decoded({0: job})[0])
        step = statistics.median(self._step_seconds)
        return f"{said}; {job.seconds:.3f} s there, {1000 * step:.1f} ms a step here"

    def neighbours(self) -> str:
        """A job beside one that comes and goes between its steps."""
        if self.decode.slots == 1:
            return "one slot: it has no neighbours"
        job, other = self._computed(SHORT[0]), self._computed(SHORT[0] + 1)
        chosen = self._decoded({0: job, self.decode.slots - 1: other}, comes_at=NEW // 3, goes_at=2 * NEW // 3)
        return f"{self._verdict(job, chosen[0])}; of the other, {self._verdict(other, chosen[self.decode.slots - 1])}"

    def cancel(self) -> str:
        if not any(self._cancelled() for _ in range(TRIES)):
            raise Failed(f"it ran on, {TRIES} times")
        job = self._computed(SHORT[0])
        return self._verdict(job, self._decoded({0: job})[0])

    def oversized(self) -> str:
        length = self.prefill.max_tokens + 1
        try:
            self.prefill.begin(self._fixture(length)).advance(_ignore, bool)
        except DeviceError as error:
            if str(self.prefill.max_tokens) not in str(error):
                raise
            job = self._computed(SHORT[0])
            return self._verdict(job, self._decoded({0: job})[0])
        raise Failed(f"{length} tokens were taken")

    def _cancelled(self) -> bool:
        """A prefill, asked to stop after its second part."""
        looks = count()
        running = self.prefill.begin(self._fixture(self.longest))
        try:
            while running.advance(partial(self.decode.insert, 0), lambda: next(looks) >= 1) is None:
                pass
        except Cancelled:
            return True
        finally:
            self.decode.evict(0)
        return False

    def _fixture(self, length: int) -> list[int]:
        return fixture(length, self._native.vocabulary)

    def _computed(self, length: int) -> _Job:
        prompt, pieces = self._fixture(length), list[Piece]()
        started = time.monotonic()
        running, logits = self.prefill.begin(prompt), None
        while logits is None:
            logits = running.advance(lambda *piece: pieces.append(piece), bool)
        seconds = time.monotonic() - started
        return _Job(prompt, pieces, int(logits.argmax()), seconds, *self._native.answer(prompt, NEW))

    def _decoded(self, jobs: dict[int, _Job], comes_at: int = 0, goes_at: int = NEW) -> dict[int, list[int]]:
        """slot → the tokens that would be chosen, each after transformers' own before it. A slot other than 0 is filled
        before step `comes_at`, and emptied before step `goes_at`."""
        chosen = {slot: [job.first] for slot, job in jobs.items()}
        try:
            for step in range(NEW - 1):
                for slot, job in jobs.items():
                    if step == (comes_at if slot else 0):
                        for piece in job.pieces:
                            self.decode.insert(slot, *piece)
                        self.decode.begin(slot, len(job.prompt), job.wanted[0])
                    if slot and step == goes_at:
                        self.decode.evict(slot)
                started = time.monotonic()
                logits = self.decode.step()
                self._step_seconds.append(time.monotonic() - started)
                for slot, job in jobs.items():
                    if not slot or comes_at <= step < goes_at:
                        chosen[slot].append(int(logits[slot].argmax()))
                        self.decode.commit(slot, job.wanted[len(chosen[slot]) - 1])
        finally:
            for slot in jobs:
                self.decode.evict(slot)
        return chosen

    def _verdict(self, job: _Job, chosen: Sequence[int]) -> str:
        """A token may be another one only if transformers rates it so near the best that rounding may turn them.

        Raises Failed, also when no token after the first, which is the prefill's alone, was clear.
        """
        bound = CLEAR[self.prefill.geometry.dtype]
        clear = [leads(logits) >= bound for logits in job.logits[: len(chosen)]]
        for at, (token, logits) in enumerate(zip(chosen, job.logits, strict=False)):
            if (logits.max() - logits[token]) / logits.std() >= bound:
                raise Failed(f"token {at} is {token}, not {job.wanted[at]}")
        if not any(clear[1:]):
            raise Failed("every choice was so close that rounding may change it: nothing is proved")
        equal = sum(ours == theirs for ours, theirs in zip(chosen, job.wanted, strict=False))
        return f"{equal} of {len(chosen)} tokens equal, {len(clear) - sum(clear)} too close to tell"


def _ignore(*_: object) -> None:
    """Nobody wants these K and V."""
