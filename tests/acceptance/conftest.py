"""The default model, fetched and converted once (`kvrelay pull`, which `make test` calls first)."""

from pathlib import Path

import pytest

from api.pull import pull
from pipeline.config import Config


@pytest.fixture(scope="session")
def smollm2() -> Path:
    return pull(Config())
