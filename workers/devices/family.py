"""Which models of transformers the devices serve, and what is the same for all chips: checks, geometry, weights.

Two workers are a pair if what this file says about the model is equal in both, whatever version of transformers each has.
"""

import json
import os
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging
from typing_extensions import Buffer

from pipeline.config import Config
from pipeline.errors import ConfigError, DeviceError
from pipeline.geometry import Geometry, Layer
from pipeline.model import Model

FAMILIES = ("llama", "qwen2", "qwen3", "gemma3", "gemma3_text")
#: The others (dynamic, longrope) turn K by angles that depend on the length of the text, so that K changes afterwards.
ROPES = ("default", "linear", "llama3", "yarn")
FULL, SLIDING = "full_attention", "sliding_attention"


def text_config(model: Model, config: Config) -> Any:
    """transformers' configuration of the text model.

    Raises DeviceError for what would give wrong text, ConfigError for a context that the model does not hold.
    """
    try:
        whole = AutoConfig.from_pretrained(model.directory, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise DeviceError(f"{model.directory} cannot be loaded: {error}") from error
    if whole.model_type not in FAMILIES:
        raise DeviceError(f"models of type {whole.model_type!r} are not supported, only {', '.join(FAMILIES)}")
    hf: Any = whole.get_text_config()
    for kind in set(kinds_of(hf)):
        if kind not in (FULL, SLIDING):
            raise DeviceError(f"{whole.model_type} with layers of type {kind!r} is not supported")
        rope = _rope(hf, kind).get("rope_type", "default")
        if rope not in ROPES:
            raise DeviceError(f"{whole.model_type} with {rope!r} RoPE is not supported, only {', '.join(ROPES)}")
    for trait in ("attn_logit_softcapping", "use_bidirectional_attention"):
        if getattr(hf, trait, None):
            raise DeviceError(f"{whole.model_type} with {trait} is not supported")
    if config.context > hf.max_position_embeddings:
        raise ConfigError("KVR_CONTEXT", config.context, f"the model holds at most {hf.max_position_embeddings} tokens")
    return hf


def geometry(hf: Any, dtype: torch.dtype, digest: str) -> Geometry:
    """hf: of `text_config`. dtype: of the KV cache on the wire."""
    return Geometry(
        model=digest,
        kv_heads=hf.num_key_value_heads,
        # stated by Qwen3 and Gemma, and then it is not hidden / heads; some Llamas lack it
        head_dim=getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        dtype=str(dtype).removeprefix("torch."),
        layers=tuple(
            Layer(
                window=hf.sliding_window if kind == SLIDING else None,
                rope=json.dumps(_rope(hf, kind), sort_keys=True, default=str),
            )
            for kind in kinds_of(hf)
        ),
    )


def use_threads(count: int) -> int:
    """Compute threads of this process; 0: half of the cores, for a machine has two kinds of worker. Answers how many."""
    threads = count or max(1, (os.cpu_count() or 1) // 2)
    torch.set_num_threads(threads)
    return threads


def load_weights(model: Model, dtype: torch.dtype, attention: str) -> Any:
    """transformers' model, ready to run on the CPU. attention: the name of an attention implementation."""
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    try:
        network, report = AutoModelForCausalLM.from_pretrained(
            model.directory,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            attn_implementation=attention,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise DeviceError(f"{model.directory} cannot be loaded: {error}") from error
    if missing := sorted(report["missing_keys"]):  # transformers would go on with random numbers
        raise DeviceError(f"{model.directory} lacks {len(missing)} weights, {missing[0]} among them")
    return network.eval()


def tensor_over(buffer: Buffer, dtype: torch.dtype) -> torch.Tensor:
    """Over bytes that are only read, without a copy if they may be written: torch knows no other tensors."""
    rows = np.frombuffer(buffer, dtype=np.uint8)
    return torch.from_numpy(rows if rows.flags.writeable else rows.copy()).view(dtype)


def kinds_of(hf: Any) -> list[str]:
    """FULL or SLIDING, per layer."""
    return list(getattr(hf, "layer_types", None) or [FULL] * hf.num_hidden_layers)


def _rope(hf: Any, kind: str) -> dict[str, Any]:
    """The RoPE parameters of a layer kind; Gemma-3 has one set for each."""
    parameters = getattr(hf, "rope_parameters", None) or {}
    return dict(parameters.get(kind) or parameters)
