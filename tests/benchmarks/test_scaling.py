"""Throughput with 1, 2 and 4 workers of the saturated role, on sim devices of fixed speed. Prints target and figure."""

import secrets
import time
from pathlib import Path

import pytest

from tests.acceptance.system import System, wait_for

TARGETS = {1: 1.0, 2: 1.9, 4: 3.7}
#: The saturated role's device takes so long that two cores are no limit: 4 prefills, or 5 answers of 8 slots, a second.
#: Many jobs a worker, or the last wave, when some workers are done and others not yet, weighs more than the rest.
SATURATED = {
    "prefill": {"sim_prefill_us": 250, "sim_step_ms": 2, "slots": 16, "prompt": 1000, "max_tokens": 2, "jobs": 24},
    "decode": {"sim_prefill_us": 1, "sim_step_ms": 50, "slots": 4, "prompt": 16, "max_tokens": 17, "jobs": 96},
}


def jobs_per_second(redis_url: str, folder: Path, role: str, count: int) -> float:
    """From the first lease to the last end, with all jobs queued before."""
    setting = dict(SATURATED[role])
    prompt, max_tokens, jobs = (int(setting.pop(name)) for name in ("prompt", "max_tokens", "jobs"))
    name = f"scale-{secrets.token_hex(4)}"
    sim = {"model": "sim", "prefill_device": "sim", "decode_device": "sim", "served_name": name}
    system = System(redis_url, folder, **sim, **setting)
    try:
        system.start("api")
        other = "decode" if role == "prefill" else "prefill"
        system.start(other, 1)
        wait_for(lambda: len(system.redis.smembers(system.key("workers"))) == 1, f"a {other} worker is there")
        system.start(role, count)
        system.wait_ready(**{role: count})
        begin = time.monotonic()
        for n in range(jobs * count):
            system.submit([n % 200] * prompt, max_tokens=max_tokens)
        wait_for(lambda: system.unfinished() == 0, "all jobs have ended", 100)
        assert time.monotonic() - begin < 100
        marks = []
        for key in system.redis.scan_iter(system.key("job:*"), count=1000):
            timeline = [line.split() for line in system.redis.hget(key, "timeline").splitlines()]
            assert timeline[-1][1] == "finished"
            marks += [int(at) for at, event, *_ in timeline if event in ("prefilling", "finished")]
        return jobs * count / ((max(marks) - min(marks)) / 1000)
    finally:
        system.close()


@pytest.mark.benchmark
@pytest.mark.timeout(600)
@pytest.mark.parametrize("role", SATURATED)
def test_throughput_grows_with_the_saturated_role(redis_url: str, tmp_path: Path, role: str) -> None:
    rates = {}
    for count in TARGETS:
        folder = tmp_path / str(count)
        folder.mkdir()
        rates[count] = jobs_per_second(redis_url, folder, role, count)
    for count, target in TARGETS.items():
        ratio = rates[count] / rates[1]
        print(f"\n{count} {role} workers: {rates[count]:6.1f} jobs/s, {ratio:.2f} × one (target {target})", end="")
