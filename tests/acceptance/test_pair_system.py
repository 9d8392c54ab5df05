"""RNGD's graphs to ATOM's decoder: prefill through furiosa-torch (imported graphs, executed on the CPU), the KV cache over
ZeroMQ, decode through optimum-rbln (over an emulated chip); three Python environments, three versions of torch."""

import secrets
import subprocess
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer

from tests.acceptance.system import wait_for
from tests.acceptance.test_atom_system import PYTHON, TOP, AtomSystem, save
from tests.evidence import keep
from tests.unit.test_torch_device import WINDOW, prompt_of

pytestmark = [pytest.mark.rngd, pytest.mark.timeout(1800)]

NEW, NEW_REAL = 5, 12
MARGIN = 0.15  # of the logits' standard deviation


class PairSystem(AtomSystem):
    def __init__(self, redis_url: str, folder: Path, **settings: object) -> None:
        # graphs on a CPU are slow, and so is their import: no deadline of a device call may end it
        slow = {"device_call_seconds": 600, "part_seconds": 300, "dtype": "bfloat16", "job_seconds": 900}
        super().__init__(redis_url, folder, **{**slow, "served_name": f"pair-{secrets.token_hex(4)}", **settings})
        self.environ["PYTHONPATH"] += f":{TOP}"
        self.ready_seconds = 600.0
        self.python["prefill"] = str(TOP / ".venv-rngd" / "bin" / "python")
        self.arguments["prefill"] = ["--factory", "tests.rngd.dfg:build"]


def expected(model: Any, prompt: list[int], new: int) -> tuple[list[int], float]:
    """`generate` in float32, and by how much its closest choice was made, in standard deviations."""
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=new,
            do_sample=False,
            output_scores=True,
            return_dict_in_generate=True,
        )
    margins = []
    for (score,) in out.scores:
        first, second = score.topk(2).values
        margins.append(float((first - second) / score.std()))
    return out.sequences[0, len(prompt) :].tolist(), min(margins)


def clear_prompt(model: Any, length: int) -> tuple[list[int], list[int]]:
    """A prompt whose answer bfloat16 cannot change: what it rounds away is less than any choice was made by."""
    for seed in range(500):
        prompt = prompt_of(length, seed)
        answer, margin = expected(model, prompt, NEW)
        if margin > MARGIN:
            return prompt, answer
    raise AssertionError(f"of 500 prompts of {length} tokens none is clear")


def kept(system: PairSystem, name: str, lengths: list[int], new: int) -> None:
    workers = {worker["role"]: worker["versions"] for worker in system.call("GET", "/v1/system")[1]["workers"]}
    keep("rngd-to-atom", name, prompt_tokens=lengths, new_tokens_each=new, equal=len(lengths), workers=workers)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3"])
def test_tokens_of_a_small_model_equal_transformers(family: str, redis_url: str, tmp_path: Path) -> None:
    model = save(family, tmp_path)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    model.float()  # both halves have the weights that were saved
    prompts, right = zip(*(clear_prompt(model, n) for n in (5, WINDOW - 1, WINDOW + 1, 40, 64)), strict=True)
    system = PairSystem(redis_url, tmp_path, model=tmp_path, context=128, slots=2, rngd_widths="16,64")
    try:
        system.start_all()
        assert [system.answer(prompt, NEW) for prompt in prompts] == list(right)
        facts = system.decode_facts()
        assert (facts["device"], facts["kv_import"], facts["local_fallbacks"]) == ("atom", "graph", "0")
        prefill = next(w for w in system.redis.smembers(system.key("workers")) if w.startswith("prefill"))
        assert system.redis.hget(system.key(f"worker:{prefill}"), "device") == "tests.rngd.dfg:build"
        system.wait_idle()
        kept(system, f"{family}, small", [len(prompt) for prompt in prompts], NEW)
    finally:
        system.close()


def test_smollm2_s_real_weights_through_both_vendors_software(redis_url: str, smollm2: Path, tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    question = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    prompts = [tokenizer.encode(text).ids for text in ("The capital of France is", question)]
    right = [expected(model, prompt, NEW_REAL)[0] for prompt in prompts]
    settings = {"context": 256, "slots": 2, "rngd_widths": "128"}
    system = PairSystem(redis_url, tmp_path, model=smollm2, decode_threads=1, prefill_threads=2, **settings)
    try:
        system.start_all()
        assert [system.answer(prompt, NEW_REAL) for prompt in prompts] == right
        assert tokenizer.decode(right[1]).startswith("The capital of France is Paris")
        wait_for(system.idle, "the system is idle again")
        kept(system, "SmolLM2-135M, real weights", [len(prompt) for prompt in prompts], NEW_REAL)
    finally:
        system.close()


def test_the_checklist_passes_with_both_vendors_software(smollm2: Path, tmp_path: Path) -> None:
    """As somebody would prove two chips: from the one environment, which starts the other."""
    settings = {"model": smollm2, "context": 160, "slots": 2, "rngd_widths": "128", "atom_dtype": "float32"}
    environ = PairSystem("redis://127.0.0.1:1/0", tmp_path, **settings).environ
    environ["KVR_PREFILL_PYTHON"] = ".venv-rngd/bin/python"  # relative: it stands in the evidence
    command = [PYTHON, "-m", "workers", "checklist", "pair", "--factory", "tests.rngd.dfg:build"]
    done = subprocess.run(command, cwd=TOP, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line]
    assert all(line.startswith("PASS  ") for line in lines)
    assert [line for line in lines if line.startswith("PASS  129 tokens, prefilled there and decoded here")]
    keep("rngd-to-atom", "python -m workers checklist pair", lines=lines)
