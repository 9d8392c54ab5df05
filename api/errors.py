"""What goes wrong at the HTTP edge, and how it is shown: OpenAI's error object.

ApiError
├── TooLarge     413
├── QueueFull    429   Retry-After
├── JobUnknown   404
├── JobGone      410
├── NoWorkers    503   Retry-After
└── JobFailed    what became of the job: 500 failed, 504 expired, 409 cancelled by someone else
"""

import logging
from typing import Any

import falcon
import falcon.asgi

from pipeline.errors import InvalidRequest, KVRelayError, RedisAway
from pipeline.states import Status

log = logging.getLogger(__name__)


class ApiError(KVRelayError):
    status = 500
    code = "server_error"
    headers: dict[str, str] = {}  # noqa: RUF012 - never changed


class TooLarge(ApiError):
    status, code = 413, "body_too_large"


class QueueFull(ApiError):
    status, code, headers = 429, "queue_full", {"Retry-After": "1"}


class JobUnknown(ApiError):
    status, code = 404, "job_not_found"


class JobGone(ApiError):
    status, code = 410, "job_expired"


class NoWorkers(ApiError):
    status, code, headers = 503, "no_workers", {"Retry-After": "5"}


class JobFailed(ApiError):
    """A job that did not finish."""

    def __init__(self, status: str, reason: str) -> None:
        super().__init__(f"the job is {status}: {reason}")
        self.status = {Status.EXPIRED: 504, Status.CANCELLED: 409}.get(Status(status), 500)
        self.code = f"job_{status}"


def error_object(status: int, message: str, code: str, param: str | None = None) -> dict[str, Any]:
    """OpenAI's shape."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def describe(error: KVRelayError) -> tuple[int, dict[str, Any], dict[str, str]]:
    """(HTTP status, error object, headers) of an error."""
    if isinstance(error, ApiError):
        return error.status, error_object(error.status, str(error), error.code), error.headers
    if isinstance(error, InvalidRequest):
        status = 404 if error.code == "model_not_found" else 400
        return status, error_object(status, str(error), error.code, error.field or None), {}
    if isinstance(error, RedisAway):
        return 503, error_object(503, "the queue does not answer", "queue_away"), {"Retry-After": "2"}
    log.error("unexpected: %s", error, extra={"action": "api_error"})
    return 500, error_object(500, "an internal error; the log has it", "server_error"), {}


async def show(_req: Any, resp: Any, error: KVRelayError, _params: Any) -> None:
    """Falcon's handler for ours."""
    status, resp.media, headers = describe(error)
    resp.status = falcon.code_to_http_status(status)
    resp.set_headers(headers)


async def show_http(_req: Any, resp: Any, error: falcon.HTTPError, _params: Any) -> None:
    """Falcon's own errors (no such route, method not allowed) in the same shape."""
    resp.status = error.status
    code = error.title.lower().replace(" ", "_") if error.title else "http_error"
    resp.media = error_object(error.status_code, error.description or error.title or "", code)
    resp.set_headers(error.headers or {})


async def show_bug(_req: Any, resp: Any, error: Exception, _params: Any) -> None:
    """A bug: logged whole, shown without detail."""
    log.error("unexpected", exc_info=error, extra={"action": "api_bug"})
    resp.status = falcon.HTTP_500
    resp.media = error_object(500, "an internal error; the log has it", "server_error")
