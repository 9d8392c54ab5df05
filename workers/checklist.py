"""What was inferred without a chip, put to the chip: PASS or FAIL, a line each. The checks are each device's own."""

import time
from collections.abc import Callable, Iterable, Sequence

from pipeline.errors import KVRelayError

#: What it claims, and what finds out: it answers a few words of detail, or raises.
Check = tuple[str, Callable[[], str]]


class Failed(KVRelayError):
    """A check came out otherwise than inferred."""


def run(checks: Iterable[Check]) -> int:
    """Prints a line for each check, as it ends; 1 if one failed."""
    failures = 0
    for name, check in checks:
        started = time.monotonic()
        try:
            verdict, detail = "PASS", check()
        except Exception as error:  # a vendor's software may raise anything, and the next check still says something
            verdict, detail = "FAIL", f"{type(error).__name__}: {error}"
            failures += 1
        print(f"{verdict}  {name}: {' '.join(detail.split())} ({time.monotonic() - started:.1f} s)", flush=True)
    return int(failures > 0)


def unchanged(drift: Sequence[str], count: int) -> str:
    """The check of a vendor's calls. drift: what is otherwise than recorded; count: of all that are recorded."""
    if drift:
        raise Failed("; ".join(drift))
    return f"{count} names"
