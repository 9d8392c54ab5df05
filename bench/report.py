"""What a measurement found: as a table for people, and as JSON for programs."""

import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from bench.client import Client, Server
from bench.measurement import Round
from bench.summary import LATENCIES, Slo, Spread, Summary, over_rounds, shown
from bench.trace import Trace

WIDTH = 12


@dataclass(slots=True, kw_only=True)
class Measured:
    """One server. summaries: of each round; intruders': None where there were none."""

    server: Server
    model: str
    rounds: list[Round] = field(default_factory=list)
    summaries: list[Summary] = field(default_factory=list)
    intruders: list[Summary | None] = field(default_factory=list)

    def add(self, taken: Round, slo: Slo) -> None:
        self.rounds.append(taken)
        self.summaries.append(Summary.of(taken.traces, slo))
        self.intruders.append(Summary.of(taken.intruders, slo) if taken.intruders else None)

    @property
    def failed(self) -> int:
        return sum(sum(summary.failures.values()) for summary in [*self.summaries, *self.intruders] if summary)

    def failures(self) -> list[str]:
        return [line for summary in [*self.summaries, *self.intruders] if summary for line in _failures(summary)]

    def figures(self) -> dict[str, float]:
        """Over all rounds."""
        rounds = []
        for summary, intruders in zip(self.summaries, self.intruders, strict=True):
            longer = intruders.figures() if intruders else {}
            rounds.append(summary.figures() | {f"intruders' {k}": v for k, v in longer.items() if k.startswith("TTFT")})
        return over_rounds(rounds)


class Report:
    """parameters: as they were asked for, without secrets."""

    def __init__(self, parameters: Mapping[str, Any], slo: Slo) -> None:
        self._parameters = parameters
        self._slo = slo
        self._date = datetime.now(UTC)
        self.servers: dict[str, Measured] = {}

    def add(self, client: Client, taken: Round) -> Measured:
        name = client.server.name
        measured = self.servers.setdefault(name, Measured(server=client.server, model=client.model))
        measured.add(taken, self._slo)
        return measured

    @property
    def failed(self) -> int:
        return sum(measured.failed for measured in self.servers.values())

    # For people

    def round_lines(self, measured: Measured) -> list[str]:
        """Of the last round."""
        summary, intruders, taken = measured.summaries[-1], measured.intruders[-1], measured.rounds[-1]
        number = len(measured.rounds)
        lines = [
            f"{measured.server.name}, round {number}: {measured.model} at {measured.server.url}",
            *_spreads(summary),
        ]
        lines.append("   ".join(f"{name} {rate:.2f}" for name, rate in summary.rates().items()))
        if self._slo:
            lines.append(f"kept to {self._slo}: {summary.good} of {summary.requests}")
        lines += _remarks(summary, taken)
        if intruders:
            lines += [f"intruders: {intruders.requests}", *_spreads(intruders, ("ttft", "e2e")), *_failures(intruders)]
        return [*lines, ""]

    def comparison(self) -> list[str]:
        """Side by side, and each rival's figures as multiples of the first one's; [] for one round of one server."""
        servers = list(self.servers.values())
        rounds = len(servers[0].rounds)
        if len(servers) == 1 and rounds == 1:
            return []
        first, *rivals = ((measured.server.name, measured.figures()) for measured in servers)
        head = [first[0], *(word for name, _ in rivals for word in (name, f"÷ {first[0]}"))]
        columns = [max(WIDTH, len(word) + 2) for word in head]
        title = f"median of {rounds} rounds" if rounds > 1 else "side by side"
        lines = [f"{title:28}" + "".join(f"{word:>{width}}" for word, width in zip(head, columns, strict=True))]
        for figure, value in first[1].items():
            cells = [f"{value:.2f}"]
            for _, theirs in rivals:
                cells += _beside(theirs.get(figure), value)
            lines.append(f"{figure:28}" + "".join(f"{c:>{width}}" for c, width in zip(cells, columns, strict=True)))
        return lines

    # For programs

    def shown(self) -> dict[str, Any]:
        return {
            "date": self._date.isoformat(timespec="seconds"),
            "kvrelay": version("kvrelay"),
            "machine": machine(),
            "parameters": dict(self._parameters),
            "servers": [_shown(measured) for measured in self.servers.values()],
        }


def _spreads(summary: Summary, names: Sequence[str] = LATENCIES) -> list[str]:
    columns = ("mean", "p50", "p90", "p95", "p99", "max")
    lines = [f"{'milliseconds':14}" + "".join(f"{column:>10}" for column in columns)]
    for name in names:
        spread: Spread | None = getattr(summary, name)
        cells = [f"{getattr(spread, column):.1f}" if spread else "-" for column in columns]
        lines.append(f"{shown(name):14}" + "".join(f"{cell:>10}" for cell in cells))
    return lines


def _remarks(summary: Summary, taken: Round) -> list[str]:
    """What a reader of the figures must know."""
    lines = _failures(summary)
    if summary.short:
        lines.append(f"{summary.short} answers ended before the length that was asked for: compare with care")
    if summary.chunks and summary.output_tokens > 1.05 * summary.chunks:
        each = summary.output_tokens / summary.chunks
        lines.append(f"{each:.2f} tokens came together in a piece: ITL is between pieces, TPOT between tokens")
    lines.append(f"the client took {taken.cpu:.0%} of a core, and sent at most {summary.late * 1000:.1f} ms late")
    return lines


def _failures(summary: Summary) -> list[str]:
    return [
        f"failed: {count} of {summary.requests}: {kind}: {summary.said[kind]}"
        for kind, count in summary.failures.items()
    ]


def _beside(theirs: float | None, ours: float) -> tuple[str, str]:
    if theirs is None:
        return "-", "-"
    return f"{theirs:.2f}", f"{theirs / ours:.2f}" if ours else "-"


def _shown(measured: Measured) -> dict[str, Any]:
    rounds = []
    for taken, summary, intruders in zip(measured.rounds, measured.summaries, measured.intruders, strict=True):
        one = {**asdict(summary), **summary.rates(), "client_cpu": round(taken.cpu, 4)}
        if intruders:
            one["intruders"] = {**asdict(intruders), "answers": [_row(t, taken.started) for t in taken.intruders]}
        rounds.append({**one, "answers": [_row(trace, taken.started) for trace in taken.traces]})
    return {
        "name": measured.server.name,
        "url": measured.server.url,
        "model": measured.model,
        "extra": dict(measured.server.extra),
        "figures": measured.figures(),
        "rounds": rounds,
    }


def _row(trace: Trace, started: float) -> dict[str, Any]:
    """Of one request; times in seconds from the beginning of its round."""
    times = {"due": trace.due, "sent": trace.sent, "first": trace.first, "end": trace.end}
    return {
        **{name: round(at - started, 6) for name, at in times.items()},
        "longest_gap": round(max(trace.gaps, default=0.0), 6),
        "prompt_tokens": trace.prompt_tokens,
        "tokens": trace.tokens,
        "chunks": len(trace.chunks),
        "failure": trace.failure,
    }


def machine() -> dict[str, Any]:
    """What the client ran on, and so did most likely the servers of a benchmark on one machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"cpu": _cpu(), "cores": cores, "system": platform.platform(), "python": platform.python_version()}


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
