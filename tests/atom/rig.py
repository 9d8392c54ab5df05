"""A device next to transformers' own model: small ones with random weights, in float32."""

import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from pipeline.config import Config
from pipeline.model import SIM, Model
from workers.chips import Chips
from workers.devices import open_decode
from workers.devices.family import FULL

WINDOW = 16
FLASH = {"context": 2048, "atom_partition": 1024}
PIECE = 7  # tokens of a layer that are inserted at once
CLOSE = 3e-4  # of logits up to ten
SMALL = {
    "vocab_size": 300,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16384,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
    "initializer_range": 0.3,  # large enough that every cached token matters to the next one
}
_GEMMA = transformers.Gemma3TextConfig(
    **{**SMALL, "num_hidden_layers": 6, "initializer_range": 0.06},
    head_dim=24,
    sliding_window=WINDOW,
    query_pre_attn_scalar=24,
)
_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
FAMILIES = {
    "llama": transformers.LlamaConfig(**SMALL),
    "llama-3": transformers.LlamaConfig(**{**SMALL, "num_hidden_layers": 3}),
    "qwen2": transformers.Qwen2Config(**SMALL),
    "qwen2-hybrid": transformers.Qwen2Config(
        **{**SMALL, "num_hidden_layers": 3}, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "qwen3": transformers.Qwen3Config(**SMALL, head_dim=32),
    "gemma3": _GEMMA,
    "gemma3-images": transformers.Gemma3Config(
        text_config=_GEMMA.to_dict(), vision_config=_VISION, mm_tokens_per_image=4
    ),
}


class Reference:
    """A model as transformers runs it, saved to a directory."""

    def __init__(self, family: str, directory: Path, seed: int = 1) -> None:
        torch.manual_seed(seed)
        self.directory = directory
        self.model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family]).eval()
        self.model.save_pretrained(directory)
        (directory / "tokenizer.json").write_bytes((SIM / "tokenizer.json").read_bytes())
        self.cache: Callable[[tuple[int, ...]], Any] = functools.lru_cache(64)(self._cache)
        self.generated: Callable[[tuple[int, ...], int], Any] = functools.lru_cache(64)(self._generated)

    def _generated(self, prompt: tuple[int, ...], new: int) -> tuple[list[int], np.ndarray]:
        """The next tokens, and the logits `[new, vocab]` that they were drawn from."""
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = self.model.generate(
                torch.tensor([prompt]),
                max_new_tokens=new,
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
            )
        return out.sequences[0, len(prompt) :].tolist(), torch.cat(out.logits).numpy()

    def _cache(self, prompt: tuple[int, ...]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """K and V of each layer, `[kv_heads, tokens, head_dim]`: of the last tokens, as many as a step can see."""
        with torch.inference_mode():
            layers = self.model(torch.tensor([prompt]), use_cache=True).past_key_values.layers
        return [(layer.keys[0], layer.values[0]) for layer in layers]


@dataclass
class Job:
    prompt: tuple[int, ...]
    tokens: list[int]
    logits: list[np.ndarray] = field(default_factory=list)


class Rig:
    """Fills slots as a worker would, steps them, and holds what comes out against the reference."""

    def __init__(self, device: Any, reference: Reference) -> None:
        self.device = device
        self.reference = reference
        self.jobs: dict[int, Job] = {}

    def insert(self, slot: int, prompt: Sequence[int], scale: float = 1.0) -> None:
        """Piece by piece, and of each piece all layers, as a chunked prefill sends them."""
        layers = [(len(prompt) - k.shape[1], k, v) for k, v in self.reference.cache(tuple(prompt))]
        for piece in range(0, len(prompt), PIECE):
            for layer, (first, k, v) in enumerate(layers):
                start, end = max(piece, first), min(piece + PIECE, len(prompt))
                if start < end:
                    rows = slice(start - first, end - first)
                    wire = [(side[:, rows] * scale).to(self.wire).contiguous() for side in (k, v)]
                    self.device.insert(slot, layer, start, end - start, *(raw(side) for side in wire))

    @property
    def wire(self) -> torch.dtype:
        return getattr(torch, self.device.geometry.dtype)

    def begin(self, slot: int, prompt: Sequence[int]) -> None:
        token = self.reference.generated(tuple(prompt), 1)[0][0]
        self.device.begin(slot, len(prompt), token)
        self.jobs[slot] = Job(tuple(prompt), [token])

    def fill(self, slot: int, prompt: Sequence[int], scale: float = 1.0) -> None:
        self.insert(slot, prompt, scale)
        self.begin(slot, prompt)

    def memory(self, slot: int) -> dict[str, torch.Tensor]:
        """What the emulated chip holds for a slot: its blocks, and its windows, by their names."""
        runtime = self.device._loaded.decoders[1].runtime
        return {
            name: runtime._caches[name][self.device._tables[slot].long() if caches.kind == FULL else [slot]]
            for caches in self.device._caches
            for name in caches.names()
        }

    def step(self, times: int = 1) -> None:
        for _ in range(times):
            logits = self.device.step()
            for slot, job in self.jobs.items():
                job.logits.append(logits[slot].copy())
                job.tokens.append(int(logits[slot].argmax()))
                self.device.commit(slot, job.tokens[-1])

    def evict(self, slot: int) -> Job:
        self.device.evict(slot)
        return self.jobs.pop(slot)

    def check(self, slot: int) -> None:
        """Ends the slot's job, which must be what `generate` makes of its prompt."""
        job = self.evict(slot)
        tokens, logits = self.reference.generated(job.prompt, len(job.tokens))
        assert job.tokens == tokens, f"slot {slot}, a prompt of {len(job.prompt)}"
        np.testing.assert_allclose(np.stack(job.logits), logits[1:], atol=CLOSE, rtol=0)

    def serve(self, slot: int, prompt: Sequence[int], steps: int = 3) -> None:
        """One job from its beginning to its end."""
        self.fill(slot, prompt)
        self.step(steps)
        self.check(slot)

    def spoil(self, slot: int, length: int) -> None:
        """A job whose numbers overflow while it steps, so that what it writes is no number."""
        for layer, (k, v) in enumerate(self.reference.cache(prompt_of(length))):
            huge = [raw(torch.full_like(side, 3e38)) for side in (k, v)]
            self.device.insert(slot, layer, length - k.shape[1], k.shape[1], *huge)
        self.device.begin(slot, length, 1)
        for _ in range(WINDOW):
            assert not np.isfinite(self.device.step()[slot]).any()
            self.device.commit(slot, 1)
        self.device.evict(slot)


class Opened:
    """Opens devices, and remembers which chips they took."""

    def __init__(self, **usual: Any) -> None:
        self._usual = usual
        self.claimed: list[Chips] = []

    def __call__(self, model: Reference, **settings: Any) -> Rig:
        config = Config(model=str(model.directory), decode_device="atom", **{**self._usual, **settings})
        return Rig(open_decode(config, Model(model.directory)), model)

    def release(self, rig: Rig) -> None:
        """As if the worker's process had ended."""
        self.claimed.remove(rig.device._chips)
        rig.device._chips.release()


Models = Callable[..., Reference]  # (family, seed=1)


def vendors_own(model: Reference, directory: Path, **options: Any) -> Path:
    """Compiled as the vendor's documents show it: without us, and without our graphs."""
    usual = {"batch_size": 4, "max_seq_len": 128, "npu": "RBLN-CA22", "create_runtimes": False}
    name = f"RBLN{type(model.model).__name__}"
    import optimum.rbln  # only after the emulation is in its place

    getattr(optimum.rbln, name).from_model(model.model, rbln_config=usual | options, model_save_dir=directory)
    return directory


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(length + 10000 * seed)
    return tuple(torch.randint(1, 300, (length,), generator=generator).tolist())


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


def actions(caplog: pytest.LogCaptureFixture) -> set[str]:
    return {getattr(record, "action", "") for record in caplog.records}
