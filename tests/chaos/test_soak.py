"""A short soak, as part of every run; `make soak` for ten minutes, `make soak SEED=7` for one that was seen."""

import os
import secrets
from pathlib import Path

import pytest

from tests.chaos.soak import soak


@pytest.mark.timeout(300)
def test_nothing_is_lost_doubled_or_left_over_whatever_happens(tmp_path: Path) -> None:
    seed = int(os.environ.get("SOAK_SEED") or secrets.randbelow(1_000_000))
    assert soak(seed, 30.0, tmp_path) == 0, f"SOAK_SEED={seed} repeats it"
