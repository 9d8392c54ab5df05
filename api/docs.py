"""``/openapi.json``, and ``/docs``, the same for people: one page without scripts, and nothing from anywhere else."""

import base64
import hashlib
import json
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from falcon.asgi import Request as HttpRequest
from falcon.asgi import Response
from markupsafe import Markup, escape

from api.openapi import Json, Routes, document
from api.operation import Operation

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
code, pre { font: 14px/1.5 ui-monospace, monospace; }
pre { overflow-x: auto; padding: .5rem 1rem; background: #8881; }
table { border-collapse: collapse; width: 100%; margin: .5rem 0 1rem; }
th, td { text-align: left; vertical-align: top; padding: .2rem .8rem .2rem 0; border-bottom: 1px solid #8884; }
h2 { margin-top: 2.5rem; }
"""
DIGEST = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()

#: The page needs its own style and nothing else; whatever a name or a description may hold, it stays text.
HEADERS = {
    "Content-Security-Policy": f"default-src 'none'; style-src 'sha256-{DIGEST}'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}

#: What schemas say of a value beside its type, and how a person would.
BOUNDS = {
    "minimum": "≥ {}",
    "exclusiveMinimum": "> {}",
    "maximum": "≤ {}",
    "exclusiveMaximum": "< {}",
    "minLength": "length ≥ {}",
    "maxLength": "length ≤ {}",
    "minItems": "length ≥ {}",
    "maxItems": "length ≤ {}",
    "maxProperties": "length ≤ {}",
    "pattern": "matches {}",
}


class Docs:
    def __init__(self, routes: Routes) -> None:
        self._routes = routes

    @Operation(answers={200: dict[str, Any]})
    async def on_get(self, _req: HttpRequest, resp: Response) -> None:
        """This API, as OpenAPI describes one."""
        resp.content_type = "application/json"
        resp.data = self._json

    @Operation(answers={200: "text/html"})
    async def on_get_page(self, _req: HttpRequest, resp: Response) -> None:
        """The same, to be read by people."""
        resp.content_type = "text/html; charset=utf-8"
        resp.set_headers(HEADERS)
        resp.data = self._page

    @cached_property
    def _json(self) -> bytes:
        return json.dumps(document(self._routes), ensure_ascii=False).encode()

    @cached_property
    def _page(self) -> bytes:
        return page(json.loads(self._json)).encode()


def page(description: Json) -> str:
    """HTML of an OpenAPI document."""
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"type": _type, "fields": _fields, "json": lambda value: json.dumps(value, indent=2)}
    template = environment.from_string(Path(__file__).with_name("docs.html").read_text(encoding="utf-8"))
    return template.render(api=description, style=Markup(STYLE))  # noqa: S704 - ours, and a constant


class Field(NamedTuple):
    name: str
    type: Markup
    meaning: str
    required: bool


def _fields(schema: Json) -> Iterator[Field]:
    """Of an object, those that must be there first."""
    required = schema.get("required", [])
    properties = schema.get("properties", {})
    for name in sorted(properties, key=lambda name: name not in required):
        meanings = [part["description"] for part in _parts(properties[name]) if "description" in part]
        yield Field(name, _type(properties[name]), "; ".join(meanings), name in required)


def _parts(schema: Json) -> Iterator[Json]:
    """A schema and the alternatives in it."""
    yield schema
    for part in schema.get("anyOf", ()):
        yield from _parts(part)


def _type(schema: Json) -> Markup:
    """What a value may be, with links to what has a name."""
    if "$ref" in schema:
        return Markup('<a href="#{0}">{0}</a>').format(schema["$ref"].rpartition("/")[2])
    if "anyOf" in schema:
        return Markup(" or ").join(_type(part) for part in schema["anyOf"])
    if "enum" in schema or "const" in schema:
        values = schema.get("enum", [schema.get("const")])
        return Markup(" or ").join(Markup("<code>{}</code>").format(json.dumps(value)) for value in values)
    if "contentSchema" in schema:
        return _type(schema["contentSchema"])
    if "event" in schema.get("properties", ()):
        return Markup("events {} of {}").format(*(_type(schema["properties"][name]) for name in ("event", "data")))
    bounds = [shown.format(schema[key]) for key, shown in BOUNDS.items() if key in schema]
    said = escape(" (" + ", ".join(bounds) + ")" if bounds else "")
    if schema.get("type") == "array":
        return Markup("list of {}{}").format(_type(schema.get("items", {})), said)
    return Markup("{}{}").format(schema.get("type", "anything"), said)
