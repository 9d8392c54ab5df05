"""Keys and limits, from outside: the commands of docs/keys.md, bounds and turns under load, requests that come again."""

import http.client
import json
import os
import re
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.acceptance.system import System, wait_for
from workers.devices.sim import expected

ROOT = Path(__file__).parents[2]
MAIN = "import sys; from api.command import main; sys.exit(main())"
SIM = {"model": "sim", "prefill_device": "sim", "decode_device": "sim", "lease_seconds": 2, "heartbeat_seconds": 0.5}
TURN_TOKENS = 256


@pytest.fixture
def system(redis_url: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[System]:
    settings = {**SIM, "served_name": f"keys-{secrets.token_hex(4)}", **getattr(request, "param", {})}
    system = System(redis_url, tmp_path, **settings)
    system.start("api")
    wait_for(system.answers, "the API answers")
    yield system
    system.close()


def kvrelay(system: System, *words: str, code: int = 0) -> tuple[str, str]:
    """What it prints for programs, and for people."""
    command = [sys.executable, "-c", MAIN, *words]
    done = subprocess.run(command, env=system.environ, capture_output=True, text=True, timeout=60)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout.strip(), done.stderr


def tenant(system: System, name: str, *options: str) -> System:
    """The system as the holder of a new key sees it."""
    secret, _ = kvrelay(system, "keys", "create", name, *options)
    return system.asking(Authorization=f"Bearer {secret}")


class Answer(NamedTuple):
    status: int
    headers: http.client.HTTPMessage
    json: Any


def post(system: System, path: str, body: Any) -> Answer:
    """With the headers of the answer."""
    connection = http.client.HTTPConnection("127.0.0.1", system.port, timeout=110)
    try:
        connection.request("POST", path, json.dumps(body), system.headers)
        response = connection.getresponse()
        return Answer(response.status, response.headers, json.loads(response.read()))
    finally:
        connection.close()


def at_once(count: int, do: Callable[[int], Answer]) -> list[Answer]:
    """All of them released together."""
    together = threading.Barrier(count)

    def one(number: int) -> Answer:
        together.wait()
        return do(number)

    with ThreadPoolExecutor(count) as clients:
        return list(clients.map(one, range(count)))


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(seed * 31 + index * 7) % 200 for index in range(length)]


def began(system: System, jobs: Sequence[str]) -> dict[str, int]:
    """Job → when a worker took it, of those that were taken."""
    return _times(system, jobs, "prefilling")


def _times(system: System, jobs: Sequence[str], event: str) -> dict[str, int]:
    pipe = system.redis.pipeline(transaction=False)
    for job in jobs:
        pipe.hget(system.key(f"job:{job}"), "timeline")
    found = (re.search(rf"^(\d+) {event}", timeline, re.MULTILINE) for timeline in pipe.execute())
    return {job: int(match[1]) for job, match in zip(jobs, found, strict=True) if match}


# The commands


def test_every_command_of_the_page_works(system: System, tmp_path: Path) -> None:
    (tmp_path / "kvrelay").write_text(f"#!/bin/sh\nexec {sys.executable} -c '{MAIN}' \"$@\"\n")
    (tmp_path / "kvrelay").chmod(0o755)
    system.start("prefill")
    system.start("decode")
    system.wait_ready()
    page = (ROOT / "docs" / "keys.md").read_text()
    script = "\n".join(re.findall(r"^    (.*)$", page, re.MULTILINE)).replace(":8000", f":{system.port}")
    assert script.count("kvrelay keys") == 4
    environ = system.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    command = ["bash", "-euo", "pipefail", "-c", script.replace("curl -s", "curl -sS --fail-with-body")]
    done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    shown = done.stdout
    assert re.search(r"^[0-9a-f]{12} +ops +yes +- +- ", shown, re.MULTILINE), shown
    assert re.search(r"^[0-9a-f]{12} +alice +- +600 +100 .* never$", shown, re.MULTILINE), shown
    assert '"object": "list"' in shown
    assert "is revoked" in shown
    accepted, answered = re.findall(r'"id": "(?:cmpl-)?([0-9a-f]{32})"', shown)
    assert accepted == answered, "one job"
    system.asking(Authorization=f"Bearer {kvrelay(system, 'keys', 'create', 'x', '--admin')[0]}").wait_idle()


def test_a_key_s_life_as_an_operator_sees_it(system: System) -> None:
    secret, said = kvrelay(system, "keys", "create", "alice")
    assert re.fullmatch(r"kvr-[\w-]{32}", secret)
    assert "from now on every request needs a key" in said
    assert system.call("GET", "/v1/models")[0] == 401
    alice = system.asking(Authorization=f"Bearer {secret}")
    assert alice.call("GET", "/v1/models")[0] == 200
    assert secret not in kvrelay(system, "keys", "list")[0]
    assert "there is a key alice already" in kvrelay(system, "keys", "create", "alice", code=1)[1]
    assert "there is no key bob" in kvrelay(system, "keys", "revoke", "bob", code=1)[1]
    assert "--waiting -1: must be" in kvrelay(system, "keys", "create", "bob", "--waiting", "-1", code=1)[1]
    assert "no name for a key" in kvrelay(system, "keys", "create", " ", code=1)[1]
    assert "the last one" in kvrelay(system, "keys", "revoke", "alice")[1]
    assert system.call("GET", "/v1/models")[0] == 200
    system.check()


def test_who_sends_much_and_is_refused_hears_why(system: System) -> None:
    """Without the rest of the body being read, the answer would be lost with the connection."""
    limited = tenant(system, "limited", "--per-minute", "1")
    body = {"prompt": 5, "user": "x" * (5 << 20)}
    assert post(system, "/v1/jobs", body).status == 401
    assert [post(limited, "/v1/jobs", body).status for _ in range(2)] == [400, 429]
    assert [post(limited, "/v1/no-such-thing", body).status for _ in range(2)] == [429, 429]


def test_the_command_shows_its_key_to_the_api(system: System) -> None:
    secret, _ = kvrelay(system, "keys", "create", "me")
    assert "an API key is needed" in kvrelay(system, "submit", "x", code=1)[1]
    system.environ["KVR_API_KEY"] = secret
    job, _ = kvrelay(system, "submit", "x")
    assert "cancelled" in kvrelay(system, "cancel", job)[0]


# Bounds


@pytest.mark.parametrize("system", [{"queue_bound": 10, "api_workers": 2}], indirect=True)
def test_the_bound_of_waiting_jobs_is_exact_under_a_hundred_clients_of_two_processes(system: System) -> None:
    """R9. Without the count inside of `submit`, those who looked at the same moment would all find room."""
    answers = at_once(100, lambda number: post(system, "/v1/jobs", {"prompt": prompt(5, number)}))
    statuses = [answer.status for answer in answers]
    assert (statuses.count(202), statuses.count(429)) == (10, 90)
    assert system.unfinished() == 10
    for answer in answers:
        if answer.status == 429:
            assert answer.json["error"]["code"] == "queue_full"
            assert 1 <= int(answer.headers["Retry-After"]) <= 60
    system.check()


@pytest.mark.parametrize("system", [{"api_workers": 2}], indirect=True)
def test_the_bound_and_the_rate_of_each_key_are_exact_beside_another_s(system: System) -> None:
    tenants = [tenant(system, "waits", "--waiting", "7"), tenant(system, "hurries", "--per-minute", "11")]
    answers = at_once(100, lambda number: post(tenants[number % 2], "/v1/jobs", {"prompt": prompt(5, number)}))
    first, second = ([a.status for a in of_one].count(202) for of_one in (answers[0::2], answers[1::2]))
    assert first == 7
    assert 11 <= second <= 13  # one more every five seconds
    codes = {number % 2: answer.json["error"]["code"] for number, answer in enumerate(answers) if answer.status == 429}
    assert codes == {0: "queue_full", 1: "rate_limit_exceeded"}
    system.check()


# Turns


@pytest.mark.parametrize("system", [{"sim_prefill_us": 1000}], indirect=True)  # 20 ms for each prompt
def test_one_job_of_a_tenant_does_not_wait_for_another_s_hundreds(
    system: System, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without turns it would wait for all of them."""
    many, one = tenant(system, "many"), tenant(system, "one")
    jobs = [many.submit(prompt(20, n), max_tokens=1) for n in range(200)]
    system.start("prefill")
    system.start("decode")
    wait_for(lambda: len(began(system, jobs)) >= 10, "some are served")
    job = one.submit(prompt(20), max_tokens=1)
    shown = one.finished(job)
    queued, taken = (_times(system, [job], event)[job] for event in ("queued", "prefilling"))
    passed = sum(queued < at < taken for at in began(system, jobs).values())
    assert passed <= 3
    assert system.unfinished() > 100
    with capsys.disabled():
        print(f"\nbeside {system.unfinished()} jobs of another: {passed} went before, TTFT {_ttft(shown)} ms")
    wait_for(lambda: system.unfinished() == 0, "the others are served, too")
    system.wait_idle()


def _ttft(shown: dict[str, Any]) -> int:
    at = {event["event"]: event["at"] for event in shown["timeline"]}
    return int(at["first_token"] - at["queued"])


@pytest.mark.parametrize(
    "system", [{"sim_prefill_us": 200}], indirect=True
)  # 1.6 s for the long one, 4 ms for a short one
def test_short_prompts_pass_a_long_one_that_waits_and_it_is_served_while_they_come(
    system: System, capsys: pytest.CaptureFixture[str]
) -> None:
    """R8. First come, first served, all would wait for the long one; shortest first, it would wait for all."""
    long = system.submit(prompt(8000), max_tokens=1)
    short = [system.submit(prompt(20, n), max_tokens=1) for n in range(50)]
    system.start("prefill")
    system.start("decode")
    while long not in began(system, [long]):
        short.append(system.submit(prompt(20, len(short)), max_tokens=1))
    wait_for(lambda: system.unfinished() == 0, "all are served")
    order = sorted((at, job) for job, at in began(system, [long, *short]).items())
    before = [job for _, job in order].index(long)
    assert 8000 // TURN_TOKENS - 1 <= before <= 8000 // TURN_TOKENS
    waits = sorted(_ttft(system.job(job)) for job in short[:50])
    with capsys.disabled():
        print(f"\n1 long and 50 short prompts: {before} short ones first; p95 of their TTFT {waits[47]} ms")
    system.wait_idle()


# The same request again


def completion(system: System, body: Any) -> tuple[str, Any, str]:
    """Text, usage and job id of an answer."""
    answer = post(system, "/v1/completions", body)
    assert answer.status == 200, answer
    return answer.json["choices"][0]["text"], answer.json["usage"], answer.headers["X-Job-Id"]


def test_fifty_at_once_under_one_key_are_one_job_and_all_get_its_text(system: System) -> None:
    """W10. With ids of their own they would be fifty jobs; with one id and no look at it, one job with mixed text."""
    workers = [*system.start("prefill", 2), *system.start("decode", 2)]
    system.wait_ready()
    client = system.asking(Idempotency_Key="one")
    body = {"prompt": prompt(40), "max_tokens": 60, "temperature": 1.0}
    with ThreadPoolExecutor(50) as clients:
        answers = list(clients.map(lambda _: completion(client, body), range(50)))
    text, usage, job = answers[0]
    assert answers == [answers[0]] * 50
    assert text == "".join(map(chr, expected(prompt(40), 60)))
    assert len(list(system.redis.scan_iter(system.key("job:*")))) == 1
    assert completion(client, dict(reversed(body.items()))) == (text, usage, job), "also after it ended"
    assert client.call("POST", "/v1/jobs", body) == (202, {"id": job, "object": "job", "status": "finished"})
    assert client.call("POST", "/v1/completions", {**body, "max_tokens": 61})[0] == 422
    assert system.job(job)["attempt"] == 1
    system.wait_idle()
    for worker in workers:
        system.stop(worker)
    assert completion(client, body) == (text, usage, job), "nobody needs to work for it"


def test_a_stream_that_is_asked_for_again_is_sent_again_from_its_beginning(system: System) -> None:
    system.start("prefill")
    system.start("decode")
    system.wait_ready()
    client = system.asking(Idempotency_Key="stream")
    body = {"prompt": prompt(40), "max_tokens": 30, "stream": True, "stream_options": {"include_usage": True}}

    def pieces() -> list[Any]:
        events = list(client.events("/v1/completions", body))
        assert events[-1]["data"] == "[DONE]"
        return [(e.get("id"), {**json.loads(e["data"]), "created": 0}) for e in events[:-1]]

    with ThreadPoolExecutor(10) as clients:
        *together, first = clients.map(lambda _: pieces(), range(10))
    text = "".join(map(chr, expected(prompt(40), 30)))
    for some in (first, *together, pieces()):
        assert "".join(piece["choices"][0]["text"] for _, piece in some if piece["choices"]) == text
        assert some[-1] == first[-1], "the usage"
    assert len(list(system.redis.scan_iter(system.key("job:*")))) == 1
    system.wait_idle()


@pytest.mark.parametrize("system", [{"sim_prefill_us": 200}], indirect=True)
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_a_request_that_may_come_again_finds_it_answered(system: System, stream: bool) -> None:
    """Without, its return would be told that it had cancelled the job itself; and so would all others who ask for it."""
    system.start("prefill")
    system.start("decode")
    system.wait_ready()
    body = {"prompt": prompt(4000), "max_tokens": 20, "stream": stream}  # 0.8 s of prefill
    connection = system.stream("/v1/completions", body, headers="Idempotency-Key: back\r\n")
    wait_for(lambda: system.unfinished() == 1, "the job is queued")
    connection.close()
    wait_for(lambda: system.unfinished() == 0, "the job has ended")
    (key,) = system.redis.scan_iter(system.key("job:*"))
    assert system.redis.hget(key, "status") == "finished"
    client = system.asking(Idempotency_Key="back")
    text = "".join(map(chr, expected(prompt(4000), 20)))
    if stream:
        data = [event["data"] for event in client.events("/v1/completions", body)]
        assert "".join(json.loads(piece)["choices"][0]["text"] for piece in data[:-1]) == text
    else:
        assert completion(client, body)[0] == text
    system.wait_idle()
