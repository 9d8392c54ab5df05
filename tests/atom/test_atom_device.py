"""The atom device's slots against transformers' own `generate`: the vendor's real graphs, on the emulated chip."""

import warnings
from collections.abc import Callable

import numpy as np
import pytest
import rebel
import torch
from rig import FLASH, PIECE, WINDOW, Models, Opened, Rig, prompt_of, raw

from pipeline.errors import DeviceError
from workers.devices.atom.caches import ExportGraph, ImportGraph

NEW = 6
AT_THE_WINDOW = (WINDOW - 6, WINDOW - 1, WINDOW, WINDOW + 1, 60)  # the first one crosses it
AT_THE_BLOCK = (1024 - 4, 500, 1024, 1500, 1023, 1025)  # the first one crosses into the second block
CASES = {
    "llama-1": ("llama", {"slots": 1}, (1, 40)),
    "llama-2": ("llama", {"slots": 2}, (3, 40)),
    "llama-4": ("llama", {"slots": 4}, (1, 3, 40, 100)),
    "llama-flash-1": ("llama", {"slots": 1, **FLASH}, AT_THE_BLOCK[:4]),
    "llama-flash-2": ("llama", {"slots": 2, **FLASH}, AT_THE_BLOCK[:4]),
    "llama-flash-4": ("llama", {"slots": 4, **FLASH}, AT_THE_BLOCK),
    "qwen2": ("qwen2", {"slots": 4}, (3, 40, 100)),
    "qwen2-hybrid": ("qwen2-hybrid", {"slots": 4}, AT_THE_WINDOW),
    "qwen3-9216": ("qwen3", {"slots": 1, "context": 9216}, (30, 8200)),
    "gemma3-1": ("gemma3", {"slots": 1}, AT_THE_WINDOW),
    "gemma3-4": ("gemma3", {"slots": 4}, AT_THE_WINDOW),
    "gemma3-images": ("gemma3-images", {"slots": 2}, AT_THE_WINDOW),
}


@pytest.fixture(params=["llama", "llama-flash", "qwen2-hybrid", "gemma3"])
def rig(request: pytest.FixtureRequest, opened: Opened, reference: Models, route: str) -> Rig:
    """Four slots, by either route."""
    family, flash = request.param.removesuffix("-flash"), request.param.endswith("-flash")
    return opened(reference(family), atom_import=route, **(FLASH if flash else {}))


@pytest.fixture
def llama(opened: Opened, reference: Models) -> Rig:
    return opened(reference("llama"))


# Tokens


@pytest.mark.parametrize("case", CASES)
def test_tokens_equal_generate(opened: Opened, reference: Models, route: str, case: str) -> None:
    family, settings, lengths = CASES[case]
    rig = opened(reference(family), atom_import=route, **settings)
    assert (rig.device.slots, rig.device.figures["kv_import"]) == (settings["slots"], route)
    for wave in range(0, len(lengths), rig.device.slots):
        prompts = [prompt_of(length) for length in lengths[wave : wave + rig.device.slots]]
        for slot, prompt in enumerate(prompts):
            rig.fill(slot, prompt)
        rig.step(NEW - 1)
        for slot in range(len(prompts)):
            rig.check(slot)


def test_a_job_may_go_on_to_the_last_token_of_its_slot(rig: Rig) -> None:
    room = rig.device.max_tokens
    prompt = prompt_of(room - 3)
    rig.fill(0, prompt)
    rig.fill(3, prompt_of(5))
    rig.step(3)
    with pytest.raises(DeviceError, match=f"all its {room} tokens"):
        rig.step()
    rig.check(0)
    rig.step()
    rig.check(3)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen2-hybrid", "qwen3", "gemma3"])
def test_one_wrong_token_of_a_cache_gives_other_logits(opened: Opened, reference: Models, family: str) -> None:
    """Without which the other tests would prove nothing."""
    rig, prompt = opened(reference(family)), prompt_of(40)
    right = rig.reference.cache
    for wrong in (0, PIECE, 39):

        def altered(prompt: tuple[int, ...], wrong: int = wrong) -> list[tuple[torch.Tensor, torch.Tensor]]:
            layers = []
            for k, v in right(prompt):
                row = wrong - (len(prompt) - k.shape[1])
                k, v = k.clone(), v.clone()
                if row >= 0:
                    k[:, row] = v[:, row] = 0
                layers.append((k, v))
            return layers

        rig.reference.cache = altered
        try:
            rig.fill(0, prompt)
        finally:
            rig.reference.cache = right
        rig.step()
        with pytest.raises(AssertionError, match=r"generate|Not equal to tolerance|slot 0"):
            rig.check(0)


# Slots


def test_a_job_among_idle_rows_is_joined_by_others_and_nobody_is_harmed(rig: Rig) -> None:
    rig.fill(2, prompt_of(50))
    rig.step(2)
    rig.fill(0, prompt_of(WINDOW + 1))
    rig.step()
    rig.fill(3, prompt_of(3))
    rig.step(3)
    for slot in (0, 2, 3):
        rig.check(slot)


@pytest.mark.parametrize("lengths", [(20, 60), (60, 20)], ids=["longer", "shorter"])
def test_a_slot_is_refilled_while_others_go_on(rig: Rig, lengths: tuple[int, int]) -> None:
    before, after = lengths
    rig.fill(1, prompt_of(before))
    rig.fill(2, prompt_of(40))
    rig.step(2)
    rig.check(1)
    rig.step()
    rig.fill(1, prompt_of(after, seed=1))
    rig.step(3)
    rig.check(1)
    rig.check(2)


def test_rows_keep_their_slots_when_their_order_by_length_changes(rig: Rig) -> None:
    for slot, length in enumerate((20, 50, 5)):
        rig.fill(slot, prompt_of(length))
    rig.step()  # 1, 0, 2
    rig.check(1)
    rig.step()  # 0, 2
    rig.fill(1, prompt_of(9))
    rig.step()  # 0, 1, 2
    rig.fill(3, prompt_of(60))
    rig.step(2)  # 3, 0, 1, 2
    rig.check(0)
    rig.step()  # 3, 1, 2
    for slot in (1, 2, 3):
        rig.check(slot)


def test_an_idle_row_writes_nothing_into_a_slot_that_is_being_filled(rig: Rig) -> None:
    prompt = prompt_of(30)
    rig.fill(1, prompt_of(40))
    rig.fill(2, prompt_of(9))
    rig.insert(0, prompt)
    rig.step(2)
    rig.begin(0, prompt)
    rig.step(2)
    for slot in (0, 1, 2):
        rig.check(slot)


@pytest.mark.parametrize("family", ["qwen2-hybrid", "gemma3"])
def test_the_row_of_a_window_that_no_token_has_is_zero(
    opened: Opened, reference: Models, route: str, family: str
) -> None:
    rig = opened(reference(family), atom_import=route)
    rig.serve(0, prompt_of(WINDOW - 1), 2 * WINDOW)
    rig.fill(0, prompt_of(WINDOW))
    for name, tensor in rig.memory(0).items():
        if tensor.shape[2] == WINDOW:
            assert not tensor[:, :, 0].any(), name
            assert tensor[:, :, 1:].all(), name


def test_a_row_is_shown_all_up_to_its_own_token_and_nothing_later(
    opened: Opened, reference: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The emulated attention is causal with any mask, so tokens do not show it."""
    rig, seen = opened(reference("gemma3")), []
    decoders = rig.device._loaded.decoders
    decode = decoders[4]
    monkeypatch.setitem(decoders, 4, lambda **inputs: seen.append(inputs) or decode(**inputs))
    for slot, length in enumerate((20, 50)):
        rig.fill(slot, prompt_of(length))
    rig.step()
    (inputs,) = seen
    assert inputs["cache_position"].flatten().tolist() == [50, 20, 0, 0]
    assert inputs["attention_mask"].sum(1).tolist() == [51, 21, 1, 1]
    assert inputs["attention_mask"][0, :51].all()


def test_graphs_that_want_the_longest_row_first_get_it_so(
    opened: Opened, reference: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """optimum-rbln checks it itself for this generation of chips."""
    monkeypatch.setattr(rebel, "NPU", "RBLN-CR13")
    rig = opened(reference("llama"), **FLASH)
    assert rig.device._rbln.requires_batch_sort
    for slot, length in enumerate((20, 1040, 5)):
        rig.fill(slot, prompt_of(length))
    rig.step(2)
    for slot in range(3):
        rig.check(slot)


# What is no number


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", [0, 1], ids=["k", "v"])
def test_a_cache_with_what_is_no_number_is_refused_and_its_slot_serves_the_next(
    llama: Rig, number: float, side: int
) -> None:
    sides = [torch.ones(2, 5, 12), torch.ones(2, 5, 12)]
    sides[side][1, 4, 11] = number
    with pytest.raises(DeviceError, match=r"KV of layer 1 reaches .*float32 holds"):
        llama.device.insert(0, 1, 0, 5, *(raw(tensor) for tensor in sides))
    assert llama.device.figures["overflows"] == 1
    llama.device.evict(0)
    llama.serve(0, prompt_of(20))


def test_a_slot_whose_logits_overflowed_serves_the_next_job(rig: Rig) -> None:
    rig.spoil(0, 60)
    assert any(tensor.isnan().any() for tensor in rig.memory(0).values())
    rig.fill(2, prompt_of(40))
    rig.serve(0, prompt_of(5))
    assert not any(tensor.isnan().any() for tensor in rig.memory(0).values())
    rig.serve(0, prompt_of(70))
    rig.check(2)


def test_a_slot_whose_second_block_overflowed_serves_a_job_of_one_block(
    opened: Opened, reference: Models, route: str
) -> None:
    rig = opened(reference("llama"), atom_import=route, **FLASH)
    rig.spoil(0, 1500)
    rig.serve(0, prompt_of(5))


@pytest.mark.parametrize("shape", [{}, FLASH], ids=["eager", "flash"])
def test_what_an_earlier_worker_left_in_the_chip_spoils_no_job(
    opened: Opened, reference: Models, monkeypatch: pytest.MonkeyPatch, shape: dict[str, int], route: str
) -> None:
    monkeypatch.setattr(rebel, "RUBBISH", float("nan"))
    rig = opened(reference("llama"), atom_import=route, **shape)
    for slot in range(4):
        rig.serve(slot, prompt_of(5))


# Range


@pytest.mark.parametrize("wire", ["float32", "bfloat16"])
def test_a_cache_beyond_the_chips_range_is_refused_with_its_layer_and_the_slot_stays_usable(
    opened: Opened, reference: Models, route: str, wire: str
) -> None:
    rig = opened(reference("llama"), atom_import=route, dtype=wire, atom_dtype="float16")
    prompt = prompt_of(20)
    rig.fill(1, prompt)
    rig.step(3)
    undisturbed = rig.evict(1).logits
    for sign in (1, -1):
        too_far = raw(torch.full((2, 3, 12), sign * 7e4, dtype=rig.wire))
        one = raw(torch.ones((2, 3, 12), dtype=rig.wire))
        for sides in ((too_far, one), (one, too_far)):
            rig.device.insert(0, 0, 0, 3, one, one)
            with pytest.raises(DeviceError, match=r"KV of layer 1 reaches .*70\d{3}, torch\.float16 holds ±65504"):
                rig.device.insert(0, 1, 0, 3, *sides)
            rig.device.evict(0)
    assert rig.device.figures["overflows"] == 4
    rig.fill(0, prompt)
    rig.step(3)
    np.testing.assert_array_equal(rig.evict(0).logits, undisturbed)


def test_what_the_chips_range_just_holds_is_taken(opened: Opened, reference: Models) -> None:
    rig = opened(reference("llama"), atom_dtype="float16")
    edge = raw(torch.full((2, 1, 12), 65504.0))
    rig.device.insert(0, 0, 0, 1, edge, edge)
    assert rig.device.figures["overflows"] == 0


# Arguments


def test_what_would_give_wrong_text_is_refused_and_nothing_is_broken_afterwards(rig: Rig) -> None:
    device, room, row = rig.device, rig.device.max_tokens, bytes(rig.device.geometry.token_bytes)
    with pytest.raises(DeviceError, match="needs a slot that has begun"):
        device.step()
    rig.fill(3, prompt_of(WINDOW))
    rig.step()
    for start, tokens in ((room, 1), (-1, 1), (0, 0), (room - 1, 2)):
        with pytest.raises(DeviceError, match="do not fit"):
            device.insert(0, 0, start, tokens, row * tokens, row * tokens)
    for layer, shape in enumerate(device.geometry.layers):
        if shape.window:
            with pytest.raises(DeviceError, match=f"do not fit layer {layer}"):
                device.insert(0, layer, 0, WINDOW + 1, row * (WINDOW + 1), row * (WINDOW + 1))
    for k, v in ((row, row * 2), (row * 2, row), (row * 3, row * 3), (b"", b"")):
        with pytest.raises(DeviceError, match="bytes for 2 tokens"):
            device.insert(0, 0, 0, 2, k, v)
    with pytest.raises(DeviceError, match="slot 3 is in use"):
        device.insert(3, 0, 0, 1, row, row)
    with pytest.raises(DeviceError, match="slot 3 was not filled"):
        device.begin(3, 5, 1)
    with pytest.raises(DeviceError, match="slot 0 was not filled"):
        device.begin(0, 5, 1)
    for length in (0, -1, room):
        with pytest.raises(DeviceError, match="no room to step"):
            device.begin(0, length, 1)
    for token in (-1, 300):
        with pytest.raises(DeviceError, match="token ids must be 0 to 299"):
            device.begin(0, 5, token)
        with pytest.raises(DeviceError, match="token ids must be 0 to 299"):
            device.commit(3, token)
    for length in (19, 21):  # of 20
        rig.insert(0, prompt_of(20))
        with pytest.raises(DeviceError, match=r"layer \d of slot 0 lacks some"):
            device.begin(0, length, 1)
        device.evict(0)
    rig.step()
    rig.fill(0, prompt_of(20))
    rig.step(2)
    rig.check(0)
    rig.check(3)


def test_a_cache_that_lacks_a_layer_or_tokens_does_not_begin(rig: Rig) -> None:
    prompt, pieces = prompt_of(40), []
    real = rig.device.insert
    rig.device.insert = lambda *arguments: pieces.append(arguments)
    rig.insert(0, prompt)
    rig.device.insert = real
    last = max(layer for _, layer, *_ in pieces)
    middle = next(piece for piece in pieces if piece[1] == last and piece[2] >= 28)
    for kept in (
        [piece for piece in pieces if piece[1] != last],
        [piece for piece in pieces if piece is not middle],
        [piece for piece in pieces if piece[2:4] != (35, 5)],
        pieces[1:],
        [(slot, layer, start + 1, *rest) for slot, layer, start, *rest in pieces],
    ):
        for piece in kept:
            rig.device.insert(*piece)
        with pytest.raises(DeviceError, match=r"layer \d of slot 0 lacks some of the tokens"):
            rig.device.begin(0, 40, 1)
        rig.device.evict(0)
    rig.serve(0, prompt)


def test_one_piece_twice_does_not_make_up_for_another_that_is_missing(llama: Rig) -> None:
    for layer, (k, v) in enumerate(llama.reference.cache(prompt_of(3 * PIECE))):
        for start in (0, PIECE, PIECE):
            rows = slice(start, start + PIECE)
            llama.device.insert(0, layer, start, PIECE, raw(k[:, rows]), raw(v[:, rows]))
    with pytest.raises(DeviceError, match="lacks some of the tokens"):
        llama.device.begin(0, 3 * PIECE, 1)


def test_an_evicted_slot_remembers_no_piece(rig: Rig) -> None:
    rig.insert(0, prompt_of(20))
    rig.device.evict(0)
    with pytest.raises(DeviceError, match="slot 0 was not filled"):
        rig.device.begin(0, 20, 1)
    rig.serve(0, prompt_of(9))


# The graphs that import and export


def caches(blocks: int = 4) -> list[torch.Tensor]:
    return [torch.full((blocks, 2, 8, 12), float(index)) for index in range(4)]


def fresh(seed: int) -> list[torch.Tensor]:
    """K and V of two layers."""
    return list(torch.randn((2, 2, 2, 8, 12), generator=torch.Generator().manual_seed(seed)))


def block(number: int) -> torch.Tensor:
    return torch.tensor([number], dtype=torch.int16)


def traced(graph: torch.nn.Module, *inputs: torch.Tensor) -> Callable[..., list[torch.Tensor]]:
    with warnings.catch_warnings():
        for message in ("torch.tensor results are", "Encountering a list at the output"):
            warnings.filterwarnings("ignore", message, torch.jit.TracerWarning)
        warnings.filterwarnings("ignore", ".torch.jit.trace", DeprecationWarning)
        return torch.jit.trace(graph, inputs, check_trace=False)


def test_a_traced_import_graph_writes_the_block_that_it_is_told_at_each_call() -> None:
    write = traced(ImportGraph(), *fresh(0), block(1), *caches())
    memory = caches()
    k, v = fresh(1)
    write(k, v, block(3), *memory)
    for index, (tensor, before) in enumerate(zip(memory, caches(), strict=True)):
        assert torch.equal(tensor[3], (k, v)[index % 2][index // 2])
        assert torch.equal(tensor[:3], before[:3])


def test_a_traced_export_graph_reads_the_block_that_it_is_told_at_each_call() -> None:
    read = traced(ExportGraph(), block(1), *caches())
    memory = [tensor + torch.arange(4.0).view(4, 1, 1, 1) * 100 for tensor in caches()]
    for tensor, answer in zip(memory, read(block(2), *memory), strict=True):
        assert torch.equal(answer, tensor[2:3])
