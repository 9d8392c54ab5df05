"""``/v1/models``, ``/v1/system`` and ``/health``: what is served, by whom, and whether it can be."""

import time
from importlib.metadata import version
from typing import Any

import falcon
from falcon.asgi import Request as HttpRequest
from falcon.asgi import Response

from api.front import Front
from api.operation import Operation
from api.shapes import LiveAnswer, ModelList, ReadyAnswer, ServedModel, SystemRecord
from brokers.credits import Credits
from pipeline.errors import InvalidRequest, RedisAway


class Models:
    def __init__(self, front: Front) -> None:
        self._front = front
        self._created = int(time.time())

    @Operation(answers={200: ModelList})
    async def on_get(self, _req: HttpRequest, resp: Response) -> None:
        """The model that is served, under each of its names."""
        resp.media = {"object": "list", "data": [self._model(name) for name in self._front.config.names]}

    on_head = on_get

    @Operation(answers={200: ServedModel}, errors=(404,))
    async def on_get_one(self, _req: HttpRequest, resp: Response, name: str) -> None:
        """One of these names."""
        if name not in self._front.config.names:
            raise InvalidRequest("model", f"{name!r} is not served here", code="model_not_found")
        resp.media = self._model(name)

    on_head_one = on_get_one

    def _model(self, name: str) -> dict[str, Any]:
        config = self._front.config
        return {
            "id": name,
            "object": "model",
            "created": self._created,
            "owned_by": "kvrelay",
            "max_model_len": config.context,
        }


class System:
    #: Of a worker's facts, those that are numbers.
    NUMBERS = frozenset(
        {"pid", "slots", "capacity", "busy", "jobs", "tokens", "bytes", "seen", "told", "reported"}
        | {"local_fallbacks", "overflows"}
    )

    def __init__(self, front: Front) -> None:
        self._front = front

    @Operation(answers={200: SystemRecord})
    async def on_get(self, _req: HttpRequest, resp: Response) -> None:
        """Who works here, on which software, and what is in use. All of it free again means that nothing was left behind."""
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

    on_head = on_get

    async def _worker(self, worker: str, facts: dict[str, str]) -> dict[str, Any]:
        """places: KV caches that it offers to take now, of a decode worker."""
        shown: dict[str, Any] = {"id": worker, **facts}
        shown |= {name: int(facts[name]) for name in self.NUMBERS & facts.keys()}
        shown["versions"] = dict(part.split("=", 1) for part in facts.get("versions", "").split())
        if facts.get("role") == "decode":
            shown["places"] = len(await Credits(self._front.store, worker).listed())
        return shown


class Live:
    @Operation(answers={200: LiveAnswer}, public=True)
    async def on_get(self, _req: HttpRequest, resp: Response) -> None:
        """The process answers. It says nothing about anything else."""
        resp.media = {"live": True}

    on_head = on_get


class Ready:
    def __init__(self, front: Front) -> None:
        self._front = front

    @Operation(answers={200: ReadyAnswer, 503: ReadyAnswer}, errors=(500,), public=True)
    async def on_get(self, _req: HttpRequest, resp: Response) -> None:
        """A job submitted now would be served. Redis answers, and both halves have a living worker."""
        try:
            workers = await self._front.workers()
            state: dict[str, Any] = {"redis": True, **workers, "ready": all(workers.values())}
            if warning := await self._front.store.warning():
                state["warning"] = warning
        except RedisAway:
            state = {"redis": False, "prefill": 0, "decode": 0, "ready": False}
        resp.media = state
        resp.status = falcon.HTTP_200 if state["ready"] else falcon.HTTP_503

    on_head = on_get
