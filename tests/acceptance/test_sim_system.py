"""The whole system on the sim device: whatever it answers is right only if every KV byte arrived in its place."""

import itertools
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from brokers.store import CONNECTIONS
from tests.acceptance.system import WAYS_TO_LEAVE, System, leave, wait_for
from workers.devices.sim import expected
from workers.prefill import AHEAD

SIM = {"model": "sim", "prefill_device": "sim", "decode_device": "sim"}


def make(redis_url: str, folder: Path, **settings: object) -> System:
    defaults = {"served_name": f"sim-{secrets.token_hex(4)}", "lease_seconds": 2, "heartbeat_seconds": 0.5}
    return System(redis_url, folder, **{**SIM, **defaults, **settings})


@pytest.fixture
def system(redis_url: str, tmp_path: Path) -> Iterator[System]:
    system = make(redis_url, tmp_path, sim_prefill_us=200, sim_step_ms=5, slots=4)
    yield system
    system.close()


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(seed * 31 + index * 7) % 200 for index in range(length)]


def test_answers_of_many_jobs_are_right_and_nothing_is_left_over(system: System) -> None:
    system.start_all(prefill=2, decode=2)
    jobs = {
        system.submit(prompt(20 + 13 * n, n), max_tokens=10 + n): (prompt(20 + 13 * n, n), 10 + n) for n in range(30)
    }
    for job, (tokens, count) in jobs.items():
        assert system.finished(job)["status"] == "finished"
        assert system.tokens(job) == expected(tokens, count)
    system.wait_idle()


def test_answers_are_right_where_both_halves_share_a_chip(system: System, tmp_path: Path) -> None:
    """Without an end to each call's turn the other half would wait for ever."""
    system.environ |= {"KVR_SIM_CHIP": "one", "KVR_LOCKS": str(tmp_path), "KVR_CHUNK": "50"}
    system.start_all()
    jobs = {
        system.submit(prompt(100 + 50 * n, n), max_tokens=10 + n): (prompt(100 + 50 * n, n), 10 + n) for n in range(8)
    }
    for job, (tokens, count) in jobs.items():
        assert system.finished(job)["status"] == "finished"
        assert system.tokens(job) == expected(tokens, count)
    system.wait_idle()


def test_waiting_jobs_show_in_xlen_while_workers_are_stopped_and_started(system: System) -> None:
    system.start("api")
    wait_for(system.answers, "the API answers")
    for count in range(1, 6):
        system.submit(prompt(10, count), max_tokens=4)
        assert system.unfinished() == count
    worker = system.start("prefill")[0]
    system.start("decode")
    wait_for(lambda: system.unfinished() == 0, "the queue is drained")
    system.stop(worker)
    for count in range(1, 4):
        system.submit(prompt(10, count), max_tokens=4)
        assert system.unfinished() == count
    system.start("prefill")
    wait_for(lambda: system.unfinished() == 0, "the queue is drained again")
    system.wait_idle()


def test_a_cancel_takes_effect_in_every_phase_and_says_so(system: System, capsys: pytest.CaptureFixture[str]) -> None:
    system.environ["KVR_CHUNK"] = "100"
    system.start("api")
    wait_for(system.answers, "the API answers")
    waiting = system.submit(prompt(50), max_tokens=5)
    records = {"queued": system.call("DELETE", f"/v1/jobs/{waiting}")[1]["stopped"]}
    assert system.unfinished() == 0
    system.start("prefill")
    system.start("decode")
    system.wait_ready()
    for phase, tokens, status in (("prefill", 8000, "prefilling"), ("decode", 50, "decoding")):
        job = system.submit(prompt(tokens), max_tokens=150)
        wait_for(lambda job=job, status=status: system.job(job)["status"] == status, f"{job} is {status}")
        assert system.call("DELETE", f"/v1/jobs/{job}")[0] == 200
        records[phase] = wait_for(lambda job=job: _settled(system, job), "the holder has confirmed")
        system.wait_idle(5)
    for phase, record in records.items():
        assert record["phase"] == phase
        print(f"cancel in {phase}: {record['milliseconds']} ms")
    assert system.call("DELETE", f"/v1/jobs/{waiting}")[1]["status"] == "cancelled"
    assert system.call("DELETE", "/v1/jobs/nobody")[0] == 404


def test_a_cancel_in_transfer_waits_for_no_answer(system: System) -> None:
    system.start("api")
    system.start("prefill")
    decode = system.start("decode")[0]
    system.wait_ready()
    job = system.submit(prompt(6000), max_tokens=50)
    wait_for(lambda: int(_figure(system, "decode", "busy")) == 1, "the transfer is open")
    decode.send_signal(signal.SIGSTOP)
    wait_for(lambda: "first_token" in [event["event"] for event in system.job(job)["timeline"]], "all was computed")
    assert system.job(job)["status"] == "prefilling"
    system.call("DELETE", f"/v1/jobs/{job}")
    assert wait_for(lambda: _settled(system, job), "the holder has confirmed", 5)["phase"] == "transfer"
    decode.send_signal(signal.SIGCONT)
    system.wait_idle()


def _figure(system: System, role: str, name: str) -> str:
    for worker in system.redis.smembers(system.key("workers")):
        facts = system.redis.hgetall(system.key(f"worker:{worker}"))
        if facts.get("role") == role:
            return str(facts[name])
    return "0"


def _settled(system: System, job: str) -> dict[str, object] | None:
    record = system.job(job).get("stopped")
    return record if record and record["milliseconds"] is not None else None


@pytest.mark.parametrize("way", WAYS_TO_LEAVE)
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_cancels_its_request(system: System, way: str, stream: bool) -> None:
    """C10. Without the pump that is always at `receive`, a half-close would not be seen before the next token."""
    system.start_all()
    body = {"prompt": prompt(4000), "max_tokens": 4000, "stream": stream}  # 0.8 s of silent prefill
    connection = system.stream("/v1/completions", body)
    wait_for(lambda: system.unfinished() == 1, "the job is queued")
    leave(connection, way)
    wait_for(lambda: system.unfinished() == 0, "the job has ended", 2)
    connection.close()
    system.wait_idle(5)
    job = next(iter(system.redis.scan_iter(system.key("job:*"))))
    assert system.redis.hget(job, "status") == "cancelled"
    assert system.redis.hget(job, "reason") == "client left"


def test_a_stream_resumes_at_every_index_without_gap_or_repeat(system: System) -> None:
    """H8. Without the place in the log as the event's id a client could not say where it was."""
    system.start_all()
    tokens = prompt(30)
    job = system.submit(tokens, max_tokens=8)
    whole = list(system.events(f"/v1/jobs/{job}/events"))
    assert [event["id"] for event in whole] == [str(n) for n in range(1, 10)]
    for place in range(9):
        rest = list(system.events(f"/v1/jobs/{job}/events", headers={"Last-Event-ID": str(place)}))
        assert rest == whole[place:]


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP])
def test_a_job_survives_the_loss_of_its_worker(system: System, role: str, number: int) -> None:
    system.environ |= {"KVR_GRACE_SECONDS": "0.2", "KVR_OPEN_SECONDS": "0.5"}
    system.start("api")
    first = system.start(role)[0]
    system.start("decode" if role == "prefill" else "prefill")
    system.wait_ready()
    tokens, count = (prompt(6000), 5) if role == "prefill" else (prompt(40), 200)
    job = system.submit(tokens, max_tokens=count)
    status = "prefilling" if role == "prefill" else "decoding"
    wait_for(lambda: system.job(job)["status"] == status, f"the job is {status}")
    if number == signal.SIGSTOP:
        first.send_signal(number)
    else:
        system.stop(first, number)
    system.start(role)
    shown = system.finished(job, 30)
    assert shown["status"] == "finished", shown
    assert system.tokens(job) == expected(tokens, count)
    if number == signal.SIGSTOP:  # the late one wakes up, is fenced, and says nothing
        first.send_signal(signal.SIGCONT)
        wait_for(lambda: len(system.redis.smembers(system.key("workers"))) >= 3, "it is back")
        assert system.tokens(job) == expected(tokens, count)
    system.wait_idle()


def test_a_job_that_fails_at_every_attempt_is_given_up_with_its_reasons(system: System) -> None:
    system.start("api")
    system.start("prefill")
    system.start("decode", sim_layers=3)  # another geometry: every OPEN is refused
    system.wait_ready()
    status, answer = system.call("POST", "/v1/completions", {"prompt": prompt(10), "max_tokens": 3})
    assert status == 500
    assert "layers differ" in answer["error"]["message"]
    dead = system.redis.xrange(system.key("dead"))
    assert len(dead) == 1
    reasons = system.job(dead[0][1]["job"])["failed_attempts"]
    assert sorted(reasons) == ["1", "2", "3"]
    assert all("layers differ" in reason for reason in reasons.values())


def test_a_deadline_ends_a_job_wherever_it_is(system: System) -> None:
    system.start_all()
    status, answer = system.call("POST", "/v1/completions", {"prompt": prompt(10), "max_tokens": 4000, "timeout": 0.5})
    assert status == 504, answer
    assert answer["error"]["code"] == "job_expired"
    system.wait_idle(5)


def test_without_workers_a_waiting_client_is_told_so_and_a_job_waits(system: System) -> None:
    system.environ["KVR_NO_WORKER_SECONDS"] = "0.5"
    system.environ["KVR_QUEUE_BOUND"] = "2"
    system.start("api")
    wait_for(system.answers, "the API answers")
    status, answer = system.call("POST", "/v1/completions", {"prompt": "x"})
    assert (status, answer["error"]["code"]) == (503, "no_workers")
    assert [system.call("POST", "/v1/jobs", {"prompt": "x"})[0] for _ in range(3)] == [202, 202, 429]
    assert system.call("GET", "/health/live")[0] == 200
    assert system.call("GET", "/health/ready")[0] == 503


def test_priorities_go_first(system: System) -> None:
    system.start("api")
    wait_for(system.answers, "the API answers")
    jobs = [system.submit(prompt(20), max_tokens=2, priority=priority) for priority in ("low", "normal", "high")]
    system.start("prefill")
    system.start("decode")
    order = sorted(
        jobs, key=lambda job: next(e["at"] for e in system.finished(job)["timeline"] if e["event"] == "first_token")
    )
    assert order == jobs[::-1]


def test_jobs_are_leased_while_another_is_computed_and_none_long_before_its_turn(system: System) -> None:
    """Without the first, the device idles for some round trips before each job; without the second, jobs wait in one worker's
    hands while another one is free."""
    system.environ["KVR_SIM_PREFILL_US"] = "1000"
    system.start("api")
    wait_for(system.answers, "the API answers")
    jobs = [system.submit(prompt(20, n), max_tokens=1) for n in range(4 * AHEAD)]
    system.start("prefill")
    system.start("decode")
    times = []
    for job in jobs:
        system.finished(job)
        timeline = [line.split() for line in system.redis.hget(system.key(f"job:{job}"), "timeline").splitlines()]
        times.append({event: int(at) for at, event, *_ in timeline})
    for before, job in itertools.pairwise(times[1:]):  # with the first one the worker sees how fast its device is
        assert job["prefilling"] < before["first_token"]
    for long_before, job in zip(times, times[AHEAD + 4 :], strict=False):
        assert job["prefilling"] >= long_before["first_token"]


def test_short_prompts_pass_a_long_one_that_is_computed_and_it_goes_on_between_them(system: System) -> None:
    """Without slices all wait for the long one; if short ones had no bound, it would wait for all."""
    system.environ |= {"KVR_SIM_PREFILL_US": "1000", "KVR_CHUNK": "50"}
    system.start("api")
    wait_for(system.answers, "the API answers")
    warm = system.submit(prompt(20), max_tokens=1)
    system.start("prefill")
    system.start("decode")
    system.finished(warm)  # the worker knows how fast its device is
    long = system.submit(prompt(1500), max_tokens=1)
    wait_for(lambda: system.redis.hget(system.key(f"job:{long}"), "status") == "prefilling", "the long one has begun")
    short = [system.submit(prompt(20, n), max_tokens=1) for n in range(100)]
    ended = {
        job: int(system.finished(job) and system.redis.hget(system.key(f"job:{job}"), "ended"))
        for job in [long, *short]
    }
    assert system.tokens(long) == expected(prompt(1500), 1)
    assert [system.tokens(job) for job in short] == [expected(prompt(20, n), 1) for n in range(100)]
    before = sum(ended[job] < ended[long] for job in short)
    assert 10 < before < 100, "some pass, not all"


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere niceness is of whole processes")
def test_the_thread_that_computes_prompts_gives_way_and_no_other_does(system: System) -> None:
    """Without it a long prompt takes half of the time that running answers need, where both share the cores."""

    def nice(process: "subprocess.Popen[bytes]") -> list[int]:
        """Of its threads, and of its keeper's."""
        tasks = [
            task
            for one in (psutil.Process(process.pid), *psutil.Process(process.pid).children())
            for task in Path(f"/proc/{one.pid}/task").iterdir()
        ]
        return sorted(int((task / "stat").read_text().rpartition(")")[2].split()[16]) for task in tasks)

    system.environ["KVR_PREFILL_NICE"] = "19"
    system.start("api")
    (prefill,), (decode,) = system.start("prefill"), system.start("decode")
    system.wait_ready()
    system.finished(system.submit(prompt(10), max_tokens=2))
    base = os.getpriority(os.PRIO_PROCESS, 0)
    assert set(nice(decode)) == {base}
    assert (nice(prefill)[-1], set(nice(prefill)[:-1])) == (19, {base})


def test_memory_and_descriptors_stay_flat_over_two_thousand_jobs(system: System) -> None:
    """R4 has a hundred thousand, in tests/chaos."""
    system.environ |= {"KVR_SIM_PREFILL_US": "1", "KVR_SIM_STEP_MS": "0.5", "KVR_QUEUE_BOUND": "5000", "KVR_SLOTS": "8"}
    system.start_all()

    def run(count: int) -> None:
        for _ in range(count):
            system.submit(prompt(16), max_tokens=4)
        wait_for(lambda: system.unfinished() == 0, "all jobs have ended", 60)
        system.wait_idle()

    def state() -> list[tuple[int, int, int]]:
        return [(system.memory(process), *descriptors(process.pid)) for process in system.processes]

    def descriptors(pid: int) -> tuple[int, int]:
        """Connections to Redis, of which a pool opens more at its busiest moment so far, and all others."""
        process = psutil.Process(pid)
        port = urlsplit(system.environ["KVR_REDIS_URL"]).port
        pooled = sum(1 for it in process.net_connections("tcp") if it.raddr and it.raddr.port == port)
        return pooled, process.num_fds() - pooled

    run(300)  # caches and pools have their size then
    before = state()
    run(2000)
    for (memory, _, others), (memory_after, pooled, others_after) in zip(before, state(), strict=True):
        assert memory_after - memory < 12 << 20
        assert others_after <= others + 2
        assert pooled <= CONNECTIONS + 1  # the one that scripts share
    assert max(system.memory(process) for process in system.processes[:1]) < 150 << 20


def test_a_text_that_asks_for_a_stop_string_ends_before_it(system: System) -> None:
    system.start_all()
    text = system.complete(prompt(30), max_tokens=60)["choices"][0]["text"]
    stop = text[20:23]
    answer = system.complete(prompt(30), max_tokens=60, stop=[stop, "never in it"])
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["choices"][0]["text"] == text[: text.index(stop)]
    first = system.complete(prompt(30), max_tokens=60, stop=text[0])
    assert (first["choices"][0]["text"], first["usage"]["completion_tokens"]) == ("", 1)
    one = system.complete(prompt(30), max_tokens=1)
    assert (one["choices"][0]["text"], one["choices"][0]["finish_reason"]) == (text[0], "length")
    system.wait_idle()


def test_garbage_on_the_kv_port_kills_nothing(system: System) -> None:
    """Z6. What reads a frame checks it first; a pickle is as good as any other bytes."""
    system.start_all()
    workers = system.redis.smembers(system.key("workers"))
    endpoint = next(e for w in workers if (e := system.redis.hget(system.key(f"worker:{w}"), "endpoint")))
    host, port = endpoint.removeprefix("tcp://").split(":")
    for junk in (os.urandom(4096), b"\x80\x04\x95" * 100, b"GET / HTTP/1.1\r\n\r\n"):
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            connection.sendall(junk)
    started = time.monotonic()
    assert system.complete(prompt(10), max_tokens=5)["usage"]["completion_tokens"] == 5
    assert time.monotonic() - started < 10
    system.check_alive()
