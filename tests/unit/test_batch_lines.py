"""The lines of a batch: what is a request, what is an error of one line, and what spoils the whole file."""

import io
import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from api.batch_lines import LINE_LIMIT, MAX_ERRORS, Line, examine, name_of
from api.requests import Request, make_jobs
from api.text import PromptCodec
from brokers.token_log import Entry
from pipeline.batch import MAX_LINES, Batch, BatchStatus, job_id_of
from pipeline.config import Config
from pipeline.job import Job
from pipeline.model import SIM, Model

BATCH = Batch(id=f"batch_{'1' * 32}", endpoint="/v1/completions")
CONFIG, CODEC = Config(model="sim"), PromptCodec(Model(SIM), 8192)


async def make(request: Request, seed: int) -> list[Job]:
    return await make_jobs(request, CODEC, CONFIG, seed)


FRONT: Any = SimpleNamespace(config=CONFIG, codec=CODEC, jobs=make)
GOOD: dict[str, Any] = {
    "custom_id": "one",
    "method": "POST",
    "url": "/v1/completions",
    "body": {"prompt": [1, 2, 3], "max_tokens": 2},
}


async def prepared(raw: bytes, batch: Batch = BATCH) -> Line:
    line = Line(number=7, end=100, size=len(raw), job_ids=[job_id_of(batch.id, 7)])
    await line.prepare(raw, batch, FRONT)
    return line


def encoded(**changes: Any) -> bytes:
    return json.dumps({**GOOD, **changes}).encode() + b"\n"


def without(name: str) -> bytes:
    return json.dumps({key: value for key, value in GOOD.items() if key != name}).encode()


def body(**changes: Any) -> bytes:
    return encoded(body={**GOOD["body"], **changes})


async def test_a_good_line_becomes_a_job_and_its_answer_is_a_completion() -> None:
    line = await prepared(encoded())
    assert [job.prompt for job in line.jobs] == [(1, 2, 3)]
    assert not line.result
    line.logs[line.job_ids[0]] = [
        Entry(index=0, token=5, text="a"),
        Entry(index=1, token=6, text="é"),
        Entry(index=2, end="finished", reason="length"),
    ]
    line.finish(FRONT)
    shown = json.loads(line.result)
    assert line.result.endswith(b"\n")
    assert line.result.count(b"\n") == 1
    assert (shown["id"], shown["custom_id"], shown["error"]) == (f"batch_req_{line.job_ids[0]}", "one", None)
    assert (shown["response"]["status_code"], shown["response"]["request_id"]) == (200, line.job_ids[0])
    assert shown["response"]["body"]["choices"][0]["text"] == "aé"
    assert (line.failed, line.input_tokens, line.output_tokens) == (False, 3, 2)


#: Line → whether it can be told whose it is, the error's code, and a part of what it says.
NO_REQUESTS = [
    (b"{", None, "invalid_json_line", "line 7: the body is not valid JSON"),
    (b'{"custom_id": "one", "body": NaN}', None, "invalid_json_line", "line 7: "),
    (b'{"custom_id": "\\ud800"}', None, "invalid_json_line", "line 7: "),
    (b"\xff\xfe", None, "invalid_json_line", "not valid JSON"),
    (b'{"body": ' + b"[" * 100_000, None, "invalid_json_line", "nested"),
    (b"[1]", None, "invalid_request", "expected `object`"),
    (without("custom_id"), None, "invalid_request", "line 7: custom_id: is required"),
    (encoded(custom_id=7), None, "invalid_request", "custom_id"),
    (encoded(custom_id=""), "", "invalid_request", "custom_id"),
    (encoded(custom_id="x" * 513), "x" * 513, "invalid_request", "custom_id"),
    (without("method"), "one", "invalid_request", "line 7: method: is required"),
    (encoded(method="GET"), "one", "invalid_request", "method"),
    (without("url"), "one", "invalid_request", "line 7: url: is required"),
    (encoded(url="/v1/chat/completions"), "one", "invalid_request", "not the batch's endpoint, /v1/completions"),
    (encoded(url="/v1/embeddings"), "one", "invalid_request", "'/v1/embeddings'"),
    (without("body"), "one", "invalid_request", "line 7: body: is required"),
    (encoded(priority="high"), "one", "invalid_request", "priority: is not a known parameter"),
]


@pytest.mark.parametrize(("raw", "name", "code", "message"), NO_REQUESTS)
async def test_a_line_that_is_no_request_is_an_error_without_a_response(
    raw: bytes, name: str | None, code: str, message: str
) -> None:
    line = await prepared(raw)
    shown = json.loads(line.result)
    assert (line.failed, shown["custom_id"], shown["response"], shown["error"]["code"]) == (True, name, None, code)
    assert message in shown["error"]["message"]


#: Line → the parameter that its error names.
BAD_REQUESTS = [
    (body(stream=True), "stream"),
    (body(priority="high"), "priority"),
    (body(max_tokens=0), "max_tokens"),
    (body(nonsense=1), "nonsense"),
    (body(prompt=[]), "prompt"),
    (body(prompt=[1] * 9000), "prompt"),
    (body(model="another"), "model"),
    (encoded(body={}), "prompt"),
    (encoded(body=[]), None),
]


@pytest.mark.parametrize(("raw", "param"), BAD_REQUESTS)
async def test_a_request_that_is_refused_has_the_answer_that_it_would_have_had(raw: bytes, param: str | None) -> None:
    line = await prepared(raw)
    shown = json.loads(line.result)
    assert (line.failed, shown["custom_id"], shown["error"]) == (True, "one", None)
    assert shown["response"]["status_code"] == (404 if param == "model" else 400)
    assert shown["response"]["body"]["error"]["param"] == param


async def test_low_priority_is_what_a_batch_has() -> None:
    assert (await prepared(body(priority="low"))).jobs


async def test_a_chat_needs_a_batch_for_chats() -> None:
    chat = encoded(url="/v1/chat/completions", body={"messages": [{"role": "user", "content": "Hi"}]})
    assert (await prepared(chat)).failed
    assert (await prepared(chat, replace(BATCH, endpoint="/v1/chat/completions"))).jobs


def test_an_id_is_told_wherever_it_stands() -> None:
    assert name_of(encoded()) == "one"
    assert name_of(b'{"body": {"custom_id": "inner"}, "custom_id": "outer"}') == "outer"
    assert name_of(b'{"body": {"custom_id": "inner"}}') is None


def test_lines_are_counted_and_blank_ones_are_not() -> None:
    lines = b"\n".join([without("custom_id"), b"", b"  ", b"broken", encoded(custom_id="a"), encoded(custom_id="b")])
    assert examine(io.BytesIO(lines)) == (4, [])


def test_the_most_lines_are_no_error_and_one_more_is() -> None:
    lines = b"".join(b'{"custom_id":"%d"}\n' % number for number in range(MAX_LINES))
    assert examine(io.BytesIO(lines)) == (MAX_LINES, [])
    total, errors = examine(io.BytesIO(lines + b"x"))
    assert (total, errors[0]["code"]) == (MAX_LINES + 1, "too_many_tasks")


def test_ids_that_come_again_are_named_with_their_lines_and_not_without_end() -> None:
    _, errors = examine(io.BytesIO(encoded() + encoded(custom_id="two") + encoded() * 100))
    assert len(errors) == MAX_ERRORS
    assert (errors[0]["code"], errors[0]["line"]) == ("duplicate_custom_id", 3)
    assert "'one' again" in errors[0]["message"]


def test_a_line_without_end_is_not_read_to_its_end() -> None:
    class Endless(io.RawIOBase):
        taken = 0

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            self.taken += len(buffer)
            assert self.taken <= LINE_LIMIT + (1 << 20)
            buffer[:] = b"x" * len(buffer)
            return len(buffer)

    assert examine(io.BufferedReader(Endless()))[1][0]["code"] == "line_too_long"


def test_the_ids_of_jobs_differ_by_batch_line_and_choice() -> None:
    ids = {
        job_id_of(batch, line, choice)
        for batch in ("batch_1", "batch_11")
        for line in (1, 11, 111)
        for choice in (0, 1)
    }
    assert len(ids) == 12


def test_a_batch_is_read_from_what_is_stored_and_the_rest_has_its_default() -> None:
    batch = Batch.decode({"id": "batch_1", "status": "cancelling", "total": "7", "nonsense": "1"})
    assert batch == Batch(id="batch_1", status=BatchStatus.CANCELLING, total=7)
