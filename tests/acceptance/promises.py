"""What the OpenAPI document promises: every answer that a test gets from the API is held against it."""

import re
from functools import cache
from typing import Any

import jsonschema_rs

from api.app import wire
from api.front import Front
from api.openapi import Routes, document
from api.text import PromptCodec
from brokers.store import Store
from pipeline.config import Config
from pipeline.model import Model


@cache
def promised() -> dict[str, Any]:
    """The document; it is the same for every system."""
    config, routes = Config(model="sim"), Routes()
    wire(Front(config, PromptCodec(Model.locate(config), config.context), Store(config)), routes)
    return document(routes)


def check(method: str, path: str, status: int, answer: Any) -> None:
    """Without it a status or a field could appear of which the document says nothing."""
    found = _path(path.partition("?")[0])
    operation = promised()["paths"].get(found, {}).get(method.lower())
    if operation is None:
        assert status in (404, 405), f"{method} {path} answered {status} and is not in the document"
        return
    assert str(status) in operation["responses"], f"{method} {found} answered {status}, which is not in the document"
    validator(found, method.lower(), str(status)).validate(answer)


def _path(path: str) -> str:
    for template in promised()["paths"]:
        if re.fullmatch(re.sub(r"{\w+}", "[^/]+", template), path):
            return template
    return path


@cache
def validator(path: str, method: str, status: str) -> Any:
    response = promised()["paths"][path][method]["responses"][status]
    if "$ref" in response:
        response = promised()["components"]["responses"][status]
    return jsonschema_rs.Draft202012Validator(
        {**response["content"]["application/json"]["schema"], "components": promised()["components"]}
    )
