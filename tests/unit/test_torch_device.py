"""The torch device against transformers' own `generate`, in float32, on small models with random weights."""

import gc
import json
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from pipeline.config import Config
from pipeline.errors import Cancelled, ConfigError, DeviceError
from pipeline.model import SIM, Model
from workers.devices.torch import TorchDecode, TorchPrefill, open_decode, open_prefill

WINDOW = 16
NEW = 12
SMALL = {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": 0.3,  # large enough that every cached token matters to the next one
}
FAMILIES = {
    "llama": transformers.LlamaConfig(**SMALL),
    "qwen2": transformers.Qwen2Config(**SMALL),
    "qwen3": transformers.Qwen3Config(**SMALL, head_dim=32),
    "gemma3": transformers.Gemma3TextConfig(
        **{**SMALL, "num_hidden_layers": 6, "initializer_range": 0.06},
        head_dim=24,
        sliding_window=WINDOW,
        query_pre_attn_scalar=24,
    ),
    "qwen2-hybrid": transformers.Qwen2Config(
        **SMALL, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
}
Block = tuple[int, int, int, bytes, bytes]


class Pair:
    """A prefill and a decode device on the same model, and the reference."""

    def __init__(self, directory: Path, cache: Path, chunk: int) -> None:
        config = Config(
            model=str(directory), cache=str(cache), context=256, chunk=chunk, slots=4, dtype="float32", decode_threads=1
        )
        self.prefill: TorchPrefill = open_prefill(config, Model(directory))
        self.decode: TorchDecode = open_decode(config, Model(directory))
        self.reference = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)

    def expected(self, prompt: list[int], new: int = NEW) -> list[int]:
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = self.reference.generate(torch.tensor([prompt]), max_new_tokens=new, do_sample=False)
        return list(out[0, len(prompt) :].tolist())

    def cache(self, prompt: list[int]) -> tuple[list[Block], int]:
        """KV as it would go over the wire, and the first token."""
        blocks: list[Block] = []
        running = self.prefill.begin(prompt)
        logits = None
        while logits is None:
            logits = running.advance(lambda *block: blocks.append((*block[:3], bytes(block[3]), bytes(block[4]))), bool)
        return blocks, int(logits.argmax())

    def fill(self, slot: int, prompt: list[int], *, zeroed: bool = False) -> int:
        blocks, token = self.cache(prompt)
        for layer, start, tokens, k, v in blocks:
            self.decode.insert(slot, layer, start, tokens, bytes(len(k)) if zeroed else k, v)
        self.decode.begin(slot, len(prompt), token)
        return token

    def step(self, answers: dict[int, list[int]]) -> None:
        logits = self.decode.step()
        for slot, answer in answers.items():
            answer.append(int(logits[slot].argmax()))
            self.decode.commit(slot, answer[-1])


def prompt_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(length + 1000 * seed)
    return list(torch.randint(1, 300, (length,), generator=generator).tolist())


@pytest.fixture(params=FAMILIES, scope="module")
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[request.param])
    model.save_pretrained(path)
    (path / "tokenizer.json").write_bytes((SIM / "tokenizer.json").read_bytes())
    return path


@pytest.fixture(params=[8, 64], ids=["chunk8", "chunk64"], scope="module")
def pair(request: pytest.FixtureRequest, directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(directory, tmp_path_factory.mktemp("cache"), request.param)


@pytest.fixture(autouse=True)
def _empty_slots(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "pair" in request.fixturenames:
        decode = request.getfixturevalue("pair").decode
        for slot in range(decode.slots):
            decode.evict(slot)


def test_tokens_equal_generate_for_ragged_rows_below_at_and_above_the_window(pair: Pair) -> None:
    prompts = {slot: prompt_of(length) for slot, length in enumerate((3, WINDOW - 1, WINDOW, 50))}
    answers = {slot: [pair.fill(slot, prompt)] for slot, prompt in prompts.items()}
    for _ in range(NEW - 1):
        pair.step(answers)
    assert answers == {slot: pair.expected(prompt) for slot, prompt in prompts.items()}


def test_a_slot_is_refilled_while_others_go_on_and_idle_rows_harm_nobody(pair: Pair) -> None:
    long, first, second = prompt_of(40), prompt_of(5), prompt_of(WINDOW + 1)
    answers = {3: [pair.fill(3, long)]}  # rows 0 to 2 are idle
    pair.step(answers)
    answers[1] = [pair.fill(1, first)]
    for _ in range(2):
        pair.step(answers)
    pair.decode.evict(1)
    assert answers.pop(1) == pair.expected(first, 3)
    pair.step(answers)
    answers[1] = [pair.fill(1, second)]
    for _ in range(4):
        pair.step(answers)
    assert answers[1] == pair.expected(second, 5)
    assert answers[3] == pair.expected(long, len(answers[3]))


def test_an_idle_row_never_writes_into_a_slot_that_is_being_filled(pair: Pair) -> None:
    prompt = prompt_of(20)
    blocks, token = pair.cache(prompt)
    answers = {2: [pair.fill(2, prompt_of(9))]}
    for count, (layer, start, tokens, k, v) in enumerate(blocks):
        pair.decode.insert(0, layer, start, tokens, k, v)
        if count % 2:
            pair.step(answers)
    pair.decode.begin(0, len(prompt), token)
    answers[0] = [token]
    for _ in range(4):
        pair.step(answers)
    assert answers[0] == pair.expected(prompt, 5)


def test_a_zeroed_cache_gives_other_tokens(pair: Pair) -> None:
    prompt = prompt_of(50)
    answers = {0: [pair.fill(0, prompt, zeroed=True)]}
    for _ in range(NEW - 1):
        pair.step(answers)
    assert answers[0] != pair.expected(prompt)


def test_a_cancel_between_layers_leaves_the_device_usable(pair: Pair) -> None:
    asked: list[bool] = []

    def cancelled() -> bool:
        asked.append(len(asked) == 2)
        return asked[-1]

    running = pair.prefill.begin(prompt_of(60))
    with pytest.raises(Cancelled):
        running.advance(lambda *_: None, cancelled)
    assert asked == [False, False, True]
    prompt = prompt_of(30)
    answers = {0: [pair.fill(0, prompt)]}
    for _ in range(3):
        pair.step(answers)
    assert answers[0] == pair.expected(prompt, 4)


def test_two_prompts_may_take_turns_chunk_by_chunk(pair: Pair) -> None:
    prompts = [prompt_of(70, seed=1), prompt_of(33, seed=2)]
    running = {index: pair.prefill.begin(prompt) for index, prompt in enumerate(prompts)}
    first: dict[int, int] = {}
    while running:
        for index in list(running):
            logits = running[index].advance(lambda *_: None, bool)
            if logits is not None:
                first[index] = int(logits.argmax())
                del running[index]
    assert [first[index] for index in range(2)] == [pair.expected(prompt, 1)[0] for prompt in prompts]


def test_rows_of_any_length_have_the_logits_that_they_would_have_alone(pair: Pair) -> None:
    prompts = {0: prompt_of(9), 3: prompt_of(60)}
    together = {slot: pair.fill(slot, prompt) for slot, prompt in prompts.items()}
    both = pair.decode.step()
    for slot in prompts:
        pair.decode.evict(slot)
    for slot, prompt in prompts.items():
        assert pair.fill(slot, prompt) == together[slot]
        np.testing.assert_allclose(pair.decode.step()[slot], both[slot], atol=1e-4)
        pair.decode.evict(slot)


def test_a_cache_full_of_nan_spoils_nobody_who_comes_later(pair: Pair) -> None:
    for layer, start, tokens, k, _ in pair.cache(prompt_of(50))[0]:
        nan = np.full(len(k) // 4, np.nan, dtype=np.float32).tobytes()
        pair.decode.insert(0, layer, start, tokens, nan, nan)
    pair.decode.begin(0, 50, 1)
    assert np.isnan(pair.decode.step()[0]).all()
    pair.decode.evict(0)
    short, long = prompt_of(5), prompt_of(70)
    answers = {0: [pair.fill(0, short)], 1: [pair.fill(1, long)]}
    for _ in range(4):
        pair.step(answers)
    assert answers == {0: pair.expected(short, 5), 1: pair.expected(long, 5)}


def test_dropping_a_prompt_frees_its_memory_at_once(pair: Pair) -> None:
    running = pair.prefill.begin(prompt_of(100))
    running.advance(lambda *_: None, bool)
    gone = weakref.ref(running)
    gc.disable()
    try:
        del running
        assert gone() is None
    finally:
        gc.enable()


def test_a_cancelled_prompt_cannot_go_on(pair: Pair) -> None:
    running = pair.prefill.begin(prompt_of(60))
    with pytest.raises(Cancelled):
        running.advance(lambda *_: None, lambda: True)
    with pytest.raises(DeviceError, match="cancelled"):
        running.advance(lambda *_: None, bool)


def test_what_would_give_wrong_text_is_refused(pair: Pair) -> None:
    row = bytes(pair.decode.geometry.token_bytes)
    for slot, start, tokens in ((0, 256, 1), (0, -1, 1), (0, 0, 0)):
        with pytest.raises(DeviceError, match="do not fit"):
            pair.decode.insert(slot, 0, start, tokens, row * tokens, row * tokens)
    with pytest.raises(DeviceError, match="bytes for 2 tokens"):
        pair.decode.insert(0, 0, 0, 2, row, row)
    with pytest.raises(DeviceError, match="no room"):
        pair.decode.begin(0, 256, 1)
    with pytest.raises(DeviceError, match="token ids"):
        pair.decode.begin(0, 5, 300)
    with pytest.raises(DeviceError, match="has begun"):
        pair.decode.step()
    pair.fill(0, prompt_of(255))
    pair.decode.step()
    with pytest.raises(DeviceError, match="all its 256 tokens"):
        pair.decode.step()
    with pytest.raises(DeviceError, match="in use"):
        pair.decode.insert(0, 0, 0, 1, row, row)
    for prompt in ([], [300], [-1], [1] * 257):
        with pytest.raises(DeviceError):
            pair.prefill.begin(prompt)


def saved(path: Path, config: transformers.PreTrainedConfig) -> Path:
    torch.manual_seed(1)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def opened(path: Path, cache: Path, **settings: object) -> TorchPrefill:
    config = Config(model=str(path), cache=str(cache), **{"context": 256, "dtype": "float32", **settings})
    return open_prefill(config, Model(path))


def test_a_model_that_lacks_a_weight_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "model", FAMILIES["llama"])
    weights = load_file(path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(DeviceError, match=r"lacks 1 weights, model\.layers\.1\.mlp\.up_proj"):
        opened(path, tmp_path)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"model_type": "mistral"}, "type 'mistral' are not supported"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "'dynamic' RoPE"),
        ({"max_position_embeddings": 128}, "holds at most 128"),
        ({"hidden_size": 52}, "cannot be loaded"),
    ],
)
def test_a_model_that_cannot_work_is_refused_with_a_sentence(
    tmp_path: Path, change: dict[str, object], sentence: str
) -> None:
    path = saved(tmp_path / "model", FAMILIES["llama"])
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**values, **change}))
    with pytest.raises((DeviceError, ConfigError), match=sentence):
        opened(path, tmp_path)


def test_cuda_without_a_cuda_device_names_the_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="KVR_PREFILL_DEVICE=cuda"):
        opened(saved(tmp_path / "model", FAMILIES["llama"]), tmp_path, prefill_device="cuda")


def test_gemma3_with_images_serves_its_text_half(tmp_path: Path) -> None:
    text = FAMILIES["gemma3"].to_dict()
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    whole = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4)
    pair = Pair(saved(tmp_path / "model", whole), tmp_path, chunk=8)
    prompt = prompt_of(40)
    answers = {0: [pair.fill(0, prompt)]}
    for _ in range(5):
        pair.step(answers)
    assert answers[0] == pair.expected(prompt, 6)
