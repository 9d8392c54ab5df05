"""Which model is this? A digest over everything that decides its tokens: configuration, tokenizer and weights."""

import contextlib
import hashlib
import json
import os
import tempfile
from pathlib import Path

from pipeline.config import Config


def model_digest(directory: Path, config: Config) -> str:
    """32 hex digits, the same for the same files anywhere. Files are read once and remembered by size and time."""
    memory = Path(config.cache).expanduser() / "digests.json"
    known = _remembered(memory)
    names = ["config.json", "tokenizer.json", *sorted(path.name for path in directory.glob("*.safetensors"))]
    digests = {}
    for name in names:
        path = (directory / name).resolve()
        if path.is_file():
            key = f"{path}:{path.stat().st_size}:{path.stat().st_mtime_ns}"
            if key not in known:
                with path.open("rb") as file:
                    known[key] = hashlib.file_digest(file, "sha256").hexdigest()
            digests[name] = known[key]
    _remember(memory, known)
    return hashlib.sha256(json.dumps(digests).encode()).hexdigest()[:32]


def _remembered(memory: Path) -> dict[str, str]:
    try:
        known = json.loads(memory.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}  # it only costs time
    return known if isinstance(known, dict) else {}


def _remember(memory: Path, known: dict[str, str]) -> None:
    with contextlib.suppress(OSError):
        memory.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=memory.parent, delete=False) as file:
            json.dump(known, file)
        os.replace(file.name, memory)
