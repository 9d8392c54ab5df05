"""SmolLM2's real weights, in float32, through HTTP, Redis, ZeroMQ and both workers: the same tokens as transformers."""

import concurrent.futures
import json
import secrets
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest
import torch
import transformers
from tokenizers import Tokenizer

from tests.acceptance.system import System, wait_for

pytestmark = pytest.mark.timeout(900)

Reference = Callable[[list[int], int], list[int]]

LENGTHS = (5, 8, 13, 24, 40, 77, 128, 200, 333, 512, 900, 1500)
TEXT = (
    "The history of computing is older than the machines that we know. Tables of numbers were computed by people, line "
    "by line, for astronomers, sailors and tax collectors, and the errors in them cost ships and money. "
)


@pytest.fixture(scope="module")
def tokenizer(smollm2: Path) -> Tokenizer:
    return Tokenizer.from_file(str(smollm2 / "tokenizer.json"))


@pytest.fixture(scope="module")
def system(redis_url: str, smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    system = System(
        redis_url,
        tmp_path_factory.mktemp("system"),
        model=smollm2,
        served_name=f"smollm2-{secrets.token_hex(4)}",
        dtype="float32",
        decode_threads=1,
        prefill_threads=1,
    )
    yield system.start_all()
    system.close()


@pytest.fixture(scope="module")
def reference(smollm2: Path) -> Reference:
    """Plain `generate`, greedy; it stops at the end of the text, as a job does."""
    torch.set_num_threads(1)  # beside two workers, more threads only wait for each other
    model = transformers.AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval()
    known: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def generate(prompt: list[int], count: int) -> list[int]:
        if (tuple(prompt), count) not in known:
            with torch.inference_mode(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                out = model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)
            known[tuple(prompt), count] = out[0, len(prompt) :].tolist()
        return known[tuple(prompt), count]

    return generate


def prompts(tokenizer: Tokenizer) -> list[tuple[list[int], int]]:
    """(token ids, new tokens): 64, and 32 for the long ones."""
    ids = tokenizer.encode(TEXT * 40).ids
    return [(ids[index : index + length], 64 if length < 900 else 32) for index, length in enumerate(LENGTHS)]


def answer(system: System, prompt: list[int], count: int) -> list[int]:
    job = system.submit(prompt, max_tokens=count, temperature=0)
    assert system.finished(job, 300)["status"] == "finished"
    return system.tokens(job)


def test_tokens_equal_generate_alone(system: System, reference: Reference, tokenizer: Tokenizer) -> None:
    for prompt, count in prompts(tokenizer):
        assert answer(system, prompt, count) == reference(prompt, count), f"{len(prompt)} tokens"


def test_tokens_equal_generate_eight_at_once(system: System, reference: Reference, tokenizer: Tokenizer) -> None:
    some = prompts(tokenizer)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda item: answer(system, *item), some))
    for (prompt, count), tokens in zip(some, answers, strict=True):
        assert tokens == reference(prompt, count), f"{len(prompt)} tokens"
    system.wait_idle()


def test_the_comparison_sees_a_cache_that_arrives_zeroed(
    redis_url: str, smollm2: Path, tmp_path: Path, reference: Reference, tokenizer: Tokenizer
) -> None:
    """A sender that puts zeros on the wire, with right digests: every guard is satisfied, only the text is wrong."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "if 'prefill' in sys.argv or 'prefill' in sys.orig_argv:\n"
        "    import brokers.kv_sender as sender\n"
        "    put = sender.Outbound.put\n"
        "    zeros = lambda buffer: memoryview(bytes(memoryview(buffer).nbytes))\n"
        "    sender.Outbound.put = lambda self, l, s, t, k, v: put(self, l, s, t, zeros(k), zeros(v))\n"
    )
    system = System(
        redis_url, tmp_path, model=smollm2, served_name=f"zeroed-{secrets.token_hex(4)}", dtype="float32", slots=1
    )
    system.environ["PYTHONPATH"] = f"{tmp_path}:{Path(__file__).parents[2]}"
    try:
        system.start_all()
        prompt, count = prompts(tokenizer)[6]
        assert answer(system, prompt, count) != reference(prompt, count)
    finally:
        system.close()


def test_a_seed_gives_the_same_text_alone_among_neighbours_and_on_another_worker(
    system: System, redis_url: str, smollm2: Path, tmp_path: Path
) -> None:
    """H9. Without draws that depend on seed and index alone, neighbours or another worker would change the text."""
    request = {"max_tokens": 48, "temperature": 0.8, "top_p": 0.95, "seed": 7}
    alone = system.complete(TEXT, **request)["choices"][0]["text"]
    assert system.complete(TEXT, **{**request, "seed": 8})["choices"][0]["text"] != alone
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        others = [pool.submit(system.complete, TEXT[n * 5 :], max_tokens=60, seed=n) for n in range(7)]
        among = pool.submit(system.complete, TEXT, **request).result()["choices"][0]["text"]
        assert all(other.result()["usage"]["completion_tokens"] for other in others)
    assert among == alone
    other = System(
        redis_url, tmp_path, **{"model": smollm2, "served_name": system.name, "dtype": "float32", "slots": 2}
    )
    other.port = system.port
    try:
        decode = other.start("decode")[0]
        wait_for(lambda: system.call("GET", "/health/ready")[1]["decode"] == 2, "another decode worker is there", 60)
        with concurrent.futures.ThreadPoolExecutor(4) as pool:  # the emptiest worker first: both get some
            texts = [pool.submit(system.complete, TEXT, **request) for _ in range(4)]
            assert {text.result()["choices"][0]["text"] for text in texts} == {alone}
        name = next(
            w
            for w in system.redis.smembers(system.key("workers"))
            if str(decode.pid) == system.redis.hget(system.key(f"worker:{w}"), "pid")
        )
        wait_for(lambda: int(system.redis.hget(system.key(f"worker:{name}"), "jobs")) > 0, "the other one took part")
    finally:
        other.close()
    wait_for(lambda: system.call("GET", "/health/ready")[1]["decode"] == 1, "it has left")


def test_a_cancel_is_seen_between_layers_of_a_long_prompt(system: System, tokenizer: Tokenizer) -> None:
    prompt = (tokenizer.encode(TEXT * 300).ids)[:8000]
    for delay in (0.5, 3.0):
        job = system.submit(prompt, max_tokens=20)
        wait_for(lambda job=job: system.job(job)["status"] == "prefilling", "prefill has begun")
        began = time.monotonic()
        wait_for(lambda began=began, delay=delay: time.monotonic() - began > delay, "some of it is done")
        system.call("DELETE", f"/v1/jobs/{job}")
        stopped = wait_for(
            lambda job=job: (s := system.job(job)["stopped"])["milliseconds"] is not None and s,
            "the worker has confirmed",
        )
        assert stopped["phase"] == "prefill"
        print(f"cancel in an 8,000-token prefill: {stopped['milliseconds']} ms")
        system.wait_idle()


def test_openai_clients_stream_chats_and_see_errors(system: System) -> None:
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{system.port}/v1", api_key="none", max_retries=0)
    try:
        messages = [{"role": "user", "content": "Name a colour."}]
        fixed = {"model": system.name, "messages": messages, "max_tokens": 24, "temperature": 0}
        whole = client.chat.completions.create(**fixed)
        assert whole.choices[0].message.content
        chunks = list(client.chat.completions.create(**fixed, stream=True, stream_options={"include_usage": True}))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == whole.choices[0].message.content
        assert chunks[-1].usage == whole.usage
        assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
        assert [model.id for model in client.models.list()] == [system.name]
        with pytest.raises(openai.BadRequestError, match="presence_penalty"):
            client.chat.completions.create(**fixed, presence_penalty=3.0)
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(**{**fixed, "model": "another"})
    finally:
        client.close()


def test_streams_never_show_half_a_character(system: System) -> None:
    body = {
        "prompt": "Emoji: 😀 👩‍🔬 한국어 😃 👨‍👩‍👧 안녕하세요",
        "max_tokens": 60,
        "temperature": 1.0,
        "seed": 5,
        "stream": True,
    }
    texts = [
        json.loads(event["data"])["choices"][0]["text"]
        for event in system.events("/v1/completions", body)
        if event["data"] != "[DONE]"
    ]
    whole = system.complete(**{**body, "stream": False})["choices"][0]["text"]
    assert "".join(texts) == whole


def test_memory_stays_within_what_the_readme_states(system: System, smollm2: Path) -> None:
    """Weights + KV slots + KV in flight + 600 MB a worker, 150 MB an API process."""
    weights = 2 * (smollm2 / "model.safetensors").stat().st_size  # bf16 on disk, float32 here
    per_token = 30 * 2 * 3 * 64 * 4
    flight = 3 * 8192 * per_token
    api, prefill, decode = (system.memory(process) for process in system.processes)
    print(f"api {api >> 20} MiB, prefill {prefill >> 20} MiB, decode {decode >> 20} MiB")
    assert api <= 150e6
    assert prefill <= weights + flight + 600e6
    assert decode <= weights + (8 + 2) * 8192 * per_token + 600e6
