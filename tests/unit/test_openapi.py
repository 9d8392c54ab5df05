"""The OpenAPI document is whole and true to the types, and the page made from it shows all of it and is harmless."""

import base64
import hashlib
import json
import re
from contextlib import nullcontext
from html.parser import HTMLParser
from typing import Any

import falcon.inspect
import jsonschema_rs
import pytest
import schemathesis
from falcon.asgi import Request, Response

from api.app import wire
from api.docs import HEADERS, page
from api.front import Front
from api.openapi import Routes, document
from api.operation import Operation
from api.requests import ChatRequest, CompletionRequest, read
from api.text import PromptCodec
from brokers.store import Store
from pipeline.config import Config
from pipeline.errors import InvalidRequest
from pipeline.model import Model

ROUTES = Routes()
CONFIG = Config(model="sim")
APP = wire(Front(CONFIG, PromptCodec(Model.locate(CONFIG), CONFIG.context), Store(CONFIG)), ROUTES)
DOCUMENT = json.loads(json.dumps(document(ROUTES)))
OPERATIONS = [
    pytest.param(operation, id=f"{method} {path}")
    for path, methods in DOCUMENT["paths"].items()
    for method, operation in methods.items()
]


def test_every_route_and_method_is_in_the_document() -> None:
    """Falcon says itself which it has; it answers OPTIONS by itself, and what is not there."""
    served = {
        (re.sub(r":\w+}", "}", route.path), method.method.lower())
        for route in falcon.inspect.inspect_routes(APP)
        for method in route.methods
        if not method.internal
    }
    assert {(path, method) for path, methods in DOCUMENT["paths"].items() for method in methods} == served


class Silent:
    async def on_get(self, req: Request, resp: Response) -> None:
        """It has a docstring, and nothing else."""


class Wordless:
    @Operation(answers={200: None})
    async def on_get(self, req: Request, resp: Response) -> None: ...


@pytest.mark.parametrize("resource", [Silent(), Wordless()])
def test_a_route_that_says_nothing_of_itself_is_refused(resource: object) -> None:
    """Without the check in `Routes.add_route` the document would be silent about it, too."""
    with pytest.raises(TypeError, match="GET /new needs an @Operation"):
        Routes().add_route("/new", resource)


def test_the_document_is_valid_and_its_schemas_are() -> None:
    schemathesis.openapi.from_dict(DOCUMENT).validate()
    for schema in DOCUMENT["components"]["schemas"].values():
        jsonschema_rs.meta.validate(schema)
    for name in re.findall(r'"\$ref": "#/([^"]+)"', json.dumps(DOCUMENT)):
        found = DOCUMENT
        for part in name.split("/"):
            found = found[part]
    assert len({operation.values[0]["operationId"] for operation in OPERATIONS}) == len(OPERATIONS)


def _validator(schema: Any) -> Any:
    return jsonschema_rs.Draft202012Validator({**schema, "components": DOCUMENT["components"]})


@pytest.mark.parametrize("operation", [one for one in OPERATIONS if "requestBody" in one.values[0]])
def test_the_examples_are_valid(operation: Any) -> None:
    ((_, body),) = operation["requestBody"]["content"].items()
    _validator(body["schema"]).validate(body["example"])


TEXT = {"prompt": "a"}
CHAT = {"messages": [{"role": "user", "content": "a"}]}
TAKEN = [
    TEXT,
    {"prompt": ["a", "b"]},
    {"prompt": [1, 2]},
    {"prompt": [[1], [2]]},
    TEXT | {"best_of": 1, "suffix": "", "store": False},
    TEXT | {"logit_bias": {"1": 100}},
    CHAT,
    CHAT | {"response_format": {"type": "json_object"}},
    CHAT | {"tool_choice": {"type": "function", "function": {"name": "a"}}},
]
REFUSED = [
    {},
    {"prompt": {}},
    TEXT | {"best_of": 2},
    TEXT | {"suffix": "b"},
    TEXT | {"store": True},
    TEXT | {"max_tokens": 0},
    TEXT | {"stop": ""},
    TEXT | {"stop": ["a"] * 17},
    TEXT | {"stop": "a" * 1001},
    TEXT | {"logit_bias": {"1": 101}},
    TEXT | {"logprobs": 21},
    TEXT | {"repetition_penalty": 5e-324},  # logits divided by it are infinite, and the job failed
    TEXT | {"nothing": 1},
    TEXT | {"n": True},
    {"messages": []},
    {"messages": [{"role": "nobody", "content": "a"}]},
    CHAT | {"response_format": {"type": "xml"}},
    CHAT | {"tools": [{"type": "function", "function": {"name": "a b"}}]},
]


@pytest.mark.parametrize(
    ("body", "taken"), [(body, True) for body in TAKEN] + [(body, False) for body in REFUSED], ids=str
)
def test_a_body_is_read_if_and_only_if_the_document_allows_it(body: dict[str, Any], taken: bool) -> None:
    """Without `SCHEMAS` the document would promise fields that are refused."""
    kind: Any = ChatRequest if "messages" in body else CompletionRequest
    schema = DOCUMENT["components"]["schemas"][kind.__name__]
    assert _validator(schema).is_valid(body) == taken
    with nullcontext() if taken else pytest.raises(InvalidRequest):
        read(json.dumps(body).encode(), kind)


class Tags(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[tuple[str, tuple[str, ...]]] = []
        self.links: list[str] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, tuple(name for name, _ in attrs)))
        self.links += [value or "" for name, value in attrs if name in ("href", "src")]

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_says_all_that_the_document_says_and_fetches_nothing() -> None:
    html = page(DOCUMENT)
    tags = Tags(html)
    for path, methods in DOCUMENT["paths"].items():
        for method, operation in methods.items():
            assert f"{method.upper()} {path}" in tags.text
            assert operation["summary"] in tags.text
    for name, schema in DOCUMENT["components"]["schemas"].items():
        assert f'id="{name}"' in html
        assert all(f"<code>{field}</code>" in html for field in schema["properties"])
    assert all(link.startswith("#") or link == "openapi.json" for link in tags.links)
    targets = {link for link in tags.links if link.startswith("#")}
    assert all(f'id="{link[1:]}"' in html for link in targets)
    assert not {"script", "img", "link", "iframe", "object", "form"} & {tag for tag, _ in tags.found}


def test_the_policy_allows_the_page_its_own_style_and_nothing_else() -> None:
    (style,) = re.findall(r"<style>(.*?)</style>", page(DOCUMENT), re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = dict(part.strip().split(" ", 1) for part in HEADERS["Content-Security-Policy"].split(";"))
    assert policy.pop("style-src") == f"'sha256-{digest}'"
    assert policy.pop("default-src") == "'none'"
    assert set(policy.values()) == {"'none'"}


EVIL = "</code></style><script>alert(1)</script><img src=//evil onerror=alert(1)>{{ 7*7 }}\"'"


def test_no_name_or_description_becomes_markup() -> None:
    """Without autoescape a description could bring tags of its own; without `Markup.format`, a type."""
    evil = _with_evil(DOCUMENT)
    assert evil != DOCUMENT
    tags, own = Tags(page(evil)), Tags(page(DOCUMENT))
    assert tags.found == own.found
    assert "{{ 7*7 }}" in tags.text


def _with_evil(value: Any, name: str = "") -> Any:
    """In every text, and in every name that is not OpenAPI's or JSON Schema's own."""
    if isinstance(value, dict):
        free = (
            name in ("schemas", "properties", "paths") and not {"event", "data"} <= value.keys()
        )  # an event's fields are SSE's
        return {key + EVIL if free else key: _with_evil(item, key) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_evil(item, name) for item in value]
    return value + EVIL if isinstance(value, str) and name != "type" else value
