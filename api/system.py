"""``/v1/models`` and ``/health``: what is served, and whether it can be."""

import time
from typing import Any

import falcon
from falcon.asgi import Request as HttpRequest
from falcon.asgi import Response

from api.front import Front
from pipeline.errors import InvalidRequest, RedisAway


class Models:
    def __init__(self, front: Front) -> None:
        self._front = front
        self._created = int(time.time())

    async def on_get(self, _req: HttpRequest, resp: Response) -> None:
        resp.media = {"object": "list", "data": [self._model()]}

    async def on_get_one(self, _req: HttpRequest, resp: Response, name: str) -> None:
        if name != self._front.config.name:
            raise InvalidRequest("model", f"{name!r} is not served here", code="model_not_found")
        resp.media = self._model()

    def _model(self) -> dict[str, Any]:
        config = self._front.config
        return {
            "id": config.name,
            "object": "model",
            "created": self._created,
            "owned_by": "kvrelay",
            "max_model_len": config.context,
        }


class Live:
    """The process answers. Says nothing about anything else."""

    async def on_get(self, _req: HttpRequest, resp: Response) -> None:
        resp.media = {"live": True}


class Ready:
    """A job submitted now would be served: Redis answers, and both halves have a living worker."""

    def __init__(self, front: Front) -> None:
        self._front = front

    async def on_get(self, _req: HttpRequest, resp: Response) -> None:
        try:
            workers = await self._front.workers()
            state: dict[str, Any] = {"redis": True, **workers, "ready": all(workers.values())}
        except RedisAway:
            state = {"redis": False, "prefill": 0, "decode": 0, "ready": False}
        resp.media = state
        resp.status = falcon.HTTP_200 if state["ready"] else falcon.HTTP_503
