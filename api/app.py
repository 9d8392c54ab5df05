"""The ASGI application: everything is wired here."""

import asyncio
import contextlib
import logging
from typing import Any

import dotenv
import falcon
import falcon.asgi

from api.access import Access
from api.batch_runner import BatchRunner
from api.batches import BatchList, OneBatch
from api.completions import ChatCompletions, TextCompletions
from api.disconnect import App, Disconnect
from api.docs import Docs
from api.errors import show, show_bug, show_http
from api.files import FileList, OneFile
from api.front import Front
from api.jobs import JobEvents, Jobs, OneJob
from api.keys import Keys
from api.metrics import Metrics
from api.openapi import Routes
from api.system import Live, Models, Ready, System
from api.text import PromptCodec
from api.tokens import Detokenize, Tokenize
from api.webhooks import Deliverer
from brokers.api_keys import ApiKeys
from brokers.batches import Batches
from brokers.files import Files
from brokers.store import Store
from pipeline.config import Config
from pipeline.errors import KVRelayError, RedisAway, RedisRefused
from pipeline.model import Model

log = logging.getLogger(__name__)


class Lifespan:
    """Runs the reader of token logs, the batches, and the webhooks if there are any, for as long as the process serves."""

    def __init__(self, front: Front, runner: BatchRunner) -> None:
        self._front = front
        self._runner = runner
        self._tasks: list[asyncio.Task[None]] = []

    async def process_startup(self, _scope: Any, _event: Any) -> None:
        self._tasks = [asyncio.create_task(self._front.reader.run()), asyncio.create_task(self._runner.run())]
        if self._front.config.webhook_key:
            deliverer = Deliverer(self._front.store, self._front.config)
            self._tasks.append(asyncio.create_task(deliverer.run()))
        with contextlib.suppress(RedisAway, RedisRefused):  # readiness says it again
            if warning := await self._front.store.warning():
                log.warning(warning, extra={"action": "redis_policy"})

    async def process_shutdown(self, _scope: Any, _event: Any) -> None:
        for task in self._tasks:
            task.cancel()
        if waiting := [*self._tasks, *self._front.cancels]:
            await asyncio.wait(waiting, timeout=self._front.config.grace_seconds)
        await self._front.store.close()


def create_app(config: Config) -> App:
    front = Front(config, PromptCodec(Model.locate(config), config.context), Store(config))
    return Disconnect(wire(front, Routes()), config.request_seconds)


def wire(front: Front, routes: Routes) -> Any:
    """The Falcon application, its resources added to the routes."""
    batches, files = Batches(front.store), Files(front.store, front.config.files_folder)
    runner = BatchRunner(front, batches, files)
    models, docs = Models(front), Docs(routes)
    middleware: Any = [Lifespan(front, runner), Access(), Keys(ApiKeys(front.store))]
    app: Any = falcon.asgi.App(middleware=middleware, router=routes)
    app.add_route("/v1/completions", TextCompletions(front))
    app.add_route("/v1/chat/completions", ChatCompletions(front))
    app.add_route("/v1/tokenize", Tokenize(front))
    app.add_route("/v1/detokenize", Detokenize(front))
    app.add_route("/v1/models", models)
    app.add_route("/v1/models/{name:path}", models, suffix="one")
    app.add_route("/v1/jobs", Jobs(front))
    app.add_route("/v1/jobs/{job_id}", OneJob(front))
    app.add_route("/v1/jobs/{job_id}/events", JobEvents(front))
    one_file, one_batch = OneFile(files), OneBatch(batches, front.config.name)
    app.add_route("/v1/files", FileList(files, front.config))
    app.add_route("/v1/files/{file_id}", one_file)
    app.add_route("/v1/files/{file_id}/content", one_file, suffix="content")
    app.add_route("/v1/batches", BatchList(front, batches, files, runner))
    app.add_route("/v1/batches/{batch_id}", one_batch)
    app.add_route("/v1/batches/{batch_id}/cancel", one_batch, suffix="cancel")
    app.add_route("/v1/system", System(front))
    app.add_route("/metrics", Metrics(front))
    app.add_route("/health/live", Live())
    app.add_route("/health/ready", Ready(front))
    app.add_route("/openapi.json", docs)
    app.add_route("/docs", docs, suffix="page")
    app.add_error_handler(Exception, show_bug)
    app.add_error_handler(falcon.HTTPError, show_http)
    app.add_error_handler(KVRelayError, show)
    return app


def build() -> App:
    """What gunicorn calls: ``api.app:build()``."""
    dotenv.load_dotenv(".env")
    config = Config.from_env()
    logging.basicConfig(level=config.log_level, format="%(asctime)s %(levelname)s %(message)s")
    return create_app(config)
