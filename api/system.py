"""``/v1/models``, ``/v1/system`` and ``/health``: what is served, by whom, and whether it can be."""

import time
from importlib.metadata import version
from typing import Any

import falcon
from falcon.asgi import Request as HttpRequest
from falcon.asgi import Response

from api.front import Front
from brokers.credits import Credits
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


class System:
    """Who works here, on which software, and what is in use: all of it free again means that nothing was left behind."""

    #: Of a worker's facts, those that are numbers.
    NUMBERS = frozenset(
        {"pid", "slots", "capacity", "busy", "jobs", "tokens", "bytes", "seen", "told", "local_fallbacks", "overflows"}
    )

    def __init__(self, front: Front) -> None:
        self._front = front

    async def on_get(self, _req: HttpRequest, resp: Response) -> None:
        config = self._front.config
        load = await self._front.queue.load()
        workers = await self._front.registry.living()
        resp.media = {
            "object": "system",
            "kvrelay": version("kvrelay"),
            "model": config.name,
            "max_model_len": config.context,
            "jobs": {"waiting": sum(queue.waiting for queue in load), "working": sum(queue.working for queue in load)},
            "workers": [await self._worker(worker, facts) for worker, facts in workers.items()],
        }

    async def _worker(self, worker: str, facts: dict[str, str]) -> dict[str, Any]:
        """places: KV caches that it offers to take now, of a decode worker."""
        shown: dict[str, Any] = {"id": worker, **facts}
        shown |= {name: int(facts[name]) for name in self.NUMBERS & facts.keys()}
        shown["versions"] = dict(part.split("=", 1) for part in facts.get("versions", "").split())
        if facts.get("role") == "decode":
            shown["places"] = len(await Credits(self._front.store, worker).listed())
        return shown


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
            if warning := await self._front.store.warning():
                state["warning"] = warning
        except RedisAway:
            state = {"redis": False, "prefill": 0, "decode": 0, "ready": False}
        resp.media = state
        resp.status = falcon.HTTP_200 if state["ready"] else falcon.HTTP_503
