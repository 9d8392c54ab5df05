"""One streamed request at a time against a server that speaks OpenAI's API. What it costs itself is kept small: of the many
pieces of an answer only what tells a token from something else is looked at."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

import httpcore2
import msgspec

from bench.errors import Away, Unfit
from bench.sse import Events
from bench.trace import Trace
from bench.workload import Request

CONNECT_SECONDS = 10.0
PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
DONE = b"[DONE]"

NO_ANSWER = (httpcore2.NetworkError, httpcore2.ProtocolError, OSError, UnicodeError)


class Failed(Exception):
    """A request did; the kind of failure, and what was said about it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """extra: fields of every body; None takes one out."""

    name: str
    url: str
    model: str = ""  # empty: the first that it names
    api_key: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def root(self) -> str:
        """Without the /v1 that some write and some do not."""
        return self.url.rstrip("/").removesuffix("/v1")


class Client:
    """Connections are kept and opened as needed. Use as a context manager."""

    def __init__(
        self,
        server: Server,
        endpoint: str,
        *,
        timeout: float,
        ignore_eos: bool,
        network: httpcore2.AsyncNetworkBackend | None = None,
    ) -> None:
        parts = urlsplit(server.root)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise Unfit(f"{server.name} at", server.url, "must be an address as in http://127.0.0.1:8000")
        self.server = server
        self.model = server.model
        self._url = server.root + PATHS[endpoint]
        self._chat = endpoint == "chat"
        self._timeout = timeout
        self._ignore_eos = ignore_eos
        self._headers = [("Host", parts.netloc), ("Content-Type", "application/json")]
        if server.api_key:
            self._headers.append(("Authorization", f"Bearer {server.api_key}"))
        self._pool = httpcore2.AsyncConnectionPool(max_connections=None, network_backend=network)

    async def __aenter__(self) -> "Client":
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self._pool.aclose()

    async def enter(self) -> None:
        """Finds out whether somebody is there, and the model's name. Raises Away."""
        url = f"{self.server.root}/v1/models"
        try:
            async with asyncio.timeout(CONNECT_SECONDS):
                answer = await self._pool.request("GET", url, headers=self._headers)
        except (*NO_ANSWER, TimeoutError) as error:
            raise Away(f"no answer from {self.server.url} ({_named(error)}): is it running?") from None
        if self.model:
            return
        try:
            self.model = str(json.loads(answer.content)["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            raise Away(f"{url} names no model (it answered {answer.status}): say which with --model") from None

    async def ask(self, request: Request, due: float) -> Trace:
        """Never raises for a request that fails: that is in the trace."""
        body = json.dumps(self._body(request)).encode()
        trace = Trace(due=due, sent=perf_counter(), asked=request.output_tokens, prompt_tokens=request.prompt_tokens)
        try:
            async with asyncio.timeout(self._timeout):
                await self._stream(body, trace)
        except TimeoutError:
            trace.failure, trace.said = "timeout", f"not over after {self._timeout:g} s"
        except Failed as failed:
            trace.failure, trace.said = failed.args
        except NO_ANSWER as error:
            trace.failure, trace.said = "no answer" if not trace.chunks else "broken off", _named(error)
        trace.end = trace.end or perf_counter()
        trace.tokens = trace.tokens or len(trace.chunks)
        return trace

    def _body(self, request: Request) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": request.output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._chat:
            body["messages"] = [{"role": "user", "content": request.prompt}]
        else:
            body["prompt"] = request.prompt
        if self._ignore_eos:
            body |= {"ignore_eos": True, "min_tokens": request.output_tokens}
        return {name: value for name, value in {**body, **self.server.extra}.items() if value is not None}

    async def _stream(self, body: bytes, trace: Trace) -> None:
        """Raises Failed, one of NO_ANSWER, or TimeoutError."""
        events, over = Events(), False
        async with self._pool.stream("POST", self._url, headers=self._headers, content=body) as answer:
            if answer.status != 200:
                raise _refusal(str(answer.status), await answer.aread())
            async for raw in answer.aiter_stream():
                now = perf_counter()
                for data in events.feed(raw):
                    over |= self._note(data, now, trace)
        if not over:
            raise Failed("cut off", "the stream ended before the answer did")

    def _note(self, data: bytes, now: float, trace: Trace) -> bool:
        """True: the answer is over. Raises Failed."""
        if data == DONE:
            trace.end = now
            return True
        try:
            piece = _piece.decode(data)
        except msgspec.MsgspecError as error:
            raise Failed("no JSON of OpenAI's", str(error)) from None
        if piece.error is not None:
            raise _refusal("error in the stream", data)
        if piece.usage is not None:
            trace.tokens = piece.usage.completion_tokens
            trace.prompt_tokens = piece.usage.prompt_tokens
        if any(choice.says_something for choice in piece.choices):
            trace.chunks.append(now)
        over = any(choice.finish_reason for choice in piece.choices)
        if over:
            trace.end = now
        return over


class Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class Choice(msgspec.Struct):
    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None

    @property
    def says_something(self) -> bool:
        """The first chunk of a chat only says who speaks, and a token may be half of a character."""
        delta = self.delta
        return bool(self.text or (delta and (delta.content or delta.reasoning_content or delta.reasoning)))


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class Piece(msgspec.Struct):
    choices: list[Choice] = []
    usage: Usage | None = None
    error: Any = None


_piece = msgspec.json.Decoder(Piece)


def _refusal(kind: str, raw: bytes) -> Failed:
    """With the error's code, and what it says, wherever this server puts them."""
    try:
        answer = json.loads(raw)
        error = answer.get("error", answer)
        codes = [code for name in ("code", "type") if isinstance(code := error.get(name), str)]
        said = error.get("message") or error.get("detail") or answer
    except (ValueError, AttributeError):
        codes, said = [], raw.decode(errors="replace")
    return Failed(" ".join([kind, *codes[:1]]), str(said)[:300])


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
