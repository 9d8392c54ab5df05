"""EXPERIMENTAL. Texts longer than a Qwen was trained on: its RoPE stretched with YaRN, as far as KVR_CONTEXT asks.

    KVR_MODEL=qwen2.5-coder-0.5b KVR_CONTEXT=65536 python -m workers prefill --factory examples.qwen_yarn:open_prefill
    KVR_MODEL=qwen2.5-coder-0.5b KVR_CONTEXT=65536 python -m workers decode --factory examples.qwen_yarn:open_decode

Both workers need it: a pair of which one lacks it is refused. The stretch is static, so short texts change, too. What Qwen
says of it: https://qwen.readthedocs.io/en/latest/deployment/vllm.html#extended-context-support
"""

import hashlib
import json
import shutil
import tempfile
from pathlib import Path

from pipeline.config import Config
from pipeline.errors import DeviceError
from pipeline.model import Model
from workers import devices

FAMILIES = ("qwen2", "qwen3")


def open_prefill(config: Config, model: Model) -> devices.PrefillDevice:
    """On the device that KVR_PREFILL_DEVICE names. Raises DeviceError for another model than a Qwen."""
    return devices.open_prefill(config, stretched(config, model))


def open_decode(config: Config, model: Model) -> devices.DecodeDevice:
    """On the device that KVR_DECODE_DEVICE names. Raises DeviceError for another model than a Qwen."""
    return devices.open_decode(config, stretched(config, model))


def stretched(config: Config, model: Model) -> Model:
    """The model with another config.json, in KVR_CACHE: its files are links. The one that came, if it holds the context."""
    family, trained = model.config.get("model_type"), int(model.config.get("max_position_embeddings", 0))
    if family not in FAMILIES:
        raise DeviceError(f"examples.qwen_yarn is for {' and '.join(FAMILIES)}, and {config.name} is {family}")
    if config.context <= trained:
        return model
    factor = -(-config.context // trained)  # whole, so that contexts that differ a little still make a pair
    rope = model.config.get("rope_parameters") or {"rope_theta": model.config["rope_theta"]}
    yarn = {"rope_type": "yarn", "factor": float(factor), "original_max_position_embeddings": trained}
    changed = {
        **json.loads((model.directory / "config.json").read_text(encoding="utf-8")),
        "rope_parameters": {**rope, **yarn},
        "max_position_embeddings": factor * trained,
    }
    changed.pop("rope_scaling", None)  # where it stood before transformers 5
    written = json.dumps(changed, indent=2)
    name = hashlib.sha256(f"{model.directory} {written}".encode()).hexdigest()[:16]
    folder = Path(config.cache).expanduser() / "yarn" / name
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(dir=folder.parent))
        for path in model.directory.iterdir():
            if path.name != "config.json":
                (partial / path.name).symlink_to(path.resolve())
        (partial / "config.json").write_text(written, encoding="utf-8")
        try:
            partial.rename(folder)
        except OSError:
            shutil.rmtree(partial)
            if not folder.is_dir():  # else the other worker was faster, with the same
                raise
    return Model(folder)
