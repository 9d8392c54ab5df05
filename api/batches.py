"""``/v1/batches``: many requests in one file, answered when there is room, in OpenAI's shapes."""

import json
import re
from typing import Annotated, Any, Literal

import msgspec
from falcon.asgi import Request as HttpRequest
from falcon.asgi import Response
from msgspec import Meta

from api import body
from api.batch_runner import BatchRunner
from api.errors import BatchUnknown, FileUnknown
from api.files import LEAST_SECONDS, MOST_SECONDS, PURPOSE
from api.files import find as find_file
from api.front import Front
from api.operation import Operation
from api.pages import page, place
from api.shapes import BatchPage, BatchRecord
from brokers.api_keys import ApiKey
from brokers.batches import Batches
from brokers.files import Files
from pipeline.batch import BATCH_OVER, Batch, BatchStatus
from pipeline.errors import InvalidRequest

MOST = 100  # batches of a page
UNITS = {"s": 1, "m": 60, "h": 3600}
MOST_WINDOW = 7 * 86400  # seconds
MOST_PAIRS = 16

STAMPS = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


class ExpiresAfter(msgspec.Struct, forbid_unknown_fields=True):
    anchor: Literal["created_at"]
    seconds: Annotated[int, Meta(ge=LEAST_SECONDS, le=MOST_SECONDS)]


class NewBatch(msgspec.Struct, forbid_unknown_fields=True):
    input_file_id: str
    endpoint: Literal["/v1/completions", "/v1/chat/completions"]
    completion_window: str
    metadata: dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=512)]] | None = None
    output_expires_after: ExpiresAfter | None = None

    def window(self) -> int:
        """Seconds. OpenAI has 24h alone."""
        found = re.fullmatch(r"([1-9]\d{0,5})([smh])", self.completion_window)
        seconds = int(found[1]) * UNITS[found[2]] if found else 0
        if not 0 < seconds <= MOST_WINDOW:
            message = f"{self.completion_window[:40]!r} must be a number of s, m or h up to seven days, as in 24h"
            raise InvalidRequest("completion_window", message)
        return seconds


def shown(batch: Batch, model: str) -> dict[str, Any]:
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": batch.endpoint,
        "model": model,
        "errors": {"object": "list", "data": json.loads(batch.errors)} if batch.errors else None,
        "input_file_id": batch.input_file_id,
        "completion_window": batch.completion_window,
        "status": str(batch.status),
        "output_file_id": batch.output_file_id or None,
        "error_file_id": batch.error_file_id or None,
        "created_at": batch.created_at,
        "expires_at": batch.expires_at,
        **{f"{stamp}_at": getattr(batch, f"{stamp}_at") or None for stamp in STAMPS},
        "request_counts": {"total": batch.total, "completed": batch.completed, "failed": batch.failed},
        "usage": {
            "input_tokens": batch.input_tokens,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": batch.output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": batch.input_tokens + batch.output_tokens,
        },
        "metadata": json.loads(batch.metadata) if batch.metadata else None,
    }


async def find(batches: Batches, batch_id: str, key: ApiKey) -> Batch:
    """Raises BatchUnknown, also for another's."""
    batch = await batches.find(batch_id)
    if batch is None or not key.sees(batch.owner):
        raise BatchUnknown(f"there is no batch {batch_id[:100]}")
    return batch


class BatchList:
    def __init__(self, front: Front, batches: Batches, files: Files, runner: BatchRunner) -> None:
        self._front = front
        self._batches = batches
        self._files = files
        self._runner = runner

    @Operation(
        body=NewBatch,
        example={
            "input_file_id": "file-0123456789abcdef0123456789abcdef",
            "endpoint": "/v1/completions",
            "completion_window": "24h",
        },
        answers={200: BatchRecord},
        errors=(404,),
    )
    async def on_post(self, req: HttpRequest, resp: Response) -> None:
        """Begins a batch of the requests in a file."""
        key: ApiKey = req.context.key
        wanted = body.decode(await body.read(req), NewBatch)
        window = wanted.window()
        if len(wanted.metadata or ()) > MOST_PAIRS:
            raise InvalidRequest(
                "metadata", f"has {len(wanted.metadata or ())} pairs; at most {MOST_PAIRS} are allowed"
            )
        file = await find_file(self._files, wanted.input_file_id, key)
        if file.purpose != PURPOSE:
            raise InvalidRequest("input_file_id", f"{file.id} has the purpose {file.purpose!r}, not {PURPOSE!r}")
        kept = wanted.output_expires_after
        batch_id = await self._batches.add(
            file.id,
            window,
            key.id,
            {
                "owner_waiting": key.waiting,
                "endpoint": wanted.endpoint,
                "completion_window": wanted.completion_window,
                "metadata": json.dumps(wanted.metadata) if wanted.metadata else "",
                "result_seconds": kept.seconds if kept else int(self._front.config.file_seconds),
            },
        )
        if batch_id is None:
            raise FileUnknown(f"there is no file {file.id}")
        self._runner.wake()
        resp.media = shown(await find(self._batches, batch_id, key), self._front.config.name)

    @Operation(
        answers={200: BatchPage}, errors=(400, 404), query={"after": str, "limit": Annotated[int, Meta(ge=1, le=MOST)]}
    )
    async def on_get(self, req: HttpRequest, resp: Response) -> None:
        """The batches of the key that asks, in pages, the newest first."""
        key: ApiKey = req.context.key
        after, limit = place(req, most=MOST, default=20)
        if after:
            await find(self._batches, after, key)
        found, more = await self._batches.catalogue.page(
            lambda stored: key.sees(stored["owner"]), after=after, limit=limit, oldest_first=False
        )
        resp.media = page([shown(Batch.decode(stored), self._front.config.name) for stored in found], more)


class OneBatch:
    def __init__(self, batches: Batches, model: str) -> None:
        self._batches = batches
        self._model = model

    @Operation(answers={200: BatchRecord}, errors=(404,))
    async def on_get(self, req: HttpRequest, resp: Response, batch_id: str) -> None:
        """How far a batch is."""
        resp.media = shown(await find(self._batches, batch_id, req.context.key), self._model)

    @Operation(answers={200: BatchRecord}, errors=(400, 404))
    async def on_post_cancel(self, req: HttpRequest, resp: Response, batch_id: str) -> None:
        """Ends a batch. Its jobs end, and what is done can be read. Of a batch that is over: 400."""
        batch = await find(self._batches, batch_id, req.context.key)
        status = await self._batches.cancel(batch.id)
        if status in BATCH_OVER - {BatchStatus.CANCELLED}:
            raise InvalidRequest("batch_id", f"{batch.id} is {status} already", code="batch_over")
        resp.media = shown(await find(self._batches, batch_id, req.context.key), self._model)
