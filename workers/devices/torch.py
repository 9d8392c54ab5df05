"""cpu and cuda, through PyTorch and transformers: any Llama, Qwen2, Qwen3 or Gemma-3 class model.

transformers' own forward computes everything; only the caches are ours. Prefill uses its dynamic cache and looks in as
each layer adds its K and V. Decode uses fixed slots: one forward steps rows that stand at different positions, with a
mask per kind of layer; sliding layers are rings of their window.
"""

import json
import os
from collections.abc import Callable, Sequence
from typing import Any

from typing_extensions import Buffer

from pipeline.config import Config
from pipeline.errors import Cancelled, DeviceError
from pipeline.geometry import Geometry, Layer
from pipeline.model import Model
from workers.devices import Logits, OnLayer
from workers.digest import model_digest

try:
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.cache_utils import Cache, DynamicCache
    from transformers.utils import logging as transformers_logging
except ImportError as error:
    raise DeviceError(
        f"the cpu and cuda devices need torch and transformers ({error}): pip install 'kvrelay[cpu]'"
    ) from None

FAMILIES = ("llama", "qwen2", "qwen3", "gemma3_text")
FULL, SLIDING = "full_attention", "sliding_attention"


def open_prefill(config: Config, model: Model) -> "TorchPrefill":
    return TorchPrefill(_Loaded(config, model, config.prefill_device, config.prefill_threads))


def open_decode(config: Config, model: Model) -> "TorchDecode":
    return TorchDecode(_Loaded(config, model, config.decode_device, config.decode_threads))


class _Loaded:
    """The weights on their device, and the shape of their KV cache."""

    def __init__(self, config: Config, model: Model, device: str, threads: int) -> None:
        if device == "cuda" and not torch.cuda.is_available():
            raise DeviceError("there is no CUDA device here: set KVR_PREFILL_DEVICE and KVR_DECODE_DEVICE to cpu")
        torch.set_num_threads(threads or max(1, (os.cpu_count() or 1) // 2))
        self.config = config
        self.device = torch.device(device)
        self.dtype = _dtype(config, self.device)
        transformers_logging.disable_progress_bar()
        transformers_logging.set_verbosity_error()
        try:
            self.model = AutoModelForCausalLM.from_pretrained(
                model.directory, dtype=self.dtype, local_files_only=True, attn_implementation="sdpa"
            )
        except (OSError, ValueError, KeyError) as error:
            raise DeviceError(f"{model.directory} cannot be loaded: {error}") from error
        self.hf: Any = self.model.config
        if self.hf.model_type not in FAMILIES:
            raise DeviceError(f"models of type {self.hf.model_type!r} are not supported, only {', '.join(FAMILIES)}")
        self.model.eval().to(self.device)
        self.kinds: list[str] = list(getattr(self.hf, "layer_types", None) or [FULL] * self.hf.num_hidden_layers)
        self.geometry = Geometry(
            model=model_digest(model.directory, config),
            kv_heads=self.hf.num_key_value_heads,
            # stated by Qwen3 and Gemma, and then it is not hidden / heads; some Llamas lack it
            head_dim=getattr(self.hf, "head_dim", None) or self.hf.hidden_size // self.hf.num_attention_heads,
            dtype=str(self.dtype).removeprefix("torch."),
            layers=tuple(
                Layer(window=self.hf.sliding_window if kind == SLIDING else None, rope=_rope(self.hf, kind))
                for kind in self.kinds
            ),
        )

    def buffer(self, tensor: torch.Tensor) -> Buffer:
        """The bytes of a tensor that nobody writes again, without a copy if it is contiguous and on the CPU."""
        return memoryview(tensor.contiguous().cpu().view(torch.uint8).numpy()).cast("B")

    def tensor(self, buffer: Buffer, tokens: int) -> torch.Tensor:
        """`[kv_heads, tokens, head_dim]` over received bytes, which are only read."""
        rows = torch.frombuffer(bytearray(buffer), dtype=self.dtype)
        return rows.view(self.geometry.kv_heads, tokens, self.geometry.head_dim)


class TorchPrefill:
    def __init__(self, loaded: _Loaded) -> None:
        self._loaded = loaded
        self.geometry = loaded.geometry
        self.max_tokens = loaded.config.context

    def begin(self, tokens: Sequence[int]) -> "TorchPrompt":
        return TorchPrompt(self._loaded, tokens)


class TorchPrompt:
    """State between chunks: the cache. A cancelled prompt is dropped whole, so a half-written cache harms nobody."""

    def __init__(self, loaded: _Loaded, tokens: Sequence[int]) -> None:
        self._loaded = loaded
        self._tokens = torch.tensor([list(tokens)], device=loaded.device)
        self._cache = _WatchedCache(loaded.hf, self._layer_is_ready)
        self._done = 0
        self._on_layer: OnLayer | None = None
        self._cancelled: Callable[[], bool] = bool

    def advance(self, on_layer: OnLayer, cancelled: Callable[[], bool]) -> Logits | None:
        self._on_layer, self._cancelled = on_layer, cancelled
        chunk = self._tokens[:, self._done : self._done + self._loaded.config.chunk]
        with torch.inference_mode():
            answer = self._loaded.model(chunk, cache=self._cache, use_cache=True, logits_to_keep=1)
            self._done += chunk.shape[1]
            if self._done < self._tokens.shape[1]:
                return None
            logits: Logits = answer.logits[0, -1].float().cpu().numpy()
            return logits

    def _layer_is_ready(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """keys, values: `[1, kv_heads, chunk, head_dim]`, fresh from this layer, after RoPE."""
        if self._cancelled():
            raise Cancelled
        first = self._loaded.geometry.layers[layer].first_token(self._tokens.shape[1])
        skip = max(0, first - self._done)  # tokens of this chunk that no decode step will see
        count = keys.shape[2] - skip
        if count > 0 and self._on_layer is not None:
            k, v = (self._loaded.buffer(tensor[0, :, skip:]) for tensor in (keys, values))
            self._on_layer(layer, self._done + skip, count, k, v)


class _WatchedCache(DynamicCache):
    """transformers' cache, which says so before it takes a layer's fresh K and V."""

    def __init__(self, hf: Any, on_update: Callable[[int, torch.Tensor, torch.Tensor], None]) -> None:
        super().__init__(config=hf)
        self._on_update = on_update

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._on_update(layer_idx, key_states, value_states)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


class TorchDecode:
    def __init__(self, loaded: _Loaded) -> None:
        config = loaded.config
        self._loaded = loaded
        self.geometry = loaded.geometry
        self.slots = config.slots
        self.max_tokens = config.context
        self._length = [0] * self.slots  # tokens in the cache; 0: idle
        self._input = [0] * self.slots
        self._cache = _SlotCache(
            [
                _SlotLayer(self.slots, min(layer.window or self.max_tokens, self.max_tokens), loaded)
                for layer in self.geometry.layers
            ]
        )

    def insert(self, slot: int, layer: int, start: int, tokens: int, k: Buffer, v: Buffer) -> None:
        if start + tokens > self.max_tokens:
            raise DeviceError(f"token {start + tokens} is beyond the {self.max_tokens} that a slot holds")
        store = self._cache.layers[layer]
        at = torch.arange(start, start + tokens, device=self._loaded.device) % store.width
        store.k[slot][:, at] = self._loaded.tensor(k, tokens).to(self._loaded.device)
        store.v[slot][:, at] = self._loaded.tensor(v, tokens).to(self._loaded.device)

    def begin(self, slot: int, length: int, token: int) -> None:
        self._length[slot], self._input[slot] = length, token

    def commit(self, slot: int, token: int) -> None:
        self._input[slot] = token

    def step(self) -> Logits:
        active = [slot for slot, length in enumerate(self._length) if length]
        if any(self._length[slot] >= self.max_tokens for slot in active):
            raise DeviceError(f"a slot is full: it holds {self.max_tokens} tokens")
        rows = active[-1] + 1
        device = self._loaded.device
        positions = torch.tensor(self._length[:rows], device=device)
        with torch.inference_mode():
            self._cache.prepare(torch.tensor(active, device=device), positions)
            answer = self._loaded.model(
                torch.tensor(self._input[:rows], device=device)[:, None],
                attention_mask=self._masks(positions),
                position_ids=positions[:, None],
                cache=self._cache,
                use_cache=True,
            )
            for slot in active:
                self._length[slot] += 1
            logits: Logits = answer.logits[:, -1].float().cpu().numpy()
            return logits

    def evict(self, slot: int) -> None:
        self._length[slot] = self._input[slot] = 0

    def _masks(self, positions: torch.Tensor) -> Any:
        """True where a row sees a cached token: `[rows, 1, 1, width]`, per kind of layer where there are two."""
        masks = {}
        for kind, layer in zip(self._loaded.kinds, self._cache.layers, strict=True):
            if kind not in masks:
                seen = torch.arange(layer.used, device=positions.device)[None] <= positions[:, None]
                masks[kind] = seen[:, None, None]
        return masks if self._loaded.hf.model_type == "gemma3_text" else masks[self._loaded.kinds[0]]


class _SlotLayer:
    """K and V `[slots, kv_heads, width, head_dim]`. Token p stands at p mod width: a ring, where width is the window."""

    is_sliding = is_compileable = False
    is_initialized = True

    def __init__(self, slots: int, width: int, loaded: _Loaded) -> None:
        shape = (slots, loaded.geometry.kv_heads, width, loaded.geometry.head_dim)
        self.width = self.used = width
        self.k = torch.zeros(shape, dtype=loaded.dtype, device=loaded.device)
        self.v = torch.zeros(shape, dtype=loaded.dtype, device=loaded.device)  # zeros_like would touch every page


class _SlotCache(Cache):
    """What the model sees: it appends one token a row, and gets the whole row back."""

    def __init__(self, layers: list[_SlotLayer]) -> None:
        super().__init__(layers=layers)

    def prepare(self, active: torch.Tensor, positions: torch.Tensor) -> None:
        """Before a step. active: rows that may write; an idle row must not touch a slot that is being filled."""
        self._active = active
        self._at = positions[active]
        longest = int(positions.max()) + 1
        for layer in self.layers:
            layer.used = min(layer.width, longest)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layer = self.layers[layer_idx]
        at = self._at % layer.width
        layer.k[self._active, :, at] = key_states[self._active, :, 0]
        layer.v[self._active, :, at] = value_states[self._active, :, 0]
        rows = key_states.shape[0]
        return layer.k[:rows, :, : layer.used], layer.v[:rows, :, : layer.used]


def _dtype(config: Config, device: torch.device) -> torch.dtype:
    if config.dtype != "auto":
        dtype: torch.dtype = getattr(torch, config.dtype)
        return dtype
    if device.type == "cuda" or torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return torch.bfloat16
    return torch.float32


def _rope(hf: Any, kind: str) -> str:
    """The RoPE parameters of a layer kind as one line; Gemma-3 has one set for each."""
    parameters = getattr(hf, "rope_parameters", None) or {}
    return json.dumps(parameters.get(kind, parameters), sort_keys=True, default=str)
