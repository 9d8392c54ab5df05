"""A device without weights, for tests of scheduling, failure and scaling.

It takes the time that a given chip would take, and derives each token from the KV bytes that it holds: every byte at its
place, of every layer. So a cache that arrives with one wrong byte, in the wrong order or in the wrong slot gives another
text than `expected` says.

A prefill and a decode worker can be on one chip (KVR_SIM_CHIP): then a call of one waits until the other's is over.
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Buffer

from pipeline.config import Config
from pipeline.errors import Cancelled, ConfigError, DeviceError
from pipeline.geometry import Geometry, Layer
from pipeline.model import Model
from workers.chips import SharedChip
from workers.devices import Logits, OnLayer

VOCAB = 257
FIRST, SHOWN = 32, 95  # it answers printable ASCII only

U64 = NDArray[np.uint64]


def open_prefill(config: Config, model: Model) -> "SimPrefill":
    _check(config, model)
    return SimPrefill(config)


def open_decode(config: Config, model: Model) -> "SimDecode":
    _check(config, model)
    return SimDecode(config)


def chips(_device: str, _config: Config) -> dict[int, str]:
    return {0: "no chip"}


def expected(prompt: Sequence[int], count: int, layers: int = 2) -> list[int]:
    """The tokens that a healthy system answers; computed without any cache."""
    tokens = list(prompt)
    for _ in range(count):
        state = sum(_sum(rows, layer, side, 0) for layer, side, rows in _cache(tokens, 0, layers))
        tokens.append(_token(state))
    return tokens[len(prompt) :]


class SimPrefill:
    def __init__(self, config: Config) -> None:
        self.geometry = _geometry(config)
        self.max_tokens = config.context
        self.chunk = config.chunk
        self.token_seconds = config.sim_prefill_us / 1e6
        self.turn = _turns(config)

    def begin(self, tokens: Sequence[int]) -> "SimPrompt":
        return SimPrompt(self, list(tokens))


class SimPrompt:
    def __init__(self, device: SimPrefill, tokens: list[int]) -> None:
        self._device = device
        self._tokens = tokens
        self._done = 0
        self._state = 0

    def advance(self, on_layer: OnLayer, cancelled: Callable[[], bool]) -> Logits | None:
        with self._device.turn():
            return self._advance(on_layer, cancelled)

    def _advance(self, on_layer: OnLayer, cancelled: Callable[[], bool]) -> Logits | None:
        start, end = self._done, min(self._done + self._device.chunk, len(self._tokens))
        layers = len(self._device.geometry.layers)
        halves: dict[int, U64] = {}
        for layer, side, rows in _cache(self._tokens[start:end], start, layers):
            self._state += _sum(rows, layer, side, start)
            if side == 0:
                if cancelled():
                    raise Cancelled
                time.sleep((end - start) * self._device.token_seconds / layers)
                halves[layer] = rows
            else:
                on_layer(layer, start, end - start, halves[layer], rows)
        self._done = end
        return _logits([_token(self._state)])[0] if end == len(self._tokens) else None


class SimDecode:
    def __init__(self, config: Config) -> None:
        self.geometry = _geometry(config)
        self.slots = config.slots
        self.max_tokens = config.context
        self.figures: dict[str, str | int] = {}
        self._turn = _turns(config)
        self._step_seconds, self._row_seconds = config.sim_step_ms / 1e3, config.sim_row_ms / 1e3
        self._insert_seconds = config.sim_insert_us / 1e6
        self._state = [0] * self.slots  # grows while KV comes in
        self._length = [0] * self.slots  # tokens in the cache; 0: idle
        self._input = [0] * self.slots

    def insert(self, slot: int, layer: int, start: int, tokens: int, k: Buffer, v: Buffer) -> None:
        for side, buffer in enumerate((k, v)):
            rows = np.frombuffer(buffer, dtype=np.uint64)
            if len(rows) != tokens:
                raise DeviceError(f"{len(rows)} rows inserted for {tokens} tokens")
            self._state[slot] += _sum(rows, layer, side, start)

    def begin(self, slot: int, length: int, token: int) -> None:
        if self._insert_seconds:
            with self._turn():
                time.sleep(length * self._insert_seconds)
        self._length[slot], self._input[slot] = length, token

    def commit(self, slot: int, token: int) -> None:
        self._input[slot] = token

    def step(self) -> Logits:
        rows = sum(length > 0 for length in self._length)
        with self._turn():
            time.sleep(self._step_seconds + rows * self._row_seconds)
        answers = [FIRST] * self.slots
        for slot, length in enumerate(self._length):
            if length:
                for layer, side, rows in _cache([self._input[slot]], length, len(self.geometry.layers)):
                    self._state[slot] += _sum(rows, layer, side, length)
                self._length[slot] += 1
                answers[slot] = _token(self._state[slot])
        return _logits(answers)

    def evict(self, slot: int) -> None:
        self._state[slot] = self._length[slot] = self._input[slot] = 0


def _check(config: Config, model: Model) -> None:
    if model.config.get("model_type") != "sim":
        raise DeviceError("the sim device serves only KVR_MODEL=sim: it has no use for weights")
    if config.context > (limit := model.config["max_position_embeddings"]):
        raise ConfigError("KVR_CONTEXT", config.context, f"the sim model holds at most {limit} tokens")


def _turns(config: Config) -> Callable[[], AbstractContextManager[None]]:
    if not config.sim_chip:
        return contextlib.nullcontext
    return SharedChip(config.locks, "sim", config.sim_chip).turn


def _geometry(config: Config) -> Geometry:
    return Geometry(
        model="sim",
        kv_heads=1,
        head_dim=4,  # of 2 bytes: one 64-bit number a row
        dtype="bfloat16",
        layers=(Layer(),) * config.sim_layers,
    )


def _cache(tokens: Sequence[int], start: int, layers: int) -> list[tuple[int, int, U64]]:
    """(layer, 0 for K or 1 for V, rows) as a model would compute them: each row from its token and position."""
    ids = np.asarray(tokens, dtype=np.uint64)
    at = np.arange(start, start + len(ids), dtype=np.uint64)
    return [
        (layer, side, _mix(ids * np.uint64(0x9E3779B97F4A7C15) + at * np.uint64(4096) + np.uint64(2 * layer + side)))
        for layer in range(layers)
        for side in (0, 1)
    ]


def _sum(rows: U64, layer: int, side: int, start: int) -> int:
    """Depends on every byte and on where it stands; sums over pieces add up."""
    at = np.arange(start, start + len(rows), dtype=np.uint64)
    return int(_mix(rows ^ (at * np.uint64(64) + np.uint64(2 * layer + side))).sum(dtype=np.uint64))


def _mix(x: U64) -> U64:
    """The finalizer of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _token(state: int) -> int:
    return FIRST + int(_mix(np.array([state % (1 << 64)], dtype=np.uint64))[0] % np.uint64(SHOWN))


def _logits(tokens: Sequence[int]) -> Logits:
    """Certainty: the sampler finds the token at any temperature that a request may have."""
    logits = np.full((len(tokens), VOCAB), -1e9, dtype=np.float32)
    logits[np.arange(len(tokens)), list(tokens)] = 1e3
    return logits
