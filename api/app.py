"""The ASGI application: everything is wired here."""

import asyncio
import contextlib
import logging
from typing import Any

import dotenv
import falcon
import falcon.asgi

from api.completions import Completions
from api.disconnect import App, Disconnect
from api.errors import show, show_bug, show_http
from api.front import Front
from api.jobs import JobEvents, Jobs, OneJob
from api.requests import ChatRequest, CompletionRequest
from api.system import Live, Models, Ready, System
from api.text import PromptCodec
from brokers.store import Store
from pipeline.config import Config
from pipeline.errors import KVRelayError, RedisAway, RedisRefused
from pipeline.model import Model

log = logging.getLogger(__name__)


class Lifespan:
    """Runs the reader of token logs for as long as the process serves."""

    def __init__(self, front: Front) -> None:
        self._front = front
        self._reading: asyncio.Task[None] | None = None

    async def process_startup(self, _scope: Any, _event: Any) -> None:
        self._reading = asyncio.create_task(self._front.reader.run())
        with contextlib.suppress(RedisAway, RedisRefused):  # readiness says it again
            if warning := await self._front.store.warning():
                log.warning(warning, extra={"action": "redis_policy"})

    async def process_shutdown(self, _scope: Any, _event: Any) -> None:
        if self._reading is not None:
            self._reading.cancel()
        await self._front.store.close()


def create_app(config: Config) -> App:
    front = Front(config, PromptCodec(Model.locate(config)), Store(config))
    app: Any = falcon.asgi.App(middleware=[Lifespan(front)])
    models, completions = Models(front), Completions(front, CompletionRequest)
    app.add_route("/v1/completions", completions)
    app.add_route("/v1/chat/completions", Completions(front, ChatRequest))
    app.add_route("/v1/models", models)
    app.add_route("/v1/models/{name:path}", models, suffix="one")
    app.add_route("/v1/jobs", Jobs(front))
    app.add_route("/v1/jobs/{job_id}", OneJob(front))
    app.add_route("/v1/jobs/{job_id}/events", JobEvents(front))
    app.add_route("/v1/system", System(front))
    app.add_route("/health/live", Live())
    app.add_route("/health/ready", Ready(front))
    app.add_error_handler(Exception, show_bug)
    app.add_error_handler(falcon.HTTPError, show_http)
    app.add_error_handler(KVRelayError, show)
    return Disconnect(app)


def build() -> App:
    """What gunicorn calls: ``api.app:build()``."""
    dotenv.load_dotenv(".env")
    config = Config.from_env()
    logging.basicConfig(level=config.log_level, format="%(asctime)s %(levelname)s %(message)s")
    return create_app(config)
