"""From a GGUF file to a model directory as transformers writes it: bf16 weights, tokenizer, chat template."""

import os
import shutil
import tempfile
from pathlib import Path

from pipeline.errors import ModelMissing


def convert(source: Path, target: Path) -> None:
    """Written beside `target` and renamed into place, so that a crash leaves nothing half done.

    Raises ModelMissing if the file is no model that transformers can read.
    """
    try:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    except ImportError as error:
        raise ModelMissing(
            f"converting a model needs torch and transformers ({error}): pip install 'kvrelay[cpu]'"
        ) from None
    partial = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
    try:
        where, name = str(source.parent), source.name
        AutoTokenizer.from_pretrained(where, gguf_file=name).save_pretrained(partial)
        model = AutoModelForCausalLM.from_pretrained(
            where, gguf_file=name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
        )
        model.save_pretrained(partial)
        if not all((partial / part).is_file() for part in ("config.json", "tokenizer.json", "model.safetensors")):
            raise ModelMissing(f"{source} gave no complete model directory")
        shutil.rmtree(target, ignore_errors=True)
        partial.chmod(0o755)
        os.replace(partial, target)
    except (OSError, ValueError, KeyError, NotImplementedError) as error:
        raise ModelMissing(f"{source} could not be converted: {type(error).__name__}: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    print(f"converted into {target}", flush=True)
