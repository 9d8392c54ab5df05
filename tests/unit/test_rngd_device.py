"""The rngd device's computation, on plain modules of PyTorch: the same as transformers' own model, in float32."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from pipeline.config import Config
from pipeline.errors import Cancelled, DeviceError
from pipeline.model import SIM, Model
from tests.unit.test_torch_device import FAMILIES, SMALL, WINDOW, prompt_of
from workers import checklist
from workers.devices.family import geometry, load_weights, text_config
from workers.devices.rngd.checklist import device_checks
from workers.devices.rngd.graphs import Network
from workers.devices.rngd.plan import Plan
from workers.devices.rngd.prefill import IN_FLIGHT, RngdPrefill
from workers.validate import Native

CONTEXT = 256
WIDTHS = (16, 32, 64)
CLOSE = 5e-5
IMAGES = "gemma3-images"
ONE_HEAD = "one-kv-head"


class OnTheHost:
    """An executor for which a graph is the module itself. It keeps account of what is launched and not yet fetched."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.launches = self.in_flight = self.most_in_flight = 0

    def load(self, name: str, module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> Callable[..., object]:
        self.loaded.append(name)
        shapes = [tensor.shape for tensor in inputs]

        def launch(*given: torch.Tensor) -> object:
            assert [tensor.shape for tensor in given] == shapes, "a compiled graph takes its own shapes and no others"
            self.launches += 1
            return module(*given)

        return launch

    def put(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Callable[[], list[torch.Tensor]]:
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)

        def wait() -> list[torch.Tensor]:
            self.in_flight -= 1
            # as the chip answers for one KV head, whatever `contiguous` was told
            return [t.transpose(1, 2).contiguous() if t.dim() == 4 and t.shape[1] == 1 else t.clone() for t in tensors]

        return wait


class Rig:
    def __init__(self, directory: Path, plan: Plan | None = None, max_tokens: int = CONTEXT) -> None:
        config, model = Config(model=str(directory), context=CONTEXT), Model(directory)
        self.network = load_weights(model, torch.float32, "eager")
        hf = text_config(model, config)
        self.executor = OnTheHost()
        self.progress: list[tuple[str, int, int]] = []
        self.device = RngdPrefill(
            Network(self.network),
            geometry(hf, torch.float32, "digest"),
            self.executor,
            plan or Plan(WIDTHS, CONTEXT),
            max_tokens=max_tokens,
            vocabulary=int(hf.vocab_size),
            progress=lambda *said: self.progress.append(said),
        )

    def prefill(self, prompt: list[int]) -> tuple[dict[int, tuple[int, np.ndarray, np.ndarray]], np.ndarray]:
        """layer → (first token, K, V `[kv_heads, tokens, head_dim]`), and the logits."""
        pieces: dict[int, list[tuple[int, int, np.ndarray, np.ndarray]]] = {}
        heads, dim = self.device.geometry.kv_heads, self.device.geometry.head_dim

        def on_layer(layer: int, start: int, tokens: int, *kv: memoryview) -> None:
            k, v = (np.frombuffer(b, dtype=np.float32).reshape(heads, tokens, dim) for b in kv)
            pieces.setdefault(layer, []).append((start, tokens, k, v))

        running, logits = self.device.begin(prompt), None
        while logits is None:
            logits = running.advance(on_layer, bool)
        joined = {}
        for layer, parts in pieces.items():
            following = parts[0][0]
            for start, tokens, *_ in parts:
                assert start == following, "pieces come in order, without gaps"
                following += tokens
            assert following == len(prompt)
            joined[layer] = (parts[0][0], *(np.concatenate([part[side] for part in parts], 1) for side in (2, 3)))
        return joined, logits

    def check(self, prompt: list[int]) -> None:
        found, logits = self.prefill(prompt)
        with torch.inference_mode():
            wanted = self.network(torch.tensor([prompt]), use_cache=True)
        assert len(found) == len(self.device.geometry.layers)
        for layer, (first, k, v) in found.items():
            assert first == self.device.geometry.layers[layer].first_token(len(prompt))
            cache = wanted.past_key_values.layers[layer]
            for mine, native in ((k, cache.keys), (v, cache.values)):
                rows = native[0, :, first - len(prompt) :].numpy()
                assert np.abs(mine - rows).max() < CLOSE, f"layer {layer} of {len(prompt)} tokens"
        assert np.abs(logits - wanted.logits[0, -1].numpy()).max() < CLOSE
        assert logits.argmax() == int(wanted.logits[0, -1].argmax())


def save(family: str, path: Path) -> Path:
    torch.manual_seed(1)
    if family == IMAGES:
        vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
        config: transformers.PreTrainedConfig = transformers.Gemma3Config(
            text_config=FAMILIES["gemma3"].to_dict(),
            vision_config={**vision, "image_size": 28, "patch_size": 14},
            mm_tokens_per_image=4,
        )
    elif family == ONE_HEAD:
        config = transformers.LlamaConfig(**{**SMALL, "num_key_value_heads": 1})
    else:
        config = FAMILIES[family]
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
    (path / "tokenizer.json").write_bytes((SIM / "tokenizer.json").read_bytes())
    return path


@pytest.fixture(params=[*FAMILIES, IMAGES, ONE_HEAD], scope="module")
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return Rig(save(request.param, tmp_path_factory.mktemp(request.param)))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Rig:
    return Rig(save("llama", tmp_path_factory.mktemp("llama")))


@pytest.mark.parametrize("length", [1, 5, WINDOW - 1, WINDOW, WINDOW + 1, 31, 32, 33, 63, 64])
def test_one_chunk_of_every_width_equals_transformers(rig: Rig, length: int) -> None:
    rig.check(prompt_of(length))


@pytest.mark.parametrize("length", [65, 70, 80, 81, 96, 128, 129, 130, 160, 192, 200, 255, 256])
def test_chunks_with_a_past_equal_transformers(rig: Rig, length: int) -> None:
    assert len(rig.device.plan.chunks(length)) > 1
    rig.check(prompt_of(length))


def test_what_padding_stands_for_is_in_no_answer(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Padded tails of ids, and padded heads of pasts, hold other rubbish: every bit of K, V and logits stays."""
    prompt = prompt_of(70)
    before, logits = rig.prefill(prompt)
    network = rig.device.network
    embed, zeros = network.embed, torch.zeros

    def rubbish_ids(ids: torch.Tensor) -> torch.Tensor:
        answer = embed(ids).clone()
        answer[:, next((i for i, t in enumerate(ids[0]) if t == 0), ids.shape[1]) :] = 7.0
        return answer

    def rubbish_past(shape: tuple[int, ...], **options: object) -> torch.Tensor:
        return torch.full(shape, 3.0, **options)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(network, "embed", rubbish_ids)
    monkeypatch.setattr("workers.devices.rngd.prefill.torch.zeros", rubbish_past)
    after, other_logits = rig.prefill(prompt)
    monkeypatch.setattr("workers.devices.rngd.prefill.torch.zeros", zeros)
    for layer, (_, k, v) in before.items():
        assert np.array_equal(k, after[layer][1])
        assert np.array_equal(v, after[layer][2])
    assert np.array_equal(logits, other_logits)


def test_a_cancel_is_seen_before_every_launch(llama: Rig) -> None:
    layers = len(llama.device.network.layers)
    for after in range(2 * layers):  # two chunks
        llama.executor.launches = 0
        running = llama.device.begin(prompt_of(70))
        if after >= layers:  # the first chunk goes through
            assert running.advance(lambda *_: None, bool) is None
        with pytest.raises(Cancelled):
            running.advance(lambda *_: None, lambda after=after: llama.executor.launches == after)
        assert llama.executor.launches == after
        with pytest.raises(DeviceError, match="cancelled, has failed, or is finished"):
            running.advance(lambda *_: None, bool)
    llama.executor.in_flight = 0
    llama.check(prompt_of(70))


def test_at_most_two_launches_are_under_way_and_layers_come_while_later_ones_run(llama: Rig) -> None:
    llama.executor.in_flight = llama.executor.most_in_flight = llama.executor.launches = 0
    launched_when: list[int] = []
    running = llama.device.begin(prompt_of(20))
    assert running.advance(lambda *_: launched_when.append(llama.executor.launches), bool) is not None
    assert llama.executor.most_in_flight == IN_FLIGHT
    layers = len(llama.device.network.layers)
    assert launched_when == [*range(IN_FLIGHT, layers + 1), layers]


def test_prompts_take_turns_between_chunks_and_do_not_disturb_each_other(llama: Rig) -> None:
    prompts = [prompt_of(130), prompt_of(130, 1)]
    alone = [llama.prefill(prompt)[1] for prompt in prompts]
    running = [llama.device.begin(prompt) for prompt in prompts]
    answers: list[np.ndarray | None] = [None, None]
    while None in [answer is not None or None for answer in answers]:
        for index, one in enumerate(running):
            if answers[index] is None:
                answers[index] = one.advance(lambda *_: None, bool)
    assert all(np.array_equal(a, b) for a, b in zip(alone, answers, strict=True))


def test_an_oversized_request_is_refused_and_the_device_is_good_for_the_next(llama: Rig) -> None:
    with pytest.raises(DeviceError, match="257 prompt tokens; this device holds 256"):
        llama.device.begin(prompt_of(CONTEXT + 1))
    for tokens in ([], [300], [-1]):
        with pytest.raises(DeviceError, match="token ids must be 0 to 299"):
            llama.device.begin(tokens)
    llama.check(prompt_of(9))


def test_every_graph_that_a_prompt_needs_is_loaded_at_the_start_with_progress(llama: Rig) -> None:
    names = list(llama.executor.loaded)
    assert len(names) == len(set(names))
    for length in range(1, CONTEXT + 1, 7):
        llama.device.begin(prompt_of(length)).advance(lambda *_: None, bool)
    assert llama.executor.loaded == names
    numbers = [(number, count) for _, number, count in llama.progress]
    assert numbers == [(number, len(names)) for number in range(len(names))]


def test_all_layers_of_a_kind_share_a_graph(rig: Rig) -> None:
    kinds = {name.rsplit("-", 2)[0] for name in rig.executor.loaded} - {"head"}
    assert kinds == set(rig.device.network.kinds)
    weights = rig.device.network.weights(0)
    exported = torch.export.export(
        rig.device.network.layer_graph(rig.device.network.kinds[0], has_past=False),
        (
            torch.zeros(1, 16, rig.device.network.embed.embedding_dim),
            *rig.device.network.angles(rig.device.network.kinds[0], torch.zeros(1, 16, 1), torch.arange(16)[None]),
            rig.device.network.mask(rig.device.network.kinds[0], 0, 16, 0),
            *weights,
        ),
    )
    assert not list(exported.parameters()), "weights are inputs, not parts of the graph"


# The plan


def test_chunks_cover_a_prompt_and_only_the_last_is_padded() -> None:
    plan = Plan((128, 512, 2048), 9216)
    for tokens in range(1, 9217):
        chunks = plan.chunks(tokens)
        assert [chunk.start for chunk in chunks] == [sum(c.tokens for c in chunks[:i]) for i in range(len(chunks))]
        assert sum(chunk.tokens for chunk in chunks) == tokens
        assert all(chunk.tokens == chunk.width for chunk in chunks[:-1])
        assert 0 < chunks[-1].tokens <= chunks[-1].width
        assert sum(chunk.width for chunk in chunks) < tokens + 512, "padding is bounded"


@pytest.mark.parametrize(
    ("tokens", "widths"),
    [(1, [128]), (128, [128]), (500, [512]), (2048, [2048]), (2100, [2048, 128]), (4000, [2048, 2048]), (8000, [8192])],
)
def test_a_prompt_is_cut_where_that_computes_least(tokens: int, widths: list[int]) -> None:
    assert [chunk.width for chunk in Plan((128, 512, 2048, 8192), 9216).chunks(tokens)] == widths


def test_widths_that_no_prompt_needs_are_left_out() -> None:
    assert Plan((128, 512, 2048, 8192), 1000).widths == [128, 512, 2048]
    assert Plan((128, 512, 2048, 8192), 100).widths == [128]
    assert Plan((8192,), 100).widths == [8192]


def test_the_past_of_a_chunk_finds_a_length_that_holds_it() -> None:
    plan = Plan((128, 512, 2048, 8192), 9216)
    assert plan.past_lengths == [128, 512, 2048, 8192, 9216]
    assert all(any(length >= start for length in plan.past_lengths) for start, _ in plan.starts())


def test_least_padding_is_a_real_choice() -> None:
    """Were the guess about launches wrong, only speed would suffer; but a wide chunk for a few tokens is never right."""
    plan = Plan((16, 64), 256)
    assert [chunk.width for chunk in plan.chunks(65)] == [64, 16]
    assert [chunk.width for chunk in plan.chunks(120)] == [64, 64]


# The checklist


def test_the_checklist_passes_on_a_good_device_and_names_what_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rig = Rig(save("gemma3", tmp_path), Plan((16, 32), 64), max_tokens=64)
    native = Native(Model(tmp_path), rig.device)
    assert checklist.run(device_checks(rig.device, native)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 9
    assert all(line.startswith("PASS  ") for line in lines), lines
    mask = rig.device.network.mask
    monkeypatch.setattr(rig.device.network, "mask", lambda *shape: torch.zeros_like(mask(*shape)))
    assert checklist.run(device_checks(rig.device, native)) == 1
    failed = [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAIL  ")]
    assert len(failed) == 7, "parity at each of six lengths, and causality"
    assert "FAIL  no token sees a later one: Failed: layer 1 changes" in failed[-1]
    monkeypatch.setattr(RngdPrefill, "logits", lambda *_: np.random.default_rng().normal(size=300).astype(np.float32))
    checklist.run(device_checks(rig.device, native))
    assert "FAIL  nothing of one prompt is left for the next" in capsys.readouterr().out
