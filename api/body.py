"""Bodies: counted while they are read, parsed once, and refused with the name of the field that is wrong."""

import asyncio
import itertools
import json
import re
from typing import Any, TypeVar

import msgspec
from falcon.asgi import Request as HttpRequest

from api.disconnect import CLIENT, Bodies, Client
from api.errors import Incomplete, NotJson, TooLarge, TooManyBodies, TooSlow
from pipeline.errors import InvalidRequest

LIMIT = 8 << 20  # bytes; the longest prompts as token ids stay well below
HELD = 32 << 20  # bytes of all bodies that are coming; hundreds of usual size
DEPTH = 100  # of brackets; what is meant seriously has ten
#: Among so much the field that is wrong is looked for: nobody else is served meanwhile.
BYTES, TOKENS = 1 << 20, 20_000
#: A string may lack its end; otherwise each of its quotes would be looked at as the beginning of one, to the end.
TOKEN = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|[\[\]{}:,]|[^\s\[\]{}:,"]+', re.DOTALL)
#: A surrogate that is not one of a pair: no character.
LONE = re.compile(rb"\\u[dD][89abAB]..(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..)\\u[dD][c-fC-F]..|\xed[\xa0-\xbf]")

T = TypeVar("T")


async def read(request: HttpRequest) -> bytes:
    """A JSON body, whole. Raises NotJson, TooLarge and TooManyBodies as soon as they are true, TooSlow, Incomplete."""
    _check_head(request)
    client: Client = request.scope[CLIENT]
    body = bytearray()
    try:
        async with asyncio.timeout(client.bodies.seconds):
            async for chunk in request.stream:
                _take(chunk, body, client.bodies)
    except TimeoutError:
        raise TooSlow(f"the body did not come within {client.bodies.seconds:g} s") from None
    finally:
        client.bodies.held -= len(body)
    if not client.whole:  # Falcon ends its stream without a word
        raise Incomplete("the connection ended in the middle of the body")
    return bytes(body)


def _take(chunk: bytes, body: bytearray, bodies: Bodies) -> None:
    body += chunk
    bodies.held += len(chunk)
    if len(body) > LIMIT:
        raise TooLarge(f"the body exceeds {LIMIT} bytes")
    if bodies.held > HELD:
        raise TooManyBodies(f"more than {HELD} bytes of requests are coming at once; try again later")


def _check_head(request: HttpRequest) -> None:
    """What can be refused before any of the body is there.

    A browser sends other types from any page without asking; for this one it asks first, and is not let in.
    """
    kind = request.content_type or "missing"
    if kind.partition(";")[0].strip().lower() != "application/json":
        raise NotJson(f"Content-Type is {kind[:100]}, and must be application/json")
    if (coding := request.get_header("Content-Encoding") or "identity") != "identity":
        raise NotJson(f"Content-Encoding is {coding[:100]}: compressed bodies are not read")
    if (request.content_length or 0) > LIMIT:
        raise TooLarge(f"the body has {request.content_length} bytes; at most {LIMIT} are read")


def decode(body: bytes, kind: type[T]) -> T:
    """Raises InvalidRequest that names the field."""
    try:
        value = msgspec.json.decode(body, type=kind)
        json.loads(body, object_pairs_hook=_unique)
    except msgspec.ValidationError as error:
        raise _named(str(error)) from None
    except (msgspec.DecodeError, ValueError, RecursionError) as error:  # ValueError: bytes that are not UTF-8
        raise InvalidRequest(*_trouble(body, error), code="invalid_json") from None
    return value


def _unique(pairs: list[tuple[str, Any]]) -> None:
    """Parsers differ in which of two they take: what one checks, another would use."""
    seen = set()
    for name, _ in pairs:
        if name in seen:
            raise InvalidRequest(name[:100], "stands twice in one object", code="invalid_json")
        seen.add(name)


def _named(message: str) -> InvalidRequest:
    """msgspec says `Expected … - at `$.field`` or `Object … field `field``."""
    what, _, path = message.partition(" - at ")
    field = re.sub(r"^\$\.?", "", path.strip("`"))
    if found := re.fullmatch(r"Object (?:contains unknown|missing required) field `(.+)`", what):
        what = "is not a known parameter" if "unknown" in what else "is required"
        field = f"{field}.{found[1]}" if field else found[1]
    return InvalidRequest(field, what[:1].lower() + what[1:])


def _trouble(body: bytes, error: Exception) -> tuple[str, str]:
    """The field, and what is wrong in it: parsers give a place at best."""
    field, text, depth = "", b"", 0
    for found in itertools.islice(TOKEN.finditer(body[:BYTES]), TOKENS):
        token = found[0]
        depth += (token in b"[{") - (token in b"]}")
        if token == b":" and depth == 1:
            field = text[1:-1].decode(errors="replace")[:100]
        if depth > DEPTH:
            return field, f"is nested deeper than {DEPTH}"
        if token in (b"NaN", b"Infinity", b"-Infinity"):
            return field, f"{token.decode()} is no JSON number"
        if token.startswith(b'"') and LONE.search(token):
            return field, "holds half of a surrogate pair, which is no character"
        text = token
    return "", f"the body is not valid JSON: {error}"
