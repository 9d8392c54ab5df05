"""``/v1/jobs``: the queue's native face. Submit now, fetch later, follow, resume, cancel."""

from collections.abc import AsyncIterator
from typing import Any

import falcon
from falcon.asgi import Request as HttpRequest
from falcon.asgi import Response, SSEvent

from api.completions import usage
from api.errors import JobUnknown, describe
from api.front import Front
from api.requests import read_job
from brokers.token_log import Entry
from pipeline.errors import InvalidRequest, KVRelayError
from pipeline.job import Job
from pipeline.states import Status


class Jobs:
    def __init__(self, front: Front) -> None:
        self._front = front

    async def on_post(self, req: HttpRequest, resp: Response) -> None:
        """Queues a completion or a chat, up to the queue's bound, whether a worker is there or not."""
        request = read_job(await self._front.body(req))
        job_id = await self._front.submit(await self._front.job(request), request)
        resp.status = falcon.HTTP_202
        resp.location = f"/v1/jobs/{job_id}"
        resp.media = {"id": job_id, "object": "job", "status": str(Status.QUEUED)}


class OneJob:
    def __init__(self, front: Front) -> None:
        self._front = front

    async def on_get(self, _req: HttpRequest, resp: Response, job_id: str) -> None:
        """Status, timeline, and what it has said so far, as text and as token ids."""
        await self._front.expect(job_id)
        resp.media = await self._shown(job_id)

    async def on_delete(self, _req: HttpRequest, resp: Response, job_id: str) -> None:
        """Cancels it, wherever it is. A job that is over stays as it ended: 409."""
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


class JobEvents:
    """SSE. ``id:`` is the place in the token log, so ``Last-Event-ID`` goes on where a client was. Leaving cancels nothing."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def on_get(self, req: HttpRequest, resp: Response, job_id: str) -> None:
        last = req.get_header("Last-Event-ID") or "0"
        if not (last.isascii() and last.isdigit()) or len(last) > 18:
            raise InvalidRequest("Last-Event-ID", f"{last[:40]!r} is not the id of an event")
        await self._front.expect(job_id)  # before the response begins: an unknown job is a 404
        resp.set_header("Cache-Control", "no-cache")
        resp.set_header("X-Accel-Buffering", "no")
        resp.sse = self._events(job_id, int(last))

    async def _events(self, job_id: str, after: int) -> AsyncIterator[Any]:
        try:
            async for entries in self._front.follow(job_id, after):
                for entry in entries:
                    yield _sse(entry)
                if not entries:
                    yield None  # a comment, so that proxies keep the connection
        except KVRelayError as error:
            yield SSEvent(event="error", json=describe(error)[1])


def _sse(entry: Entry) -> SSEvent:
    place = str(entry.index + 1)
    if entry.end is not None:
        return SSEvent(event="end", event_id=place, json={"status": entry.end, "reason": entry.reason})
    return SSEvent(event_id=place, json={"index": entry.index, "token": entry.token, "text": entry.text})


def _event(line: str) -> dict[str, Any]:
    at, event, *detail = line.split(" ", 2)
    return {"at": int(at), "event": event, "detail": detail[0] if detail else ""}
