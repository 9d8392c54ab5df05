"""Which way in for a KV cache the atom device finds at its start, and what it does without one."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rebel
from rig import FLASH, WINDOW, Models, Opened, Rig, actions, prompt_of, vendors_own

from pipeline.errors import DeviceError

NOT_THERE = r"[KV] of layer \d, slot \d, is not what was written there"


# The way in for a KV cache


def skips(skipped: Callable[[int, str], bool]) -> Callable[..., None]:
    update = rebel.Runtime._update_kv_cache

    def faulty(self: Any, host: Any, block_idx: int, block_offset: int, size: int, name: str) -> None:
        if not skipped(block_idx, name):
            update(self, host, block_idx, block_offset, size, name)

    return faulty


@pytest.mark.parametrize(
    ("family", "settings", "skipped"),
    [
        ("llama", {}, lambda block, _: block == 3),
        ("llama", {"slots": 1}, lambda _, name: name == "past_key_values_3"),
        ("llama", FLASH, lambda block, _: block == 1),
        ("llama", FLASH, lambda block, _: block == 7),
        ("qwen2-hybrid", {}, lambda _, name: name == "past_key_values_2"),
        ("gemma3", {}, lambda _, name: name == "past_key_values_11"),
    ],
    ids=["last-slot", "v-of-the-last-layer", "second-block", "last-block", "k-of-a-sliding-layer", "v-of-a-full-layer"],
)
def test_a_private_call_that_writes_nothing_somewhere_is_found_at_the_start(
    opened: Opened,
    reference: Models,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    settings: dict[str, int],
    skipped: Callable[[int, str], bool],
) -> None:
    monkeypatch.setattr(rebel.Runtime, "_update_kv_cache", skips(skipped))
    with pytest.raises(DeviceError, match=rf"no way to import .*private: {NOT_THERE}.*KVR_FALLBACK=local"):
        opened(reference(family), atom_import="private", **settings)


@pytest.mark.parametrize("settings", [{}, FLASH], ids=["eager", "flash"])
@pytest.mark.parametrize(("route", "fault"), [("private", "torn"), ("graph", "off_by_one")])
@pytest.mark.parametrize("family", ["llama", "qwen2-hybrid"])
def test_a_route_that_writes_the_wrong_rows_is_found_at_the_start(
    opened: Opened,
    reference: Models,
    monkeypatch: pytest.MonkeyPatch,
    family: str,
    settings: dict[str, int],
    route: str,
    fault: str,
) -> None:
    monkeypatch.setattr(rebel, "FAULTS", frozenset({fault}))
    with pytest.raises(DeviceError, match=f"{route}: {NOT_THERE}"):
        opened(reference(family), atom_import=route, **settings)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_route_into_memory_of_its_own_is_found_at_the_start(
    opened: Opened, reference: Models, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    monkeypatch.setattr(rebel, "FAULTS", frozenset({"apart"}))
    with pytest.raises(DeviceError, match=r"graph: a step does not write K of layer \d where this route reads"):
        opened(reference(family), atom_import="graph")
    rig = opened(reference(family))
    assert rig.device.figures["kv_import"] == "private"
    rig.serve(0, prompt_of(40))


def test_auto_takes_the_graphs_and_without_them_the_private_calls(
    opened: Opened, reference: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rebel, "FAULTS", frozenset({"torn"}))
    assert opened(reference("llama")).device.figures["kv_import"] == "graph"
    monkeypatch.setattr(rebel, "FAULTS", frozenset({"off_by_one"}))
    rig = opened(reference("llama"))
    assert rig.device.figures["kv_import"] == "private"
    rig.serve(3, prompt_of(40))


def test_a_compiler_that_refuses_our_graphs_leaves_the_private_calls(
    opened: Opened,
    reference: Models,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(rebel, "FAULTS", frozenset({"no_graph"}))
    rig = opened(reference("gemma3"), cache=str(tmp_path))
    assert rig.device.figures["kv_import"] == "private"
    assert "no_import_graph" in actions(caplog)
    rig.serve(1, prompt_of(WINDOW + 1))
    with pytest.raises(DeviceError, match="does not compile for RBLN-CA22: emulated: this graph"):
        opened(reference("gemma3"), cache=str(tmp_path), atom_import="graph")


@pytest.mark.parametrize("name", ["_update_kv_cache", "_fetch_kv_cache", "_get_kv_cache_size"])
def test_a_private_call_that_is_gone_is_named(
    opened: Opened, reference: Models, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.delattr(rebel.Runtime, name)
    with pytest.raises(DeviceError, match=f"private: rebel's runtime has no {name} any more"):
        opened(reference("llama"), atom_import="private")


def test_a_cache_of_another_size_in_the_runtime_is_found_at_the_start(
    opened: Opened, reference: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two bytes a number there, four here: the calls would read beyond the buffer."""
    monkeypatch.setattr(rebel.Runtime, "_get_kv_cache_size", lambda self, name: self._caches[name].nbytes // 2)
    with pytest.raises(
        DeviceError, match=r"private: a cache tensor takes 24576 bytes in rebel's runtime, 49152 by its"
    ):
        opened(reference("llama"), atom_import="private")


def test_without_any_route_one_sentence_has_both_reasons(
    opened: Opened, reference: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rebel, "FAULTS", frozenset({"no_graph"}))
    monkeypatch.delattr(rebel.Runtime, "_update_kv_cache")
    both = r"\(graph: .* has no graph kv_import_full_attention; private: .* no _update_kv_cache any more\)"
    with pytest.raises(DeviceError, match=rf"no way to import a KV cache into ATOM {both}"):
        opened(reference("llama"), cache=str(tmp_path))


# The last resort


@pytest.fixture
def no_route(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patched:
        patched.delattr(rebel.Runtime, "_update_kv_cache")
        patched.setattr(rebel, "FAULTS", frozenset({"off_by_one"}))
        yield


@pytest.mark.parametrize(
    ("family", "settings", "lengths"),
    [
        ("llama", {"context": 256}, (5, 200, 128)),
        ("llama", {"context": 200}, (5, 150, 128)),  # the second chunk does not fit
        ("llama", FLASH, (1500, 20, 1024)),
        ("qwen2-hybrid", {"context": 256}, (5, 200, WINDOW)),
        ("gemma3", {"context": 512}, (5, 300, WINDOW)),
        ("gemma3-images", {"context": 512}, (5, 300, WINDOW)),
    ],
    ids=["llama", "llama-200", "llama-flash", "qwen2-hybrid", "gemma3", "gemma3-images"],
)
@pytest.mark.usefixtures("no_route")
def test_without_any_route_the_chip_prefills_again_and_the_tokens_are_right(
    opened: Opened,
    reference: Models,
    caplog: pytest.LogCaptureFixture,
    family: str,
    settings: dict[str, int],
    lengths: tuple[int, ...],
) -> None:
    """Prompts longer than a window and than a chunk of the vendor's prefill graph, while other slots decode."""
    rig = opened(reference(family), fallback="local", **settings)
    assert rig.device.figures["kv_import"] == "none"
    assert "no_import" in actions(caplog)
    for slot, length in enumerate(lengths):
        prompt = prompt_of(length)
        with pytest.raises(DeviceError, match="no way to import a KV cache"):
            rig.insert(slot, prompt)
        rig.device.evict(slot)
        rig.device.refill(slot, prompt)
        rig.begin(slot, prompt)
        rig.step()
        assert rig.device.figures["local_fallbacks"] == slot + 1
    rig.step(2)
    for slot in range(len(lengths)):
        rig.check(slot)


def refilled(rig: Rig, slot: int, length: int) -> None:
    rig.device.refill(slot, prompt_of(length))
    rig.begin(slot, prompt_of(length))
    rig.step(3)
    rig.check(slot)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_one_cache_that_was_refused_is_prefilled_where_imports_work(
    opened: Opened, reference: Models, route: str, family: str
) -> None:
    rig = opened(reference(family), fallback="local", atom_import=route)
    rig.fill(1, prompt_of(20))
    refilled(rig, 0, 40)
    with pytest.raises(DeviceError, match="slot 1 is in use"):
        rig.device.refill(1, prompt_of(5))
    for tokens in ([], [300], [-1]):
        with pytest.raises(DeviceError, match="token ids must be"):
            rig.device.refill(0, tokens)
    assert rig.device.figures["local_fallbacks"] == 1
    rig.check(1)
    rig.serve(0, prompt_of(30))


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_prompt_that_no_slot_holds_is_not_prefilled(opened: Opened, reference: Models, family: str) -> None:
    rig = opened(reference(family), fallback="local", context=256)
    with pytest.raises(DeviceError):
        rig.device.refill(0, prompt_of(257))


def test_a_slot_whose_logits_overflowed_is_refilled(opened: Opened, reference: Models) -> None:
    rig = opened(reference("llama"), fallback="local", context=256)
    rig.spoil(0, 200)
    refilled(rig, 0, 5)


@pytest.mark.usefixtures("no_route")
def test_a_slot_that_nothing_can_clean_is_not_prefilled(opened: Opened, reference: Models) -> None:
    rig = opened(reference("llama"), fallback="local", context=256)
    rig.device.refill(0, prompt_of(200))
    rig.device.begin(0, 200, 1)
    for tensor in rig.device._loaded.decoders[1].runtime._caches.values():
        tensor[0, :, 150] = float("nan")
    assert np.isnan(rig.device.step()[0]).all()
    rig.device.evict(0)
    with pytest.raises(DeviceError, match="slot 0 holds what is no number, and without a route"):
        rig.device.refill(0, prompt_of(5))
    refilled(rig, 1, 20)


def test_a_prompt_whose_last_chunk_would_leave_the_slot_is_stepped_through(opened: Opened, reference: Models) -> None:
    """190 tokens are padded to 256, and a slot holds 200."""
    rig = opened(reference("llama"), fallback="local", context=200)
    rig.fill(1, prompt_of(30))
    refilled(rig, 0, 180)
    rig.check(1)


def test_a_slot_that_nothing_can_clean_serves_no_more(
    opened: Opened, reference: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = opened(reference("llama"), fallback="local")
    rig.spoil(0, 60)
    monkeypatch.setattr(rig.device, "route", None)
    with pytest.raises(DeviceError, match="slot 0 holds what is no number, and without a route nothing can clean it"):
        rig.device.refill(0, prompt_of(5))
    refilled(rig, 1, 5)


def test_gemma3_without_a_decode_graph_of_one_row_cannot_be_prefilled(
    opened: Opened, reference: Models, tmp_path: Path
) -> None:
    directory = vendors_own(reference("gemma3"), tmp_path / "compiled")
    rig = opened(reference("gemma3"), fallback="local", atom_compiled=str(directory))
    with pytest.raises(DeviceError, match="only a decode graph of batch 1 could prefill"):
        rig.device.refill(0, prompt_of(5))
    rig.serve(0, prompt_of(40))
