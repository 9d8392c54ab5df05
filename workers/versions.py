"""Which software a worker runs on, so that a result can be told from another one's."""

import platform
import re
from importlib.metadata import distributions

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
