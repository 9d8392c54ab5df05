"""The text of a real model across the death of its worker: the same as undisturbed, to the letter."""

import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.acceptance.system import wait_for
from tests.chaos.conftest import OTHER, QUICK, Chaos, Client

NEW = 16
REQUESTS = {
    "greedy": {"max_tokens": NEW, "temperature": 0, "ignore_eos": True},
    "seeded": {"max_tokens": NEW, "temperature": 1, "top_p": 0.9, "seed": 11, "ignore_eos": True},
}
STEPS = [
    *[("prefill", step) for step in ("layer#9", "logged")],
    *[("decode", step) for step in ("inserted", "stepped", "stepped#5", f"stepped#{NEW - 2}")],
]
TEXT = "The lighthouse keeper wrote in his diary that"


@pytest.fixture(scope="module")
def system(redis_url: str, smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chaos]:
    """In float32, where a text does not depend on its neighbours; the undisturbed texts come first."""
    settings = {"model": smollm2, "prefill_device": "cpu", "decode_device": "cpu", "dtype": "float32", "slots": 2}
    name = {"served_name": f"text-{secrets.token_hex(4)}", "context": 512, "prefill_threads": 1, "decode_threads": 1}
    system = Chaos(redis_url, tmp_path_factory.mktemp("text"), **{**settings, **name, **QUICK, "lease_seconds": 3})
    system.start("api")
    wait_for(system.answers, "the API answers")
    yield system
    system.close()


@pytest.fixture(scope="module")
def undisturbed(system: Chaos, smollm2: Path) -> dict[str, list[int]]:
    tokens = Tokenizer.from_file(str(smollm2 / "tokenizer.json")).encode(TEXT).ids
    system.start_all_but_the_api()
    right = {}
    for name, request in REQUESTS.items():
        job = system.submit(tokens, **request)
        assert system.finished(job, 120)["status"] == "finished"
        right[name] = system.tokens(job)
        assert len(right[name]) == NEW
    assert right["greedy"] != right["seeded"]
    return right


@pytest.mark.timeout(240)
@pytest.mark.parametrize("request_name", REQUESTS)
@pytest.mark.parametrize(("role", "step"), STEPS, ids=[step for _, step in STEPS])
def test_a_text_is_the_same_across_the_death_of_its_worker(
    system: Chaos, undisturbed: dict[str, list[int]], smollm2: Path, role: str, step: str, request_name: str
) -> None:
    """W9, W4, P3. Without the random number that depends on seed and index alone, a seeded text would go on otherwise."""
    system.stop_all("prefill")
    system.stop_all("decode")
    system.start(OTHER[role])
    faulty = system.start_faulty(role, f"{step}=kill")
    job = system.submit(Tokenizer.from_file(str(smollm2 / "tokenizer.json")).encode(TEXT).ids, **REQUESTS[request_name])
    client = Client(system, job)
    wait_for(lambda: faulty.poll() is not None, "the worker died", 60)
    system.processes.remove(faulty)
    system.start(role)
    assert system.finished(job, 120)["status"] == "finished"
    assert system.tokens(job) == undisturbed[request_name]
    client.check(system.tokens(job))
    system.wait_idle()
    system.check()
