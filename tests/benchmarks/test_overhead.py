"""What the pipeline adds to its devices: sim devices take a known time, the rest of TTFT and ITL is queue, transfer, log and
HTTP."""

import asyncio
import secrets
from pathlib import Path
from random import Random

import pytest
from tokenizers import Tokenizer

from bench.client import Client, Server
from bench.lengths import lengths
from bench.measurement import Plan, Round, measure
from bench.prompts import Prompts
from bench.summary import Slo, Summary
from bench.workload import random_words
from pipeline.model import SIM
from tests.acceptance.system import System

PROMPT, OUTPUT = 128, 64  # tokens
PREFILL_US, STEP_MS = 50, 25  # a token, a step
#: streams → milliseconds, at most, of TTFT and of ITL
TARGETS = {1: (10, 1), 4: (10, 1), 16: (None, 4)}


def measured(system: System, streams: int) -> Summary:
    """Prompts differ, and come one after the other: with all at once, TTFT would be the others' prefill."""
    client = Client(
        Server(name="kvrelay", url=f"http://127.0.0.1:{system.port}"), "completions", timeout=60, ignore_eos=True
    )
    tokenizer = Tokenizer.from_file(str(SIM / "tokenizer.json"))
    words = Prompts(tokenizer, Random("words"), special=True, shared=0)
    output = f"uniform:{OUTPUT - 16}-{OUTPUT + 16}"
    drawn = lengths("--prompt", str(PROMPT)), lengths("--output", output)
    taken: list[Round] = []
    plan = Plan(
        workload=random_words(words, *drawn, Random("lengths"), 8192),
        requests=8 * streams,
        warmup=2 * streams,
        streams=streams,
        rate=0,
        rounds=1,
        seed=1,
    )
    asyncio.run(measure(plan, [client], allow_failures=False, over=lambda _client, round: taken.append(round)))
    return Summary.of(taken[0].traces, Slo.parse(""))


@pytest.mark.benchmark
@pytest.mark.timeout(300)
def test_what_the_pipeline_adds(redis_url: str, tmp_path: Path) -> None:
    sim = {"model": "sim", "prefill_device": "sim", "decode_device": "sim", "slots": 16}
    name = f"overhead-{secrets.token_hex(4)}"
    system = System(redis_url, tmp_path, **sim, served_name=name, sim_prefill_us=PREFILL_US, sim_step_ms=STEP_MS)
    try:
        system.start_all()
        print(f"\nprefill {PREFILL_US * PROMPT / 1000:g} ms, step {STEP_MS} ms; added to them, p50 and p99 in ms:")
        for streams, targets in TARGETS.items():
            summary = measured(system, streams)
            assert summary.ttft
            assert summary.itl
            for name, spread, device, target in (
                ("TTFT", summary.ttft, PREFILL_US * PROMPT / 1000, targets[0]),
                ("ITL", summary.itl, STEP_MS, targets[1]),
            ):
                wanted = "" if target is None else f"   (p50 target {target})"
                print(f"{streams:3} streams {name:5} {spread.p50 - device:6.1f} {spread.p99 - device:6.1f}{wanted}")
    finally:
        system.close()
