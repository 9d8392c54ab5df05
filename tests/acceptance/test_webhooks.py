"""Webhooks of a whole system, to a receiver that is really there."""

import base64
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path
from subprocess import Popen
from typing import Any

import psutil
import pytest

from tests.acceptance.system import System, wait_for
from tests.receiver import Came, Receiver, receiving, verify

SHARED = f"whsec_{base64.b64encode(bytes(range(32))).decode()}"
SIM = {"model": "sim", "prefill_device": "sim", "decode_device": "sim", "lease_seconds": 2, "heartbeat_seconds": 0.5}
PROMPT = [1, 2, 3, 4, 5]


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    with receiving(Receiver()) as receiver:
        yield receiver


@pytest.fixture
def system(redis_url: str, tmp_path: Path) -> Iterator[System]:
    allowed = {"webhook_secret": SHARED, "webhook_networks": "127.0.0.1/32"}
    system = System(redis_url, tmp_path, **SIM, **allowed, served_name=f"webhooks-{secrets.token_hex(4)}")
    yield system
    system.close()


def start_api(system: System) -> "Popen[bytes]":
    (process,) = system.start("api")
    wait_for(system.answers, "the API answers")
    return process


def told(receiver: Receiver, job: str) -> Came:
    """The first word of it, once it is there; its signature is good."""

    def found() -> Came | None:
        return next((came for came in receiver.came if came.event["data"]["id"] == job), None)

    came: Came = wait_for(found, f"the end of job {job} is told")
    verify(came.body, dict(came.headers), SHARED)
    return came


def arrived(system: System, job: str) -> str:
    def line() -> str:
        return next((event["detail"] for event in system.job(job)["timeline"] if event["event"] == "webhook"), "")

    return str(wait_for(line, f"the timeline of job {job} says that its webhook has arrived"))


def test_finished_cancelled_and_expired_jobs_are_told_once_each(system: System, receiver: Receiver) -> None:
    system.environ["KVR_API_WORKERS"] = "2"
    system.start_all()
    submit: dict[str, Any] = {"webhook": receiver.url()}
    finished = [system.submit(PROMPT, max_tokens=4, **submit) for _ in range(20)]
    cancelled = system.submit(PROMPT, max_tokens=4000, **submit)
    expired = system.submit(PROMPT, max_tokens=4000, timeout=0.5, **submit)
    system.submit(PROMPT, max_tokens=4)  # and one that has none
    system.call("DELETE", f"/v1/jobs/{cancelled}")
    ends = {**dict.fromkeys(finished, "finished"), cancelled: "cancelled", expired: "expired"}
    for job, status in ends.items():
        event, shown = told(receiver, job).event, system.job(job)
        assert event["type"] == f"job.{status}"
        assert event["data"] == {name: shown[name] for name in ("id", "status", "reason", "usage")}
        assert "answered 200 at try 1" in arrived(system, job)
    assert sorted(came.event["data"]["id"] for came in receiver.came) == sorted(ends)
    system.wait_idle()


def test_a_job_that_is_given_up_is_told_with_its_reason(system: System, receiver: Receiver) -> None:
    system.start("api")
    system.start("prefill")
    system.start("decode", sim_layers=3)  # another geometry: every OPEN is refused
    system.wait_ready()
    job = system.submit(PROMPT, webhook=receiver.url())
    event = told(receiver, job).event
    assert event["type"] == "job.failed"
    assert "layers differ" in event["data"]["reason"]


def test_a_webhook_outlives_the_api_process_that_was_delivering_it(system: System, receiver: Receiver) -> None:
    """Taken out of Redis before it has arrived, it would be lost. So it may come twice, under the same id."""
    process = start_api(system)
    receiver.ready.clear()
    job = system.submit(PROMPT, webhook=receiver.url())
    system.call("DELETE", f"/v1/jobs/{job}")
    first = told(receiver, job)
    for worker in psutil.Process(process.pid).children():
        worker.kill()
    system.stop(process, signal.SIGKILL)
    receiver.ready.set()
    start_api(system)
    target = f"127.0.0.1:{receiver.port}"
    assert system.redis.zscore(system.key(f"webhooks:{target}"), job), "it is on the calendar"
    system.redis.zadd(system.key(f"webhooks:{target}"), {job: 0})  # and comes now, not in a quarter of a minute
    system.redis.zadd(system.key("webhooks"), {target: 0})
    assert arrived(system, job) == "arrived: answered 200 at try 2"
    assert [came.headers["webhook-id"] for came in receiver.came] == [first.headers["webhook-id"]] * 2
    system.check()


def test_there_are_none_without_a_secret_and_none_but_for_jobs(system: System, receiver: Receiver) -> None:
    start_api(system)
    body = {"prompt": PROMPT, "webhook": receiver.url()}
    status, answer = system.call("POST", "/v1/completions", body)
    assert (status, answer["error"]["param"]) == (400, "webhook")
    status, answer = system.call("POST", "/v1/jobs", {**body, "webhook": "http://169.254.169.254/latest"})
    assert (status, answer["error"]["param"]) == (400, "webhook")
    system.stop(system.processes[0])
    del system.environ["KVR_WEBHOOK_SECRET"]
    start_api(system)
    status, answer = system.call("POST", "/v1/jobs", body)
    assert (status, answer["error"]["param"]) == (400, "webhook")
    assert "KVR_WEBHOOK_SECRET" in answer["error"]["message"]
    assert system.unfinished() == 0
