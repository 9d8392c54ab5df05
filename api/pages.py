"""Lists that are asked for in pages, in OpenAI's shape."""

from collections.abc import Sequence
from typing import Any

from falcon.asgi import Request as HttpRequest

from pipeline.errors import InvalidRequest


def place(req: HttpRequest, *, most: int, default: int) -> tuple[str, int]:
    """(id after which the page begins, '' for the first; how many it has) of the query"""
    limit = once(req, "limit", str(default))
    if not (limit.isascii() and limit.isdigit() and len(limit) < 9 and 1 <= int(limit) <= most):
        raise InvalidRequest("limit", f"{limit[:40]!r} is no number from 1 to {most}")
    return once(req, "after", ""), int(limit)


def once(req: HttpRequest, name: str, default: str) -> str:
    """A parameter of the query. Raises InvalidRequest where it comes several times: which is meant?"""
    given = req.get_param_as_list(name, default=[default])
    if len(given) > 1:
        raise InvalidRequest(name, f"comes {len(given)} times")
    return given[0]


def page(items: Sequence[dict[str, Any]], more: bool) -> dict[str, Any]:
    ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]} if items else {"first_id": None, "last_id": None}
    return {"object": "list", "data": items, **ends, "has_more": more}
