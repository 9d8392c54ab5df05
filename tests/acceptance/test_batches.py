"""Batches on a whole system, through OpenAI's own client, and past the death of whoever works on them."""

import json
import os
import random
import secrets
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
from openai.types import Batch

from tests.acceptance.system import System, wait_for
from workers.devices.sim import expected

ROOT = Path(__file__).parents[2]
OVER = ("completed", "failed", "expired", "cancelled")


def make(redis_url: str, folder: Path, **settings: object) -> System:
    defaults = {
        "model": "sim",
        "prefill_device": "sim",
        "decode_device": "sim",
        "served_name": f"batch-{secrets.token_hex(4)}",
        "files": folder / "files",
        "lease_seconds": 1,
        "heartbeat_seconds": 0.3,
        "sim_prefill_us": 10,
        "sim_step_ms": 1,
    }
    return System(redis_url, folder, **{**defaults, **settings})


@pytest.fixture
def system(redis_url: str, tmp_path: Path) -> Iterator[System]:
    system = make(redis_url, tmp_path)
    yield system
    system.close()


def connect(system: System) -> openai.OpenAI:
    key = "none"
    return openai.OpenAI(base_url=f"http://127.0.0.1:{system.port}/v1", api_key=key, max_retries=0)


@pytest.fixture
def api(system: System) -> Iterator[openai.OpenAI]:
    with connect(system) as client:
        yield client


def prompt(number: int) -> list[int]:
    return [(number * 31 + index * 7) % 200 for index in range(5 + number % 40)]


def count(number: int) -> int:
    return 1 + number % 13


def request(number: int, **fields: Any) -> dict[str, Any]:
    body = {"prompt": prompt(number), "max_tokens": count(number), **fields}
    return {"custom_id": f"line {number}", "method": "POST", "url": "/v1/completions", "body": body}


def start(api: openai.OpenAI, *lines: Any, **how: Any) -> Batch:
    text = "".join(json.dumps(line) + "\n" for line in lines)
    file = api.files.create(file=("in.jsonl", text.encode()), purpose="batch")
    how = {"endpoint": "/v1/completions", "completion_window": "24h", **how}
    return api.batches.create(input_file_id=file.id, **how)


def retrieved(api: openai.OpenAI, batch_id: str) -> Batch | None:
    try:
        return api.batches.retrieve(batch_id)
    except (openai.APIConnectionError, openai.APIStatusError):
        return None


def ended(api: openai.OpenAI, batch_id: str, seconds: float = 90) -> Batch:
    def over() -> Batch | None:
        batch = retrieved(api, batch_id)
        return batch if batch is not None and batch.status in OVER else None

    batch: Batch = wait_for(over, f"{batch_id} is over", seconds)
    return batch


def results(api: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    return [json.loads(line) for line in api.files.content(file_id).text.splitlines()] if file_id else []


def check_answers(api: openai.OpenAI, batch: Batch, numbers: range, max_tokens: int = 0) -> None:
    """All of them, each once, in order, and right to the last token."""
    assert (batch.status, batch.error_file_id) == ("completed", None)
    answers = results(api, batch.output_file_id)
    assert [answer["custom_id"] for answer in answers] == [f"line {number}" for number in numbers]
    for number, answer in zip(numbers, answers, strict=True):
        text = answer["response"]["body"]["choices"][0]["text"]
        assert [ord(character) for character in text] == expected(prompt(number), max_tokens or count(number))


def test_five_hundred_lines_through_openais_client(system: System, api: openai.OpenAI) -> None:
    system.start_all()
    batch = start(api, *(request(number) for number in range(1, 501)), metadata={"who": "me"})
    assert (batch.object, batch.metadata) == ("batch", {"who": "me"})
    assert batch.expires_at == batch.created_at + 86400
    batch = ended(api, batch.id)
    check_answers(api, batch, range(1, 501))
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"total": 500, "completed": 500, "failed": 0}
    assert batch.usage is not None
    assert batch.usage.output_tokens == sum(count(number) for number in range(1, 501))
    assert batch.created_at <= (batch.in_progress_at or 0) <= (batch.completed_at or 0)
    assert [listed.id for listed in api.batches.list()] == [batch.id]
    output = api.files.retrieve(batch.output_file_id or "")
    assert (output.purpose, output.filename) == ("batch_output", f"{batch.id}_output.jsonl")
    assert output.bytes == len(api.files.content(output.id).content)
    assert {file.id for file in api.files.list()} == {batch.input_file_id, output.id}
    assert [file.id for file in api.files.list(purpose="batch")] == [batch.input_file_id]
    assert api.files.delete(output.id).deleted
    with pytest.raises(openai.NotFoundError):
        api.files.content(output.id)
    with pytest.raises(openai.BadRequestError, match="completed already"):
        api.batches.cancel(batch.id)
    system.wait_idle()


def test_bad_lines_go_into_the_file_of_errors_and_the_others_are_answered(system: System, api: openai.OpenAI) -> None:
    system.start_all()
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5}
    line = {"custom_id": "good", "method": "POST", "url": "/v1/chat/completions", "body": chat}
    lines = [
        {**line, "custom_id": "streams", "body": {**chat, "stream": True}},
        line,
        "no object",
        {**line, "custom_id": "elsewhere", "url": "/v1/completions"},
    ]
    batch = ended(api, start(api, *lines, endpoint="/v1/chat/completions").id)
    (answer,) = results(api, batch.output_file_id)
    assert answer["custom_id"] == "good"
    assert openai.types.chat.ChatCompletion.model_validate(answer["response"]["body"]).usage is not None
    assert answer["response"]["body"]["choices"][0]["message"]["role"] == "assistant"
    errors = {error["custom_id"]: error for error in results(api, batch.error_file_id)}
    assert list(errors) == ["streams", None, "elsewhere"]
    assert errors["streams"]["response"]["body"]["error"]["param"] == "stream"
    assert errors["elsewhere"]["error"]["code"] == errors[None]["error"]["code"] == "invalid_request"
    failed = ended(api, start(api, request(1), request(1)).id)
    assert failed.status == "failed"
    assert failed.errors is not None
    assert [(error.code, error.line) for error in failed.errors.data or ()] == [("duplicate_custom_id", 2)]
    system.wait_idle()


def test_a_cancelled_batch_frees_the_workers_and_keeps_what_is_done(system: System, api: openai.OpenAI) -> None:
    system.start_all()
    lines = [request(number) for number in range(1, 11)]
    lines += [request(number, max_tokens=8000) for number in range(11, 201)]
    batch = start(api, *lines)

    def some_are_done() -> bool:
        counts = api.batches.retrieve(batch.id).request_counts
        return counts is not None and counts.completed > 5

    wait_for(some_are_done, "some are done")
    assert api.batches.cancel(batch.id).status == "cancelling"
    batch = ended(api, batch.id, 10)
    assert batch.status == "cancelled"
    done, errors = results(api, batch.output_file_id), results(api, batch.error_file_id)
    names = [result["custom_id"] for result in (*done, *errors)]
    assert sorted(names, key=lambda name: int(name.split()[1])) == [f"line {number}" for number in range(1, 201)]
    assert {error["error"]["code"] for error in errors} == {"batch_cancelled"}
    assert len(done) > 5
    for answer in done:
        number = int(answer["custom_id"].split()[1])
        text = answer["response"]["body"]["choices"][0]["text"]
        assert [ord(character) for character in text] == expected(prompt(number), count(number))
    system.wait_idle(5)


def test_a_batch_whose_window_is_over_keeps_what_is_done(system: System, api: openai.OpenAI) -> None:
    system.start("api")
    wait_for(system.answers, "the API answers")
    batch = ended(api, start(api, request(1), request(2), completion_window="1s").id, 20)
    assert (batch.status, batch.output_file_id) == ("expired", None)
    assert [error["error"]["code"] for error in results(api, batch.error_file_id)] == ["batch_expired"] * 2
    assert system.unfinished() == 0


# Death


def kill_worker(system: System, master: "subprocess.Popen[bytes]") -> "subprocess.Popen[bytes]":
    """gunicorn starts another."""
    for child in psutil.Process(master.pid).children():
        child.kill()
    return master


def kill_all(system: System, master: "subprocess.Popen[bytes]") -> "subprocess.Popen[bytes]":
    children = psutil.Process(master.pid).children()
    master.kill()
    for child in children:
        child.kill()
    psutil.wait_procs(children)
    master.wait()
    system.processes.remove(master)
    return system.start("api")[0]


def ask_to_leave(system: System, master: "subprocess.Popen[bytes]") -> "subprocess.Popen[bytes]":
    system.stop(master, signal.SIGTERM)
    return system.start("api")[0]


@pytest.mark.parametrize("ways", [(kill_worker, kill_all), (ask_to_leave,)])
def test_a_batch_outlives_the_api_whenever_it_dies(redis_url: str, tmp_path: Path, ways: tuple[Any, ...]) -> None:
    """Without the record of how many bytes count, lines are there twice; without ids that follow from the line, jobs run
    twice."""
    system = make(redis_url, tmp_path, sim_step_ms=8)
    lines = 200
    dice = random.Random(seed := secrets.randbelow(1000))
    print(f"seed {seed}")
    try:
        master = system.start("api")[0]
        system.start("prefill")
        system.start("decode")
        system.wait_ready()
        with connect(system) as api:
            batch_id = start(api, *(request(number) for number in range(1, lines + 1))).id
            for place in sorted(dice.sample(range(1, lines - 20), 3)):

                def reached(place: int = place) -> bool:
                    batch = retrieved(api, batch_id)
                    counts = batch.request_counts if batch is not None else None
                    return counts is not None and counts.completed >= place

                wait_for(reached, f"{place} lines are done", 60)
                master = dice.choice(ways)(system, master)
            check_answers(api, ended(api, batch_id), range(1, lines + 1))
        jobs = list(system.redis.scan_iter(system.key("job:*")))
        assert len(jobs) == lines, "no line became two jobs"
        system.wait_idle()
    finally:
        system.close()


def test_two_api_processes_share_the_work(redis_url: str, tmp_path: Path) -> None:
    system = make(redis_url, tmp_path, api_workers=2)
    try:
        system.start_all()
        with connect(system) as api:
            batches = [start(api, *(request(n) for n in range(first, first + 40))) for first in (1, 41, 81, 121)]
            for first, batch in zip((1, 41, 81, 121), batches, strict=True):
                check_answers(api, ended(api, batch.id), range(first, first + 40))
        system.wait_idle()
    finally:
        system.close()


# Uploads


def test_what_is_wrong_with_an_upload_is_named(system: System, api: openai.OpenAI) -> None:
    system.environ["KVR_FILE_MIB"] = "1"
    system.start("api")
    wait_for(system.answers, "the API answers")
    most = b"x" * (1 << 20)
    assert api.files.create(file=("most", most), purpose="batch").bytes == 1 << 20
    with pytest.raises(openai.APIStatusError) as caught:
        api.files.create(file=("more", most + b"x"), purpose="batch")
    assert caught.value.status_code == 413
    with pytest.raises(openai.BadRequestError, match="purpose: 'vision' is not supported"):
        api.files.create(file=("a", b"x"), purpose="vision")
    kept = api.files.create(file=("a", b"x"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 7200})
    assert kept.expires_at == kept.created_at + 7200
    with pytest.raises(openai.BadRequestError, match=r"expires_after\[seconds\]: must be a number from 3600"):
        api.files.create(file=("a", b"x"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 60})
    for fields, message in (
        ({"purpose": "batch"}, "file: is required"),
        ({"file": "x"}, "purpose: is required"),
        ({"file": "x", "purpose": "batch", "nonsense": "1"}, "nonsense: is not a known parameter"),
        ({"file": "x", "purpose": "batch", "expires_after[anchor]": ""}, "expires_after[anchor]: must be created_at"),
    ):
        words = [word for name, value in fields.items() for word in ("-F", f"{name}={value}")]
        assert curl(system, "/v1/files", *words)["error"]["message"] == message
    assert "multipart/form-data" in curl(system, "/v1/files", "-d", "{}")["error"]["message"]
    for path, message in (
        ("/v1/batches?limit=", "limit: '' is no number from 1 to 100"),
        ("/v1/batches?limit=2&limit=3", "limit: comes 2 times"),
        ("/v1/files?order=", "order: '' is neither asc nor desc"),
    ):
        assert curl(system, path)["error"]["message"] == message
    assert len(list((system.folder / "files").rglob("file-*"))) == 2, "nothing is left of what was refused"
    for field, value in (("endpoint", "/v1/embeddings"), ("completion_window", "soon"), ("metadata", {"a": "x" * 513})):
        with pytest.raises(openai.BadRequestError) as refused:
            start(api, request(1), **{field: value})
        assert field in str(refused.value)
    for unknown in (f"file-{'0' * 32}", "../../etc/passwd", "file-x"):
        with pytest.raises(openai.NotFoundError):
            api.batches.create(input_file_id=unknown, endpoint="/v1/completions", completion_window="24h")


def test_a_folder_that_cannot_be_written_is_said_and_nothing_else_suffers(system: System, api: openai.OpenAI) -> None:
    system.environ["KVR_FILES"] = "/dev/null/nowhere"
    system.start("api")
    wait_for(system.answers, "the API answers")
    with pytest.raises(openai.APIStatusError, match="cannot be kept: Not a directory") as caught:
        api.files.create(file=("a", b"x"), purpose="batch")
    assert caught.value.status_code == 507
    assert system.answers()


def curl(system: System, path: str, *words: str) -> Any:
    command = ["curl", "-s", f"http://127.0.0.1:{system.port}{path}", *words]
    return json.loads(subprocess.run(command, capture_output=True, check=True, timeout=30).stdout)


FORM = (
    b'--cut\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--cut\r\nContent-Disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
)


def upload(system: System, headers: bytes) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", system.port), timeout=30)
    head = b"POST /v1/files HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=cut\r\n"
    connection.sendall(head + headers + b"\r\n")
    return connection


def test_an_upload_without_end_is_refused_early_and_held_nowhere(system: System) -> None:
    """H2. Without counting what comes, a body without Content-Length has no limit."""
    system.environ["KVR_FILE_MIB"] = "8"
    (process,) = system.start("api")
    wait_for(system.answers, "the API answers")
    before, sent, block = system.memory(process), 0, b"x" * (1 << 20)
    with upload(system, b"Transfer-Encoding: chunked\r\n") as connection:
        connection.sendall(b"%x\r\n%b\r\n" % (len(FORM), FORM))
        while sent < 2 << 30 and not select.select([connection], [], [], 0)[0]:
            connection.sendall(b"%x\r\n%b\r\n" % (len(block), block))
            sent += len(block)
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")
    assert sent < 64 << 20
    assert system.memory(process) - before < 24 << 20
    wait_for(lambda: not list((system.folder / "files").rglob("file-*")), "nothing is left of it")


@pytest.mark.parametrize("chunked", [True, False])
def test_a_client_that_leaves_in_the_middle_of_an_upload_has_uploaded_nothing(system: System, chunked: bool) -> None:
    """Without reading to the form's end, half a file would pass for a whole one."""
    system.start("api")
    wait_for(system.answers, "the API answers")
    data = FORM + b"x" * (3 << 20)
    headers = b"Transfer-Encoding: chunked\r\n" if chunked else b"Content-Length: %d\r\n" % (len(data) + (1 << 20))
    with upload(system, headers) as connection:
        connection.sendall(b"%x\r\n%b\r\n" % (len(data), data) if chunked else data)
        wait_for(lambda: list((system.folder / "files").rglob("file-*")), "it has begun")
    wait_for(lambda: not list((system.folder / "files").rglob("file-*")), "nothing is left of it")
    assert system.call("GET", "/v1/files")[1]["data"] == []


def test_the_commands_of_the_docs_work(system: System, tmp_path: Path) -> None:
    system.start_all()
    text = (ROOT / "docs" / "batches.md").read_text(encoding="utf-8")
    text = text.replace("127.0.0.1:8000", f"127.0.0.1:{system.port}").replace("smollm2-135m", system.name)
    blocks = [block.split("```")[0] for block in text.split("```sh\n")[1:]]
    scripts = [block.split("```")[0] for block in text.split("```python\n")[1:]]
    assert blocks
    assert scripts
    for block in blocks:
        done = subprocess.run(["bash", "-euc", block], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
    for script in scripts:
        command = [sys.executable, "-c", script.replace("sleep(5)", "sleep(0.1)")]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, env=dict(os.environ))
        assert done.returncode == 0, done.stderr
        assert "completed" in done.stdout
