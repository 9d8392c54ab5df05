"""A picture of a measurement: how TTFT and ITL are distributed, and how tokens came over time."""

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from bench.errors import Unfit
from bench.report import Measured

SUFFIXES = (".svg", ".png")
LEAST = 0.1  # milliseconds; a logarithm has no place for the gap of two pieces that came in one packet


def check(path: Path) -> None:
    """Before anything is measured. Raises Unfit."""
    if path.suffix not in SUFFIXES:
        raise Unfit("--plot", path, f"must end in {' or '.join(SUFFIXES)}")
    _figure()


def draw(path: Path, servers: Sequence[Measured]) -> None:
    """Raises Unfit."""
    figure = _figure()(figsize=(12, 3.6), layout="constrained")
    ttft, itl, flow = figure.subplots(1, 3)
    for measured in servers:
        whole = [trace for taken in measured.rounds for trace in taken.traces if not trace.failure]
        _distribution(ttft, measured, [trace.ttft for trace in whole])
        _distribution(itl, measured, [gap for trace in whole for gap in trace.gaps])
        _flow(flow, measured)
    _name(ttft, "TTFT", "milliseconds", "share of answers")
    _name(itl, "ITL", "milliseconds", "share of gaps")
    _name(flow, "tokens in the last round", "seconds", "tokens")
    ttft.legend()
    try:
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    except OSError as error:
        raise Unfit("--plot", path, f"cannot be written ({error.strerror})") from None


def _figure() -> Callable[..., Any]:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise Unfit("--plot", "", "needs matplotlib: pip install 'kvrelay[bench]'") from None
    return Figure


def _distribution(axes: Any, measured: Measured, seconds: Iterable[float]) -> None:
    values = [max(LEAST, 1000 * value) for value in seconds]
    if values:
        axes.ecdf(values, label=measured.server.name)
        axes.set_xscale("log")


def _flow(axes: Any, measured: Measured) -> None:
    """Tokens of a chunk count when it came. A grey line is an intruder that comes."""
    taken = measured.rounds[-1]
    times = sorted(
        (at - taken.started, trace.tokens / len(trace.chunks)) for trace in taken.traces for at in trace.chunks
    )
    axes.plot([at for at, _ in times], list(accumulate(tokens for _, tokens in times)), label=measured.server.name)
    for trace in taken.intruders:
        axes.axvline(trace.due - taken.started, color="0.8", linewidth=0.8, zorder=0)


def _name(axes: Any, title: str, across: str, up: str) -> None:
    axes.set(title=title, xlabel=across, ylabel=up)
    axes.grid(alpha=0.3)
