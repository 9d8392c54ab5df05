"""``/v1/jobs``: the queue's native face. Submit now, fetch later, follow, resume, cancel."""

import re
from collections.abc import AsyncIterator
from typing import Annotated, Any

import falcon
from falcon.asgi import Request as HttpRequest
from falcon.asgi import Response, SSEvent
from msgspec import Meta

from api import body, outside
from api.answer import usage
from api.errors import JobUnknown, describe, failure
from api.front import Front
from api.idempotency import AGAIN, identify
from api.operation import Operation
from api.requests import ChatJob, CompletionJob, read_job
from api.shapes import EndEvent, ErrorAnswer, JobQueued, JobRecord, TokenEvent
from brokers.api_keys import ApiKey
from brokers.token_log import Entry
from pipeline.errors import InvalidRequest, KVRelayError
from pipeline.job import Job
from pipeline.states import Status


class Jobs:
    def __init__(self, front: Front) -> None:
        self._front = front

    @Operation(
        body=(CompletionJob, ChatJob),
        example={"prompt": "Once upon a time", "max_tokens": 8},
        answers={202: JobQueued},
        errors=(404, 422, 429),
        headers=AGAIN,
        sends={"Location": "Where the job is"},
    )
    async def on_post(self, req: HttpRequest, resp: Response) -> None:
        """Queues a completion or a chat, up to the queue's bound, whether a worker is there or not. It has one prompt and
        one answer, and no `stream`.
        """
        raw = await body.read(req)
        request, identity, key = read_job(raw), identify(req, raw), req.context.key
        webhook = outside.check(request.webhook, self._front.config)
        jobs = await self._front.jobs(request, identity.seed)
        (job_id,) = await self._front.submit(jobs, request, identity, key, webhook)
        status = (await self._front.visible(job_id, key)).status if identity.may_come_again else Status.QUEUED
        resp.status = falcon.HTTP_202
        resp.location = f"/v1/jobs/{job_id}"
        resp.media = {"id": job_id, "object": "job", "status": str(status)}


class OneJob:
    def __init__(self, front: Front) -> None:
        self._front = front

    @Operation(answers={200: JobRecord}, errors=(404, 410))
    async def on_get(self, req: HttpRequest, resp: Response, job_id: str) -> None:
        """Status, timeline, and what it has said so far, as text and as token ids."""
        await self._front.expect(job_id, req.context.key)
        resp.media = await self._shown(job_id)

    on_head = on_get

    @Operation(answers={200: JobRecord, 409: JobRecord}, errors=(404,))
    async def on_delete(self, req: HttpRequest, resp: Response, job_id: str) -> None:
        """Cancels it, wherever it is. A job that is over stays as it ended: 409."""
        await self._front.visible(job_id, req.context.key)
        stopped = await self._front.queue.stop(job_id, Status.CANCELLED, "asked by the client")
        if stopped.outcome == "unknown":
            raise JobUnknown(f"there is no job {job_id}")
        if stopped.outcome == "over" and stopped.status != Status.CANCELLED:
            resp.status = falcon.HTTP_409
        resp.media = await self._shown(job_id)

    async def _shown(self, job_id: str) -> dict[str, Any]:
        record = await self._front.queue.record(job_id)
        if not record:
            raise JobUnknown(f"there is no job {job_id}")
        entries = await self._front.log.read(job_id)
        job = Job.decode(record["request"])
        tokens = [entry for entry in entries if entry.end is None]
        shown: dict[str, Any] = {
            "id": job_id,
            "object": "job",
            "status": record["status"],
            "kind": job.kind,
            "attempt": int(record["attempt"]),
            "text": "".join(entry.text for entry in tokens),
            "token_ids": [entry.token for entry in tokens],
            "usage": usage(len(job.prompt), len(tokens)),
            "timeline": [_event(line) for line in record["timeline"].splitlines()],
            "finish_reason": record.get("reason") if record["status"] == Status.FINISHED else None,
            "reason": record.get("reason"),
            "error": failure(record["status"], record.get("reason", "")),
            "failed_attempts": {
                name.removeprefix("why:"): why for name, why in record.items() if name.startswith("why:")
            },
        }
        if "stop_phase" in record:
            milliseconds = record["stop_ms"]
            shown["stopped"] = {
                "phase": record["stop_phase"],
                "milliseconds": int(milliseconds) if milliseconds else None,  # None: not yet confirmed
            }
        return shown


ID = "[0-9]{0,18}"  # empty, as browsers have it before the first event: from the beginning
PLACE = Annotated[str, Meta(pattern=f"^{ID}$", description="of the last event that came")]


class JobEvents:
    def __init__(self, front: Front) -> None:
        self._front = front

    @Operation(
        answers={200: None, 204: None},
        events={"message": (TokenEvent,), "end": (EndEvent,), "error": (ErrorAnswer,)},
        errors=(400, 404, 410),
        headers={"Last-Event-ID": PLACE},
    )
    async def on_get(self, req: HttpRequest, resp: Response, job_id: str) -> None:
        """Follows a job to its end, as server-sent events. Their `id` is the place in the token log, so Last-Event-ID
        goes on where a client was; 204 if nothing comes after that place. Leaving cancels nothing.
        """
        last = req.get_header("Last-Event-ID") or ""
        if not re.fullmatch(ID, last):
            raise InvalidRequest("Last-Event-ID", f"{last[:40]!r} is not the id of an event")
        after = int(last or 0)
        if await self._front.has_said_all(
            job_id, req.context.key, after
        ):  # before the response begins: an unknown job is a 404
            resp.status = falcon.HTTP_204
            return
        resp.set_header("Cache-Control", "no-cache")
        resp.set_header("X-Accel-Buffering", "no")
        resp.sse = self._events(job_id, req.context.key, after)

    async def _events(self, job_id: str, key: ApiKey, after: int) -> AsyncIterator[Any]:
        try:
            async for _, entries in self._front.follow([job_id], key, after):
                for entry in entries:
                    yield _sse(entry)
                if not entries:
                    yield None  # a comment, so that proxies keep the connection
        except KVRelayError as error:
            yield SSEvent(event="error", json=describe(error)[1])


def _sse(entry: Entry) -> SSEvent:
    place = str(entry.index + 1)
    if entry.end is not None:
        return SSEvent(event="end", event_id=place, json=_end(entry.end, entry.reason))
    return SSEvent(event_id=place, json={"index": entry.index, "token": entry.token, "text": entry.text})


def _end(status: str, reason: str) -> dict[str, Any]:
    return {"status": status, "reason": reason, "error": failure(status, reason)}


def _event(line: str) -> dict[str, Any]:
    at, event, *detail = line.split(" ", 2)
    return {"at": int(at), "event": event, "detail": detail[0] if detail else ""}
