"""Middleware: a name for every request, and a line in the log for it. Never what was asked or answered."""

import logging
import re
import time
import uuid
from typing import Any

from falcon.asgi import Request, Response

log = logging.getLogger(__name__)

NAME = re.compile(r"[\w.:@-]{1,128}", re.ASCII)


class Access:
    async def process_request(self, req: Request, resp: Response) -> None:
        """X-Request-Id is taken over from the client, if it is one, and sent back in any case."""
        given = req.get_header("X-Request-Id") or ""
        req.context.started = time.monotonic()
        req.context.request_id = given if NAME.fullmatch(given) else uuid.uuid4().hex
        resp.set_header("X-Request-Id", req.context.request_id)

    async def process_response(self, req: Request, resp: Response, _resource: Any, _succeeded: bool) -> None:
        milliseconds = 1000 * (time.monotonic() - req.context.started)
        log.info(
            *(
                "%s %s %d in %.0f ms, %s",
                req.method,
                req.scope["raw_path"][:200].decode(errors="replace"),  # as it came: decoded, it might hold a line's end
                resp.status_code,
                milliseconds,
                req.context.request_id,
            ),
            extra={"action": "request", "request": req.context.request_id},
        )
