"""What logs say, at their most talkative: who asked for what when, and never what was said."""

import http.client
import json
import re
import secrets
from collections.abc import Iterator

import pytest

from tests.acceptance.system import System

SECRET = "☃♞☂"  # each of them is several tokens, and stands nowhere else
BYTES = [str(byte) for byte in SECRET.encode()]
#: As text, in JSON, as bytes, as token ids: however it may have been written down.
TRACES = [*SECRET, *(rf"\u{ord(letter):04x}" for letter in SECRET), r"\xe2", ", ".join(BYTES[:3]), ",".join(BYTES[:3])]


@pytest.fixture(scope="module")
def system(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    settings = {"model": "sim", "prefill_device": "sim", "decode_device": "sim", "log_level": "DEBUG"}
    system = System(redis_url, tmp_path_factory.mktemp("logs"), served_name=f"logs-{secrets.token_hex(4)}", **settings)
    for role in ("prefill", "decode"):  # so that answers hold the secret, too
        system.arguments[role] = ["--factory", f"tests.acceptance.echo_device:open_{role}"]
    yield system.start_all()
    system.close()


def asked(system: System, path: str, body: bytes | None = None, **headers: str) -> tuple[int, str, bytes]:
    """(status, request id, body)"""
    connection = http.client.HTTPConnection("127.0.0.1", system.port, timeout=30)
    try:
        connection.request("GET" if body is None else "POST", path, body, system.headers | headers)
        response = connection.getresponse()
        return response.status, response.headers["X-Request-Id"], response.read()
    finally:
        connection.close()


def test_no_log_holds_a_prompt_or_an_answer(system: System) -> None:
    """With one line that shows a body, a job, a field's value or a token's text, it would be there for years."""
    prompt = {"prompt": f"say {SECRET} {SECRET}", "max_tokens": 40}
    chat = {"messages": [{"role": "user", "content": SECRET, "name": SECRET}], "max_tokens": 60, "user": SECRET}
    for path, body in (("/v1/completions", prompt), ("/v1/chat/completions", chat)):
        status, _, answer = asked(system, path, json.dumps(body, ensure_ascii=False).encode())
        assert status == 200
        assert SECRET in json.dumps(json.loads(answer), ensure_ascii=False)
        streamed = "".join(event["data"] for event in system.events(path, {**body, "stream": True}))
        assert json.dumps(SECRET[0])[1:-1] in streamed or SECRET[0] in streamed
    job = system.submit(**prompt, stop=[SECRET * 2], metadata={SECRET: SECRET})
    assert SECRET in system.finished(job)["text"]
    cancelled = system.submit(f"{SECRET} " * 500, max_tokens=3000)
    assert system.call("DELETE", f"/v1/jobs/{cancelled}")[0] in (200, 409)
    refused = (
        {"prompt": "x", "stop": [SECRET] * 20},
        {"prompt": "x", "temperature": SECRET},
        {"prompt": "x", SECRET: 1},
        {"prompt": [SECRET, 1]},
        {"prompt": "x", "logit_bias": {SECRET: 1}},
        {"messages": [{"role": SECRET, "content": SECRET}]},
        {"prompt": SECRET, "model": SECRET},
    )
    for wrong in refused:
        path = "/v1/chat/completions" if "messages" in wrong else "/v1/completions"
        assert asked(system, path, json.dumps(wrong, ensure_ascii=False).encode())[0] in (400, 404)
    for broken in (f'{{"prompt": "{SECRET}', f'{{"prompt": "{SECRET}\\ud800"}}', f'{{"prompt": "{SECRET}", "n": NaN}}'):
        assert asked(system, "/v1/completions", broken.encode())[0] == 400
    system.wait_idle()
    logs = system.logs()
    assert "DEBUG" in logs
    assert "POST /v1/chat/completions 200" in logs
    for trace in TRACES:
        assert trace not in logs


def test_a_request_s_id_is_the_client_s_and_stands_in_the_log(system: System) -> None:
    """Without it nobody could find a client's request in a log."""
    given = f"trace-{secrets.token_hex(8)}:1@x.y"
    status, answered, _ = asked(system, "/v1/models", **{"X-Request-Id": given})
    assert (status, answered) == (200, given)
    assert re.search(rf"INFO GET /v1/models 200 in \d+ ms, {re.escape(given)}$", system.logs(), re.MULTILINE)
    status, answered, _ = asked(system, "/v1/nothing", **{"X-Request-Id": given})
    assert (status, answered) == (404, given)


@pytest.mark.parametrize("given", ["", "a b", "<script>", "x" * 129, "a\tb", "é", "a;b", "$(id)", "a\x1b[31m"])
def test_an_id_that_is_none_is_replaced(system: System, given: str) -> None:
    """Without the check a client could write what it likes into answers and logs."""
    status, answered, _ = asked(system, "/v1/models", **{"X-Request-Id": given})
    assert status in (200, 400)  # 400: the server itself does not take such a header
    assert answered != given
    assert status == 400 or len(answered) == 32


def test_a_path_cannot_write_lines_of_its_own(system: System) -> None:
    """With the decoded path in the log, who asks for it could write lines there."""
    forged = "INFO forged by a client"
    asked(system, "/v1/x%0d%0a" + forged.replace(" ", "%20"))
    assert forged not in system.logs()
