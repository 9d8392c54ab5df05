"""A picture of a measurement: how TTFT and ITL are distributed, and how tokens came over time."""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.errors import Unfit
from bench.report import Measured
from bench.trace import Trace

SUFFIXES = (".svg", ".png")
BINS = 60


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
        _cumulate(ttft, measured, [trace.ttft for trace in whole])
        _cumulate(itl, measured, [gap for trace in whole for gap in trace.gaps])
        _flow(flow, measured)
    _name(ttft, "TTFT", "milliseconds", "share of answers")
    _name(itl, "ITL", "milliseconds", "share of gaps")
    _name(flow, "last round", "seconds", "tokens/s")
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


def _cumulate(axes: Any, measured: Measured, seconds: Iterable[float]) -> None:
    values = np.sort(np.fromiter(seconds, float)) * 1000
    if len(values):
        axes.ecdf(values, label=measured.server.name)


def _flow(axes: Any, measured: Measured) -> None:
    """Tokens of a chunk count when it came; grey lines are intruders."""
    taken = measured.rounds[-1]
    times = [(at - taken.started, trace.tokens / len(trace.chunks)) for trace in taken.traces for at in trace.chunks]
    if not times:
        return
    at, tokens = np.array(times).T
    counts, edges = np.histogram(at, BINS, (0, at.max()), weights=tokens)
    axes.stairs(counts / np.diff(edges), edges, label=measured.server.name)
    _mark(axes, taken.intruders, taken.started)


def _mark(axes: Any, intruders: Iterable[Trace], started: float) -> None:
    for trace in intruders:
        axes.axvline(trace.due - started, color="0.8", linewidth=0.8, zorder=0)


def _name(axes: Any, title: str, across: str, up: str) -> None:
    axes.set(title=title, xlabel=across, ylabel=up)
    axes.grid(alpha=0.3)
