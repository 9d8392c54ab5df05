"""From a GGUF file to a model directory as transformers writes it: bf16 weights, tokenizer, chat template."""

import tempfile
import time
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from pipeline.errors import DeviceError, ModelMissing


def convert(source: Path, target: Path) -> None:
    """Written beside `target`, read once again, and renamed into place, so that a crash leaves nothing half done.

    Raises ModelMissing if the file is no model that transformers can read, or if something stands at `target` already:
    a mistyped path must not cost anybody a directory. DeviceError without torch and transformers.
    """
    if not source.is_file() or source.open("rb").read(4) != b"GGUF":
        raise ModelMissing(f"{source} is not a GGUF file")
    if target.exists():
        raise ModelMissing(f"{target} is there already: remove it, or name another directory")
    target.parent.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}-") as room:
        partial = Path(room) / "model"
        partial.mkdir()
        try:
            _write(source, partial)
            _check(partial)
        except DeviceError:
            raise
        except Exception as error:  # its readers check little: a torn file raises whatever it meets first
            raise ModelMissing(f"{source} could not be converted: {type(error).__name__}: {error}") from error
        partial.rename(target)
    print(f"converted into {target} in {time.monotonic() - started:.0f} s", flush=True)


def _write(source: Path, directory: Path) -> None:
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    except ImportError as error:
        raise DeviceError(f"converting needs torch and transformers ({error}): pip install 'kvrelay[cpu]'") from None
    where: dict[str, Any] = {"gguf_file": source.name, "local_files_only": True}
    print(f"reading {source.name}, {source.stat().st_size >> 20} MiB", flush=True)
    AutoTokenizer.from_pretrained(str(source.parent), **where).save_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(
        str(source.parent), dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True), **where
    )
    print(f"writing {model.num_parameters() // 1_000_000} million weights in bfloat16", flush=True)
    model.save_pretrained(directory)
    for file in directory.iterdir():
        file.chmod(0o644)  # safetensors lets only the owner read; a worker may run as somebody else


def _check(directory: Path) -> None:
    """Raises what the readers of a model directory would raise."""
    from transformers import AutoConfig

    AutoConfig.from_pretrained(str(directory), local_files_only=True)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    if "test" not in tokenizer.decode(tokenizer.encode("a test").ids):
        raise ValueError("its tokenizer does not give back what it was given")
    if not any(directory.glob("*.safetensors")):
        raise ValueError("no weights were written")
