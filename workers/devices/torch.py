"""cpu and cuda, through PyTorch and transformers: any Llama, Qwen2, Qwen3 or Gemma-3 class model.

transformers' forward is the reference. On a CPU there is an own one, of a model that it knows: `forward.py` for decode steps,
`prompt.py` for prompts in bfloat16. The caches are ours everywhere.

With transformers, prefill keeps each layer's K and V in the pieces that it hands out, and joins them for as long as the layer
needs them: a prompt costs its KV cache once. Decode keeps fixed slots, and steps the busy ones in one batch. Each row of that
batch attends to its own tokens, so an idle slot costs nothing, and what an earlier job left in a slot can spoil no sum.
"""

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from typing_extensions import Buffer

from pipeline.config import Config
from pipeline.errors import Cancelled, DeviceError
from pipeline.model import Model
from workers.devices import Logits, OnLayer, at_their_slots
from workers.digest import model_digest

try:
    import torch
    from transformers import AttentionInterface
    from transformers.cache_utils import Cache, DynamicLayer

    from workers.devices.cores import cores_for
    from workers.devices.family import geometry, load_weights, text_config
    from workers.devices.forward import PackedForward
    from workers.devices.layers import unknown
    from workers.devices.prompt import PackedPrompt, PackedPrompts, fit_prompts
    from workers.devices.slots import Batch, LayerSlots
except ImportError as error:
    raise DeviceError(
        f"the cpu and cuda devices need torch and transformers ({error}): pip install 'kvrelay[cpu]'"
    ) from None

log = logging.getLogger(__name__)

ROWS = "kvrelay_rows"  # the name under which transformers knows `_attend`


def open_prefill(config: Config, model: Model) -> "TorchPrefill":
    return TorchPrefill(_Loaded(config, model, "prefill", attention="sdpa"))


def open_decode(config: Config, model: Model) -> "TorchDecode":
    AttentionInterface.register(ROWS, _attend)
    return TorchDecode(_Loaded(config, model, "decode", attention=ROWS))


def chips(device: str, _config: Config) -> dict[int, str]:
    if device == "cpu":
        return {0: f"{os.cpu_count()} cores"}
    return {number: torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())}


class _Loaded:
    """The weights on their device, and the shape of their KV cache."""

    def __init__(self, config: Config, model: Model, role: str, *, attention: str) -> None:
        name = getattr(config, f"{role}_device")
        if name == "cuda" and not torch.cuda.is_available():
            raise DeviceError(f"KVR_{role.upper()}_DEVICE=cuda: PyTorch finds no CUDA device here; cpu would work")
        self.cores = cores_for(config, role)
        self.config = config
        self.device = torch.device(name)
        self.dtype = _dtype(config, self.device)
        hf = text_config(model, config)
        self.vocabulary = int(hf.vocab_size)
        self.geometry = geometry(hf, self.dtype, model_digest(model.directory, config))
        network = load_weights(model, self.dtype, attention).to(self.device)
        self.decoder = network.get_decoder()  # of Gemma-3 with images, only the half that reads text
        self.head = network.get_output_embeddings()
        self._softcap: float | None = getattr(hf, "final_logit_softcapping", None)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, cache: Cache) -> torch.Tensor:
        """tokens, positions: int64 `[rows, tokens]`. Answers hidden states `[rows, tokens, hidden]`."""
        answer = self.decoder(input_ids=tokens, position_ids=positions, cache=cache, use_cache=True)
        hidden: torch.Tensor = answer.last_hidden_state
        return hidden

    def is_known(self) -> bool:
        """The own forward can take it: on a CPU, where it knows the model. It says why if not."""
        reason = unknown(self.decoder, self.head, self.dtype) if self.device.type == "cpu" else None
        if reason:
            log.warning("transformers computes this model: %s", reason, extra={"action": "transformers_forward"})
        return self.device.type == "cpu" and reason is None

    def capped(self, logits: torch.Tensor) -> Logits:
        """logits: of the head, `[rows, vocab]`. The same in float32."""
        if self._softcap is not None:
            logits = torch.tanh(logits / self._softcap) * self._softcap
        values: Logits = logits.float().cpu().numpy()
        return values

    def check_tokens(self, tokens: Sequence[int]) -> None:
        """A token beyond the vocabulary would end a CUDA process, not just this job."""
        if not tokens or min(tokens) < 0 or max(tokens) >= self.vocabulary:
            raise DeviceError(f"token ids must be 0 to {self.vocabulary - 1}, and at least one")


class TorchPrefill:
    def __init__(self, loaded: _Loaded) -> None:
        self._loaded = loaded
        self.geometry = loaded.geometry
        self.max_tokens = loaded.config.context
        self._own: PackedPrompts | None = None
        if loaded.is_known() and fit_prompts(loaded.geometry):
            chunk = min(loaded.config.chunk, self.max_tokens)
            self._own = PackedPrompts(loaded.decoder, loaded.head, loaded.geometry, chunk, loaded.cores)

    def begin(self, tokens: Sequence[int]) -> "TorchPrompt | OwnPrompt":
        self._loaded.check_tokens(tokens)
        if len(tokens) > self.max_tokens:
            raise DeviceError(f"{len(tokens)} prompt tokens; KVR_CONTEXT is {self.max_tokens}")
        return (
            TorchPrompt(self._loaded, tokens) if self._own is None else OwnPrompt(self._loaded, self._own.begin(tokens))
        )


class OwnPrompt:
    def __init__(self, loaded: _Loaded, prompt: PackedPrompt) -> None:
        self._loaded = loaded
        self._prompt = prompt

    def advance(self, on_layer: OnLayer, cancelled: Callable[[], bool]) -> Logits | None:
        with self._loaded.cores.held():
            logits = self._prompt.advance(on_layer, cancelled)
        return None if logits is None else self._loaded.capped(logits)[0]


class TorchPrompt:
    """State between chunks. Nothing points back at it: dropping it frees its memory at once, without a collection."""

    def __init__(self, loaded: _Loaded, tokens: Sequence[int]) -> None:
        self._loaded = loaded
        self._tokens = torch.tensor([list(tokens)], device=loaded.device)
        self._done = 0
        self._call = _Call()
        self._cache: Cache | None = Cache(
            layers=[
                _PromptLayer(self._call, index, layer.window, layer.first_token(len(tokens)))
                for index, layer in enumerate(loaded.geometry.layers)
            ]
        )

    @torch.inference_mode()
    def advance(self, on_layer: OnLayer, cancelled: Callable[[], bool]) -> Logits | None:
        cache, self._cache = self._cache, None  # not put back when the call fails: layers would then disagree
        if cache is None:
            raise DeviceError("this prompt was cancelled, has failed, or is finished")
        total, start = self._tokens.shape[1], self._done
        end = self._done = min(start + self._loaded.config.chunk, total)
        self._call.on_layer, self._call.cancelled = on_layer, cancelled
        try:
            positions = torch.arange(start, end, device=self._loaded.device)[None]
            with self._loaded.cores.held():
                hidden = self._loaded.forward(self._tokens[:, start:end], positions, cache)
        finally:
            self._call.on_layer, self._call.cancelled = _ignore, bool
        if end < total:
            self._cache = cache
            return None
        return self._loaded.capped(self._loaded.head(hidden[:, -1]))[0]


def _ignore(layer: int, start: int, tokens: int, k: Buffer, v: Buffer) -> None:
    """Between calls nobody listens."""


@dataclass(slots=True)
class _Call:
    """What the layers of one prompt need to know of the device call that is under way."""

    on_layer: OnLayer = _ignore
    cancelled: Callable[[], bool] = bool


class _PromptLayer(DynamicLayer):
    """One layer of one prompt. A full layer keeps all that came, a sliding one the window − 1 tokens still in sight."""

    def __init__(self, call: _Call, index: int, window: int | None, first: int) -> None:
        super().__init__()
        self.is_sliding = window is not None
        self._call = call
        self._index = index
        self._window = window
        self._first = first  # token of the prompt that a decode step can still see
        self._seen = 0
        self._pieces: list[tuple[torch.Tensor, torch.Tensor]] = []  # `[1, kv_heads, tokens, head_dim]`, never written

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The fresh K and V of one chunk, after RoPE. Answers what the chunk attends to."""
        if self._call.cancelled():
            raise Cancelled
        fresh = key_states.contiguous(), value_states.contiguous()
        self._hand_out(*fresh)
        self._seen += key_states.shape[2]
        self._pieces.append(fresh)
        keys, values = (_joined(pieces) for pieces in zip(*self._pieces, strict=True))
        if self._window is not None:
            skip = max(0, keys.shape[2] - self._window + 1)
            self._pieces = [(keys[:, :, skip:], values[:, :, skip:])]
        return keys, values

    def _hand_out(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        skip = max(0, self._first - self._seen)
        count = keys.shape[2] - skip
        if count > 0:
            k, v = (_bytes(tensor[0, :, skip:]) for tensor in (keys, values))
            self._call.on_layer(self._index, self._seen + skip, count, k, v)

    def get_seq_length(self) -> int:
        return self._seen

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(tokens attended to, position of the first): from these transformers draws its masks."""
        kept = self._seen if self._window is None else min(self._seen, self._window - 1)
        return kept + query_length, self._seen - kept


class Forward(Protocol):
    """Computes a step, on the memory of the slots that it was made with."""

    name: str

    def logits(self, tokens: torch.Tensor, batch: Batch) -> torch.Tensor:
        """tokens: int64 `[rows]`. `[rows, vocab]`, before any cap."""
        ...


class TorchDecode:
    def __init__(self, loaded: _Loaded) -> None:
        self._loaded = loaded
        self.geometry = loaded.geometry
        self.slots = loaded.config.slots
        self.max_tokens = loaded.config.context
        self._length = [0] * self.slots  # tokens in the cache; 0: idle
        self._input = [0] * self.slots
        config, device = loaded.config, loaded.device
        try:
            self._layers = [LayerSlots(config, self.geometry, layer, device) for layer in self.geometry.layers]
        except torch.OutOfMemoryError:
            raise DeviceError(f"{self.slots} slots of {self.max_tokens} tokens do not fit: lower KVR_SLOTS") from None
        self._forward = _forward(loaded, self._layers)
        self.figures: dict[str, str | int] = {"forward": self._forward.name}

    def insert(self, slot: int, layer: int, start: int, tokens: int, k: Buffer, v: Buffer) -> None:
        if self._length[slot]:
            raise DeviceError(f"slot {slot} is in use")
        if not 0 <= start < start + tokens <= self.max_tokens:
            raise DeviceError(f"tokens {start} to {start + tokens} do not fit the {self.max_tokens} that a slot holds")
        self._layers[layer].insert(slot, start, tokens, k, v)

    def begin(self, slot: int, length: int, token: int) -> None:
        if not 0 < length < self.max_tokens:
            raise DeviceError(f"{length} tokens leave no room to step in a slot of {self.max_tokens}")
        self._loaded.check_tokens([token])
        self._length[slot] = length
        self._input[slot] = token
        self._loaded.cores.begin()

    def commit(self, slot: int, token: int) -> None:
        self._loaded.check_tokens([token])
        self._input[slot] = token

    @torch.inference_mode()
    def step(self) -> Logits:
        active = [slot for slot, length in enumerate(self._length) if length]
        lengths = [self._length[slot] for slot in active]
        if not active or max(lengths) >= self.max_tokens:
            raise DeviceError(f"a step needs a slot that has begun, and none with all its {self.max_tokens} tokens")
        tokens = torch.tensor([self._input[slot] for slot in active], device=self._loaded.device)
        logits = self._loaded.capped(self._forward.logits(tokens, Batch(active, lengths, self._loaded.device)))
        for slot in active:
            self._length[slot] += 1
        return at_their_slots(logits, active)

    def evict(self, slot: int) -> None:
        self._length[slot] = self._input[slot] = 0
        if not any(self._length):
            self._loaded.cores.end()


def _forward(loaded: _Loaded, layers: list[LayerSlots]) -> Forward:
    if loaded.is_known():
        return PackedForward(loaded.decoder, loaded.head, loaded.geometry, layers, loaded.config.slots, loaded.cores)
    return TransformersForward(loaded, layers)


class TransformersForward:
    name = "transformers"

    def __init__(self, loaded: _Loaded, layers: list[LayerSlots]) -> None:
        self._loaded = loaded
        self._cache = Cache(layers=[_RowsLayer(layer) for layer in layers])

    def logits(self, tokens: torch.Tensor, batch: Batch) -> torch.Tensor:
        for layer in self._cache.layers:
            layer.batch = batch
        hidden = self._loaded.forward(tokens[:, None], batch.positions[:, None], self._cache)
        return self._loaded.head(hidden[:, -1])


class _RowsLayer(DynamicLayer):
    """A layer's slots, as transformers asks for them."""

    batch: Batch

    def __init__(self, layer: LayerSlots) -> None:
        super().__init__()
        self._layer = layer
        # views `[1, kv_heads, width, head_dim]`, made once rather than for every row of every step
        self._slots = list(zip(layer.k.split(1), layer.v.split(1), strict=True))

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """One new token a row. Answers, for `_attend`, what each row sees: `[1, kv_heads, tokens, head_dim]`."""
        seen = self._layer.write(self.batch, torch.stack((key_states[:, :, 0], value_states[:, :, 0]), 1))
        rows = [(self._slots[slot], count) for slot, count in zip(self.batch.slots, seen, strict=True)]
        return [k.narrow(2, 0, count) for (k, _), count in rows], [v.narrow(2, 0, count) for (_, v), count in rows]

    def get_seq_length(self) -> int:
        return 0  # rows differ; nobody needs it, for positions are given and no mask is drawn


def _attend(
    _module: torch.nn.Module,
    query: torch.Tensor,
    key: list[torch.Tensor],
    value: list[torch.Tensor],
    _mask: None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one token a row, each row to its own keys. query: `[rows, heads, 1, head_dim]`.

    The query heads that share a KV head stand in for tokens, so that K and V need not be repeated for them.
    """
    rows, heads, _, head_dim = query.shape
    grouped = query.reshape(rows, key[0].shape[1], -1, head_dim).split(1)
    answers = [
        torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=scaling)
        for q, k, v in zip(grouped, key, value, strict=True)
    ]
    return torch.cat(answers).view(rows, 1, heads, head_dim), None


def _dtype(config: Config, device: torch.device) -> torch.dtype:
    if config.dtype != "auto":
        dtype: torch.dtype = getattr(torch, config.dtype)
        return dtype
    if device.type == "cuda" or torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return torch.bfloat16
    return torch.float32


def _joined(pieces: Sequence[torch.Tensor]) -> torch.Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(list(pieces), 2)


def _bytes(tensor: torch.Tensor) -> Buffer:
    """Of a tensor that nobody writes again; without a copy if it is contiguous and on the CPU."""
    view: Buffer = tensor.contiguous().cpu().view(torch.uint8).numpy().data.cast("B")
    return view
