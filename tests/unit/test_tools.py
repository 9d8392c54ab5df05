"""Calls in the text of a model: found, whole, and nothing lost that is none; whatever the pieces that the text comes in."""

import json
import random

import pytest

from api.tools import (
    ArgumentsReader,
    CallPart,
    Function,
    FunctionName,
    ListReader,
    NamedTool,
    Piece,
    PlainReader,
    Reader,
    TagReader,
    Tool,
    constraint,
    reader,
)

TOOLS = [
    Tool(type="function", function=Function(name=name, parameters={"type": "object", "properties": {}}))
    for name in ("first", "second")
]
NAMED = NamedTool(type="function", function=FunctionName(name="first"))


def read(reader: Reader, pieces: list[str]) -> tuple[str, list[tuple[str, object]]]:
    """Content, and the calls as (name, arguments)."""
    found: list[Piece] = [part for piece in pieces for part in reader.push(piece)] + reader.finish()
    calls: dict[int, list[str]] = {}
    for part in found:
        if isinstance(part, CallPart):
            call = calls.setdefault(part.index, ["", ""])
            call[0] += part.name
            call[1] += part.arguments
    content = "".join(part for part in found if isinstance(part, str))
    return content, [(name, json.loads(arguments)) for name, arguments in calls.values()]


def cut(text: str, seed: int) -> list[str]:
    draw = random.Random(seed)
    places = sorted(draw.sample(range(len(text) + 1), min(len(text), draw.randrange(12))))
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]


CALL = '<tool_call>\n{"name": "first", "arguments": {"city": "Seoul", "text": "</tool"}}\n</tool_call>'
OTHER = '<tool_call>{"name": "second", "arguments": {}}</tool_call>'
ARGUMENTS = {"city": "Seoul", "text": "</tool"}


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("Hello <tool, a < b", "Hello <tool, a < b", []),
        (CALL, "", [("first", ARGUMENTS)]),
        (f"I look.\n{CALL}\n{OTHER}", "I look.\n", [("first", ARGUMENTS), ("second", {})]),
        (f"{OTHER} done", " done", [("second", {})]),
        ("<tool_call>not JSON</tool_call> so", "<tool_call>not JSON</tool_call> so", []),
        ('<tool_call>{"name": "first"}</tool_call>', '<tool_call>{"name": "first"}</tool_call>', []),
        ('<tool_call>{"name": "first", "arg', '<tool_call>{"name": "first", "arg', []),
        ('<tool_call>{"name": "second", "arguments": {}}', "", [("second", {})]),
        ("ends in <tool_cal", "ends in <tool_cal", []),
    ],
)
def test_calls_between_tags_are_found_and_everything_else_is_content(
    seed: int, text: str, content: str, calls: list[tuple[str, object]]
) -> None:
    """Without the held-back beginning of a tag, half of it would be shown; without the fallback, a broken call be lost."""
    assert read(TagReader(), cut(text, seed)) == (content, calls)


@pytest.mark.parametrize("seed", range(5))
def test_an_answer_that_must_be_calls_is_read_as_a_list(seed: int) -> None:
    text = '[{"name": "first", "arguments": {"a": 1}}, {"name": "second", "arguments": {}}]'
    assert read(ListReader(), cut(text, seed)) == ("", [("first", {"a": 1}), ("second", {})])
    assert read(ListReader(), cut(text[:-5], seed)) == (text[:-5], []), "cut short it is only text"


def test_an_answer_that_must_be_one_tool_s_arguments_comes_as_they_do() -> None:
    reader = ArgumentsReader("first")
    assert reader.push('{"a"') == [CallPart(index=0, name="first", arguments='{"a"')]
    assert reader.push(": 1}") == [CallPart(index=0, arguments=": 1}")]


def test_the_choice_decides_the_reader_and_the_constraint() -> None:
    for choice, kind in (("none", PlainReader), ("auto", TagReader), (None, TagReader), ("required", ListReader)):
        assert type(reader(choice, TOOLS)) is kind  # type: ignore[arg-type]
    assert type(reader(NAMED, TOOLS)) is ArgumentsReader
    assert type(reader("auto", None)) is PlainReader
    assert constraint("auto", TOOLS, parallel=True) is None
    required = constraint("required", TOOLS, parallel=False)
    assert required is not None
    assert json.loads(required.source)["maxItems"] == 1
    assert [item["properties"]["name"] for item in json.loads(required.source)["items"]["anyOf"]] == [
        {"const": "first"},
        {"const": "second"},
    ]
    named = constraint(NAMED, TOOLS, parallel=True)
    assert named is not None
    assert json.loads(named.source) == TOOLS[0].function.parameters
