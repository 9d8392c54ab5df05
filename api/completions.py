"""``/v1/completions`` and ``/v1/chat/completions``: a job for each choice, waited for or streamed, in OpenAI's shapes."""

from collections.abc import AsyncIterator
from typing import Any

from falcon.asgi import Request as HttpRequest
from falcon.asgi import Response, SSEvent

from api import body
from api.answer import Answer
from api.errors import describe
from api.front import Front, gone
from api.idempotency import AGAIN, identify
from api.operation import DONE, Operation
from api.requests import ChatRequest, CompletionRequest, Request, read
from api.shapes import ChatChunk, ChatCompletion, ErrorAnswer, TextChunk, TextCompletion
from brokers.token_log import Entry
from pipeline.errors import KVRelayError

#: What any job may come to while its client waits.
ERRORS = (404, 409, 410, 422, 429, 504)
HEADERS = {"X-Job-Id": "The ids of the choices' jobs, with commas between them"}


class Completions:
    """POST for one of the two request kinds."""

    kind: type[CompletionRequest] | type[ChatRequest]

    def __init__(self, front: Front) -> None:
        self._front = front

    async def _complete(self, req: HttpRequest, resp: Response) -> None:
        raw = await body.read(req)
        request: Request = read(raw, self.kind)
        identity, key = identify(req, raw), req.context.key
        jobs = await self._front.jobs(request, identity.seed)
        if not await self._front.knows(identity):
            await self._front.require_workers(gone(req))
        job_ids = await self._front.submit(jobs, request, identity, key)
        batches = self._front.follow_for_client(job_ids, key, gone(req), may_come_again=identity.may_come_again)
        answer = Answer(request, jobs, job_ids, self._front.codec, self._front.config.name)
        resp.set_header("X-Job-Id", ",".join(job_ids))
        if request.stream:
            resp.set_header("Cache-Control", "no-cache")
            resp.set_header("X-Accel-Buffering", "no")
            resp.sse = self._stream(batches, answer, request.include_usage)
        else:
            async for number, entries in batches:
                answer.choices[number].take(entries)
            resp.media = answer.whole()

    async def _stream(
        self, batches: AsyncIterator[tuple[int, list[Entry]]], answer: Answer, include_usage: bool
    ) -> AsyncIterator[Any]:
        """The events. A job that fails ends in an error event, without [DONE].

        They have no `id:`, for OpenAI's client remembers it, and then takes the comments that keep a connection for events.
        Whoever wants to resume follows the job (`/v1/jobs/{id}/events`).

        Something is sent before the first token, if only a comment: the server holds the headers back till then, and
        X-Job-Id is how a client knows its job.
        """
        openings: list[Any] = answer.openings()
        try:
            async for number, entries in batches:
                if not entries:
                    for opening in openings or [None]:
                        yield SSEvent(json=opening) if opening else None  # None is a comment: it keeps the connection
                    openings = []
                    continue
                choice = answer.choices[number]
                delta = choice.take(entries)
                if not delta.empty or choice.finish_reason:
                    yield SSEvent(json=answer.chunk(choice.piece(delta)))
        except KVRelayError as error:
            if include_usage:
                yield SSEvent(json=answer.usage_chunk())
            yield SSEvent(json=describe(error)[1])
            return
        if include_usage:
            yield SSEvent(json=answer.usage_chunk())
        yield SSEvent(text=DONE)


class TextCompletions(Completions):
    kind = CompletionRequest

    @Operation(
        body=CompletionRequest,
        example={"prompt": "Once upon a time", "max_tokens": 8},
        answers={200: TextCompletion},
        events={"message": (TextChunk, ErrorAnswer, DONE)},
        errors=ERRORS,
        headers=AGAIN,
        sends=HEADERS,
    )
    async def on_post(self, req: HttpRequest, resp: Response) -> None:
        """Goes on from a text, or from several. With `stream`: as server-sent events."""
        await self._complete(req, resp)


class ChatCompletions(Completions):
    kind = ChatRequest

    @Operation(
        body=ChatRequest,
        example={"messages": [{"role": "user", "content": "What is a KV cache?"}], "max_tokens": 8},
        answers={200: ChatCompletion},
        events={"message": (ChatChunk, ErrorAnswer, DONE)},
        errors=ERRORS,
        headers=AGAIN,
        sends=HEADERS,
    )
    async def on_post(self, req: HttpRequest, resp: Response) -> None:
        """Answers a conversation. With `stream`: as server-sent events."""
        await self._complete(req, resp)
