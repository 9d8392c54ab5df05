"""What opt-in tests have measured, for docs/evidence. KVR_TEST_EVIDENCE names the folder; without it nothing is kept."""

import json
import os
from datetime import UTC, datetime
from pathlib import Path

from workers.versions import versions


def keep(file: str, name: str, **facts: object) -> None:
    """Under `name` in the folder's `file`, with today's date and the versions of this Python environment."""
    if not (folder := os.environ.get("KVR_TEST_EVIDENCE")):
        return
    Path(folder).mkdir(parents=True, exist_ok=True)
    path = Path(folder) / f"{file}.json"
    kept = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    kept[name] = {**facts, "date": datetime.now(UTC).date().isoformat(), "versions": versions()}
    path.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
