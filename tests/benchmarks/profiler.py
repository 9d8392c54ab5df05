"""Where time goes, for a job and for a step: ``python -m tests.benchmarks.profiler``, for an idle machine of two cores.

A system of its own serves SmolLM2, and py-spy looks again and again at what the Python threads of its processes are doing. With
KVR_TEST_EVIDENCE the table is kept in that folder, as profile.txt.
"""

import asyncio
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from random import Random

import psutil
from tokenizers import Tokenizer

from api.pull import pull
from bench.client import Client, Server
from bench.lengths import lengths
from bench.measurement import Plan, Round, measure
from bench.prompts import Prompts
from bench.trace import Trace
from bench.workload import random_words
from pipeline.config import Config
from tests.acceptance.system import System, wait_for
from tests.benchmarks.samples import seconds_by_group
from tests.chaos.redis_server import RedisServer
from workers.versions import versions

PROMPT, OUTPUT, STREAMS = 128, 64, 4
FIRST_JOBS, UNDISTURBED_JOBS, JOBS = 2 * STREAMS, 40, 100  # the last ones take more than a minute
SAMPLES_A_SECOND = 25  # of each process; each stops it for some milliseconds, and 100 took a quarter of the speed
SAME_STEP = 0.010  # seconds between two tokens of one step at the client, at most


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """seconds: sampled, by group. cpu: seconds of all its threads."""

    name: str
    seconds: Counter[str]
    cpu: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    jobs: int
    tokens: int
    steps: int
    took: float

    @classmethod
    def of(cls, traces: Sequence[Trace]) -> "Work":
        """A step's tokens reach the client together. Each answer's first token is of no step."""
        stepped = sorted(at for trace in traces for at in trace.chunks[1:])
        return cls(
            jobs=len(traces),
            tokens=sum(trace.tokens for trace in traces),
            steps=1 + sum(later - earlier > SAME_STEP for earlier, later in pairwise(stepped)),
            took=max(trace.end for trace in traces) - min(trace.sent for trace in traces),
        )

    def row(self, name: str, seconds: float, share: float | None = None) -> str:
        per = (1000 * seconds / count for count in (self.jobs, self.tokens, self.steps))
        figures = "".join(f"{figure:10.3f}" for figure in per)
        return f"{name:18}{figures}" + (f"{share:9.1%}" if share is not None else "")


def run(system: System, tokenizer: Tokenizer, jobs: int) -> Work:
    client = Client(
        Server(name="kvrelay", url=f"http://127.0.0.1:{system.port}"), "completions", timeout=60, ignore_eos=True
    )
    words = Prompts(tokenizer, Random(f"words {jobs}"), special=True, shared=0)
    drawn = lengths("--prompt", str(PROMPT)), lengths("--output", str(OUTPUT))
    workload = random_words(words, *drawn, Random("lengths"), PROMPT + OUTPUT)
    taken: list[Round] = []
    plan = Plan(workload=workload, requests=jobs, warmup=0, streams=STREAMS, rate=0, rounds=1, seed=1)
    asyncio.run(measure(plan, [client], allow_failures=False, over=lambda _client, round: taken.append(round)))
    assert not [trace.said for trace in taken[0].traces if trace.failure]
    return Work.of(taken[0].traces)


@contextmanager
def sampling(pids: dict[str, int], folder: Path) -> Iterator[None]:
    """Leaves <name>.raw in the folder."""
    spies = [spy(pid, folder / name) for name, pid in pids.items()]
    try:
        for name in pids:
            wait_for(lambda name=name: "Sampling" in (folder / f"{name}.log").read_text(), "py-spy samples")
        yield
    finally:
        for process in spies:
            process.send_signal(signal.SIGINT)
        for process in spies:
            process.wait(30)


def spy(pid: int, path: Path) -> "subprocess.Popen[bytes]":
    options = {"pid": pid, "rate": SAMPLES_A_SECOND, "format": "raw", "output": path.with_suffix(".raw")}
    command = [Path(sys.executable).with_name("py-spy"), "record"]
    with path.with_suffix(".log").open("wb") as log:
        words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
        return subprocess.Popen([*command, *words], stdout=log, stderr=log)


def profiled(system: System, redis_pid: int, folder: Path, tokenizer: Tokenizer) -> tuple[Work, Work, list[Process]]:
    api, prefill, decode = system.processes
    (serving,) = (child for child in psutil.Process(api.pid).children() if "keeper" not in child.cmdline())
    pids = {"api": serving.pid, "prefill": prefill.pid, "decode": decode.pid}
    run(system, tokenizer, FIRST_JOBS)
    undisturbed = run(system, tokenizer, UNDISTURBED_JOBS)
    with sampling(pids, folder):
        before = cpu_seconds(pids | {"redis": redis_pid})
        work = run(system, tokenizer, JOBS)
        cpu = cpu_seconds(pids | {"redis": redis_pid}) - before
    counts = {name: seconds_by_group((folder / f"{name}.raw").read_text(), SAMPLES_A_SECOND) for name in pids}
    found = [Process(name=name, seconds=counts.get(name, Counter()), cpu=cpu[name]) for name in cpu]
    return undisturbed, work, found


def cpu_seconds(pids: dict[str, int]) -> Counter[str]:
    times = {name: psutil.Process(pid).cpu_times() for name, pid in pids.items()}
    return Counter({name: spent.user + spent.system for name, spent in times.items()})


def table(work: Work, processes: Sequence[Process]) -> Iterator[str]:
    yield f"{'milliseconds':18}" + "".join(f"{f'a {per}':>10}" for per in ("job", "token", "step")) + f"{'share':>9}"
    for process in processes:
        total = process.seconds.total()
        yield work.row(process.name, total) if total else process.name
        for name, seconds in process.seconds.most_common():
            yield work.row(f"  {name}", seconds, seconds / total)
        yield work.row("  (processor)", process.cpu)


def heading(undisturbed: Work, work: Work) -> Iterator[str]:
    installed = " ".join(f"{package} {version}" for package, version in versions().items())
    yield f"make profile, {datetime.now(UTC).date().isoformat()}, commit {commit()}"
    yield f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}; {installed}"
    yield f"SmolLM2-135M-Instruct, bfloat16; {STREAMS} streams, {work.jobs} jobs of {PROMPT} + {OUTPUT} tokens"
    spied, alone = (it.tokens / it.took for it in (work, undisturbed))
    yield f"{work.took:.1f} s, {spied:.1f} tokens/s under py-spy ({alone:.1f} without)"
    rows, milliseconds = (work.tokens - work.jobs) / work.steps, 1000 * work.took / work.steps
    yield f"{work.steps} steps of {rows:.1f} rows, one every {milliseconds:.1f} ms"


def commit() -> str:
    git = subprocess.run(["git", "describe", "--always", "--dirty", "--exclude=*"], capture_output=True, text=True)
    return git.stdout.strip() or "unknown"


def main() -> None:
    model = pull(Config())
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server = RedisServer(folder, fsync="")
        system = System(server.url, folder, model=model, served_name="profile", dtype="bfloat16")
        try:
            undisturbed, work, processes = profiled(system.start_all(), server.process.pid, folder, tokenizer)
        finally:
            system.close()
            server.close()
    text = "\n".join([*heading(undisturbed, work), "", *table(work, processes)])
    print(text)
    if kept := os.environ.get("KVR_TEST_EVIDENCE"):
        Path(kept).mkdir(parents=True, exist_ok=True)
        (Path(kept) / "profile.txt").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
