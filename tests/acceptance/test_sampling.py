"""Jobs with every parameter, through Redis and both workers, against one sampler in one process. Devices are sim's.

Sim is sure of its next token. Where a constraint does not allow that one, all others are alike to it, so chance decides.
"""

import asyncio
import json
import secrets
import signal
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest
from tokenizers import Tokenizer

from brokers.queue import JobQueue
from brokers.store import Store
from brokers.token_log import Entry, TokenLog
from pipeline.constraint import Constraint, Matcher
from pipeline.job import Job, Priority
from pipeline.model import SIM
from pipeline.sampling import SamplingParams
from pipeline.vocabulary import Vocabulary
from tests.acceptance.system import System, wait_for
from workers.devices import sim
from workers.sampler import Drawn, Sampler

T = TypeVar("T")

EOS = 256
VOCABULARY = Vocabulary(Tokenizer.from_file(str(SIM / "tokenizer.json")), {EOS})
PROMPT = tuple(range(40, 70))
PLAIN = Job(prompt=PROMPT, max_tokens=3, sampling=SamplingParams(seed=5), logprobs=2)
STRINGS = '{"type": "array", "items": {"type": "string", "maxLength": 9}, "minItems": 12, "maxItems": 12}'
EVERYTHING = Job(
    prompt=PROMPT,
    max_tokens=400,
    sampling=SamplingParams(
        temperature=0.9,
        top_p=0.95,
        top_k=60,
        min_p=0.001,
        seed=9,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        repetition_penalty=1.1,
        logit_bias=((ord("e"), 200.0), (ord('"'), 150.0)),
    ),
    min_tokens=40,
    stop_tokens=(ord("#"),),
    logprobs=1,
    constraint=Constraint("json_schema", STRINGS),
)


@pytest.fixture
def system(redis_url: str, tmp_path: Path) -> Iterator[System]:
    system = System(
        redis_url,
        tmp_path,
        model="sim",
        prefill_device="sim",
        decode_device="sim",
        served_name=f"sim-{secrets.token_hex(4)}",
        lease_seconds=2,
        heartbeat_seconds=0.5,
        sim_step_ms=5,
    )
    yield system
    system.close()


def submit(system: System, job: Job) -> str:
    """Past the API."""
    job_id = secrets.token_hex(8)

    async def send(store: Store) -> None:
        await JobQueue(store).submit(job_id, job, priority=Priority.NORMAL, bound=10, lifetime=60)

    asyncio.run(with_store(system, send))
    return job_id


def log_of(system: System, job_id: str) -> list[Entry]:
    async def read(store: Store) -> list[Entry]:
        return await TokenLog(store).read(job_id)

    return asyncio.run(with_store(system, read))


async def with_store(system: System, use: Callable[[Store], Awaitable[T]]) -> T:
    store = Store(system.config)
    try:
        return await use(store)
    finally:
        await store.close()


def answer(system: System, job_id: str) -> list[Entry]:
    """What was logged until it finished."""
    wait_for(lambda: system.redis.hget(system.key(f"job:{job_id}"), "ended"), f"job {job_id} ends")
    *entries, end = log_of(system, job_id)
    assert end.end == "finished", end
    return entries


def reference(job: Job) -> list[Drawn]:
    """The same job in one go."""
    assert job.constraint is not None
    sampler = Sampler(job, eos=VOCABULARY.eos, matcher=Matcher(job.constraint, VOCABULARY))
    tokens, drawn = list(job.prompt), []
    while tokens[-1] != EOS and len(drawn) < job.max_tokens:
        drawn.append(sampler.draw(sim._logits(sim.expected(tokens, 1))[0]))
        tokens.append(drawn[-1].token)
    return drawn


def test_the_first_token_has_logprobs_as_the_others_have(system: System) -> None:
    """W6. Another worker draws it. Without its entry's field `p` the first of three would have none."""
    system.start_all()
    entries = answer(system, submit(system, PLAIN))
    assert [entry.token for entry in entries] == sim.expected(PROMPT, 3)
    for entry in entries:
        assert entry.logprobs is not None
        assert entry.logprobs.logprob == 0
        assert [logprob for _, logprob in entry.logprobs.top] == [0, -9999]
        assert entry.logprobs.top[0][0] == entry.token
    plain = answer(system, submit(system, replace(PLAIN, logprobs=-1)))
    assert [entry.logprobs for entry in plain] == [None, None, None]
    system.wait_idle()


def test_with_every_parameter_two_workers_draw_what_one_would(system: System) -> None:
    """W4 and the rest of the parameters. Without the tokens so far, the decode worker's sampler would begin anew."""
    system.start_all()
    drawn = reference(EVERYTHING)
    entries = answer(system, submit(system, EVERYTHING))
    assert [entry.token for entry in entries] == [one.token for one in drawn]
    assert [entry.logprobs and entry.logprobs.top for entry in entries] == [
        one.logprobs and one.logprobs.top for one in drawn
    ]
    said = json.loads("".join(entry.text for entry in entries))
    assert len(said) == 12
    assert all(len(word) <= 9 for word in said)
    system.wait_idle()


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_a_job_that_loses_its_worker_goes_on_as_if_nothing_had_been(system: System, role: str) -> None:
    """Penalties, min_tokens and the place in the constraint come back from the log."""
    system.environ["KVR_SIM_PREFILL_US"] = "20000" if role == "prefill" else "50"
    system.start("api")
    first = system.start(role)[0]
    system.start("decode" if role == "prefill" else "prefill")
    system.wait_ready()
    job_id = submit(system, EVERYTHING)
    status = "prefilling" if role == "prefill" else "decoding"
    wait_for(lambda: system.redis.hget(system.key(f"job:{job_id}"), "status") == status, f"the job is {status}")
    if role == "decode":
        wait_for(lambda: len(log_of(system, job_id)) > 30, "it has said something")
    system.stop(first, signal.SIGKILL)
    system.start(role)
    entries = answer(system, job_id)
    assert [entry.token for entry in entries] == [one.token for one in reference(EVERYTHING)]
    assert int(system.redis.hget(system.key(f"job:{job_id}"), "attempt")) == 2
    system.wait_idle()


def failed(system: System, job: Job) -> dict[int, str]:
    """The reason of each attempt."""
    job_id = submit(system, job)
    record = system.key(f"job:{job_id}")
    wait_for(lambda: system.redis.hget(record, "ended"), "it has ended")
    assert system.redis.hget(record, "status") == "failed"
    return {attempt: system.redis.hget(record, f"why:{attempt}") for attempt in (1, 2, 3)}


def test_a_constraint_that_a_worker_cannot_follow_ends_its_job_and_no_other(system: System) -> None:
    """One that the API would have refused, or that becomes too hard on the way: an error, and not half an answer.
    Without the ladder around each draw, the decode worker would step nobody any more."""
    system.start_all()
    neighbour = submit(system, replace(PLAIN, max_tokens=300))
    reasons = failed(system, replace(EVERYTHING, constraint=Constraint("regex", "(a")))
    assert all("invalid regex" in reason for reason in reasons.values())
    many = " | ".join(f'"x{number}"' for number in range(5000))
    grammar = Constraint("grammar", f"start: WORD many\nWORD: /[a-z]{{9}}/\nmany: {many}")
    reasons = failed(system, replace(EVERYTHING, constraint=grammar))
    assert reasons[1].startswith("draw: ConstraintError: Parser Error: Current row has")
    assert [entry.token for entry in answer(system, neighbour)] == sim.expected(PROMPT, 300)
    system.wait_idle()
