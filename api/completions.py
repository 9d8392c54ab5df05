"""``/v1/completions`` and ``/v1/chat/completions``: one job each, waited for or streamed, in OpenAI's shapes."""

import time
from collections.abc import AsyncIterator
from typing import Any

from falcon.asgi import Request as HttpRequest
from falcon.asgi import Response, SSEvent

from api.errors import JobFailed, describe
from api.front import Front, gone
from api.requests import ChatRequest, CompletionRequest, Request, read
from brokers.token_log import Entry
from pipeline.errors import KVRelayError
from pipeline.job import Job
from pipeline.states import Status


def usage(prompt: int, completion: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


class Answer:
    """One job in OpenAI's shape, whole or in pieces."""

    def __init__(self, job_id: str, job: Job, model: str) -> None:
        self._job = job
        self._chat = job.kind == "chat"
        self._head = {
            "id": ("chatcmpl-" if self._chat else "cmpl-") + job_id,
            "created": int(time.time()),
            "model": model,
        }
        self.completion_tokens = 0
        self.finish_reason: str | None = None

    def take(self, entries: list[Entry]) -> str:
        """Counts the entries, answers their text. Raises JobFailed if the job did not finish."""
        for entry in entries:
            if entry.end is None:
                self.completion_tokens += 1
            elif entry.end == Status.FINISHED:
                self.finish_reason = entry.reason
            else:
                raise JobFailed(entry.end, entry.reason)
        return "".join(entry.text for entry in entries)

    def whole(self, text: str) -> dict[str, Any]:
        if self._chat:
            choice: dict[str, Any] = {"message": {"role": "assistant", "content": text, "refusal": None}}
        else:
            choice = {"text": text}
        choice |= {"index": 0, "logprobs": None, "finish_reason": self.finish_reason}
        kind = "chat.completion" if self._chat else "text_completion"
        return {**self._head, "object": kind, "choices": [choice], "usage": self.usage()}

    def piece(self, text: str, *, first: bool = False) -> dict[str, Any]:
        """One chunk of a stream; the one with the finish reason comes last."""
        if self._chat:
            delta = {"role": "assistant", "content": ""} if first else ({"content": text} if text else {})
            choice: dict[str, Any] = {"delta": delta}
        else:
            choice = {"text": text}
        choice |= {"index": 0, "logprobs": None, "finish_reason": self.finish_reason}
        return self._chunk([choice])

    def usage_piece(self) -> dict[str, Any]:
        return {**self._chunk([]), "usage": self.usage()}

    def usage(self) -> dict[str, int]:
        return usage(len(self._job.prompt), self.completion_tokens)

    def _chunk(self, choices: list[Any]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        return {**self._head, "object": kind, "choices": choices}


class Completions:
    """POST for one of the two request kinds."""

    def __init__(self, front: Front, kind: type[CompletionRequest] | type[ChatRequest]) -> None:
        self._front = front
        self._kind = kind

    async def on_post(self, req: HttpRequest, resp: Response) -> None:
        request: Request = read(await self._front.body(req), self._kind)
        job = await self._front.job(request)
        await self._front.require_workers(gone(req))
        job_id = await self._front.submit(job, request)
        answer = Answer(job_id, job, self._front.config.name)
        resp.set_header("X-Request-Id", job_id)
        if request.stream:
            resp.set_header("Cache-Control", "no-cache")
            resp.set_header("X-Accel-Buffering", "no")
            resp.sse = self._stream(req, job_id, answer, request.include_usage)
        else:
            text = ""
            async for entries in self._front.follow_for_client(job_id, gone(req)):
                text += answer.take(entries)
            resp.media = answer.whole(text)

    async def _stream(self, req: HttpRequest, job_id: str, answer: Answer, include_usage: bool) -> AsyncIterator[Any]:
        """The events. `id:` is the token's place in the log. A job that fails ends in an error event, without [DONE].

        Something is sent before the first token, if only a comment: the server holds the headers back till then, and
        X-Request-Id is how a client knows its job.
        """
        opening = SSEvent(json=answer.piece("", first=True)) if self._kind is ChatRequest else None
        try:
            async for entries in self._front.follow_for_client(job_id, gone(req)):
                text = answer.take(entries)
                if text or answer.finish_reason:
                    yield SSEvent(json=answer.piece(text), event_id=str(entries[-1].index + 1))
                elif not entries:
                    yield opening  # None is a comment, so that proxies keep the connection
                    opening = None
        except KVRelayError as error:
            yield SSEvent(json=describe(error)[1])
            return
        if include_usage:
            yield SSEvent(json=answer.usage_piece())
        yield SSEvent(text="[DONE]")
