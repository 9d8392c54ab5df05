"""``/v1/tokenize`` and ``/v1/detokenize``, in vLLM's shapes: what a text costs, and what tokens say."""

import asyncio
from typing import Annotated

import msgspec
from falcon.asgi import Request as HttpRequest
from falcon.asgi import Response
from msgspec import Meta

from api.body import decode, read
from api.front import Front
from api.operation import Operation
from api.requests import Message, check_model, check_tokens
from api.shapes import Text, Tokens
from api.tools import Tool, plain
from pipeline.errors import InvalidRequest


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A prompt, or the messages of a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool = True


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True):
    tokens: list[int]
    model: str | None = None


class Tokenize:
    def __init__(self, front: Front) -> None:
        self._front = front

    @Operation(
        body=TokenizeRequest,
        example={"prompt": "Once upon a time"},
        answers={200: Tokens},
        errors=(404,),
    )
    async def on_post(self, req: HttpRequest, resp: Response) -> None:
        """What a prompt is in tokens, or the messages of a chat."""
        request = decode(await read(req), TokenizeRequest)
        check_model(request.model, self._front.config)
        if (request.prompt is None) == (request.messages is None):
            raise InvalidRequest("prompt", "one of prompt and messages is needed, and not both")
        if request.prompt is not None:
            tokens = await self._front.codec.encode(request.prompt, special=request.add_special_tokens)
        else:
            messages = [message.plain() for message in request.messages or ()]
            tokens = await self._front.codec.encode_chat(messages, [plain(tool) for tool in request.tools or ()])
        resp.media = {"tokens": tokens, "count": len(tokens), "max_model_len": self._front.config.context}


class Detokenize:
    def __init__(self, front: Front) -> None:
        self._front = front

    @Operation(body=DetokenizeRequest, example={"tokens": [65, 66]}, answers={200: Text}, errors=(404,))
    async def on_post(self, req: HttpRequest, resp: Response) -> None:
        """What tokens say."""
        request = decode(await read(req), DetokenizeRequest)
        check_model(request.model, self._front.config)
        check_tokens("tokens", request.tokens, self._front.codec)
        resp.media = {"prompt": await asyncio.to_thread(self._front.codec.decode, request.tokens)}
