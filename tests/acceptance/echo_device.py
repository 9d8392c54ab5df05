"""A device that answers its prompt, token by token, and ends: so a test says what is said. Its KV cache holds the token ids.

With sim's tokenizer a token is a byte, so each character outside of ASCII is split over several tokens.
"""

from collections.abc import Callable, Sequence

import numpy as np
from typing_extensions import Buffer

from pipeline.config import Config
from pipeline.model import Model
from workers.devices import Logits, OnLayer
from workers.devices.sim import VOCAB, SimDecode, SimPrefill

END = 256


def open_prefill(config: Config, _model: Model) -> "EchoPrefill":
    return EchoPrefill(config)


def open_decode(config: Config, _model: Model) -> "EchoDecode":
    return EchoDecode(config)


class EchoPrefill(SimPrefill):
    def begin(self, tokens: Sequence[int]) -> "EchoPrompt":  # type: ignore[override]
        return EchoPrompt(list(tokens), len(self.geometry.layers))


class EchoPrompt:
    def __init__(self, tokens: list[int], layers: int) -> None:
        self._tokens, self._layers = tokens, layers

    def advance(self, on_layer: OnLayer, cancelled: Callable[[], bool]) -> Logits | None:
        rows = np.asarray(self._tokens, dtype=np.uint64)
        for layer in range(self._layers):
            on_layer(layer, 0, len(rows), rows, rows)
        return _logits([self._tokens[0]])[0]


class EchoDecode(SimDecode):
    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._prompts: list[list[int]] = [[] for _ in range(self.slots)]
        self._said = [0] * self.slots

    def insert(self, slot: int, layer: int, start: int, tokens: int, k: Buffer, v: Buffer) -> None:
        if layer == 0:
            self._prompts[slot][start:] = np.frombuffer(k, dtype=np.uint64).tolist()

    def begin(self, slot: int, length: int, token: int) -> None:
        self._said[slot] = 1

    def step(self) -> Logits:
        answers = [END] * self.slots
        for slot, prompt in enumerate(self._prompts):
            if self._said[slot] < len(prompt):
                answers[slot] = prompt[self._said[slot]]
            self._said[slot] += 1
        return _logits(answers)

    def evict(self, slot: int) -> None:
        self._prompts[slot], self._said[slot] = [], 0


def _logits(tokens: Sequence[int]) -> Logits:
    logits = np.full((len(tokens), VOCAB), -1e9, dtype=np.float32)
    logits[np.arange(len(tokens)), list(tokens)] = 1e3
    return logits
