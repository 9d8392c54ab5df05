"""Prefill devices for the pipe's tests, as `--factory` finds them: like sim, but each with a bad habit."""

import ctypes
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Sequence

import numpy as np

from pipeline.config import Config
from pipeline.errors import DeviceError
from pipeline.model import Model
from workers.devices import Logits, OnLayer
from workers.devices.sim import SimPrefill, SimPrompt

#: First token of a prompt that goes wrong.
FAILS, BREAKS, SHORT_PART, PART_TWICE, LAYER_MISSING, SHIFTED, TOO_MANY, NO_LAYER, NOT_FINITE, FEWER_LOGITS = range(
    240, 250
)

_OPENED = itertools.count()


def noisy(config: Config, _model: Model) -> SimPrefill:
    _chatter("open")
    subprocess.run(["cat"], check=True)  # a child that reads what its parent was given as stdin
    return _Noisy(config)


def faulty(config: Config, _model: Model) -> SimPrefill:
    return _Faulty(config)


def taken_at_first(config: Config, _model: Model) -> SimPrefill:
    """Cannot be opened the first time, as if another process still had the chip."""
    if next(_OPENED) == 0:
        raise DeviceError("the chip is taken")
    return SimPrefill(config)


def _chatter(what: str) -> None:
    print(f"print {what}")
    sys.stdout.write(f'{{"event": "{what}"}}\n')
    os.write(1, f"write {what}\n".encode())
    libc = ctypes.CDLL(None)
    libc.puts(f"puts {what}".encode())
    libc.fflush(None)
    subprocess.run(["echo", "echo", what], check=True)


class _Noisy(SimPrefill):
    def begin(self, tokens: Sequence[int]) -> SimPrompt:
        _chatter("begin")
        return SimPrompt(self, list(tokens))


class _Faulty(SimPrefill):
    def begin(self, tokens: Sequence[int]) -> SimPrompt:
        return _FaultyPrompt(self, list(tokens))


class _FaultyPrompt(SimPrompt):
    def advance(self, on_layer: OnLayer, cancelled: Callable[[], bool]) -> Logits | None:
        habit = self._tokens[0]
        if habit == FAILS:
            raise DeviceError("the chip is on fire")

        def hand_out(layer: int, start: int, tokens: int, k: np.ndarray, v: np.ndarray) -> None:
            if habit == BREAKS and layer == 1:
                raise ZeroDivisionError("in the SDK")
            if habit == LAYER_MISSING and layer == 1:
                return
            if habit == SHIFTED:
                start += 1
            if habit == TOO_MANY:
                tokens, k, v = 2 * tokens, np.tile(k, 2), np.tile(v, 2)
            if habit == NO_LAYER:
                layer += 2
            on_layer(layer, start, tokens, k, v[:-1] if habit == SHORT_PART else v)
            if habit == PART_TWICE:
                on_layer(layer, start, tokens, k, v)

        logits = super().advance(hand_out, cancelled)
        if logits is not None and habit == NOT_FINITE:
            logits[:] = np.nan
        return logits[:-1] if logits is not None and habit == FEWER_LOGITS else logits
