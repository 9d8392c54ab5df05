"""Every family of models through the whole system: HTTP, Redis, ZeroMQ and both workers, on small random weights in float32."""

import concurrent.futures
import secrets
import warnings
from pathlib import Path

import pytest
import torch
import transformers

from pipeline.model import SIM
from tests.acceptance.system import System
from tests.unit.test_torch_device import FAMILIES, WINDOW, prompt_of

NEW = 24
LENGTHS = (3, WINDOW - 1, WINDOW, WINDOW + 1, 50, 90, 200, 400)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_generate_alone_and_eight_at_once(family: str, redis_url: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES[family]).eval()
    model.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((SIM / "tokenizer.json").read_bytes())
    prompts = [prompt_of(length) for length in LENGTHS]
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outs = [model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False) for prompt in prompts]
    expected = [out[0, len(prompt) :].tolist() for out, prompt in zip(outs, prompts, strict=True)]
    settings = {"model": tmp_path, "dtype": "float32", "context": 512, "chunk": 64, "slots": 8}
    system = System(redis_url, tmp_path, **settings, served_name=f"{family}-{secrets.token_hex(4)}")

    def answer(prompt: list[int]) -> list[int]:
        job = system.submit(prompt, max_tokens=NEW, temperature=0)
        assert system.finished(job)["status"] == "finished"
        return system.tokens(job)

    try:
        system.start_all()
        assert [answer(prompt) for prompt in prompts] == expected
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            assert list(pool.map(answer, prompts)) == expected
        system.wait_idle()
    finally:
        system.close()
