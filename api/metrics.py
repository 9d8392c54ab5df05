"""``/metrics``: what Prometheus scrapes. All of it is read from Redis at each scrape, so every API process tells the same.

Names are vLLM's where it has one for the thing, with its label `model_name`; the rest is `kvrelay:`. The table of
docs/metrics.md is the output of ``python -m api.metrics``, and a test compares them.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from falcon.asgi import Request, Response
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from api.front import Front
from api.operation import Operation
from brokers.metrics import Counters, Reading, Waits
from pipeline.job import Priority
from pipeline.metrics import BOUNDS, histogram
from pipeline.states import TERMINAL, Status

Values = Mapping[tuple[str, ...], float]  # by the values of the labels

PRIORITIES = ("handed_back", *(priority.name.lower() for priority in Priority))  # of the queues, 0 first
ROLES = ("prefill", "decode")
STATES = ("alive", "stopped", "wedged")


class Metrics:
    def __init__(self, front: Front) -> None:
        self._counters = Counters(front.store)
        self._model = front.config.name

    @Operation(answers={200: "text/plain"})
    async def on_get(self, _req: Request, resp: Response) -> None:
        """For Prometheus, of the whole system."""
        registry = CollectorRegistry()
        registry.register(Scrape(await self._counters.read(), self._model))
        resp.content_type = CONTENT_TYPE_PLAIN_0_0_4  # which every Prometheus reads
        resp.data = generate_latest(registry)


class Scrape(Collector):
    def __init__(self, reading: Reading, model: str) -> None:
        self._reading = reading
        self._model = model

    def collect(self) -> Iterator[Metric]:
        for family in FAMILIES:
            yield family.shown(self._reading, self._model)


@dataclass(frozen=True, slots=True)
class Number:
    """A counter if its name ends as theirs do, else a gauge."""

    name: str
    text: str
    values: Callable[[Reading], Values]
    labels: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        return "counter" if self.name.endswith("_total") else "gauge"

    def shown(self, reading: Reading, model: str) -> Metric:
        make = CounterMetricFamily if self.kind == "counter" else GaugeMetricFamily
        family = make(self.name, self.text, labels=["model_name", *self.labels])
        for labels, value in self.values(reading).items():
            family.add_metric([model, *labels], value)
        return family


@dataclass(frozen=True, slots=True)
class Timing:
    """A histogram of seconds. field: its name in the hash of counters."""

    name: str
    text: str
    field: str
    labels: tuple[str, ...] = ()
    kind: str = "histogram"

    def shown(self, reading: Reading, model: str) -> Metric:
        family = HistogramMetricFamily(self.name, self.text, labels=["model_name"])
        below, seconds = histogram(reading.counts, self.field)
        limits = [*(str(float(bound)) for bound in BOUNDS), "+Inf"]
        family.add_metric([model], list(zip(limits, below, strict=True)), seconds)
        return family


# Where values come from


def one(value: Callable[[Reading], float]) -> Callable[[Reading], Values]:
    return lambda reading: {(): value(reading)}


def counted(field: str) -> Callable[[Reading], Values]:
    return one(lambda reading: reading.counts.get(field, 0))


def counted_by(prefix: str, known: Iterable[str], label: Callable[[str], str] = str) -> Callable[[Reading], Values]:
    """Of fields `<prefix>:<rest>`; label: its value for a rest. The known ones are there from the start: a rate needs a zero
    to begin with."""

    def values(reading: Reading) -> Values:
        found = Counter(dict.fromkeys(known, 0))
        for field, count in reading.counts.items():
            if field.startswith(f"{prefix}:"):
                found[label(field.removeprefix(f"{prefix}:"))] += count
        return {(name,): count for name, count in found.items()}

    return values


def status(end: str) -> str:
    return end.partition(":")[0]


def finished_reason(end: str) -> str:
    """In vLLM's words: abort is what somebody ended, or time; error what failed."""
    reason = end.partition(":")[2]
    return reason or ("error" if end == Status.FAILED else "abort")


def by_priority(value: Callable[[Waits], float]) -> Callable[[Reading], Values]:
    return lambda reading: {
        (priority,): value(queue) for priority, queue in zip(PRIORITIES, reading.queues, strict=True)
    }


def of_living(reading: Reading, role: str, fact: str) -> int:
    """A fact of workers, added up."""
    alive = (role, "alive")
    return sum(int(w.get(fact, 0)) for w in reading.workers if (w.get("role"), w.get("state")) == alive)


def by_role(fact: str) -> Callable[[Reading], Values]:
    return lambda reading: {(role,): of_living(reading, role, fact) for role in ROLES}


def by_role_and_state(reading: Reading) -> Values:
    found: Counter[tuple[str, ...]] = Counter({(role, state): 0 for role in ROLES for state in STATES})
    found.update((worker["role"], worker["state"]) for worker in reading.workers if {"role", "state"} <= worker.keys())
    return found


FAMILIES: tuple[Number | Timing, ...] = (
    Number(
        "vllm:num_requests_running",
        "Jobs that a worker holds, in prefill or decode.",
        one(lambda reading: sum(queue.held for queue in reading.queues)),
    ),
    Number(
        "vllm:num_requests_waiting",
        "Jobs that wait for a worker.",
        one(lambda reading: sum(queue.waiting for queue in reading.queues)),
    ),
    Timing(
        "vllm:time_to_first_token_seconds",
        "From the submission of a job to its first token in the log.",
        "ttft",
    ),
    Timing(
        "vllm:inter_token_latency_seconds",
        "Between two tokens of a job, as its decode worker draws them; the first time from when it took the job over.",
        "itl",
    ),
    Timing(
        "vllm:e2e_request_latency_seconds",
        "From the submission of a job to its end, of those that finished.",
        "e2e",
    ),
    Timing(
        "vllm:request_queue_time_seconds",
        "How long a job waited in line, each time that it did, whether a worker took it then or it ended.",
        "queue",
    ),
    Number(
        "vllm:prompt_tokens_total",
        "Tokens of prompts, counted with the first token of the answer, however often they were computed.",
        counted("prompt_tokens"),
    ),
    Number("vllm:generation_tokens_total", "Tokens of answers, in the log.", counted("generation_tokens")),
    Number(
        "vllm:request_success_total",
        "Jobs that ended: stop, length, abort (cancelled or expired), error (given up).",
        counted_by("ended", ("stop", "length", "abort", "error"), finished_reason),
        ("finished_reason",),
    ),
    Number(
        "kvrelay:jobs_ended_total",
        "Jobs that ended: finished, cancelled, expired, or failed, which makes a dead letter.",
        counted_by("ended", sorted(TERMINAL), status),
        ("status",),
    ),
    Number("kvrelay:queue_depth", "Jobs that wait.", by_priority(lambda queue: queue.waiting), ("priority",)),
    Number(
        "kvrelay:queue_oldest_age_seconds",
        "How long the job that waits longest has waited, 0 if none does.",
        by_priority(lambda queue: queue.oldest_seconds),
        ("priority",),
    ),
    Number("kvrelay:attempts_total", "Leases: how often a prefill worker took a job.", counted("attempts")),
    Number(
        "kvrelay:requeues_total",
        "Jobs back in line: lease_ran_out, released after a failure, refunded (the attempt does not count), "
        "by_hand, mended.",
        counted_by("requeues", ("lease_ran_out", "released", "refunded", "by_hand", "mended")),
        ("cause",),
    ),
    Number(
        "kvrelay:cancels_total",
        "Cancels that took effect: at once for a job that waited, else when its holder had undone its side.",
        counted_by("cancels", ("queued", "prefill", "transfer", "decode")),
        ("phase",),
    ),
    Number("kvrelay:dead_letters", "Jobs that were given up and are kept.", one(lambda reading: reading.dead)),
    Number("kvrelay:kv_transfer_bytes_total", "Bytes of KV caches sent.", counted("transfer_bytes")),
    Timing(
        "kvrelay:kv_transfer_seconds",
        "What a transfer took longer than the prefill that it overlaps, till the decode worker had the job.",
        "transfer",
    ),
    Number(
        "kvrelay:kv_transfer_failures_total",
        "Transfers that came to nothing: void (the place was gone, or nobody answered), failed (refused, broken off, silent).",
        counted_by("transfer_failures", ("void", "failed")),
        ("cause",),
    ),
    Number(
        "kvrelay:local_fallbacks_total",
        "Prompts that a decode worker had to prefill itself (KVR_FALLBACK).",
        counted("local_fallbacks"),
    ),
    Number("kvrelay:credits", "KV caches that decode workers offer to take now.", one(lambda reading: reading.credits)),
    Number(
        "kvrelay:places",
        "KV caches that living workers can hold, in a slot or waiting for one.",
        one(lambda reading: of_living(reading, "decode", "capacity")),
    ),
    Number("kvrelay:slots", "Jobs that living workers compute at a time.", by_role("slots"), ("role",)),
    Number(
        "kvrelay:jobs_in_hand",
        "Jobs of living workers; in decode, those whose KV cache is still on its way, too.",
        by_role("busy"),
        ("role",),
    ),
    Number(
        "kvrelay:workers",
        "Workers: alive, stopped (no sign of life), wedged (in a device call for too long).",
        by_role_and_state,
        ("role", "state"),
    ),
)


def table() -> str:
    """FAMILIES, as docs/metrics.md has them."""
    lines = ["| name | type | labels | what |", "|---|---|---|---|"]
    for family in FAMILIES:
        labels = ", ".join(f"`{label}`" for label in family.labels)
        lines.append(f"| `{family.name}` | {family.kind} | {labels} | {family.text} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
