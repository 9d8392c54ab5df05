"""Prefill and decode on different chips, against the same chips that do both: sim devices at the speed of RNGD and ATOM.

The figures come from where docs/bench.md says, and so does what this emulation leaves out."""

import asyncio
import json
import os
import secrets
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from time import perf_counter
from typing import Any

import pytest
from matplotlib.figure import Figure
from tokenizers import Tokenizer

from bench.arrivals import closed_loop, open_loop, poisson
from bench.client import Client, Server
from bench.prompts import Prompts
from bench.report import machine
from bench.summary import Slo, Summary
from bench.trace import Trace
from bench.workload import Request
from pipeline.model import SIM
from tests.acceptance.system import System

SLOTS = 16
SECONDS, LEAST = 9, 20  # of arrivals at each point; or so many requests
STALL, TRIES = 50, 2  # milliseconds that a point may be disturbed by; how often it is measured
EVEN = 0.1  # shares of good answers that are no further apart are even


@dataclass(frozen=True, slots=True, kw_only=True)
class Chip:
    """One card, with Llama 3.1 8B in 16 bits. A decode step takes step_ms + rows × row_ms."""

    name: str
    prefill_us: float  # a token
    chunk: int  # tokens of a device call
    step_ms: float
    row_ms: float

    def seconds(self, prompt: int, output: int) -> tuple[float, float]:
        """Of one request: prefill, and its share of steps with every slot in use."""
        return prompt * self.prefill_us / 1e6, output * (self.step_ms / SLOTS + self.row_ms) / 1e3


RNGD = Chip(name="RNGD", prefill_us=130, chunk=512, step_ms=17.4, row_ms=0.5)
ATOM = Chip(name="ATOM", prefill_us=325, chunk=128, step_ms=18.3, row_ms=0.75)
#: Microseconds that a prompt token's KV, 128 KiB, takes into a decode chip: a quarter of PCIe 5.0 x16
INSERT_US = 8.0

#: Of MLPerf Inference for Llama 3.1 8B
SLOS = {"interactive": Slo.parse("ttft=500ms,tpot=30ms"), "conversational": Slo.parse("ttft=2000ms,tpot=100ms")}


@dataclass(frozen=True, slots=True)
class Way:
    """Two chips: each with both halves of its share of the requests, or the first for prefill and the second for decode."""

    chips: tuple[Chip, Chip]
    apart: bool

    def __str__(self) -> str:
        return ("{} → {}" if self.apart else "{} + {}").format(*(chip.name for chip in self.chips))

    def capacities(self, prompt: int, output: int) -> list[float]:
        """Requests a second of each system, as the figures have it."""
        if not self.apart:
            return [1 / sum(chip.seconds(prompt, output)) for chip in self.chips]
        prefill, decode = (chip.seconds(prompt, output)[half] for half, chip in enumerate(self.chips))
        return [1 / max(prefill, decode + prompt * INSERT_US / 1e6)]


@dataclass(frozen=True, slots=True)
class Point:
    """load: of what the two different chips can do together."""

    prompt: int
    output: int
    load: float

    @property
    def rate(self) -> float:
        return self.load * sum(TOGETHER.capacities(self.prompt, self.output))


TOGETHER, APART = Way((RNGD, ATOM), apart=False), Way((RNGD, ATOM), apart=True)
PROMPTS, OUTPUTS, LOADS = (256, 1024, 3072), (16, 64, 192), (0.4, 0.8)
GRID = [Point(prompt, output, load) for output in OUTPUTS for prompt in PROMPTS for load in LOADS]
SOME = [Point(256, 192, 0.8), Point(1024, 64, 0.8), Point(3072, 16, 0.8)]
WAYS = {
    TOGETHER: GRID,
    APART: GRID,
    Way((ATOM, RNGD), apart=True): SOME,
    Way((RNGD, RNGD), apart=False): SOME,
    Way((RNGD, RNGD), apart=True): SOME,
}


@contextmanager
def systems(redis_url: str, folder: Path, way: Way) -> Iterator[list[System]]:
    """Of processes of their own each. Both workers of a chip with both halves share it, call by call."""
    pairs = [way.chips] if way.apart else [(chip, chip) for chip in way.chips]
    with ExitStack() as stack:
        started = []
        for number, (prefill, decode) in enumerate(pairs):
            name = f"pd-{secrets.token_hex(4)}"
            place = folder / f"{name}-{number}"
            place.mkdir()
            system = System(
                redis_url,
                place,
                **{"model": "sim", "prefill_device": "sim", "decode_device": "sim", "served_name": name},
                **{"slots": SLOTS, "locks": place, "sim_chip": "" if way.apart else "shared"},
            )
            stack.callback(system.close)
            system.start("api")
            system.start("prefill", chunk=prefill.chunk, sim_prefill_us=prefill.prefill_us)
            insert = INSERT_US if way.apart else 0
            system.start("decode", sim_step_ms=decode.step_ms, sim_row_ms=decode.row_ms, sim_insert_us=insert)
            started.append(system)
        for system in started:
            system.wait_ready()
        yield started


def requests(point: Point, count: int) -> list[Request]:
    """The same for every way."""
    words = Prompts(Tokenizer.from_file(str(SIM / "tokenizer.json")), Random(str(point)), special=True)
    return [
        Request(prompt=words.of(point.prompt), prompt_tokens=point.prompt, output_tokens=point.output)
        for _ in range(count)
    ]


def by_shares(weights: Sequence[float]) -> Iterator[int]:
    """Whose turn it is, so that each comes as often as its weight says, and as evenly as that can be."""
    owed = [0.0] * len(weights)
    while True:
        owed = [debt + weight / sum(weights) for debt, weight in zip(owed, weights, strict=True)]
        chosen = owed.index(max(owed))
        owed[chosen] -= 1
        yield chosen


async def measure(urls: Sequence[str], way: Way, points: Sequence[Point]) -> dict[Point, dict[str, float]]:
    async with AsyncExitStack() as stack:
        clients = []
        for url in urls:
            client = Client(Server(name=url, url=url), "completions", timeout=120, ignore_eos=True)
            clients.append(await stack.enter_async_context(client))
            await client.enter()
            await closed_loop(client.ask, requests(Point(256, 16, 0), 4), 2)
        return {point: await at(point, way, clients) for point in points}


async def at(point: Point, way: Way, clients: Sequence[Client]) -> dict[str, float]:
    """Once more if the machine had something else to do; then what was disturbed less."""
    asked = requests(point, max(LEAST, round(point.rate * SECONDS)))
    times = poisson(point.rate, len(asked), Random(f"{point} arrivals"))
    turns = by_shares(way.capacities(point.prompt, point.output))
    whose = {id(request): clients[next(turns)] for request in asked}
    tries = []
    for _ in range(TRIES):
        async with stalls() as seen:
            traces = await open_loop(lambda request, due: whose[id(request)].ask(request, due), asked, times)
        tries.append(figures(traces) | {"stall": 1000 * max(seen)})
        if tries[-1]["stall"] < STALL:
            break
    return min(tries, key=lambda it: it["stall"])


@asynccontextmanager
async def stalls() -> AsyncIterator[list[float]]:
    """By how many seconds this process came too late: so did the workers, then."""
    seen = [0.0]

    async def watch() -> None:
        while True:
            before = perf_counter()
            await asyncio.sleep(0.01)
            seen.append(perf_counter() - before - 0.01)

    watching = asyncio.create_task(watch())
    try:
        yield seen
    finally:
        watching.cancel()


def figures(traces: Sequence[Trace]) -> dict[str, float]:
    """Milliseconds, and shares of answers."""
    summary = Summary.of(traces, Slo({}))
    assert not summary.failures, summary.said
    assert summary.ttft
    assert summary.itl
    good = {name: sum(map(slo.kept, traces)) / len(traces) for name, slo in SLOS.items()}
    return {
        "requests": summary.requests,
        "ttft p50": summary.ttft.p50,
        "ttft p99": summary.ttft.p99,
        "itl p50": summary.itl.p50,
        "itl p99": summary.itl.p99,
        "pause": summary.itl.max,
        **good,
    }


def winner(found: Mapping[Way, Mapping[str, float]], slo: str) -> str:
    """Between the two that use the same two different chips."""
    together, apart = found[TOGETHER][slo], found[APART][slo]
    if abs(together - apart) <= EVEN:
        return "even"
    return "PD" if apart > together else "together"


def rows(point: Point, found: Mapping[Way, Mapping[str, float]]) -> Iterator[str]:
    """Of a table in Markdown. What is of the point stands in its first row only."""
    what = f"{point.prompt} → {point.output}, {point.rate:.2f}/s ({point.load:.0%})"
    verdict = " / ".join(winner(found, slo) for slo in SLOS)
    for way, it in found.items():
        spreads = " | ".join(f"{it[f'{name} p50']:.0f} / {it[f'{name} p99']:.0f}" for name in ("ttft", "itl"))
        good = " / ".join(f"{it[slo]:.0%}" for slo in SLOS)
        yield f"| {what} | {way} | {spreads} | {it['pause']:.0f} | {good} | {verdict} |"
        what = verdict = ""


def draw(path: Path, results: Mapping[Point, Mapping[Way, Mapping[str, float]]]) -> None:
    figure = Figure(figsize=(16, 7.5), layout="constrained")
    columns = [(output, load) for output in OUTPUTS for load in LOADS]
    what = {"interactive": "good answers (interactive)", "ttft p99": "TTFT p99, ms", "pause": "longest pause, ms"}
    axes = figure.subplots(len(what), len(columns), sharex=True, sharey="row")
    for row, (name, title) in enumerate(what.items()):
        axes[row][0].set_ylabel(title)
        for axis, (output, load) in zip(axes[row], columns, strict=True):
            for way in (TOGETHER, APART):
                values = [results[Point(prompt, output, load)][way][name] for prompt in PROMPTS]
                axis.plot(PROMPTS, values, marker="o", label=str(way))
            axis.set_xscale("log", base=2)
            axis.set_xticks(PROMPTS, [str(prompt) for prompt in PROMPTS])
            axis.grid(alpha=0.3)
            if name != "interactive":
                axis.set_yscale("log")
            if row == 0:
                axis.set_title(f"{output} out, load {load:.0%}")
    for axis in axes[-1]:
        axis.set_xlabel("prompt tokens")
    axes[0][0].legend()
    figure.suptitle("Emulated: one RNGD and one ATOM card, together (+) and as prefill → decode")
    figure.savefig(path, metadata={"Date": None})


def shown(results: Mapping[Point, Mapping[Way, Mapping[str, float]]]) -> dict[str, Any]:
    points = [
        {**asdict(point), "rate": point.rate, "ways": {str(way): it for way, it in found.items()}}
        for point, found in results.items()
    ]
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "emulated": True,
        "machine": machine(),
        "chips": [asdict(chip) for chip in (RNGD, ATOM)],
        "slots": SLOTS,
        "insert_us": INSERT_US,
        "slos": {name: str(slo) for name, slo in SLOS.items()},
        "points": points,
    }


@pytest.mark.benchmark
@pytest.mark.timeout(1200)
def test_pd_against_the_same_chips_together(redis_url: str, tmp_path: Path) -> None:
    results: dict[Point, dict[Way, dict[str, float]]] = {point: {} for point in GRID}
    for way, points in WAYS.items():
        with systems(redis_url, tmp_path, way) as started:
            urls = [f"http://127.0.0.1:{system.port}" for system in started]
            for point, it in asyncio.run(measure(urls, way, points)).items():
                results[point][way] = it
    print("\n| prompt → output, rate (load) | chips | TTFT p50 / p99 | ITL p50 / p99 | longest pause |", end="")
    print(f" good: {' / '.join(SLOS)} | better |\n|---|---|---|---|---|---|---|")
    for point, found in results.items():
        print("\n".join(rows(point, found)))
    folder = Path(os.environ.get("KVR_TEST_EVIDENCE") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "pd.json").write_text(json.dumps(shown(results), indent=1) + "\n", encoding="utf-8")
    draw(folder / "pd.svg", results)
    worst = max(it["stall"] for found in results.values() for it in found.values())
    print(f"disturbed by {worst:.0f} ms at most; pd.json and pd.svg are in {folder}")
