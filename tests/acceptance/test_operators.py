"""The commands of whoever runs the system: check, dead, keygen; as they are typed."""

import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.system import System, wait_for

COMMAND = [sys.executable, "-c", "import sys; from api.command import main; sys.exit(main())"]


@pytest.fixture
def system(redis_url: str, tmp_path: Path) -> Iterator[System]:
    sim = {
        "model": "sim",
        "prefill_device": "sim",
        "decode_device": "sim",
        "lease_seconds": 1.5,
        "heartbeat_seconds": 0.4,
    }
    system = System(redis_url, tmp_path, **sim, served_name=f"operators-{secrets.token_hex(4)}")
    system.start("api")
    yield system
    system.close()


def kvrelay(system: System, *words: str, code: int = 0) -> str:
    done = subprocess.run([*COMMAND, *words], env=system.environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


def dead_job(system: System) -> str:
    """Given up: the decode worker has another geometry."""
    system.start("prefill")
    (other,) = system.start("decode", sim_layers=3)
    system.wait_ready()
    job = system.submit([1, 2, 3], max_tokens=4)
    assert system.finished(job)["status"] == "failed"
    system.stop(other)
    return job


def test_check_is_silent_when_all_is_well_and_names_and_mends_what_is_not(system: System) -> None:
    wait_for(system.answers, "the API answers")
    job = system.submit([1, 2, 3])
    assert kvrelay(system, "check") == ""
    system.redis.delete(system.key("queue:2"))
    assert f"job {job} is queued, and in no queue" in kvrelay(system, "check", code=1)
    assert kvrelay(system, "check", "--repair").splitlines()[-1] == "mended"
    assert kvrelay(system, "check") == ""
    system.start("prefill")
    system.start("decode")
    assert system.finished(job)["status"] == "finished"
    system.wait_idle()


def test_a_dead_job_is_listed_shown_and_requeued(system: System) -> None:
    job = dead_job(system)
    listed = kvrelay(system, "dead", "list").splitlines()
    assert len(listed) == 2
    assert listed[1].startswith(job)
    assert "layers differ" in listed[1]
    shown = kvrelay(system, "dead", "show", job)
    assert [f"attempt {number}: " in shown for number in (1, 2, 3)] == [True] * 3
    assert "prefilling prefill-" in shown, "and the timeline"
    assert kvrelay(system, "dead", "requeue", job) == f"{job}: queued again\n"
    system.start("decode")
    assert system.finished(job)["status"] == "finished"
    assert len(kvrelay(system, "dead", "list").splitlines()) == 1
    assert "no dead job" in kvrelay(system, "dead", "requeue", job, code=1)
    system.wait_idle()


def test_a_dead_job_can_be_forgotten(system: System) -> None:
    job = dead_job(system)
    assert kvrelay(system, "dead", "purge", "all") == "1 forgotten\n"
    assert system.call("GET", f"/v1/jobs/{job}")[0] == 404
    assert kvrelay(system, "dead", "purge", "all") == "0 forgotten\n"


def test_a_key_is_written_once(system: System, tmp_path: Path) -> None:
    path = tmp_path / "kv.key"
    assert "copy it to every host" in kvrelay(system, "keygen", str(path))
    before = path.read_bytes()
    assert "File exists" in kvrelay(system, "keygen", str(path), code=1)
    assert path.read_bytes() == before
