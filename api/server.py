"""gunicorn's configuration, from the same settings as everything else: ``gunicorn -c python:api.server``."""

import gc
import resource
from typing import Any

import dotenv
from gunicorn.workers import gasgi

from api.connection import SPARE, Gate
from pipeline.config import Config
from pipeline.errors import ConfigError

OTHER_FILES = 100  # that a process has open beside its clients' connections: logs, sockets to Redis


def _allow_files(connections: int) -> None:
    files = connections + SPARE + OTHER_FILES
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY != soft < files:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
        except (OSError, ValueError):
            remedy = f"needs {files} open files, and `ulimit -Hn` is {hard}"
            raise ConfigError("KVR_CONNECTIONS", connections, remedy) from None


dotenv.load_dotenv(".env")
_config = Config.from_env()
_allow_files(_config.connections)

bind = f"{_config.host}:{_config.port}"
workers = _config.api_workers
loglevel = _config.log_level.lower()
asgi_lifespan = "on"
asgi_loop = "asyncio"  # also where there is a faster one: `api.connection` needs its sockets
keepalive = int(_config.idle_seconds)
timeout = int(_config.request_seconds) + 30  # a body that stops is ours to end, not the server's
graceful_timeout = int(_config.grace_seconds) + 1
asgi_disconnect_grace_period = 1  # a client that left has cancelled its job by then


def post_worker_init(_worker: Any) -> None:
    """In a process that is about to serve."""
    gasgi.ASGIProtocol = Gate(_config).guard(gasgi.ASGIProtocol)  # gunicorn has no setting for it
    # What is there now stays. A full collection beside a thousand streams stops all of them for a tenth of a second, to find
    # next to nothing; so it comes ten times less often than by default.
    gc.freeze()
    gc.set_threshold(700, 10, 100)


def pre_request(_worker: Any, _request: Any) -> None:
    """Instead of gunicorn's line in the log, which would show a path that holds line ends; ours is in `api.access`."""
