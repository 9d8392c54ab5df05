"""Whether a vendor's package still has what is called of it, by name and by parameters."""

import importlib
import inspect
from collections.abc import Mapping
from typing import Any


def drift(calls: Mapping[str, str | None]) -> list[str]:
    """What is otherwise now, a sentence each. calls: `module:name` → its parameters, or None where only the name is known."""
    return [sentence for call, recorded in calls.items() if (sentence := _changed(call, recorded))]


def _changed(call: str, recorded: str | None) -> str | None:
    module, _, path = call.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError):
        return f"{path} is gone from {module}"
    if recorded is None:
        return None
    parameters = " ".join(inspect.signature(found).parameters)
    return None if parameters == recorded else f"{path} takes ({parameters}), and took ({recorded})"
