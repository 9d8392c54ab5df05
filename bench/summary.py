"""From traces to figures: what is counted, and how each figure is defined. docs/bench.md says it to people."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, quantiles

from bench.errors import Unfit
from bench.trace import Trace

#: Name, and what of an answer it is. ITL has many values for each answer, the others one.
LATENCIES = ("ttft", "itl", "tpot", "e2e")
PERCENTILES = (50, 90, 95, 99)


@dataclass(frozen=True, slots=True)
class Spread:
    """In milliseconds. count: values that it is of."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> "Spread | None":
        """None, if there are no values."""
        if not seconds:
            return None
        values = [1000 * value for value in seconds]
        hundredths = quantiles(values * 2 if len(values) == 1 else values, n=100, method="inclusive")
        percentiles = (hundredths[percent - 1] for percent in PERCENTILES)
        return cls(len(values), *(round(value, 3) for value in (fmean(values), *percentiles, max(values))))


@dataclass(frozen=True, slots=True)
class Slo:
    """What each answer must keep to, in seconds. itl: its longest pause."""

    bounds: Mapping[str, float]

    @classmethod
    def parse(cls, text: str) -> "Slo":
        """Of `ttft=500ms,itl=100ms`; '' is none. Raises Unfit."""
        bounds = {}
        for part in filter(None, text.split(",")):
            name, _, value = part.strip().partition("=")
            try:
                bounds[name] = float(value.removesuffix("ms")) / 1000
            except ValueError:
                name = ""
            if name not in LATENCIES:
                raise Unfit(
                    "--slo", text, "must be bounds in milliseconds of ttft, itl, tpot or e2e: ttft=500ms,itl=100ms"
                )
        return cls(bounds)

    def __bool__(self) -> bool:
        return bool(self.bounds)

    def kept(self, trace: Trace) -> bool:
        took = {"ttft": trace.ttft, "itl": max(trace.gaps, default=0.0), "tpot": trace.tpot or 0.0, "e2e": trace.e2e}
        return not trace.failure and all(took[name] <= bound for name, bound in self.bounds.items())

    def __str__(self) -> str:
        return ", ".join(f"{name} ≤ {bound * 1000:g} ms" for name, bound in self.bounds.items())


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Of the answers that came whole, but for `requests` and `failures`.

    seconds: from the first request's due time to the last end. late: by how many seconds a request was sent late, at most.
    """

    requests: int
    failures: dict[str, int]
    said: dict[str, str]  # an example for each kind of failure
    short: int  # answers that ended by themselves
    seconds: float
    prompt_tokens: int
    output_tokens: int
    chunks: int
    ttft: Spread | None
    itl: Spread | None
    tpot: Spread | None
    e2e: Spread | None
    good: int | None  # kept to the objectives; None: there are none
    late: float

    @classmethod
    def of(cls, traces: Sequence[Trace], slo: Slo) -> "Summary":
        whole = [trace for trace in traces if not trace.failure]
        failed = [trace for trace in traces if trace.failure]
        return cls(
            requests=len(traces),
            failures=dict(Counter(trace.failure for trace in failed)),
            said={trace.failure: trace.said for trace in failed},
            short=sum(trace.tokens < trace.asked for trace in whole),
            seconds=_duration(traces),
            prompt_tokens=sum(trace.prompt_tokens for trace in whole),
            output_tokens=sum(trace.tokens for trace in whole),
            chunks=sum(len(trace.chunks) for trace in whole),
            ttft=Spread.of([trace.ttft for trace in whole]),
            itl=Spread.of([gap for trace in whole for gap in trace.gaps]),
            tpot=Spread.of([trace.tpot for trace in whole if trace.tpot is not None]),
            e2e=Spread.of([trace.e2e for trace in whole]),
            good=sum(map(slo.kept, traces)) if slo else None,
            late=max((trace.sent - trace.due for trace in traces), default=0.0),
        )

    def rates(self) -> dict[str, float]:
        """A second, and of all requests, failed ones too."""
        whole = self.requests - sum(self.failures.values())
        rates = {
            "output tokens/s": self.output_tokens / self.seconds,
            "total tokens/s": (self.prompt_tokens + self.output_tokens) / self.seconds,
            "requests/s": whole / self.seconds,
        }
        if self.good is not None:
            rates |= {"goodput requests/s": self.good / self.seconds, "goodput share": self.good / self.requests}
        return {name: round(rate, 4) for name, rate in rates.items()}

    def figures(self) -> dict[str, float]:
        """All that can be compared, by name."""
        figures = self.rates()
        for name in LATENCIES:
            spread: Spread | None = getattr(self, name)
            if spread is not None:
                figures |= {f"{shown(name)} {part} ms": getattr(spread, part) for part in ("p50", "p99", "max")}
        return figures


def shown(latency: str) -> str:
    return latency if latency == "e2e" else latency.upper()


def _duration(traces: Iterable[Trace]) -> float:
    """At least a microsecond, so that it can be divided by."""
    due, end = zip(*((trace.due, trace.end) for trace in traces), strict=True)
    return max(1e-6, float(max(end) - min(due)))


def over_rounds(rounds: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of each figure that every round has: the median, and of a maximum the maximum."""
    names = [name for name in rounds[0] if all(name in figures for figures in rounds)]
    return {name: (max if " max " in name else median)([figures[name] for figures in rounds]) for name in names}
