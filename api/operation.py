"""What a responder takes and answers, declared beside it: the rest of its description is its docstring.

    @Operation(answers={200: ServedModel}, errors=(404,))
    async def on_get(self, req, resp, name):
        'A model that is served here.'

A route whose responder lacks either is refused when it is added, by ``api/openapi.py``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

Responder = TypeVar("Responder", bound=Callable[..., Any])

DONE = "[DONE]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """Types are those that msgspec knows; a text stands for a media type, whose content is only text."""

    answers: Mapping[int, Any]  # status → type
    errors: tuple[int, ...] = ()  # statuses with the error object, beside those that every route has, or every body
    body: Any = None  # a type, or a tuple of them: one of these
    media: str = "application/json"  # of the body
    example: Any = None  # of a body
    headers: Mapping[str, Any] = field(default_factory=dict)  # that the client may send: name → type
    query: Mapping[str, Any] = field(default_factory=dict)
    sends: Mapping[str, str] = field(default_factory=dict)  # headers of the answers: name → meaning
    #: Of a 200 as server-sent events: name of the event → what its data may be, types and DONE.
    events: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    public: bool = False  # depends on nothing: no key, no Redis

    def __call__(self, responder: Responder) -> Responder:
        responder.operation = self  # type: ignore[attr-defined]
        return responder
