"""The OpenAPI document: from the routes, the types that bodies are decoded with, and what `Operation` says beside a responder.

OpenAPI 3.1, whose schemas are JSON Schema 2020-12: what msgspec writes.
"""

import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from http import HTTPStatus
from importlib.metadata import version
from typing import Any

import msgspec
from falcon.routing import CompiledRouter

from api.operation import DONE, Operation
from api.requests import SCHEMAS, ChatJob, ChatRequest, CompletionJob, CompletionRequest
from api.shapes import ErrorAnswer

Json = dict[str, Any]

#: status → what it means when it comes with the error object.
MEANING = {
    400: "The request is wrong; `param` names the field.",
    401: "An API key is needed, or this one is not known.",
    404: "There is no such thing; `code` says what is missing.",
    408: "The body did not come in time.",
    409: "The job was cancelled by somebody else.",
    410: "The job is over, and its answer has expired.",
    413: "The body is too large.",
    415: "The body is of another media type.",
    422: "The Idempotency-Key came with another body before.",
    429: "Too many jobs wait, or the key has no request left for now.",
    500: "The job failed, or the server did.",
    503: "No worker is there, or the queue does not answer.",
    504: "The job's deadline passed.",
    507: "The disk that files lie on is full, or gone.",
}
#: What the server refuses before there is a request, in plain text.
UNREAD = {414: "The path and its query are too long.", 431: "A header is too large, or there are too many."}
#: What every route may answer that depends on anything …
COMMON = frozenset({401, 500, 503})
#: … and one that takes a body.
OF_BODIES = frozenset({400, 408, 413, 415, 429})
_AGAIN = {"Retry-After": "Seconds after which another try is worth it"}
#: The headers that come with some of them.
SENDS = {401: {"WWW-Authenticate": "How to authenticate"}, 429: _AGAIN, 503: _AGAIN}

#: Of every answer.
HEADERS = {
    "X-Request-Id": {"description": "The request's, or a new one", "required": True, "schema": {"type": "string"}}
}

REF = "#/components/schemas/{name}"
FIELD = re.compile(r"{(\w+)(?::\w+)?}")  # of a route; the converter is nobody else's business


class Routes(CompiledRouter):
    """Falcon's router, which remembers what was added: (route, method) → what it takes and answers, and its docstring."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: dict[tuple[str, str], tuple[Operation, str]] = {}

    def add_route(self, uri_template: str, resource: object, **kwargs: Any) -> None:
        for method, responder in self.map_http_methods(resource, **kwargs).items():
            operation, said = getattr(responder, "operation", None), responder.__doc__
            if operation is None or said is None:
                raise TypeError(f"{method} {uri_template} needs an @Operation(…) and a docstring: see api/operation.py")
            self.operations[uri_template, method] = operation, inspect.cleandoc(said)
        super().add_route(uri_template, resource, **kwargs)


def document(routes: Routes) -> Json:
    """The whole of it, as JSON."""
    schemas = _Schemas(operation for operation, _ in routes.operations.values())
    paths: dict[str, Json] = {}
    for (route, method), (operation, said) in routes.operations.items():
        path = FIELD.sub(r"{\1}", route)
        named = {"operationId": re.sub(r"\W+", "_", f"{method.lower()}{path}").strip("_")}
        paths.setdefault(path, {})[method.lower()] = named | _words(said) | _operation(route, operation, schemas)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "kvrelay",
            "version": version("kvrelay"),
            "summary": "Large-language-model serving, in OpenAI's shapes and as a job queue",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "servers": [{"url": "/"}],
        "paths": paths,
        "components": {
            "schemas": schemas.components,
            "headers": HEADERS,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "responses": {
                **{str(status): _error(status, meaning, schemas) for status, meaning in MEANING.items()},
                **{str(status): _unread(meaning) for status, meaning in UNREAD.items()},
            },
        },
    }


class _Schemas:
    """Of all types, by name where they have one."""

    def __init__(self, operations: Iterable[Operation]) -> None:
        types = [kind for operation in operations for kind in _types(operation)] + [ErrorAnswer]
        found, self.components = msgspec.json.schema_components(types, ref_template=REF)
        self._of = list(zip(types, found, strict=True))
        for kind in (CompletionRequest, CompletionJob, ChatRequest, ChatJob):
            properties = self.components[kind.__name__]["properties"]
            properties |= {name: schema for name, schema in SCHEMAS.items() if name in properties}

    def of(self, kind: Any) -> Json:
        if isinstance(kind, tuple):
            return {"anyOf": [self.of(one) for one in kind]}
        return next(schema for known, schema in self._of if known == kind)


def _types(operation: Operation) -> Iterator[Any]:
    bodies = operation.body if isinstance(operation.body, tuple) else (operation.body,)
    data = (kind for kinds in operation.events.values() for kind in kinds)
    for kind in (*bodies, *operation.answers.values(), *data, *operation.headers.values(), *operation.query.values()):
        if kind is not None and not isinstance(kind, str):
            yield kind


def _words(said: str) -> Json:
    summary, _, rest = said.replace("\n", " ").partition(". ")
    return {"summary": summary.rstrip(".")} | ({"description": rest} if rest else {})


def _operation(route: str, operation: Operation, schemas: _Schemas) -> Json:
    shown: Json = {}
    if parameters := list(_parameters(route, operation, schemas)):
        shown["parameters"] = parameters
    if operation.body is not None:
        content: Json = {"schema": schemas.of(operation.body)}
        if operation.example is not None:
            content["example"] = operation.example
        shown["requestBody"] = {"required": True, "content": {operation.media: content}}
    if not operation.public:
        shown["security"] = [{"key": []}, {}]  # {}: while there are no keys
    shown["responses"] = dict(sorted(_responses(operation, schemas)))
    return shown


def _parameters(route: str, operation: Operation, schemas: _Schemas) -> Iterator[Json]:
    for name in FIELD.findall(route):
        yield {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
    for name, kind in operation.query.items():
        yield {"name": name, "in": "query", "schema": schemas.of(kind)}
    for name, kind in operation.headers.items():
        yield {"name": name, "in": "header", "schema": schemas.of(kind)}


def _responses(operation: Operation, schemas: _Schemas) -> Iterator[tuple[str, Json]]:
    for status, kind in operation.answers.items():
        content: Json = {}
        if isinstance(kind, str):
            content[kind] = {"schema": {"type": "string"}}
        elif kind is not None:
            content["application/json"] = {"schema": schemas.of(kind)}
        if operation.events and status == HTTPStatus.OK:
            content["text/event-stream"] = {"schema": _events(operation.events, schemas)}
        yield str(status), _response(HTTPStatus(status).phrase, operation.sends, content)
    errors = {*operation.errors, *(() if operation.public else COMMON), *(OF_BODIES if operation.body else ())}
    for status in {*errors, *UNREAD} - operation.answers.keys():
        yield str(status), {"$ref": f"#/components/responses/{status}"}


def _error(status: int, meaning: str, schemas: _Schemas) -> Json:
    return _response(meaning, SENDS.get(status, {}), {"application/json": {"schema": schemas.of(ErrorAnswer)}})


def _unread(meaning: str) -> Json:
    return {"description": meaning, "content": {"text/plain": {"schema": {"type": "string"}}}}


def _response(meaning: str, sends: Mapping[str, str], content: Json) -> Json:
    headers: Json = {name: {"$ref": f"#/components/headers/{name}"} for name in HEADERS}
    for name, what in sends.items():
        headers[name] = {"description": what, "required": True, "schema": {"type": "string"}}
    return {"description": meaning, "headers": headers} | ({"content": content} if content else {})


def _events(events: Mapping[str, tuple[Any, ...]], schemas: _Schemas) -> Json:
    """Of one event: OpenAPI 3.1 has no words for a stream of them."""
    return {
        "description": "Of each event: its fields, with the data as text.",
        "anyOf": [_event(name, [_data(kind, schemas) for kind in kinds]) for name, kinds in events.items()],
    }


def _event(name: str, data: list[Json]) -> Json:
    """`message` is what an event without a name is called."""
    return {
        "type": "object",
        "properties": {"event": {"const": name}, "id": {"type": "string"}, "data": {"anyOf": data}},
        "required": ["data"] if name == "message" else ["event", "data"],
    }


def _data(kind: Any, schemas: _Schemas) -> Json:
    if kind == DONE:
        return {"const": DONE}
    return {"type": "string", "contentMediaType": "application/json", "contentSchema": schemas.of(kind)}
