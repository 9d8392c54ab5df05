"""The checks of `python -m workers checklist pair`, with both devices in this process: each can fail."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import Config
from pipeline.errors import DeviceError
from pipeline.model import Model
from tests.unit.test_rngd_device import save
from workers.checklist import Failed
from workers.devices import open_decode, open_prefill
from workers.pair import NEW, Pair

CONTEXT = 64


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(save("gemma3", tmp_path_factory.mktemp("gemma3")))


@pytest.fixture
def pair(model: Model, tmp_path: Path) -> Pair:
    settings = {"context": CONTEXT, "chunk": 16, "slots": 3, "dtype": "float32"}
    config = Config(model=str(model.directory), cache=str(tmp_path), **settings)
    return Pair(Prefill(open_prefill(config, model)), Decode(open_decode(config, model)), model)


class Prefill:
    """The device that it is given, but for what a test sets."""

    def __init__(self, device: Any) -> None:
        self.geometry, self.max_tokens, self._device = device.geometry, device.max_tokens, device
        self.heeds_cancel = self.refuses = True
        self.spoils: Callable[[int], bool] = lambda start: False

    def begin(self, tokens: Sequence[int]) -> Any:
        if len(tokens) > self.max_tokens and not self.refuses:
            tokens = tokens[: self.max_tokens]
        if len(tokens) > self.max_tokens:
            raise DeviceError(f"{len(tokens)} token ids; this worker takes at most {self.max_tokens}")
        running, prefill = self._device.begin(tokens), self

        class Running:
            def advance(self, on_layer: Callable[..., None], cancelled: Callable[[], bool]) -> Any:
                def hand_out(layer: int, start: int, count: int, k: Any, v: Any) -> None:
                    zeros = bytes(memoryview(v).nbytes)
                    on_layer(layer, start, count, k, zeros if prefill.spoils(start) else v)

                return running.advance(hand_out, cancelled if prefill.heeds_cancel else bool)

        return Running()


class Decode:
    """The device that it is given; with `mixes`, its rows change places when there are several."""

    def __init__(self, device: Any) -> None:
        self._device, self.mixes, self._begun = device, False, set[int]()

    def begin(self, slot: int, length: int, token: int) -> None:
        self._begun.add(slot)
        self._device.begin(slot, length, token)

    def evict(self, slot: int) -> None:
        self._begun.discard(slot)
        self._device.evict(slot)

    def step(self) -> Any:
        logits = self._device.step()
        return logits[::-1].copy() if self.mixes and len(self._begun) > 1 else logits

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)


def test_a_good_pair_passes_every_check(pair: Pair) -> None:
    assert pair.match() == "6 layers in float32"
    assert pair.parity(24).startswith(f"{NEW} of {NEW} tokens equal, 0 too close to tell; ")
    assert pair.parity(pair.longest).startswith(f"{NEW} of {NEW} tokens equal")
    for check in (pair.neighbours, pair.cancel, pair.oversized):
        assert check().startswith(f"{NEW} of {NEW} tokens equal")


def test_a_cache_that_is_wrong_in_one_part_is_seen(pair: Pair) -> None:
    pair.prefill.spoils = lambda start: start == 16  # type: ignore[attr-defined]
    with pytest.raises(Failed, match=r"token \d+ is \d+, not \d+"):
        pair.parity(40)


def test_rows_that_change_places_are_seen_beside_neighbours_only(pair: Pair) -> None:
    pair.decode.mixes = True  # type: ignore[attr-defined]
    assert pair.parity(24)
    with pytest.raises(Failed, match=r"token \d+ is"):
        pair.neighbours()


def test_a_prefill_that_runs_on_after_a_cancel_is_seen(pair: Pair) -> None:
    pair.prefill.heeds_cancel = False  # type: ignore[attr-defined]
    with pytest.raises(Failed, match="ran on"):
        pair.cancel()
    assert pair.parity(24), "and the next check has a slot"


def test_a_prefill_that_takes_too_much_is_seen(pair: Pair) -> None:
    pair.prefill.refuses = False  # type: ignore[attr-defined]
    with pytest.raises(Failed, match=f"{CONTEXT + 1} tokens were taken"):
        pair.oversized()


def test_choices_that_rounding_could_turn_prove_nothing(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("workers.pair").pair.CLEAR, "float32", 1e9)
    with pytest.raises(Failed, match="nothing is proved"):
        pair.parity(24)


def test_what_follows_goes_beyond_the_model_s_own_end_and_without_its_penalties(model: Model, pair: Pair) -> None:
    native = pair._native
    tokens, logits = native.answer([0, 5, 6], NEW)
    native._network.generation_config.eos_token_id = tokens[0]
    native._network.generation_config.repetition_penalty = 5.0
    again, _ = native.answer([0, 5, 6], NEW)
    assert (len(again), again) == (NEW, tokens)
    assert tokens == [int(one.argmax()) for one in logits]
    assert tokens[0] == native.prefill([0, 5, 6]).token, "a token 0 in the prompt is a token"
