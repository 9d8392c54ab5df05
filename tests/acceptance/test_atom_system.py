"""The pair: prefill on the CPU, decode on the vendor's optimum-rbln over an emulated chip, in an environment of its own."""

import concurrent.futures
import json
import secrets
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer

from pipeline.model import SIM
from tests.acceptance.system import System, wait_for
from tests.unit.test_torch_device import FAMILIES, WINDOW, prompt_of

pytestmark = [pytest.mark.atom, pytest.mark.timeout(600)]

TOP = Path(__file__).parents[2]
PYTHON = TOP / ".venv-atom" / "bin" / "python"
NEW = 24
LENGTHS = (3, WINDOW - 1, WINDOW, WINDOW + 1, 50, 90, 200)
EOS = 7


class AtomSystem(System):
    """Its decode worker runs in the atom environment, with the test double of `rebel` on its path."""

    def __init__(self, redis_url: str, folder: Path, **settings: object) -> None:
        atom = {"decode_device": "atom", "atom_dtype": "float32", "dtype": "float32", "test_emulated_npu": "RBLN-CA22"}
        names = {"served_name": f"atom-{secrets.token_hex(4)}", "locks": folder, "cache": folder / "cache"}
        super().__init__(redis_url, folder, **{**atom, **names, **settings})
        self.environ["PYTHONPATH"] = str(TOP / "tests" / "emulation")
        self.python["decode"] = str(PYTHON)

    def answer(self, prompt: list[int], new: int = NEW) -> list[int]:
        job = self.submit(prompt, max_tokens=new, temperature=0)
        assert self.finished(job, 300)["status"] == "finished", self.job(job)
        return self.tokens(job)

    def decode_facts(self) -> dict[str, Any]:
        workers = self.redis.smembers(self.key("workers"))
        return dict(self.redis.hgetall(self.key(f"worker:{next(w for w in workers if w.startswith('decode'))}")))


def save(family: str, folder: Path) -> Any:
    """A small model with random weights, for which EOS ends a text."""
    torch.manual_seed(1)
    config = FAMILIES[family]
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    model.generation_config.eos_token_id = EOS
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes((SIM / "tokenizer.json").read_bytes())
    return model


def expected(model: Any, prompt: list[int], new: int = NEW) -> list[int]:
    """`generate`, which ends with EOS as a job does."""
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = model.generate(torch.tensor([prompt]), max_new_tokens=new, do_sample=False)
    return list(out[0, len(prompt) :].tolist())


def ending_prompt(model: Any, new: int = NEW) -> list[int]:
    """One whose answer ends by EOS before its limit, and not at once."""
    for seed in range(2000):
        prompt = prompt_of(20, seed)
        answer = expected(model, prompt, new)
        if 2 < len(answer) < new:
            return prompt
    raise AssertionError("no prompt of 2,000 ends by EOS")


CASES = {
    "llama": {"slots": 4, "context": 512},
    "llama-flash": {"slots": 2, "context": 2048, "atom_partition": 1024},
    "qwen2": {"slots": 2, "context": 512},
    "qwen3": {"slots": 1, "context": 512},
    "gemma3": {"slots": 4, "context": 512},
}


@pytest.mark.parametrize("case", CASES)
def test_tokens_equal_generate_through_eos_alone_and_all_at_once(case: str, redis_url: str, tmp_path: Path) -> None:
    family = case.removesuffix("-flash")
    config = FAMILIES[family]
    limit, config.max_position_embeddings = config.max_position_embeddings, 2048
    try:
        model = save(family, tmp_path)
    finally:
        config.max_position_embeddings = limit
    lengths = (*LENGTHS, 1000, 1023, 1024, 1030) if case == "llama-flash" else LENGTHS
    prompts = [*(prompt_of(length) for length in lengths), ending_prompt(model)]
    right = [expected(model, prompt) for prompt in prompts]
    assert right[-1][-1] == EOS
    system = AtomSystem(redis_url, tmp_path, model=tmp_path, chunk=64, **CASES[case])
    try:
        system.start_all()
        assert [system.answer(prompt) for prompt in prompts] == right
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            assert list(pool.map(system.answer, prompts)) == right
        system.wait_idle()
        facts = system.decode_facts()
        assert (facts["device"], facts["kv_import"]) == ("atom", "graph")
        assert (facts["overflows"], facts["local_fallbacks"]) == ("0", "0")
    finally:
        system.close()


@pytest.fixture(scope="module")
def llama(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[AtomSystem, Any]]:
    folder = tmp_path_factory.mktemp("llama")
    model = save("llama", folder)
    system = AtomSystem(redis_url, folder, model=folder, slots=2, context=512, chunk=64)
    system.start_all()
    yield system, model
    system.close()


def test_a_cancel_in_decode_frees_the_slot_and_the_next_job_in_it_is_right(llama: tuple[AtomSystem, Any]) -> None:
    system, model = llama
    for number in range(6):  # three times as many as slots, and each slot has held a longer job
        long = system.submit(prompt_of(100, number), max_tokens=400, temperature=0, ignore_eos=True)
        wait_for(lambda long=long: len(system.tokens(long)) > 5, "the job decodes")
        status, answer = system.call("DELETE", f"/v1/jobs/{long}")
        assert (status, answer["status"]) == (200, "cancelled")
        prompt = prompt_of(30 + number)
        assert system.answer(prompt) == expected(model, prompt)
        stopped = wait_for(lambda long=long: system.job(long).get("stopped", {}).get("phase"), "the holder has settled")
        assert stopped == "decode"
    system.wait_idle()


def test_a_client_that_leaves_ends_its_job_on_the_chip(llama: tuple[AtomSystem, Any]) -> None:
    system, model = llama
    body = {"prompt": prompt_of(40), "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True}
    connection = system.stream("/v1/completions", body)
    connection.recv(4096)
    connection.close()
    system.wait_idle()
    prompt = prompt_of(41)
    assert system.answer(prompt) == expected(model, prompt)


def test_two_workers_take_a_chip_each_and_a_third_is_told_who_has_them(llama: tuple[AtomSystem, Any]) -> None:
    system, _ = llama
    (second,) = system.start("decode")
    system.wait_ready(1, 2)
    workers = [w for w in system.redis.smembers(system.key("workers")) if w.startswith("decode")]
    assert sorted(system.redis.hget(system.key(f"worker:{worker}"), "chips") for worker in workers) == ["0", "1"]
    third = subprocess.run([PYTHON, "-m", "workers", "decode"], env=system.environ, capture_output=True, text=True)
    assert third.returncode == 1
    assert f"1 is held by process {second.pid}" in third.stderr
    assert len([line for line in third.stderr.splitlines() if line.startswith("kvrelay decode: ")]) == 1
    shown = subprocess.run(
        [PYTHON.with_name("kvrelay"), "devices"],
        env=system.environ | {"KVR_DECODE_PYTHON": str(PYTHON), "KVR_PREFILL_DEVICE": "sim"},
        capture_output=True,
        text=True,
    )
    assert shown.returncode == 0, shown.stderr
    assert f"decode   atom        1  RBLN-CA22               process {second.pid}" in shown.stdout
    system.stop(second)
    assert (
        f"process {second.pid}"
        not in subprocess.run(
            [PYTHON, "-m", "workers", "devices", "decode"], env=system.environ, capture_output=True, text=True
        ).stdout
    )


def test_without_a_way_to_import_jobs_are_prefilled_on_the_chip_and_say_so(redis_url: str, tmp_path: Path) -> None:
    model = save("gemma3", tmp_path)  # its vendor's prefill graph would let tokens see later ones
    system = AtomSystem(redis_url, tmp_path, model=tmp_path, slots=2, context=512, fallback="local")
    system.environ["KVR_TEST_EMULATED_FAULTS"] = "no_private,off_by_one"
    prompts = [prompt_of(length) for length in (5, 50, 90)]
    try:
        system.start_all()
        jobs = [system.submit(prompt, max_tokens=NEW, temperature=0) for prompt in prompts]
        for job, prompt in zip(jobs, prompts, strict=True):
            shown = system.finished(job)
            assert system.tokens(job) == expected(model, prompt)
            assert [event["event"] for event in shown["timeline"]].count("local_fallback") == 1
        wait_for(lambda: system.decode_facts()["local_fallbacks"] == "3", "the worker's figures count them")
        assert system.decode_facts()["kv_import"] == "none"
    finally:
        system.close()


def test_a_cache_beyond_the_device_s_range_is_given_up_with_the_reason(redis_url: str, tmp_path: Path) -> None:
    model = save("llama", tmp_path)
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight *= 1e6
    model.save_pretrained(tmp_path)
    system = AtomSystem(redis_url, tmp_path, model=tmp_path, slots=1, context=512, atom_dtype="float16")
    try:
        system.start_all()
        shown = system.finished(system.submit(prompt_of(20), max_tokens=NEW, temperature=0))
        assert shown["status"] == "failed"
        assert "KV of layer 1 reaches" in shown["reason"]
        wait_for(lambda: system.decode_facts()["overflows"] == "3", "each attempt was counted")
        system.wait_idle()
    finally:
        system.close()


def test_smollm2_s_real_weights_decode_on_atom_as_in_transformers(
    redis_url: str, smollm2: Path, tmp_path: Path
) -> None:
    tokenizer = Tokenizer.from_file(str(smollm2 / "tokenizer.json"))
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    ids = tokenizer.encode("The history of computing is older than the machines that we know. " * 40).ids
    question = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    prompts = [ids[:5], ids[:77], ids[3:203], ids[1:400], tokenizer.encode(question).ids]
    right = [expected(model, prompt, 40) for prompt in prompts]
    assert tokenizer.decode(right[-1]).startswith("The capital of France is Paris.")
    assert len(right[-1]) < 40, "it ends by itself"
    system = AtomSystem(redis_url, tmp_path, model=smollm2, slots=2, context=512, decode_threads=1, prefill_threads=1)
    try:
        system.start_all()
        assert [system.answer(prompt, 40) for prompt in prompts] == right
        with concurrent.futures.ThreadPoolExecutor(5) as pool:
            assert list(pool.map(lambda prompt: system.answer(prompt, 40), prompts)) == right
        body = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
        status, answer = system.call("POST", "/v1/chat/completions", body)
        assert (status, answer["choices"][0]["finish_reason"]) == (200, "stop"), json.dumps(answer)
        system.wait_idle()
        assert system.decode_facts()["kv_import"] == "graph"
    finally:
        system.close()
