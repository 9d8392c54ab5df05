"""A job as it lies in Redis: small, readable, and the same job when it is read again."""

import json

from hypothesis import given
from hypothesis import strategies as st

from pipeline.constraint import Constraint
from pipeline.job import Job
from pipeline.sampling import MAX_SEED, SamplingParams

PLAIN = Job(prompt=(1, 2, 3), max_tokens=8, sampling=SamplingParams(seed=7))

ids = st.integers(0, 300_000)
numbers = st.floats(-100, 100)
params = st.builds(
    SamplingParams,
    temperature=st.floats(0, 100),
    top_p=st.floats(0.1, 1),
    top_k=st.integers(0, 1000),
    seed=st.integers(0, MAX_SEED),
    min_p=st.floats(0, 1),
    presence_penalty=numbers,
    frequency_penalty=numbers,
    repetition_penalty=st.floats(0.1, 10),
    logit_bias=st.lists(st.tuples(ids, numbers), max_size=3).map(tuple),
)
constraints = st.builds(
    Constraint, kind=st.sampled_from(["json_object", "json_schema", "regex", "choice", "grammar"]), source=st.text()
)
jobs = st.builds(
    Job,
    prompt=st.lists(ids, min_size=1, max_size=5).map(tuple),
    max_tokens=st.integers(1, 100_000),
    sampling=params,
    stop=st.lists(st.text(min_size=1), max_size=3).map(tuple),
    ignore_eos=st.booleans(),
    kind=st.sampled_from(["text", "chat"]),
    min_tokens=st.integers(0, 100),
    stop_tokens=st.lists(ids, max_size=3).map(tuple),
    include_stop=st.booleans(),
    logprobs=st.integers(-1, 20),
    constraint=st.none() | constraints,
)


@given(jobs)
def test_a_job_that_is_read_again_is_the_same_job(job: Job) -> None:
    again = Job.decode(job.encode())
    assert again == job
    assert hash(again) == hash(job)  # lists have become tuples again
    assert again.digest() == job.digest()


def test_what_was_not_asked_for_takes_no_room() -> None:
    assert json.loads(PLAIN.encode()) == {"prompt": [1, 2, 3], "max_tokens": 8, "sampling": {"seed": 7}}


def test_a_record_from_before_these_fields_is_still_read() -> None:
    """Jobs that wait while kvrelay is brought up to date."""
    record = (
        '{"prompt":[1,2,3],"max_tokens":8,"sampling":{"temperature":1.0,"top_p":1.0,"top_k":0,"seed":7},"stop":[],'
        '"ignore_eos":false,"kind":"text"}'
    )
    assert Job.decode(record) == PLAIN


@given(jobs, jobs)
def test_other_jobs_have_other_digests(one: Job, other: Job) -> None:
    assert (one.digest() == other.digest()) == (one == other)
