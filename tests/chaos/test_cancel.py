"""Cancel and leave: at any moment, by anyone, with the bell dead or Redis just back; one end, nothing left over."""

import signal
import time

import pytest

from tests.acceptance.system import wait_for
from tests.chaos.conftest import OTHER, Chaos, prompt

SLACK = 3.0  # seconds, on waits for what takes milliseconds


def cancel(system: Chaos, job: str) -> int:
    return system.call("DELETE", f"/v1/jobs/{job}")[0]


def decoding(system: Chaos, job: str) -> bool:
    return system.job(job)["status"] == "decoding" and len(system.tokens(job)) > 2


def test_a_wave_of_clients_that_leave_holds_up_nobody(system: Chaos) -> None:
    """C1. Without the cancel of a client that left, two hundred jobs would be served first."""
    system.start_all_but_the_api()
    connections = [system.stream("/v1/completions", {"prompt": prompt(400, n), "max_tokens": 200}) for n in range(200)]
    for connection in connections:
        connection.close()
    started = time.monotonic()
    jobs = {system.submit(prompt(50, n), max_tokens=3): prompt(50, n) for n in range(20)}
    for job, tokens in jobs.items():
        system.finishes(job, tokens, 3)
    assert time.monotonic() - started < 60
    system.wait_idle()
    system.check()


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("system", [{"sim_prefill_us": 2000, "chunk": 4000, "sim_layers": 32}], indirect=True)
def test_a_cancel_in_a_long_prefill_frees_its_worker_within_a_layer(system: Chaos, share: float) -> None:
    """C2, C14. Without the look between layers the prefill would go on for its eight seconds."""
    system.start_all_but_the_api()
    job = system.submit(prompt(4000), max_tokens=3)
    wait_for(lambda: system.job(job)["status"] == "prefilling", "the prefill began")
    time.sleep(8 * share)
    asked = time.monotonic()
    assert cancel(system, job) == 200
    following = system.submit(prompt(10), max_tokens=1)
    assert system.finished(following)["status"] == "finished"
    if share < 0.9:
        assert time.monotonic() - asked < 0.25 + SLACK, "a layer takes a quarter of a second, the rest of it seconds"
    shown = wait_for(lambda: (s := system.job(job))["stopped"].get("milliseconds") is not None and s, "it is confirmed")
    assert (shown["status"], shown["stopped"]["phase"]) == ("cancelled", "prefill")
    system.wait_idle()
    system.check()


@pytest.mark.parametrize(
    "system", [{"lease_seconds": 9, "heartbeat_seconds": 3, "sim_prefill_us": 2000}], indirect=True
)
def test_a_cancel_that_falls_between_a_lease_and_its_answer_is_not_missed(system: Chaos) -> None:
    """C2. Without the memory of bells that rang meanwhile, the prefill would go on until a renewal fails, seconds later."""
    system.start("decode")
    system.start_faulty("prefill", "leased=wait=1")
    job = system.submit(prompt(8000), max_tokens=5)
    system.wait_fault()
    assert cancel(system, job) == 200
    shown = wait_for(lambda: (s := system.job(job))["stopped"].get("milliseconds") is not None and s, "it is confirmed")
    assert shown["stopped"]["milliseconds"] < 2500, "the wait of a second, and slack; a renewal comes every three"
    system.wait_idle()


def test_a_deadline_that_passes_while_nobody_looks_ends_its_job(system: Chaos) -> None:
    """Without the deadlines that the sweep reads, it would wait for somebody to lease or look at it."""
    system.start("decode")
    job = system.submit(prompt(30), max_tokens=5, timeout=1)
    wait_for(lambda: system.redis.hget(system.key(f"job:{job}"), "status") == "expired", "it is over", 1 + SLACK + 2)
    assert system.unfinished() == 0
    system.check()


@pytest.mark.parametrize(("role", "step"), [("prefill", "sent#3"), ("decode", "part#3")])
@pytest.mark.parametrize("system", [{"slots": 1, "waiting": 1}], indirect=True)
def test_frames_that_come_late_for_a_cancelled_job_change_nothing(system: Chaos, role: str, step: str) -> None:
    """C3, W2. Without the nonce as the name of a transfer the late frames would go into the next job's cache."""
    system.start(OTHER[role])
    system.start_faulty(role, f"{step}=wait=1.5")
    late = system.submit(prompt(700, 1), max_tokens=5)
    system.wait_fault()
    assert cancel(system, late) == 200
    job = system.submit(prompt(700, 2), max_tokens=5)
    system.finishes(job, prompt(700, 2), 5)
    time.sleep(1.5)
    assert system.job(late)["status"] == "cancelled"
    assert "Traceback" not in system.logs()
    system.wait_idle()
    system.check()


@pytest.mark.timeout(300)
def test_a_cancel_at_the_moment_of_the_end_makes_one_end(system: Chaos) -> None:
    """C4. Without the one way of ending a job, some would have two."""
    system.start_all_but_the_api()
    ends = []
    for number in range(300):
        job = system.submit(prompt(20, number), max_tokens=4)
        wait_for(lambda job=job: len(system.tokens(job)) >= 2, "it is about to end")
        time.sleep((number % 11) / 500)
        status = cancel(system, job)
        shown = system.finished(job)
        assert (status, shown["status"]) in ((200, "cancelled"), (409, "finished")), (status, shown)
        ends.append(shown["status"])
    assert {"cancelled", "finished"} == set(ends), "both sides of the moment were met"
    assert "Traceback" not in system.logs()
    system.wait_idle()
    system.check()


@pytest.mark.parametrize("system", [{"slots": 1, "waiting": 1, "sim_step_ms": 20}], indirect=True)
def test_jobs_that_are_cancelled_while_they_wait_leave_their_queue_at_once(system: Chaos) -> None:
    """C5. Without the XDEL of `finish` they would stay until somebody leases them, and the bound would count them."""
    jobs = [system.submit(prompt(20, n), max_tokens=5) for n in range(3)]
    assert system.unfinished() == 3
    assert [cancel(system, job) for job in jobs[:2]] == [200, 200]
    assert system.unfinished() == 1
    system.check()


def test_clients_that_leave_while_they_wait_are_never_served(system: Chaos) -> None:
    """C6."""
    system.start_all_but_the_api()
    first = system.submit(prompt(30), max_tokens=200)
    wait_for(lambda: decoding(system, first), "the first job runs")
    before = set(system.redis.keys(system.key("job:*")))
    leaving = [system.stream("/v1/completions", {"prompt": prompt(2000, n), "max_tokens": 400}) for n in range(4)]
    wait_for(lambda: len(set(system.redis.keys(system.key("job:*"))) - before) == 4, "they are queued")
    for connection in leaving:
        connection.close()
    wait_for(lambda: system.unfinished() == 1, "they are gone", SLACK)
    assert cancel(system, first) == 200
    system.wait_idle()
    for key in set(system.redis.keys(system.key("job:*"))) - before:
        assert system.redis.hget(key, "status") == "cancelled"
        assert (
            not system.redis.exists(key.replace(":job:", ":tokens:"))
            or system.redis.xlen(key.replace(":job:", ":tokens:")) <= 2
        ), "at most the one that a place was free for had begun"
    system.check()


def test_a_cancel_of_an_unknown_job_is_not_remembered(system: Chaos) -> None:
    """C7. With a memory of cancels, a later job of that id would never run."""
    before = set(system.redis.keys(system.key("*")))
    assert cancel(system, "00000000000000000000000000000000") == 404
    assert set(system.redis.keys(system.key("*"))) == before


def test_a_cancel_works_when_the_bell_s_connections_have_been_killed(system: Chaos) -> None:
    """C8. Without the other ways to learn of it, the answers to append and renew, the job would go on to its end."""
    system.start_all_but_the_api()
    job = system.submit(prompt(30), max_tokens=2000)
    wait_for(lambda: decoding(system, job), "it runs")
    assert system.redis.client_kill_filter(_type="pubsub") >= 2
    time.sleep(0.1)
    assert cancel(system, job) == 200
    wait_for(lambda: system.job(job)["stopped"].get("milliseconds") is not None, "it is confirmed", SLACK)
    system.wait_idle()
    system.check()


def test_a_job_that_is_cancelled_in_the_queue_never_runs_whoever_starts_later(system: Chaos) -> None:
    """C9. With cancels in a worker's memory it would."""
    job = system.submit(prompt(30), max_tokens=5)
    assert cancel(system, job) == 200
    system.start_all_but_the_api()
    other = system.submit(prompt(31), max_tokens=5)
    system.finishes(other, prompt(31), 5)
    assert system.tokens(job) == []
    assert system.job(job)["attempt"] == 0
    system.check()


@pytest.mark.parametrize("system", [{"sim_prefill_us": 2000}], indirect=True)
def test_a_client_that_leaves_during_a_silent_prefill_is_noticed_at_once(system: Chaos) -> None:
    """C11. Without the one owner of `receive` it would be noticed at the first token."""
    system.start_all_but_the_api()
    connection = system.stream("/v1/completions", {"prompt": prompt(4000), "max_tokens": 5, "stream": True})
    wait_for(lambda: system.redis.keys(system.key("job:*")), "it is submitted")
    time.sleep(0.5)
    left = time.monotonic()
    connection.close()
    wait_for(lambda: system.redis.keys(system.key("tombstone:*")), "the tombstone stands", SLACK)
    assert time.monotonic() - left < 1 + SLACK
    system.wait_idle()
    system.check()


def test_slots_of_jobs_whose_prefill_workers_died_free_themselves(system: Chaos) -> None:
    """C13. Without the comparison with the leases at each heartbeat nobody would look, for no request comes."""
    system.start("decode")
    for number in range(3):
        system.submit(prompt(700, number), max_tokens=5)
        faulty = system.start_faulty("prefill", "layer#2=kill")
        wait_for(lambda faulty=faulty: faulty.poll() is not None, "it died")
        system.processes.remove(faulty)
    (decode,) = (worker for worker in system.redis.smembers(system.key("workers")) if worker.startswith("decode"))

    def free() -> bool:
        facts = system.redis.hgetall(system.key(f"worker:{decode}"))
        return facts["busy"] == "0" and system.redis.zcard(system.key("credits")) == int(facts["capacity"])

    wait_for(free, "all its places are free again", 20)  # of which KVR_PART_SECONDS would be 30
    system.check()


def test_a_stopped_prefill_worker_holds_up_no_decode(system: Chaos) -> None:
    """P1. With a send that waits for its peer, the decode loop would stand still."""
    system.start("decode")
    stopped = system.start_faulty("prefill", "layer#3=stop")
    job = system.submit(prompt(700), max_tokens=5)
    system.wait_fault()
    assert cancel(system, job) == 200
    system.start("prefill")
    for number in range(3):
        other = system.submit(prompt(50, number), max_tokens=20)
        system.finishes(other, prompt(50, number), 20)
    (decode,) = (worker for worker in system.redis.smembers(system.key("workers")) if worker.startswith("decode"))
    assert system.redis.hget(system.key(f"worker:{decode}"), "state") == "alive"
    stopped.send_signal(signal.SIGCONT)
    system.wait_idle()
    system.check()
