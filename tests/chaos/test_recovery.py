"""A worker dies or stops, at any step of a job's life: it goes on elsewhere, its client sees one text, nothing is left over."""

import signal
import time

import pytest

from tests.acceptance.system import wait_for
from tests.chaos.conftest import OTHER, Chaos, Client, prompt
from workers.devices.sim import expected

PREFILL = ["leased", "opened", "layer", "layer#3", "drawn", "logged", "committed"]
DECODE = ["credit", "taken", "part", "arrived", "handed", "inserted", "stepped", "stepped#5", "written#2", "finished"]
STEPS = [("prefill", step) for step in PREFILL] + [("decode", step) for step in DECODE]
PROMPT, COUNT = prompt(700), 12
GRACE_SLACK = 8.0  # of which a second is KVR_GRACE_SECONDS, twice


@pytest.mark.parametrize("action", ["kill", "stop"])
@pytest.mark.parametrize(("role", "step"), STEPS, ids=[step for _, step in STEPS])
def test_a_job_goes_on_elsewhere_from_every_step(system: Chaos, role: str, step: str, action: str) -> None:
    """R5, P3, C12, W3, W9. Without the sweep the job stays where it was; without the fence of the lease id a stopped worker
    that wakes up writes its tokens a second time; without the index check of append there is a gap."""
    system.start(OTHER[role])
    faulty = system.start_faulty(role, f"{step}={action}")
    job = system.submit(PROMPT, max_tokens=COUNT)
    client = Client(system, job)
    system.wait_fault()
    system.processes.remove(faulty)
    system.start(role)
    try:
        system.finishes(job, PROMPT, COUNT)
        if action == "stop":  # the late one wakes up, is fenced, and says nothing
            faulty.send_signal(signal.SIGCONT)
            wait_for(lambda: len(system.redis.smembers(system.key("workers"))) >= 3, "it is back")
            system.finishes(job, PROMPT, COUNT)
        client.check(system.tokens(job))
        again = system.submit(PROMPT[:50], max_tokens=3)
        system.finishes(again, PROMPT[:50], 3)
    finally:
        faulty.kill()
        faulty.wait()
    system.check()


@pytest.mark.parametrize(("role", "step"), STEPS, ids=[step for _, step in STEPS])
def test_a_worker_that_is_asked_to_leave_loses_nothing_and_goes_in_time(system: Chaos, role: str, step: str) -> None:
    """P9. Without the release on the way out the job would wait for a lease; without the abort of arriving transfers their
    sender would wait for KVR_PART_SECONDS."""
    system.start(OTHER[role])
    leaving = system.start_faulty(role, f"{step}=term")
    job = system.submit(PROMPT, max_tokens=COUNT)
    client = Client(system, job)
    system.wait_fault()
    leaving.wait(GRACE_SLACK)
    assert leaving.returncode == 0, system.logs()[-3000:]
    system.processes.remove(leaving)
    system.start(role)
    system.finishes(job, PROMPT, COUNT, seconds=20)  # of which KVR_PART_SECONDS would be 30
    client.check(system.tokens(job))
    assert system.job(job)["attempt"] <= 2
    system.check()


@pytest.mark.parametrize("system", [{"sim_prefill_us": 2000, "chunk": 256}], indirect=True)
def test_a_busy_prefill_worker_that_is_asked_to_leave_takes_no_other_job(system: Chaos) -> None:
    """P9. Without the look at the way out while it waits for its device, it would lease the next job first."""
    system.start("decode")
    (leaving,) = system.start("prefill")
    jobs = [system.submit(prompt(2500, number), max_tokens=3) for number in range(2)]
    wait_for(lambda: system.job(jobs[0])["status"] == "prefilling", "it is at work")
    leaving.send_signal(signal.SIGTERM)
    leaving.wait(GRACE_SLACK)
    system.processes.remove(leaving)
    assert [event["event"] for event in system.job(jobs[1])["timeline"]] == ["queued"]
    assert [system.job(job)["status"] for job in jobs] == ["queued", "queued"]
    system.start("prefill")
    for number, job in enumerate(jobs):
        system.finishes(job, prompt(2500, number), 3)
    system.check()


@pytest.mark.parametrize("system", [{"sim_step_ms": 30}], indirect=True)
def test_a_worker_that_wakes_up_while_another_has_its_job_says_nothing_more(system: Chaos) -> None:
    """W9, P3. Without the fence of the lease id it would go on with the job, and both would write."""
    system.start("prefill")
    late = system.start_faulty("decode", "stepped#5=stop")
    job = system.submit(PROMPT, max_tokens=200)
    client = Client(system, job)
    system.wait_fault()
    system.start("decode")
    wait_for(lambda: len(system.tokens(job)) > 20, "another one goes on with it", 30)
    late.send_signal(signal.SIGCONT)
    wait_for(lambda: facts(system, late.pid).get("state") == "alive", "it is awake")
    wait_for(lambda: facts(system, late.pid)["busy"] == "0", "it has let go", 3)
    assert system.job(job)["status"] == "decoding", "while the other one is at it"
    system.finishes(job, PROMPT, 200)
    client.check(system.tokens(job))
    system.wait_idle()
    assert facts(system, late.pid)["jobs"] == "0", "the other one ended it"


@pytest.mark.parametrize(
    "fault", ["sent#3=flip", "sent#3=drop", "sent#8=drop", "sent#2=twice", "layer#3=raise", "drawn=raise"]
)
def test_a_cache_that_does_not_arrive_whole_is_sent_again_and_never_decoded(system: Chaos, fault: str) -> None:
    """W1, W3. Without the digest a flipped byte gives other tokens; without the order and the count of parts a dropped one."""
    system.start("decode")
    system.start_faulty("prefill", fault)
    job = system.submit(PROMPT, max_tokens=COUNT)
    client = Client(system, job)
    system.finishes(job, PROMPT, COUNT)
    client.check(system.tokens(job))
    assert system.job(job)["attempt"] == 2
    system.wait_idle()
    system.check()


@pytest.mark.parametrize("request_", [{"max_tokens": 1}, {"max_tokens": 50, "stop": "STOP"}], ids=["length", "stop"])
def test_a_job_that_is_over_with_its_first_token_never_reaches_decode(
    system: Chaos, request_: dict[str, object]
) -> None:
    """W5. Without the look at the first token before the commit, decode would go on with it."""
    system.start("prefill")
    system.start("decode")
    first = expected(PROMPT, 1)
    if "stop" in request_:
        request_ = {**request_, "stop": chr(first[0])}
    job = system.submit(PROMPT, **request_)
    shown = system.finished(job)
    assert (shown["status"], shown["finish_reason"]) == ("finished", "stop" if "stop" in request_ else "length")
    assert system.tokens(job) == first
    assert "decoding" not in [event["event"] for event in shown["timeline"]]
    assert shown["text"] == ("" if "stop" in request_ else chr(first[0]))
    system.wait_idle()


def test_one_of_four_that_cannot_be_decoded_leaves_the_others_alone(system: Chaos) -> None:
    """P7. Without the catch around each insert the whole batch is given back."""
    system.start("prefill")
    system.start_faulty("decode", "inserted#3=raise")
    jobs = {system.submit(prompt(60, seed), max_tokens=40): prompt(60, seed) for seed in range(4)}
    for job, tokens in jobs.items():
        system.finishes(job, tokens, 40)
    assert sorted(system.job(job)["attempt"] for job in jobs) == [1, 1, 1, 2]
    system.check()


def test_a_prefill_that_fails_for_good_is_an_error_at_once(system: Chaos) -> None:
    """P8. Without the release the client waits for its deadline."""
    system.environ["KVR_ATTEMPTS"] = "1"
    system.start("decode")
    system.start_faulty("prefill", "layer=raise", attempts=1)
    system.wait_ready()
    started = time.monotonic()
    status, answer = system.call("POST", "/v1/completions", {"prompt": PROMPT, "max_tokens": 3})
    assert (status, answer["error"]["code"]) == (500, "job_failed")
    assert "a fault of the test" in answer["error"]["message"]
    assert time.monotonic() - started < 5, "a second, with slack"
    system.check()


def test_a_job_that_kills_its_workers_is_given_up_with_all_its_reasons(system: Chaos) -> None:
    """P5. Without the bound on attempts it would kill workers for ever."""
    system.start("decode")
    job = system.submit(PROMPT, max_tokens=COUNT)
    for _ in range(3):
        faulty = system.start_faulty("prefill", "layer=kill")
        wait_for(lambda faulty=faulty: faulty.poll() is not None, "the worker died", 30)
        system.processes.remove(faulty)
        wait_for(lambda: system.job(job)["status"] != "prefilling", "the lease ran out", 30)
    system.start("prefill")
    shown = system.finished(job)
    assert shown["status"] == "failed"
    assert sorted(shown["failed_attempts"]) == ["1", "2", "3"]
    assert all("ran out" in why for why in shown["failed_attempts"].values())
    system.check()


@pytest.mark.parametrize(("role", "step"), [("prefill", "layer#2"), ("decode", "inserted")])
def test_a_long_device_call_that_holds_the_interpreter_runs_once(system: Chaos, role: str, step: str) -> None:
    """P6, R1. Without the keeper's process the lease would run out, for nobody could renew it."""
    system.start(OTHER[role])
    system.start_faulty(role, f"{step}=hold=5")
    job = system.submit(PROMPT, max_tokens=COUNT)
    system.finishes(job, PROMPT, COUNT)
    assert system.job(job)["attempt"] == 1
    system.check()


@pytest.mark.parametrize("system", [{"lease_seconds": 6, "heartbeat_seconds": 2}], indirect=True)
def test_a_device_call_beyond_its_bound_is_taken_over_and_the_late_one_fenced(system: Chaos) -> None:
    """P6. Without the bound a wedged chip would keep its job for ever; without the fence it would be answered twice. It is
    seen as wedged for two heartbeats, then it is gone: hence longer ones than elsewhere.
    """
    system.start("decode")
    system.start_faulty("prefill", "layer#2=hold=16", device_call_seconds=1)
    job = system.submit(PROMPT, max_tokens=COUNT)
    system.wait_fault()
    wait_for(lambda: "wedged" in states(system), "the worker is seen as wedged")
    system.start("prefill")
    system.finishes(job, PROMPT, COUNT)
    assert system.job(job)["attempt"] == 2
    wait_for(lambda: states(system).count("alive") == 3, "the late one is back", 30)
    system.finishes(job, PROMPT, COUNT)
    system.check()


def facts(system: Chaos, pid: int) -> dict[str, str]:
    """What Redis has of a worker."""
    for worker in system.redis.smembers(system.key("workers")):
        found: dict[str, str] = system.redis.hgetall(system.key(f"worker:{worker}"))
        if found.get("pid") == str(pid):
            return found
    return {}


def states(system: Chaos) -> list[str]:
    workers = system.redis.smembers(system.key("workers"))
    return [system.redis.hget(system.key(f"worker:{worker}"), "state") for worker in workers]
