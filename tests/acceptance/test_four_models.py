"""`kvrelay validate` over four models, three of them with real weights, for docs/evidence: hours on a CPU, so only when asked
for, by `make validate-models`. What it takes long to make is kept in build/ and made again when it is not there."""

import os
import secrets
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from api.pull import pull
from pipeline.config import Config
from pipeline.model import SIM
from tests.acceptance.system import System
from tests.acceptance.test_atom_system import TOP, AtomSystem

pytestmark = [pytest.mark.evidence, pytest.mark.timeout(4 * 3600)]

KONI = "koni-like"
CONTEXT = {"cpu": 8192, "atom": 4096}
ONE_BLOCK = 9216  # the context of KONI on ATOM, in one block
LENGTHS = {"cpu": "short,medium,long", "atom": "short,medium"}
BUILD = Path("build") / "validation"  # relative, so that reports name no folder of one machine
KVRELAY = [sys.executable, "-c", "import sys; from api.command import main; sys.exit(main())"]


def koni_like() -> Path:
    """The shape of a KONI (Llama 3.1 8B): 32 heads of 128 over 8 of K and V, llama3 RoPE, three tokens that end a text; with
    random weights, few layers, few hidden units and few words."""
    folder = BUILD / KONI
    if not (folder / "tokenizer.json").is_file():
        torch.manual_seed(1)
        rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}
        config = transformers.LlamaConfig(
            vocab_size=260,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=3,
            num_attention_heads=32,
            num_key_value_heads=8,
            head_dim=128,
            max_position_embeddings=131072,
            rope_parameters={**rope, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192},
            bos_token_id=None,
            eos_token_id=[7, 8, 9],
            initializer_range=0.1,  # large enough that every cached token matters to the next one
        )
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        (folder / "tokenizer.json").write_bytes((SIM / "tokenizer.json").read_bytes())
    return folder


def baseline(model: str, directory: Path, words: list[str]) -> Path:
    path = BUILD / f"{model}.json"
    if not path.is_file():
        environ = {**os.environ, "KVR_MODEL": str(directory), "KVR_SERVED_NAME": model}
        command = [sys.executable, "-m", "workers", "baseline", str(path), *words]
        subprocess.run(command, env=environ, check=True)
    return path


@pytest.mark.parametrize("model", ["smollm2-135m", "qwen2.5-coder-0.5b", "gemma-3-270m", KONI])
@pytest.mark.parametrize("decode", ["cpu", "atom"])
def test_every_answer_equals_generate(
    model: str, decode: str, redis_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(TOP)
    BUILD.mkdir(parents=True, exist_ok=True)
    directory = koni_like() if model == KONI else pull(Config(model=model))
    right = baseline(model, directory, ["--random"] if model == KONI else [])
    settings = {
        "model": directory.absolute(),
        "served_name": f"{model}-{secrets.token_hex(4)}",
        "context": ONE_BLOCK if model == KONI else CONTEXT[decode],
        "slots": 4,
        "dtype": "float32",
        "prefill_threads": 2,
    }
    system = (AtomSystem if decode == "atom" else System)(redis_url, tmp_path, **settings)
    system.ready_seconds = 600.0
    reports = Path(os.environ.get("KVR_TEST_EVIDENCE") or BUILD)
    reports.mkdir(parents=True, exist_ok=True)
    report = reports / f"validate-{decode}-{model}.json"
    try:
        system.start_all()
        command = ["validate", str(right), "--lengths", LENGTHS[decode], "--report", str(report)]
        done = subprocess.run([*KVRELAY, *command], env=system.environ)
        assert done.returncode == 0, system.logs()[-3000:]
        system.wait_idle()
    finally:
        system.close()
