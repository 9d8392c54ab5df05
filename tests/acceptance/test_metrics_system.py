"""`/metrics` of a system at work: true numbers, the same from every API process, before and after restarts."""

import secrets
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.acceptance.system import System, free_port, wait_for

Series = dict[tuple[str, frozenset[tuple[str, str]]], float]

#: Tokens of prompt and answer. One that is over before the prefill worker hears of the hand-over is no transfer.
JOBS = {(10 + length, 30 + length) for length in range(12)}


@pytest.fixture
def system(redis_url: str, tmp_path: Path) -> Iterator[System]:
    sim = {"model": "sim", "prefill_device": "sim", "decode_device": "sim"}
    name = f"metrics-{secrets.token_hex(4)}"
    times = {"lease_seconds": 2, "heartbeat_seconds": 0.2, "sim_prefill_us": 100, "sim_step_ms": 5}
    system = System(redis_url, tmp_path, **sim, served_name=name, slots=4, **times)
    yield system
    system.close()


def scrape(port: int) -> tuple[int, str, str]:
    """Status, content type, body."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as response:
            return response.status, response.headers["Content-Type"], response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.headers["Content-Type"], error.read().decode()


def series(port: int) -> Series:
    status, kind, body = scrape(port)
    assert (status, kind) == (200, "text/plain; version=0.0.4; charset=utf-8")
    families = text_string_to_metric_families(body)
    return {
        (sample.name, frozenset(sample.labels.items() - {("model_name", sample.labels["model_name"])})): sample.value
        for family in families
        for sample in family.samples
    }


def value(found: Series, name: str, **labels: str) -> float:
    return found[name, frozenset(labels.items())]


def counters(found: Series) -> Series:
    ends = ("_total", "_count", "_sum", "_bucket")
    return {key: number for key, number in found.items() if key[0].endswith(ends)}


def prompt(length: int) -> list[int]:
    return [index % 200 for index in range(length)]


def run_jobs(system: System) -> None:
    for job in [system.submit(prompt(length), max_tokens=count, ignore_eos=True) for length, count in JOBS]:
        assert system.finished(job)["status"] == "finished"


def cancel_one(system: System, status: str = "decoding", length: int = 20) -> int:
    """Answers how many tokens it had."""
    job = system.submit(prompt(length), max_tokens=400, ignore_eos=True)
    wait_for(lambda: system.job(job)["status"] == status, f"the job is {status}")
    if status == "decoding":
        wait_for(lambda: len(system.tokens(job)) > 20, "the prefill worker has heard of the hand-over")
    else:
        wait_for(
            lambda: value(series(system.port), "kvrelay:jobs_in_hand", role="decode") == 1, "its KV cache is on its way"
        )
    assert system.call("DELETE", f"/v1/jobs/{job}")[0] == 200
    wait_for(lambda: system.job(job)["stopped"]["milliseconds"] is not None, "the holder has confirmed")
    return len(system.tokens(job))


def told(port: int) -> Series:
    """When nobody has a job in hand, and all tokens but the first ones are reported."""

    def still() -> Series | None:
        found = series(port)
        busy = any(value(found, "kvrelay:jobs_in_hand", role=role) for role in ("prefill", "decode"))
        tokens, jobs = (
            value(found, f"vllm:{name}") for name in ("generation_tokens_total", "time_to_first_token_seconds_count")
        )
        gaps, transfers = (
            value(found, f"{name}_seconds_count") for name in ("vllm:inter_token_latency", "kvrelay:kv_transfer")
        )
        return None if busy or gaps < tokens - jobs or transfers < jobs else found

    return dict(wait_for(still, "all is reported"))


def test_two_api_processes_tell_the_same_and_it_is_true(system: System) -> None:
    other = free_port()
    system.start("api", port=other)
    system.start_all()
    run_jobs(system)
    cancelled = cancel_one(system)
    system.wait_idle()
    found, again = told(system.port), told(other)
    assert found == again
    tokens = sum(count for _, count in JOBS) + cancelled
    assert value(found, "vllm:prompt_tokens_total") == sum(length for length, _ in JOBS) + 20
    assert value(found, "vllm:generation_tokens_total") == tokens
    assert value(found, "vllm:request_success_total", finished_reason="length") == len(JOBS)
    assert value(found, "vllm:request_success_total", finished_reason="abort") == 1
    assert value(found, "vllm:e2e_request_latency_seconds_count") == len(JOBS)
    for name in ("time_to_first_token", "request_queue_time"):
        assert value(found, f"vllm:{name}_seconds_count") == len(JOBS) + 1
    assert value(found, "kvrelay:attempts_total") == len(JOBS) + 1
    assert value(found, "kvrelay:cancels_total", phase="decode") == 1
    assert value(found, "kvrelay:kv_transfer_seconds_count") == len(JOBS) + 1
    drawn = value(found, "vllm:inter_token_latency_seconds_count")  # what the cancelled one drew last, nobody wrote
    assert tokens - len(JOBS) - 1 <= drawn <= tokens - len(JOBS) + 2
    workers: list[dict[str, Any]] = system.call("GET", "/v1/system")[1]["workers"]
    assert value(found, "kvrelay:kv_transfer_bytes_total") == sum(worker.get("bytes", 0) for worker in workers) > 0
    assert value(found, "kvrelay:slots", role="decode") == 4
    assert value(found, "kvrelay:credits") == value(found, "kvrelay:places") == 6
    for role in ("prefill", "decode"):
        assert value(found, "kvrelay:workers", role=role, state="alive") == 1


def test_counters_only_grow_over_restarts_of_everything_but_redis(system: System) -> None:
    system.start_all()
    run_jobs(system)
    before = told(system.port)
    for process in list(system.processes):
        system.stop(process)
    system.start_all()
    assert counters(series(system.port)) == counters(before)
    run_jobs(system)
    after = told(system.port)
    assert all(after[key] >= number for key, number in counters(before).items())
    assert value(after, "vllm:generation_tokens_total") == 2 * value(before, "vllm:generation_tokens_total")


def test_what_a_worker_has_counted_last_is_told_when_it_leaves(system: System) -> None:
    system.environ |= {"KVR_HEARTBEAT_SECONDS": "20", "KVR_LEASE_SECONDS": "60"}
    system.start_all()
    run_jobs(system)
    for process in system.processes[1:]:
        system.stop(process)
    found = series(system.port)
    tokens = sum(count for _, count in JOBS)
    assert value(found, "vllm:inter_token_latency_seconds_count") == tokens - len(JOBS)
    assert value(found, "kvrelay:kv_transfer_seconds_count") == len(JOBS)


def test_jobs_that_wait_are_told_by_priority_and_age(system: System) -> None:
    system.start("api")
    wait_for(system.answers, "the API answers")
    for priority in ("low", "low", "high"):
        system.submit(prompt(5), max_tokens=2, priority=priority)
    wait_for(
        lambda: value(series(system.port), "kvrelay:queue_oldest_age_seconds", priority="low") > 0.1, "they grow old"
    )
    found = series(system.port)
    depths = {
        priority: value(found, "kvrelay:queue_depth", priority=priority) for priority in ("high", "normal", "low")
    }
    assert depths == {"high": 1, "normal": 0, "low": 2}
    assert value(found, "vllm:num_requests_waiting") == 3
    assert value(found, "kvrelay:queue_oldest_age_seconds", priority="normal") == 0


def test_a_transfer_that_is_refused_is_a_failure(system: System) -> None:
    system.start("api")
    system.start("prefill")
    system.start("decode", sim_layers=3)  # another geometry
    system.wait_ready()
    job = system.submit(prompt(10), max_tokens=3)
    assert system.finished(job)["status"] == "failed"

    def failures() -> bool:
        return value(series(system.port), "kvrelay:kv_transfer_failures_total", cause="failed") == 3

    wait_for(failures, "three attempts have failed")
    found = series(system.port)
    assert value(found, "kvrelay:requeues_total", cause="released") == 2
    assert value(found, "kvrelay:dead_letters") == value(found, "kvrelay:jobs_ended_total", status="failed") == 1


def test_a_transfer_that_is_broken_off_because_its_job_is_over_is_no_failure(system: System) -> None:
    """Without the look at `ended`, every cancel in prefill would be an alarm about the network."""
    system.environ |= {"KVR_CHUNK": "100", "KVR_SIM_PREFILL_US": "300"}
    system.start_all()
    for _ in range(3):
        assert cancel_one(system, "prefilling", 7000) == 0
    system.wait_idle()
    wait_for(lambda: value(series(system.port), "kvrelay:kv_transfer_bytes_total") > 0, "the worker has reported")
    found = told(system.port)
    assert value(found, "kvrelay:cancels_total", phase="prefill") == 3
    assert [value(found, "kvrelay:kv_transfer_failures_total", cause=cause) for cause in ("void", "failed")] == [0, 0]


def test_without_redis_there_is_an_error_and_no_half_of_an_answer(tmp_path: Path) -> None:
    system = System(f"redis://127.0.0.1:{free_port()}/0", tmp_path, model="sim")
    try:
        system.start("api")
        wait_for(system.answers, "the API answers")
        status, kind, body = scrape(system.port)
        assert (status, kind.partition(";")[0]) == (503, "application/json")
        assert "queue_away" in body
        assert "vllm:" not in body
    finally:
        system.close()
