"""``python -m workers checklist rngd``: KVR_MODEL is prefilled as a worker would do it, and by transformers on the CPU."""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from pipeline.errors import Cancelled
from workers.checklist import Check, Failed, unchanged
from workers.devices import PrefillDevice
from workers.devices.drift import drift
from workers.devices.rngd.vendor import CALLS
from workers.prefilled import Prefilled
from workers.sweep import first_layer_that_saw
from workers.validate import Native, fixture, judge

CANCEL_AFTER = 3  # launches


def vendor_checks(open_device: Callable[[], PrefillDevice], opened: list[PrefillDevice]) -> Iterator[Check]:
    """What only the SDK and the chip can answer. Puts the device into `opened`, if it opens."""
    yield "the vendor's calls are those that were tested", lambda: unchanged(drift(CALLS), len(CALLS))

    def open_it() -> str:
        opened.append(open_device())
        return "every graph that a prompt needs"

    yield "a chip is there, and the model compiles for it", open_it
    yield "what the chip cannot compute is an error, and not computed on the host", _no_fallback


def device_checks(device: Any, native: Native) -> Iterator[Check]:
    """device: an open RngdPrefill, wherever its graphs run."""
    for length in _lengths(device):
        yield (
            f"{length} tokens give transformers' K, V, logits and first token",
            lambda n=length: _parity(device, native, n),
        )
    longest = _lengths(device)[-1]
    one_chunk = min(device.plan.widths[-1], device.max_tokens)  # of an earlier chunk nothing could show
    yield "no token sees a later one", lambda: _causality(device, native, one_chunk)
    yield "nothing of one prompt is left for the next", lambda: _repeat(device, native, longest)
    yield "a cancel is seen before the next launch", lambda: _cancel(device, native, longest)


def _no_fallback() -> str:
    import furiosa.torch

    if furiosa.torch.config.get_cpu_fallback():
        raise Failed("the SDK would compute it on the host")
    return "so it is"


def _lengths(device: Any) -> list[int]:
    """Below, at and above each width, as far as the context goes; so with and without a past."""
    edges = {width + more for width in device.plan.widths for more in (-1, 0, 1)}
    return sorted(edge for edge in edges if 0 < edge <= device.max_tokens)


def _parity(device: Any, native: Native, length: int) -> str:
    verdict = judge(device, native, fixture(length, native.vocabulary))
    if not verdict.passed:
        raise Failed(verdict.sentence)
    return f"{verdict.sentence}, {verdict.seconds:.3f} s on the device"


def _causality(device: Any, native: Native, length: int) -> str:
    prompt = fixture(length, native.vocabulary)
    other = [*prompt[:-1], (prompt[-1] + 1) % native.vocabulary]
    layer = first_layer_that_saw(Prefilled.by(device, prompt), Prefilled.by(device, other), length - 1)
    if layer is not None:
        raise Failed(f"layer {layer} changes")
    return "equal"


def _repeat(device: Any, native: Native, length: int) -> str:
    """The same prompt before and after another one."""
    prompt = fixture(length, native.vocabulary)
    before = Prefilled.by(device, prompt)
    Prefilled.by(device, fixture(length, native.vocabulary, seed=1))
    if not (before.logits == Prefilled.by(device, prompt).logits).all():
        raise Failed("the second time the logits are others")
    return "equal"


def _cancel(device: Any, native: Native, length: int) -> str:
    asked: list[float] = []

    def cancelled() -> bool:
        asked.append(time.monotonic())
        return len(asked) > CANCEL_AFTER

    try:
        device.begin(fixture(length, native.vocabulary)).advance(_ignore, cancelled)
    except Cancelled:
        return f"{1000 * (time.monotonic() - asked[-1]):.1f} ms, with what was under way"
    raise Failed("it ran on")


def _ignore(*_: Sequence[object]) -> None:
    """Nobody wants these K and V."""
