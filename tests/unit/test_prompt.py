"""The own forward of prompts against transformers' forward: small models with random weights."""

import gc
import itertools
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

import workers.devices.torch as torch_device
from pipeline.config import Config
from pipeline.errors import Cancelled, DeviceError
from pipeline.model import Model
from tests.unit.test_forward import saved
from tests.unit.test_torch_device import SMALL, WINDOW, prompt_of
from workers.devices.bfloat16 import is_here
from workers.devices.torch import OwnPrompt, TorchPrefill, open_prefill

pytestmark = pytest.mark.skipif(not is_here(), reason="this CPU cannot multiply bfloat16")

HEADS = {**SMALL, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16}
HYBRID = {"use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1}
MODELS = {
    "llama": transformers.LlamaConfig(**HEADS),
    "one-head": transformers.LlamaConfig(**{**HEADS, "num_attention_heads": 3, "num_key_value_heads": 3}),
    "qwen2": transformers.Qwen2Config(**{**SMALL, "num_attention_heads": 3, "num_key_value_heads": 1}, **HYBRID),
    "qwen3": transformers.Qwen3Config(**{**HEADS, "head_dim": 32}),
    "gemma3": transformers.Gemma3TextConfig(
        **{**HEADS, "num_hidden_layers": 6, "initializer_range": 0.06},
        sliding_window=WINDOW,
        query_pre_attn_scalar=24,
    ),
}
LENGTHS = (1, WINDOW - 1, WINDOW, WINDOW + 1, 31, 70)
Handed = list[tuple[int, int, int]]


@pytest.fixture(params=MODELS, scope="module")
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp(request.param), MODELS[request.param])


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return saved(tmp_path / "model", MODELS["llama"])


def opened(
    directory: Path, dtype: str = "bfloat16", *, own: bool = True, chunk: int = 512, threads: int = 1
) -> TorchPrefill:
    config = Config(
        model=str(directory), cache=str(directory), context=512, dtype=dtype, chunk=chunk, prefill_threads=threads
    )
    with pytest.MonkeyPatch.context() as patch:
        if not own:
            patch.setattr(torch_device, "unknown", lambda *_: "the test compares them")
        device: TorchPrefill = open_prefill(config, Model(directory))
    assert isinstance(device.begin([1]), OwnPrompt) == own
    return device


def computed(device: TorchPrefill, tokens: list[int]) -> tuple[Handed, NDArray[np.float32], NDArray[np.float32]]:
    """What was handed out, its numbers token by token, and the logits."""
    handed: Handed = []
    numbers = []

    def on_layer(layer: int, start: int, count: int, k: memoryview, v: memoryview) -> None:
        handed.append((layer, start, count))
        for part in (k, v):
            tensor = torch.frombuffer(bytearray(part), dtype=getattr(torch, device.geometry.dtype)).float()
            numbers.append(tensor.view(device.geometry.kv_heads, count, -1).transpose(0, 1).numpy())

    running = device.begin(tokens)
    while (logits := running.advance(on_layer, bool)) is None:
        pass
    return handed, np.concatenate([part.ravel() for part in numbers]), logits


@pytest.mark.parametrize("chunk", [512, 24])
def test_it_is_as_far_from_float32_as_transformers_and_hands_out_the_same(directory: Path, chunk: int) -> None:
    exact = opened(directory, "float32", own=False, chunk=chunk)
    own, reference = opened(directory, chunk=chunk), opened(directory, own=False, chunk=chunk)
    errors = np.zeros((2, 2))
    for length in LENGTHS:
        handed, *wanted = computed(exact, prompt_of(length))
        for row, device in enumerate((own, reference)):
            found, *numbers = computed(device, prompt_of(length))
            assert found == handed
            errors[row] += [np.linalg.norm(n - w) ** 2 for n, w in zip(numbers, wanted, strict=True)]
    assert (np.sqrt(errors[0]) < 1.5 * np.sqrt(errors[1])).all(), np.sqrt(errors)


def test_chunks_and_threads_change_no_bit(directory: Path) -> None:
    """Each sum has its order, and what has not come yet, or is behind the window, has no part in it."""
    devices = [opened(directory, chunk=chunk) for chunk in (512, 24, 7)] + [opened(directory, threads=2)]
    for length in LENGTHS:
        (_, _, wanted), *others = [computed(device, prompt_of(length)) for device in devices]
        for _, _, logits in others:
            np.testing.assert_array_equal(logits, wanted)


def test_threads_that_come_and_go_change_no_bit(llama: Path) -> None:
    device = opened(llama)
    (_, _, wanted), cores = computed(device, prompt_of(70)), device._loaded.cores
    seen = itertools.cycle((2, 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cores, "look", lambda: setattr(cores, "now", next(seen)))
        np.testing.assert_array_equal(computed(device, prompt_of(70))[2], wanted)


@pytest.mark.parametrize("own", [True, False])
def test_others_may_have_the_cores_between_chunks_and_after_a_cancel(llama: Path, own: bool) -> None:
    device = opened(llama, chunk=16, own=own)
    cores, computes = device._loaded.cores, []
    prompt = device.begin(prompt_of(70))
    assert prompt.advance(lambda *_: computes.append(cores.computes), bool) is None
    assert computes
    assert all(computes)
    assert not cores.computes
    with pytest.raises(Cancelled):
        prompt.advance(lambda *_: None, lambda: True)
    assert not cores.computes


def test_two_prompts_take_turns(llama: Path) -> None:
    device = opened(llama, chunk=16)
    prompts = [prompt_of(70, seed=1), prompt_of(33, seed=2)]
    wanted = [computed(device, prompt)[2] for prompt in prompts]
    running = [device.begin(prompt) for prompt in prompts]
    for _ in range(2):
        assert [prompt.advance(lambda *_: None, bool) for prompt in running] == [None, None]
    np.testing.assert_array_equal(running[1].advance(lambda *_: None, bool), wanted[1])
    logits = None
    while logits is None:
        logits = running[0].advance(lambda *_: None, bool)
    np.testing.assert_array_equal(logits, wanted[0])


def test_a_cancel_between_layers_ends_a_prompt_and_no_other(llama: Path) -> None:
    device = opened(llama)
    wanted = computed(device, prompt_of(40))[2]
    asked: list[bool] = []
    handed: list[int] = []

    def cancelled() -> bool:
        asked.append(len(asked) == 2)
        return asked[-1]

    running = device.begin(prompt_of(60))
    with pytest.raises(Cancelled):
        running.advance(lambda layer, *_: handed.append(layer), cancelled)
    assert handed == [0, 1]
    with pytest.raises(DeviceError, match="cancelled"):
        running.advance(lambda *_: None, bool)
    np.testing.assert_array_equal(computed(device, prompt_of(40))[2], wanted)


def test_a_prompt_that_is_dropped_frees_its_memory_without_a_collection(llama: Path) -> None:
    running = opened(llama, chunk=16).begin(prompt_of(40))
    running.advance(lambda *_: None, bool)
    assert isinstance(running, OwnPrompt)
    assert running._prompt._layers is not None
    memory = weakref.ref(running._prompt._layers[0])
    gc.disable()
    try:
        del running
        assert memory() is None
    finally:
        gc.enable()


def test_a_nan_stays_one(llama: Path) -> None:
    """Text of NaNs would look like any other."""
    device = opened(llama)
    assert device._own is not None
    tokens = prompt_of(40)
    with torch.inference_mode():
        device._own.layers._embed._rows[tokens[5]] = torch.nan
    assert np.isnan(computed(device, tokens)[2]).all()


def test_what_is_handed_out_is_never_written_again(llama: Path) -> None:
    device = opened(llama, chunk=16)
    kept: list[tuple[memoryview, bytes]] = []
    for _ in range(2):
        running = device.begin(prompt_of(50))
        logits = None
        while logits is None:
            logits = running.advance(lambda *block: kept.extend((part, bytes(part)) for part in block[3:]), bool)
    assert all(bytes(part) == then for part, then in kept)


@pytest.mark.parametrize(("dtype", "head_dim"), [("float32", 16), ("bfloat16", 12)])
def test_what_does_not_fit_is_left_to_transformers(tmp_path: Path, dtype: str, head_dim: int) -> None:
    path = saved(tmp_path / "model", transformers.LlamaConfig(**{**HEADS, "head_dim": head_dim}))
    config = Config(model=str(path), cache=str(tmp_path), context=512, dtype=dtype, prefill_threads=1)
    assert not isinstance(open_prefill(config, Model(path)).begin([1]), OwnPrompt)
