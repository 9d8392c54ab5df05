"""Tools: what a client may declare, how a model is made to call one, and how its text is read.

With `auto` the model decides, and writes a call as its chat template taught it: JSON between <tool_call> tags, the form of
Hermes and Qwen. With `required`, or the name of a tool, its answer is constrained to be nothing but calls.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Protocol

import msgspec
from msgspec import Meta

from pipeline.constraint import Constraint
from pipeline.text import overlap

OPEN, CLOSE = "<tool_call>", "</tool_call>"

Name = Annotated[str, Meta(pattern="^[a-zA-Z0-9_-]{1,64}$")]


class Function(msgspec.Struct, forbid_unknown_fields=True):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def schema(self) -> dict[str, Any]:
        return self.parameters or {"type": "object", "properties": {}, "additionalProperties": False}


class Tool(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    function: Function


def plain(tool: Tool) -> dict[str, Any]:
    """As a chat template gets it."""
    shown: dict[str, Any] = msgspec.to_builtins(tool)
    shown["function"] = {name: value for name, value in shown["function"].items() if value is not None}
    return shown


class FunctionName(msgspec.Struct, forbid_unknown_fields=True):
    name: Name


class NamedTool(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedTool


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPart:
    """A piece of call number `index`: its name comes with the first, the arguments (JSON) in one or more."""

    index: int
    name: str = ""
    arguments: str = ""


Piece = str | CallPart


class Reader(Protocol):
    """Text as it comes, into what is content and what is a call. Never loses a character of an answer that is no call."""

    def push(self, text: str) -> list[Piece]: ...

    def finish(self) -> list[Piece]: ...


def reader(choice: ToolChoice | None, tools: Sequence[Tool] | None) -> Reader:
    if not tools or choice == "none":
        return PlainReader()
    if isinstance(choice, NamedTool):
        return ArgumentsReader(choice.function.name)
    return ListReader() if choice == "required" else TagReader()


def constraint(choice: ToolChoice | None, tools: Sequence[Tool], *, parallel: bool) -> Constraint | None:
    """What the answer must be, if the model has no choice. parallel: several calls are welcome."""
    if isinstance(choice, NamedTool):
        (schema,) = (tool.function.schema for tool in tools if tool.function.name == choice.function.name)
        return Constraint(kind="json_schema", source=json.dumps(schema))
    if choice != "required":
        return None
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.function.name}, "arguments": tool.function.schema},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for tool in tools
    ]
    schema = {"type": "array", "items": {"anyOf": calls}, "minItems": 1}
    return Constraint(kind="json_schema", source=json.dumps(schema if parallel else {**schema, "maxItems": 1}))


class PlainReader:
    def push(self, text: str) -> list[Piece]:
        return [text] if text else []

    def finish(self) -> list[Piece]:
        return []


class ArgumentsReader:
    """All of it is the arguments of one call."""

    def __init__(self, name: str) -> None:
        self._name = name

    def push(self, text: str) -> list[Piece]:
        if not text:
            return []
        name, self._name = self._name, ""
        return [CallPart(index=0, name=name, arguments=text)]

    def finish(self) -> list[Piece]:
        return []


class ListReader:
    """A JSON list of calls; cut short, it is only text."""

    def __init__(self) -> None:
        self._text = ""

    def push(self, text: str) -> list[Piece]:
        self._text += text
        return []

    def finish(self) -> list[Piece]:
        try:
            return [_call(index, value) for index, value in enumerate(json.loads(self._text))]
        except (ValueError, TypeError, KeyError):
            return [self._text]


class TagReader:
    """Content, and calls between tags. What stands between tags and is no call, is content."""

    def __init__(self) -> None:
        self._calls = 0
        self._inside = False
        self._held = ""  # of a call, or what may be the beginning of a tag

    def push(self, text: str) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        while self._take_one(pieces):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        rest = self._called(self._held, "") if self._inside else self._held
        return [] if self._between(rest) else [rest]

    def _take_one(self, pieces: list[Piece]) -> bool:
        """Up to the next tag; False if there is none yet."""
        before, tag, after = self._held.partition(CLOSE if self._inside else OPEN)
        if self._inside and not tag:
            return False
        if not self._inside and not tag:
            keep = overlap(self._held, OPEN)
            before, after = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
            if self._between(before):
                return False
        if self._inside:
            pieces.append(self._called(before, tag))
        elif not self._between(before):
            pieces.append(before)
        self._held = after
        self._inside ^= bool(tag)
        return bool(tag)

    def _between(self, piece: Piece) -> bool:
        """Nothing, or the white space that stands between two calls."""
        return isinstance(piece, str) and not (piece.strip() if self._calls else piece)

    def _called(self, body: str, closed: str) -> Piece:
        try:
            call = _call(self._calls, json.loads(body))
        except (ValueError, TypeError, KeyError):
            return OPEN + body + closed
        self._calls += 1
        return call


def _call(index: int, value: Any) -> CallPart:
    """Raises KeyError or TypeError if it is none."""
    name, arguments = value["name"], value["arguments"]
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise TypeError
    return CallPart(index=index, name=name, arguments=json.dumps(arguments, ensure_ascii=False))
