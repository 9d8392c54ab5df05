"""Which software a worker runs on, so that a result can be told from another one's."""

import platform
import re
import shlex
import sys
from datetime import UTC, datetime
from importlib.metadata import distributions
from typing import Any

from pipeline.config import Config
from pipeline.geometry import Geometry

#: Packages that decide what a model answers: ours, the frameworks, and everything of the chips' vendors.
DECISIVE = re.compile(r"kvrelay|torch|transformers|optimum-rbln|(rebel|rbln|furiosa)[\w-]*")


def versions() -> dict[str, str]:
    """Package → version, and that of Python, of what is installed in this environment."""
    found = {
        name: distribution.version
        for distribution in distributions()
        if DECISIVE.fullmatch(name := (distribution.metadata["Name"] or "").lower().replace("_", "-"))
    }
    return {"python": platform.python_version(), **dict(sorted(found.items()))}


def provenance(config: Config, geometry: Geometry, device: str) -> dict[str, Any]:
    """What a result is of: command, date, versions, model with its digest, device and dtype."""
    return {
        "command": f"python -m workers {shlex.join(sys.argv[1:])}",
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "versions": versions(),
        "model": config.name,
        "digest": geometry.model,
        "device": device,
        "dtype": geometry.dtype,
    }
