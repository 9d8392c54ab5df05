"""gunicorn's configuration, from the same settings as everything else: ``gunicorn -c python:api.server``."""

import dotenv

from pipeline.config import Config

dotenv.load_dotenv(".env")
_config = Config.from_env()

bind = f"{_config.host}:{_config.port}"
workers = _config.api_workers
loglevel = _config.log_level.lower()
asgi_lifespan = "on"
graceful_timeout = int(_config.grace_seconds) + 1
asgi_disconnect_grace_period = 1  # a client that left has cancelled its job by then
