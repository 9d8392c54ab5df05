"""Lists that are asked for in pages, in OpenAI's shape."""

from collections.abc import Sequence
from typing import Any

from falcon.asgi import Request as HttpRequest

from pipeline.errors import InvalidRequest


def place(req: HttpRequest, *, most: int, default: int) -> tuple[str, int]:
    """(id after which the page begins, '' for the first; how many it has) of the query"""
    limit = req.get_param("limit") or str(default)
    if not (limit.isascii() and limit.isdigit() and len(limit) < 9 and 1 <= int(limit) <= most):
        raise InvalidRequest("limit", f"{limit[:40]!r} is no number from 1 to {most}")
    return req.get_param("after") or "", int(limit)


def page(items: Sequence[dict[str, Any]], more: bool) -> dict[str, Any]:
    ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]} if items else {"first_id": None, "last_id": None}
    return {"object": "list", "data": items, **ends, "has_more": more}
