"""What the client of `kvrelay bench` makes of what comes over the wire. The wire is played."""

import json
from typing import Any

import httpcore2
import pytest

from bench.client import Client, Server
from bench.errors import Away, Unfit
from bench.sse import Events
from bench.trace import Trace
from bench.workload import Request

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"  # to the end of the connection
REQUEST = Request(prompt="a b", prompt_tokens=2, output_tokens=3)


def event(**fields: Any) -> bytes:
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def text(word: str, finish_reason: str | None = None) -> bytes:
    return event(choices=[{"index": 0, "text": word, "finish_reason": finish_reason}])


def refusal(status: int, body: str) -> list[bytes]:
    return [f"HTTP/1.1 {status} No\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()]


USAGE = event(choices=[], usage={"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12})
DONE = b"data: [DONE]\n\n"


def client(*reads: bytes, endpoint: str = "completions", **server: Any) -> Client:
    network = httpcore2.AsyncMockBackend(list(reads))
    at = Server(name="it", url="http://it.test:1", **server)
    return Client(at, endpoint, timeout=5, ignore_eos=True, network=network)


async def ask(*reads: bytes, **options: Any) -> Trace:
    async with client(*reads, **options) as asking:
        return await asking.ask(REQUEST, 0.0)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("line_end", [b"\n", b"\r\n"])
def test_events_are_whole_however_their_bytes_come(size: int, line_end: bytes) -> None:
    lines = [
        b": a comment",
        b"",
        b"id: 4",
        b"event: x",
        b'data: {"a": 1}',
        b"",
        b"data:two",
        b"data: lines",
        b"",
        b"data: [DONE]",
    ]
    raw = line_end.join([*lines, b"", b"data: unfinished"])
    events = Events()
    found = [data for start in range(0, len(raw), size) for data in events.feed(raw[start : start + size])]
    assert found == [b'{"a": 1}', b"two\nlines", b"[DONE]"]


async def test_only_what_carries_text_is_a_token() -> None:
    """Comments, the word of who speaks, half characters, the end and the usage are none."""
    said = [{"role": "assistant", "content": ""}, {"content": "a"}, {"content": ""}, {"reasoning_content": "b"}, {}]
    deltas = [event(choices=[{"index": 0, "delta": delta, "finish_reason": None}]) for delta in said]
    end = event(choices=[{"index": 0, "delta": {}, "finish_reason": "length"}])
    trace = await ask(HEAD, b": ping\n\n", *deltas, b": ping\n\n", end, USAGE, DONE, endpoint="chat")
    assert (len(trace.chunks), trace.failure) == (2, "")
    assert (trace.tokens, trace.prompt_tokens) == (5, 7)
    assert trace.sent <= trace.chunks[0] <= trace.chunks[1] <= trace.end


async def test_without_usage_pieces_are_counted() -> None:
    trace = await ask(HEAD, text("a"), text("b"), text("c", "length"), DONE)
    assert (trace.tokens, trace.prompt_tokens, trace.failure) == (3, 2, "")


@pytest.mark.parametrize("end", [DONE, text("", "stop")])
async def test_an_answer_is_over_with_a_reason_or_with_done(end: bytes) -> None:
    """Not all servers say both."""
    assert (await ask(HEAD, text("a"), end)).failure == ""


@pytest.mark.parametrize(
    ("reads", "failure", "said"),
    [
        ([HEAD, text("a")], "cut off", "ended before"),
        ([HEAD, event(error={"message": "gone", "code": "job_failed"})], "error in the stream job_failed", "gone"),
        ([HEAD, b"data: {\n\n"], "no JSON of OpenAI's", "truncated"),
        (refusal(429, '{"error": {"message": "later", "code": "queue_full"}}'), "429 queue_full", "later"),
        (refusal(400, '{"error": {"message": "no", "type": "bad", "code": 400}}'), "400 bad", "no"),
        (refusal(422, '{"detail": "bad"}'), "422", "bad"),
        (refusal(502, "ugly"), "502", "ugly"),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 999\r\n\r\n" + text("a"), b""], "broken off", "RemoteProtocolError"),
        ([b"nonsense\r\n\r\n"], "no answer", "RemoteProtocolError"),
    ],
)  # fmt: skip
async def test_every_failure_has_its_kind_and_its_words(reads: list[bytes], failure: str, said: str) -> None:
    trace = await ask(*reads)
    assert trace.failure == failure
    assert said in trace.said
    assert trace.end >= trace.sent


def test_the_body_is_greedy_of_just_that_length_and_what_extra_makes_of_it() -> None:
    body = client(model="m", extra={"min_tokens": None, "top_k": 1})._body(REQUEST)
    assert body == {
        "model": "m",
        "prompt": "a b",
        "max_tokens": 3,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "top_k": 1,
    }


async def test_the_model_is_the_first_that_the_server_names() -> None:
    answer = b'{"data": [{"id": "one"}, {"id": "two"}]}'
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(answer)
    async with client(head + answer) as asking:
        await asking.enter()
        assert asking.model == "one"
    async with client(head + answer, model="mine") as asking:
        await asking.enter()
        assert asking.model == "mine"
    async with client(b"HTTP/1.1 404 No\r\nContent-Length: 2\r\n\r\n{}") as asking:
        with pytest.raises(Away, match=r"/v1/models names no model \(it answered 404\): say which with --model"):
            await asking.enter()


@pytest.mark.parametrize("url", ["", "localhost:8000", "ftp://x"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(Unfit, match="must be an address"):
        Client(Server(name="it", url=url), "chat", timeout=1, ignore_eos=True)
