"""The API keeps what its OpenAPI document promises, whatever schemathesis sends."""

import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.system import System
from tests.acceptance.test_sim_system import make

#: Of fuzzing: what a test run can spare, or as long as somebody wants; `make fuzz` takes twenty minutes.
SECONDS = int(os.environ.get("KVR_TEST_FUZZ_SECONDS", "20"))
SEED = os.environ.get("KVR_TEST_FUZZ_SEED", "1")
CONFIG = Path(__file__).with_name("schemathesis.toml")


@pytest.fixture
def system(redis_url: str, tmp_path: Path) -> Iterator[System]:
    quick = {"context": 512, "sim_prefill_us": 10, "sim_step_ms": 1, "slots": 16, "keep_seconds": 600}
    system = make(redis_url, tmp_path, aliases="sim", **quick)
    yield system.start_all()
    system.close()


@pytest.mark.timeout(SECONDS + 120)
def test_schemathesis_finds_no_server_error_and_nothing_that_is_not_documented(system: System, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    url = f"http://127.0.0.1:{system.port}/openapi.json"
    command = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(CONFIG), "run", url, "--no-color"]
    command += ["--seed", SEED, "--max-time", str(SECONDS), "--continue-on-failure", "--generation-database", "none"]
    command += ["--report", "json", "--report-json-path", str(report)]
    run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(run.stdout)
    assert run.returncode == 0, run.stdout[-5000:]
    said = json.loads(report.read_text())
    assert said["test_cases"]["generated"] > 20
    assert said["test_cases"]["errored"] == 0
    assert all(process.poll() is None for process in system.processes)
    system.wait_idle(60)


def test_the_page_is_served_with_its_policy(system: System) -> None:
    with urllib.request.urlopen(f"http://127.0.0.1:{system.port}/docs") as response:
        assert "default-src 'none'" in response.headers["Content-Security-Policy"]
        assert response.headers["Content-Type"] == "text/html; charset=utf-8"
        assert b"/v1/chat/completions" in response.read()


def test_whoever_comes_back_after_the_end_is_told_that_nothing_comes(system: System) -> None:
    """Without the look at the log, a client that asks for what is beyond the end of a job would wait until the job expires."""
    job = system.submit([1, 2, 3], max_tokens=3)
    system.finished(job)
    events = list(system.events(f"/v1/jobs/{job}/events"))
    assert events[-1]["event"] == "end"
    for place in (events[-1]["id"], "999999999999999999"):
        request = urllib.request.Request(
            f"http://127.0.0.1:{system.port}/v1/jobs/{job}/events", headers={"Last-Event-ID": place}
        )
        with urllib.request.urlopen(request, timeout=10) as response:
            assert (response.status, response.read()) == (204, b"")


def test_whoever_waits_beyond_the_end_of_a_job_is_let_go_when_it_ends(system: System) -> None:
    """Without the same look later, while the job still runs, it would be the same."""
    job = system.submit([1, 2, 3], max_tokens=200)
    assert list(system.events(f"/v1/jobs/{job}/events", headers={"Last-Event-ID": "100000"})) == []
    assert system.job(job)["status"] == "finished"
