"""What Numba compiles, and where the result is kept: the first start of a version takes some seconds, the others do not.

Numba looks whether the file of a function has changed (its size and date), not whether what the function calls has. A product
out of last week's loop would be wrong text. So each state of these sources has a folder of its own.
"""

import hashlib
import os
from pathlib import Path
from typing import Any

import numba
from numba import njit

#: What the compiler may assume: sums in any order, but a NaN is a NaN. For text of NaNs would look like any other.
FAST = {"reassoc", "contract", "nsz", "arcp"}


def compiled(function: Any, *, parallel: bool = False) -> Any:
    """Where nothing can be written each start compiles anew."""
    options = {"nogil": True, "fastmath": FAST, "error_model": "numpy", "parallel": parallel}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:
        return njit(**options)(function)


def _folder(here: Path) -> Path:
    """Beside the sources, or in the user's cache."""
    sources = b"".join(source.read_bytes() for source in sorted(here.glob("*.py")))
    place = here / "__pycache__" if os.access(here, os.W_OK) else Path("~/.cache/kvrelay").expanduser()
    return place / f"compiled-{hashlib.sha256(sources).hexdigest()[:16]}"


if not numba.config.CACHE_DIR:  # else NUMBA_CACHE_DIR says where
    numba.config.CACHE_DIR = str(_folder(Path(__file__).parent))
