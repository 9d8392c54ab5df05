"""How a job ended, told alike to all who ask for it; and what is refused before there is one."""

import concurrent.futures
import http.client
import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.acceptance.system import System, wait_for

SIM = {"model": "sim", "prefill_device": "sim", "decode_device": "sim", "lease_seconds": 2, "heartbeat_seconds": 0.5}
PROMPT = list(range(30))

#: status → (HTTP status, type, code), as docs/errors.md has them.
ENDS = {
    "failed": (500, "server_error", "job_failed"),
    "cancelled": (409, "invalid_request_error", "job_cancelled"),
    "expired": (504, "server_error", "job_expired"),
}


@pytest.fixture(scope="module")
def system(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    name = {"served_name": f"ends-{secrets.token_hex(4)}"}
    system = System(redis_url, tmp_path_factory.mktemp("ends"), **SIM, **name, sim_step_ms=20)
    yield system.start_all()
    system.close()


@pytest.fixture
def failing(redis_url: str, tmp_path: Path) -> Iterator[System]:
    """Its halves do not fit, so each attempt of every job fails."""
    system = System(redis_url, tmp_path, **SIM, served_name=f"ends-{secrets.token_hex(4)}")
    system.start("api")
    system.start("prefill")
    system.start("decode", sim_layers=3)
    system.wait_ready()
    yield system
    system.close()


def bring_about(system: System, status: str, ask: Any) -> Any:
    """Asks, and brings about that the job ends so."""
    body = {"prompt": PROMPT, "max_tokens": 4000, **({"timeout": 0.5} if status == "expired" else {})}
    before = set(system.redis.scan_iter(system.key("job:*")))
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, body)
        if status == "cancelled":
            (key,) = wait_for(lambda: set(system.redis.scan_iter(system.key("job:*"))) - before, "there is a job")
            assert system.call("DELETE", f"/v1/jobs/{key.rpartition(':')[2]}")[0] == 200
        return asked.result(60)


def check(system: System, status: str) -> None:
    http_status, kind, code = ENDS[status]

    def right(error: dict[str, Any]) -> bool:
        return (error["type"], error["code"], error["param"]) == (kind, code, None) and status in error["message"]

    answered, answer = bring_about(system, status, lambda body: system.call("POST", "/v1/completions", body))
    assert answered == http_status
    assert right(answer["error"])

    streamed = bring_about(
        system, status, lambda body: list(system.events("/v1/completions", {**body, "stream": True}))
    )
    assert right(json.loads(streamed[-1]["data"])["error"])
    assert "[DONE]" not in [event["data"] for event in streamed]

    def follow(body: dict[str, Any]) -> tuple[str, list[dict[str, str]]]:
        job = system.submit(**body)
        return job, list(system.events(f"/v1/jobs/{job}/events"))

    job, events = bring_about(system, status, follow)
    assert events[-1]["event"] == "end"
    end = json.loads(events[-1]["data"])
    assert (end["status"], right(end["error"])) == (status, True)

    shown = system.job(job)
    assert (shown["status"], shown["finish_reason"], right(shown["error"])) == (status, None, True)


@pytest.mark.parametrize("status", ["cancelled", "expired"])
def test_all_clients_hear_of_an_end_what_the_table_says(system: System, status: str) -> None:
    """H6. Without JobFailed out of `Choice.take` a stream would come to its [DONE] as if all were well."""
    check(system, status)


def test_all_clients_hear_of_a_failure_what_the_table_says(failing: System) -> None:
    """H6. As above."""
    check(failing, "failed")


def test_a_job_that_finished_has_no_error(system: System) -> None:
    """Without the test of `End.code` every record would have one."""
    job = system.submit(PROMPT, max_tokens=2)
    *_, end = system.events(f"/v1/jobs/{job}/events")
    assert json.loads(end["data"]) == {"status": "finished", "reason": "length", "error": None}
    assert system.job(job)["error"] is None


class Asked:
    """One answer, whole."""

    def __init__(self, system: System, method: str, path: str, body: bytes | None = None, **headers: str) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", system.port, timeout=30)
        try:
            connection.request(method, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
            response = connection.getresponse()
            self.status, self.headers, self.body = response.status, response.headers, response.read()
        finally:
            connection.close()

    @property
    def error(self) -> Any:
        assert self.headers["Content-Type"] == "application/json"
        error = json.loads(self.body)["error"]
        assert sorted(error) == ["code", "message", "param", "type"]
        return error


@pytest.mark.parametrize(
    ("method", "path", "status", "code", "said"),
    [
        ("GET", "/", 404, "unknown_url", "no / here"),
        ("POST", "/v1/nothing", 404, "unknown_url", "no /v1/nothing here"),
        ("GET", "/v1/completions", 405, "method_not_allowed", "takes POST"),
        ("POST", "/v1/models", 405, "method_not_allowed", "takes GET"),
        ("PUT", "/v1/jobs", 405, "method_not_allowed", "not PUT"),
        ("TRACE", "/v1/jobs", 405, "method_not_allowed", "not TRACE"),
        ("BREW", "/v1/jobs", 400, "bad_request", "Invalid HTTP method"),
        ("GET", "/v1/jobs/none", 404, "job_not_found", "no job none"),
        ("GET", "/v1/jobs/a%0d%0ab%00%7D", 404, "job_not_found", "no job"),
        ("GET", "/v1/models/%F0%9F%98%80%FF", 404, "model_not_found", "not served"),
    ],
)
def test_what_is_not_there_is_refused_in_the_one_shape(
    system: System, method: str, path: str, status: int, code: str, said: str
) -> None:
    """Without the handler of Falcon's own errors the answer would have their shape, and no code."""
    asked = Asked(system, method, path, b"{}" if method == "POST" else None)
    assert (asked.status, asked.error["code"]) == (status, code)
    assert said in asked.error["message"]
    assert ("Allow" in asked.headers) == (status == 405)


def test_options_says_which_methods_there_are_and_lets_no_page_in(system: System) -> None:
    """With CORS headers any page in a browser could use an API on its user's machine."""
    asked = Asked(
        system, "OPTIONS", "/v1/completions", Origin="https://example.org", Access_Control_Request_Method="POST"
    )
    assert asked.status == 200
    assert "POST" in asked.headers["Allow"]
    assert not [name for name in asked.headers if name.lower().startswith("access-control")]


@pytest.mark.parametrize("path", ["/health/live", "/health/ready", "/v1/models", "/v1/system"])
def test_head_is_get_without_the_body(system: System, path: str) -> None:
    """Load balancers ask so. Without `on_head` it is a 405."""
    asked = Asked(system, "HEAD", path)
    assert (asked.status, asked.body) == (200, b"")
    assert int(asked.headers["Content-Length"]) > 0


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        ({}, "missing"),
        ({"Content_Type": "text/plain"}, "text/plain"),
        ({"Content_Type": "application/x-www-form-urlencoded"}, "urlencoded"),
        ({"Content_Type": "application/json", "Content_Encoding": "gzip"}, "gzip"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/jobs", "/v1/tokenize"])
def test_only_json_is_read(system: System, path: str, headers: dict[str, str], said: str) -> None:
    """Without the check a page in a browser could submit jobs: other types are sent from anywhere without asking."""
    asked = Asked(system, "POST", path, b'{"prompt": "x"}', **headers)
    assert (asked.status, asked.error["code"]) == (415, "unsupported_media_type")
    assert said in asked.error["message"]


def test_json_may_say_its_charset(system: System) -> None:
    asked = Asked(system, "POST", "/v1/tokenize", b'{"prompt": "x"}', Content_Type="Application/JSON; charset=utf-8")
    assert asked.status == 200


def test_a_stream_with_pauses_is_one_stream_for_openai_s_client(redis_url: str, tmp_path: Path) -> None:
    """With an `id:` in its events the client takes the comments that keep a connection for events, and breaks off."""
    slow = System(redis_url, tmp_path, **SIM, served_name=f"slow-{secrets.token_hex(4)}", sim_step_ms=1500)
    slow.start_all()
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{slow.port}/v1", api_key="none", max_retries=0)
    chunks = client.completions.create(model=slow.name, prompt=PROMPT, max_tokens=4, stream=True)
    assert len("".join(chunk.choices[0].text for chunk in chunks)) == 4
    slow.close()
