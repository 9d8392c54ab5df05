"""The own forward of decode steps against transformers' forward, on the same KV caches: small models with random weights."""

import copy
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray

import workers.devices.torch as torch_device
from pipeline.config import Config
from pipeline.model import SIM, Model
from tests.unit.test_torch_device import FAMILIES, SMALL, WINDOW
from workers.devices.layers import unknown
from workers.devices.torch import TorchDecode, open_decode

SLOTS = 8
LENGTHS = {0: 3, 1: WINDOW - 2, 2: WINDOW - 1, 4: WINDOW, 5: 400, 7: 60}  # 3 and 6 are idle
STEPS = 3

ROPE = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
VARIANTS = {
    **FAMILIES,
    "linear": transformers.LlamaConfig(**SMALL, rope_parameters={**ROPE, "rope_type": "linear"}),
    "yarn": transformers.LlamaConfig(**SMALL, rope_parameters={**ROPE, "rope_type": "yarn"}),
    "llama3": transformers.LlamaConfig(
        **SMALL, rope_parameters={**ROPE, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    ),
    "biased": transformers.LlamaConfig(**SMALL, attention_bias=True, mlp_bias=True, tie_word_embeddings=True),
    "gemma3-capped": transformers.Gemma3TextConfig(
        **{**SMALL, "num_hidden_layers": 6, "initializer_range": 0.06},
        head_dim=24,
        sliding_window=WINDOW,
        query_pre_attn_scalar=32,
        final_logit_softcapping=5.0,
    ),
}


@pytest.fixture(params=VARIANTS, scope="module")
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tmp_path_factory.mktemp(request.param), VARIANTS[request.param])


def saved(path: Path, config: transformers.PreTrainedConfig) -> Path:
    torch.manual_seed(2)
    model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(config))
    with torch.no_grad():
        for parameter in model.parameters():  # norms begin as ones, and biases as zeros: any mistake there would pass
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(path)
    (path / "tokenizer.json").write_bytes((SIM / "tokenizer.json").read_bytes())
    return path


def opened(directory: Path, cache: Path, dtype: str, *, own: bool) -> TorchDecode:
    config = Config(model=str(directory), cache=str(cache), context=512, slots=SLOTS, dtype=dtype, decode_threads=1)
    with pytest.MonkeyPatch.context() as patch:
        if not own:
            patch.setattr(torch_device, "unknown", lambda *_: "the test compares them")
        device: TorchDecode = open_decode(config, Model(directory))
    assert device.figures["forward"] == ("own" if own else "transformers")
    return device


def fill(device: TorchDecode, slot: int, length: int, *, nan: bool = False) -> None:
    """A KV cache of random numbers, the same for every device; or of none, and then the slot stays idle."""
    geometry = device.geometry
    generator = torch.Generator().manual_seed(length)
    for index, layer in enumerate(geometry.layers):
        first = layer.first_token(length)
        shape = (geometry.kv_heads, length - first, geometry.head_dim)
        k, v = (torch.randn(shape, generator=generator) * (np.nan if nan else 1) for _ in "kv")
        bits = (part.to(getattr(torch, geometry.dtype)).view(torch.uint8).numpy().tobytes() for part in (k, v))
        device.insert(slot, index, first, length - first, *bits)
    if not nan:
        device.begin(slot, length, length % SMALL["vocab_size"])


def stepped(device: TorchDecode) -> NDArray[np.float32]:
    """`[steps, busy slots, vocab]`"""
    for slot in range(SLOTS):
        fill(device, slot, LENGTHS.get(slot, 200), nan=slot not in LENGTHS)
    answers = []
    for step in range(STEPS):
        answers.append(device.step()[list(LENGTHS)])
        for slot in LENGTHS:
            device.commit(slot, step + slot)
    for slot in range(SLOTS):
        device.evict(slot)
    return np.stack(answers)


def test_logits_equal_transformers_for_mixed_lengths_beside_idle_slots_full_of_nan(
    directory: Path, tmp_path: Path
) -> None:
    own, reference = (stepped(opened(directory, tmp_path, "float32", own=own)) for own in (True, False))
    np.testing.assert_allclose(own, reference, rtol=1e-4, atol=1e-4 * float(np.abs(reference).max()))


def test_bfloat16_is_as_far_from_float32_as_with_transformers(directory: Path, tmp_path: Path) -> None:
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this CPU cannot compute in bfloat16")
    exact = stepped(opened(directory, tmp_path, "float32", own=False))
    own, reference = (stepped(opened(directory, tmp_path, "bfloat16", own=own)) - exact for own in (True, False))
    assert np.linalg.norm(own) < 1.5 * np.linalg.norm(reference)


def test_a_slot_can_be_used_again_after_a_longer_job_of_nan(directory: Path, tmp_path: Path) -> None:
    """If a row saw more than its own tokens, it would see NaN."""
    device = opened(directory, tmp_path, "float32", own=True)
    expected = stepped(device)
    for slot in LENGTHS:
        fill(device, slot, 450, nan=True)
        device.evict(slot)
    np.testing.assert_allclose(stepped(device), expected, rtol=1e-5, atol=1e-5)


def test_others_may_have_the_cores_once_all_slots_are_idle(tmp_path: Path) -> None:
    device = opened(saved(tmp_path / "model", VARIANTS["gemma3"]), tmp_path, "float32", own=True)
    cores = device._loaded.cores
    assert not cores.computes
    for slot in (0, 1):
        fill(device, slot, 20)
    device.step()
    device.evict(0)
    assert cores.computes
    device.evict(1)
    assert not cores.computes


def test_weights_are_in_memory_once(tmp_path: Path) -> None:
    device = opened(saved(tmp_path / "model", VARIANTS["gemma3"]), tmp_path, "float32", own=True)
    assert not [*device._loaded.decoder.parameters(), *device._loaded.head.parameters()]


class Other(torch.nn.Linear):
    """As an adapter or a quantized layer would be."""


def test_a_model_with_an_unknown_part_takes_transformers_forward_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = saved(tmp_path / "model", VARIANTS["llama"])
    load = torch_device.load_weights

    def changed(*args: object) -> torch.nn.Module:
        network = load(*args)
        network.model.layers[1].mlp.up_proj.__class__ = Other
        return network

    expected = stepped(opened(path, tmp_path, "float32", own=False))
    monkeypatch.setattr(torch_device, "load_weights", changed)
    with caplog.at_level(logging.WARNING):
        device = open_decode(
            Config(model=str(path), cache=str(tmp_path), context=512, slots=SLOTS, dtype="float32"), Model(path)
        )
    assert device.figures["forward"] == "transformers"
    assert "layer 1 has other than plain linear layers: mlp.up_proj" in caplog.text
    np.testing.assert_array_equal(stepped(device), expected)


def reason(network: torch.nn.Module) -> str | None:
    return unknown(network.get_decoder(), network.get_output_embeddings(), torch.float32)


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        (transformers.MistralConfig(**SMALL), "MistralModel is not known"),
        (transformers.Qwen3MoeConfig(**SMALL, num_experts=2, moe_intermediate_size=16), "Qwen3MoeModel is not known"),
    ],
)
def test_what_is_unknown_is_named(config: transformers.PreTrainedConfig, sentence: str) -> None:
    assert reason(transformers.AutoModelForCausalLM.from_config(config)) == sentence


def test_a_layer_that_has_more_or_less_is_unknown() -> None:
    network = transformers.AutoModelForCausalLM.from_config(FAMILIES["llama"])
    assert reason(network) is None
    network.model.layers[2].self_attn.sinks = torch.nn.Identity()
    assert reason(network) == "layer 2 differs in self_attn.sinks"
    del network.model.layers[2].self_attn.sinks, network.model.layers[2].mlp.gate_proj
    assert reason(network) == "layer 2 differs in mlp.gate_proj"
