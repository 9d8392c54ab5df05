"""The pipe: real worker processes, driven by examples/stdio_client.py as another program would."""

import ast
import contextlib
import json
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import transformers

from examples.stdio_client import Worker, segment
from pipeline.config import Config
from pipeline.model import SIM, Model
from tests.acceptance import stdio_devices
from tests.acceptance.system import wait_for
from workers.devices import PrefillDevice
from workers.devices.sim import VOCAB, SimDecode, expected
from workers.devices.torch import open_prefill
from workers.stdio import LINE_BYTES, WAITING

ROOT = Path(__file__).parents[2]
CLIENT = ROOT / "examples" / "stdio_client.py"
DOC = (ROOT / "docs" / "stdio.md").read_text(encoding="utf-8")
SIM_DEVICE = {"model": "sim", "prefill_device": "sim", "context": 1024, "chunk": 16, "sim_prefill_us": 5}
SLOW = {"chunk": 4, "sim_prefill_us": 10_000}  # 20 ms a layer
PROMPT = list(range(40, 95))
Event = dict[str, Any]
Start = Callable[..., "Driven"]


class Driven(Worker):
    """A worker whose stderr is a file; `settings` become its KVR_…."""

    def __init__(self, folder: Path, *arguments: str, **settings: object) -> None:
        command = [sys.executable, "-m", "workers", "prefill", "--stdio", *arguments]
        self.log = folder / f"worker-{len(list(folder.glob('worker-*')))}.log"
        with self.log.open("wb") as log:
            super().__init__(command, env=environ(**settings), cwd=ROOT, stderr=log)

    @property
    def layers(self) -> int:
        return len(self.loaded["geometry"]["layers"])

    def send_raw(self, line: bytes) -> None:
        self.process.stdin.write(line)
        self.process.stdin.flush()

    def until_end(self, request_id: str) -> list[Event]:
        """The request's events up to its end; of others there must be none."""
        events = [self.receive()]
        while events[-1]["event"] == "layer":
            events.append(self.receive())
        assert {event["id"] for event in events} == {request_id}, events
        return events

    def check_good(self, tokens: list[int] = PROMPT) -> None:
        """Another request is right: every byte of it, or a decode device would go on with another token."""
        with segment(self.size(len(tokens))) as (path, memory):
            events = list(self.prefill(tokens, path, "good"))
            assert events[-1] == {
                **{"event": "done", "id": "good", "logits": 0, "vocabulary": VOCAB},
                "token": expected(tokens, 1)[0],
            }
            assert decoded(self, memory, events, tokens) == expected(tokens, 5)

    def ended(self) -> int:
        """The exit code."""
        return int(self.process.wait(20))


def environ(**settings: object) -> dict[str, str]:
    """PYTHONUNBUFFERED, where it is set, would hide what is left in buffers at the end."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("KVR_", "PYTHONUNBUFFERED"))}
    return clean | {f"KVR_{name.upper()}": str(value) for name, value in settings.items()}


def decoded(worker: Driven, memory: Any, events: list[Event], tokens: list[int]) -> list[int]:
    """Five tokens: the prefill's, and what a decode device says that has only the segment."""
    config = Config(model="sim", decode_device="sim", context=2048, slots=1, sim_step_ms=0, sim_layers=worker.layers)
    device = SimDecode(config)
    for event in events[:-1]:
        size = event["tokens"] * worker.loaded["token_bytes"]
        k, v = (memory[event[side] : event[side] + size] for side in "kv")
        device.insert(0, event["layer"], event["start"], event["tokens"], k, v)
    logits = np.frombuffer(memory[: 4 * VOCAB], dtype="<f4")
    answer = [int(logits.argmax())]
    device.begin(0, len(tokens), answer[0])
    while len(answer) < 5:
        answer.append(int(device.step()[0].argmax()))
        device.commit(0, answer[-1])
    return answer


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts workers on the sim device; whatever they are doing at the end of the test, they end."""
    with contextlib.ExitStack() as stack:

        def start(*arguments: str, load: bool = True, **settings: object) -> Driven:
            worker = Driven(tmp_path, *arguments, **{**SIM_DEVICE, **settings})
            stack.callback(_finish, worker)
            if load:
                worker.load()
            return worker

        yield start


def _finish(worker: Driven) -> None:
    worker.process.kill()
    worker.process.wait()
    for pipe in (worker.process.stdin, worker.process.stdout):
        with contextlib.suppress(BrokenPipeError):
            pipe.close()


@pytest.fixture(scope="module")
def sim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driven]:
    """One worker for all tests of errors: whatever they do to it, the next test finds it well."""
    yield from _shared(Driven(tmp_path_factory.mktemp("sim"), **SIM_DEVICE))


def _shared(worker: Driven) -> Iterator[Driven]:
    try:
        worker.load()
        yield worker
        worker.process.stdin.close()
        assert worker.ended() == 0
    finally:
        _finish(worker)


# What comes out


SMALL = {
    **{"vocab_size": 300, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.3},
}
FAMILIES = {
    "llama": transformers.LlamaConfig(**SMALL),
    "gemma3": transformers.Gemma3TextConfig(
        **{**SMALL, "num_hidden_layers": 6, "initializer_range": 0.06}, head_dim=24, sliding_window=16
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_kv_cache_and_the_logits_are_those_of_the_device_called_in_process(
    start: Start, family: str, tmp_path: Path
) -> None:
    torch.manual_seed(1)
    transformers.AutoModelForCausalLM.from_config(FAMILIES[family]).save_pretrained(tmp_path / "model")
    (tmp_path / "model" / "tokenizer.json").write_bytes((SIM / "tokenizer.json").read_bytes())
    settings: dict[str, Any] = {
        **{"model": str(tmp_path / "model"), "cache": str(tmp_path), "context": 256, "chunk": 16},
        **{"prefill_device": "cpu", "prefill_threads": 1, "dtype": "float32"},
    }
    device = open_prefill(Config(**settings), Model(tmp_path / "model"))
    worker = start(**settings)
    assert worker.loaded["geometry"] == json.loads(json.dumps(device.geometry.fingerprint()))
    with segment(worker.loaded["bytes"]) as (path, memory):
        for length in (1, 5, 16, 50):
            tokens = [(7 * index + length) % 300 for index in range(length)]
            blocks, logits = in_process(device, tokens)
            events = list(worker.prefill(tokens, path))
            came = []
            for event in events[:-1]:
                size = event["tokens"] * worker.loaded["token_bytes"]
                k, v = (memory[event[side] : event[side] + size] for side in "kv")
                came.append((event["layer"], event["start"], event["tokens"], k, v))
            assert came == blocks
            assert memory[: 4 * 300] == logits.tobytes()
            assert events[-1]["token"] == int(logits.argmax())


def in_process(device: PrefillDevice, tokens: list[int]) -> tuple[list[tuple[Any, ...]], Any]:
    """Parts as (layer, start, tokens, K's bytes, V's bytes), and the logits."""
    parts: list[tuple[Any, ...]] = []
    running, logits = device.begin(tokens), None
    while logits is None:
        logits = running.advance(lambda *part: parts.append((*part[:3], *map(bytes, part[3:]))), bool)
    return parts, logits


def test_a_decode_device_goes_on_from_the_segment_whatever_the_prompt_s_length(start: Start) -> None:
    worker = start(sim_layers=3)
    with segment(worker.loaded["bytes"]) as (path, memory):
        for length in (1, 15, 16, 17, 333, 1024):
            tokens = [index % 200 for index in range(length)]
            events = list(worker.prefill(tokens, path))
            assert events[-1]["token"] == expected(tokens, 1, 3)[0]
            assert decoded(worker, memory, events, tokens) == expected(tokens, 5, 3)


def test_parts_stand_where_the_document_s_formula_says_and_fill_the_segment(start: Start) -> None:
    worker = start(sim_layers=3)
    tokens = PROMPT * 3
    with segment(worker.size(len(tokens)) + 100) as (path, memory):
        memory[:] = b"\xee" * len(memory)
        *parts, _ = worker.prefill(tokens, path)
        for part in parts:
            begin = worker.loaded["kv"] + part["layer"] * 2 * 8 * len(tokens)
            assert part["k"] == begin + 8 * part["start"]
            assert part["v"] == begin + 8 * (len(tokens) + part["start"])
        spans = sorted((part[side], part[side] + 8 * part["tokens"]) for part in parts for side in "kv")
        assert [begin for begin, _ in spans[1:]] == [end for _, end in spans[:-1]]
        assert (spans[0][0], spans[-1][1]) == (worker.loaded["kv"], worker.size(len(tokens)))
        assert memory[worker.size(len(tokens)) :] == b"\xee" * 100  # what lies behind is not the worker's
    assert worker.loaded["bytes"] == worker.size(worker.loaded["max_tokens"])


def test_stdout_has_nothing_but_events_although_a_library_prints_and_its_children_read(start: Start) -> None:
    worker = start("--factory", "tests.acceptance.stdio_devices:noisy", load=False)
    worker.send(op="load")
    worker.send(op="cancel", id="no such")  # a child that shared our stdin would have eaten it
    worker.send(op="cancel")
    assert [worker.receive()["event"] for _ in range(2)] == ["loaded", "error"]
    with segment(5000) as (path, _):
        worker.send(op="prefill", id="a", tokens=[1, 2], segment=path)
        worker.until_end("a")
    worker.process.stdin.close()
    assert worker.process.stdout.read() == b""
    assert worker.ended() == 0
    log = worker.log.read_text()
    for way in ("print", "write", "puts", "echo"):
        assert f"{way} open" in log
        assert f"{way} begin" in log


# What is refused


def prefill(**changed: Any) -> bytes:
    """A line; a field that is None is left out."""
    fields = {"op": "prefill", "id": "bad", "tokens": [1], "segment": "/dev/null", **changed}
    return json.dumps({name: value for name, value in fields.items() if value is not None}).encode()


@pytest.mark.parametrize(
    ("line", "request_id", "field", "says"),
    [
        (b"", None, "", "is not JSON"),
        (b"load", None, "", "b'load' is not JSON"),
        (b'{"op": "load"', None, "", "is not JSON"),
        (b'{"op": "prefill", "tokens": [NaN]}', None, "", "NaN is no JSON number"),
        (b'{"op": "prefill", "tokens": [-Infinity]}', None, "", "-Infinity is no JSON number"),
        (b"[" * 100_000, None, "", "recursion"),
        (b'{"a":' * 100_000, None, "", "recursion"),
        (b'{"op": "\xff\xfe"}', None, "", "utf-8"),
        ('{"op": "load"}'.encode("utf-16"), None, "", "is not JSON"),
        (b"9" * 10_000, None, "", "is not JSON"),
        (b"[]", None, "", "[] is not a request"),
        (b"null", None, "", "None is not a request"),
        (b"{}", None, "op", "None is none of load, prefill, cancel, exit"),
        (b'{"op": "prefil", "id": "bad"}', None, "op", "'prefil' is none of"),
        (b'{"op": ["load"]}', None, "op", "['load'] is none of"),
        (b'{"op": "load", "model": "other"}', None, "model", "load has no such field"),
        (b'{"op": "exit", "code": 3}', None, "code", "exit has no such field"),
        (b'{"op": "cancel"}', None, "id", "a string of 1 to 200 characters"),
        (b'{"op": "cancel", "id": 7}', None, "id", "7 is not a string"),
        (b'{"op": "load"}', None, "op", "done before"),
        (prefill(id=None), None, "id", "a string of 1 to 200 characters"),
        (prefill(id=7), None, "id", "7 is not a string"),
        (prefill(id=""), None, "id", "'' is not a string of 1"),
        (prefill(id="x" * 201), None, "id", "of 1 to 200 characters"),
        (prefill(temperature=1), "bad", "temperature", "prefill has no such field"),
        (prefill(tokens=None), "bad", "tokens", "prefill needs it: a list of token ids"),
        (prefill(tokens="1 2"), "bad", "tokens", "'1 2' is not a list"),
        (prefill(tokens={"1": 2}), "bad", "tokens", "is not a list"),
        (prefill(tokens=[]), "bad", "tokens", "a prompt has 1 to 1024 token ids"),
        (prefill(tokens=[1, True]), "bad", "tokens", "True at index 1 is no token id; 0 to 256 are"),
        (prefill(tokens=[1.0]), "bad", "tokens", "1.0 at index 0"),
        (prefill(tokens=["1"]), "bad", "tokens", "'1' at index 0"),
        (prefill(tokens=[0, [1]]), "bad", "tokens", "[1] at index 1"),
        (prefill(tokens=[VOCAB]), "bad", "tokens", "257 at index 0"),
        (prefill(tokens=[5, -1]), "bad", "tokens", "-1 at index 1"),
        (prefill(tokens=[10**400]), "bad", "tokens", "at index 0"),
        (prefill(tokens=[1] * 1025), "bad", "tokens", "1025 token ids; this worker takes at most 1024"),
        (prefill(tokens=[1] * 1_000_000), "bad", "tokens", "1000000 token ids"),
        (prefill(segment=None), "bad", "segment", "prefill needs it: the absolute path"),
        (prefill(segment=3), "bad", "segment", "3 is not the absolute path"),
        (prefill(segment="name"), "bad", "segment", "'name' is not the absolute path"),
        (prefill(segment="/no/such/file"), "bad", "segment", "No such file or directory"),
        (prefill(segment="/dev/shm"), "bad", "segment", "Is a directory"),
        (prefill(segment="/dev/null"), "bad", "segment", "'/dev/null' is not a file"),
        (prefill(segment="/dev/shm/\0"), "bad", "segment", "can be no file's name"),
        (prefill(segment="/dev/shm/\ud800"), "bad", "segment", "can be no file's name"),
        (prefill(segment="/" + "x" * 5000), "bad", "segment", "File name too long"),
    ],
    ids=lambda value: repr(value)[:60] if isinstance(value, bytes) else "",
)
def test_a_bad_request_is_answered_with_a_sentence_and_the_next_is_served(
    sim: Driven, line: bytes, request_id: str | None, field: str, says: str
) -> None:
    sim.send_raw(line + b"\n")
    event = sim.receive()
    assert (event["event"], event["id"], event["field"]) == ("error", request_id, field), event
    assert says in event["message"]
    assert len(event["message"]) < 400
    sim.check_good()


def test_a_segment_that_cannot_take_the_prompt_is_refused(sim: Driven, tmp_path: Path) -> None:
    size = sim.size(3)
    small, pipe, busy = (tmp_path / name for name in ("small", "pipe", "busy"))
    small.write_bytes(bytes(size - 1))
    os.mkfifo(pipe)
    shutil.copy("/bin/sleep", busy)
    running = subprocess.Popen([busy, "60"])  # the kernel lets nobody write to it, not even root
    try:
        for path, says in (
            (small, f"has {size - 1} bytes; it must be a file of at least {size} bytes"),
            (pipe, "cannot be opened (No such device or address)"),
            (busy, "cannot be opened (Text file busy)"),
        ):
            ends = list(sim.prefill([1, 2, 3], str(path)))
            assert [(end["event"], end["field"]) for end in ends] == [("error", "segment")]
            assert says in ends[0]["message"]
            sim.check_good()
    finally:
        running.kill()
        running.wait()


def test_a_file_that_takes_no_more_bytes_is_an_error_of_that_request_only(sim: Driven) -> None:
    process = psutil.Process(sim.process.pid)
    with segment(sim.loaded["bytes"]) as (path, _):
        process.rlimit(resource.RLIMIT_FSIZE, (sim.loaded["kv"] + 64, resource.RLIM_INFINITY))
        try:
            *parts, end = sim.prefill(PROMPT, path)
        finally:
            process.rlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert not parts
        assert (end["event"], end["field"]) == ("error", "segment")
        assert "File too large" in end["message"]
    sim.check_good()


def test_a_segment_that_shrinks_or_vanishes_under_the_worker_harms_nobody(start: Start, tmp_path: Path) -> None:
    worker = start(**SLOW)
    path = tmp_path / "segment"
    for spoil in (lambda: os.truncate(path, 0), path.unlink):
        path.write_bytes(bytes(worker.loaded["bytes"]))
        events = worker.prefill(PROMPT[:20], str(path))
        next(events)
        spoil()
        assert list(events)[-1]["event"] == "done"
        worker.check_good(PROMPT[:8])


def test_a_line_that_is_too_long_is_refused_while_it_is_still_coming(sim: Driven) -> None:
    before = psutil.Process(sim.process.pid).memory_info().rss
    piece = b"1, " * (1 << 19)
    sim.send_raw(b'{"op": "prefill", "id": "bad", "tokens": [')
    for _ in range(LINE_BYTES // len(piece) + 1):
        sim.send_raw(piece)
    event = sim.receive()  # its end has not been sent
    assert (event["event"], event["id"], event["field"]) == ("error", None, "")
    assert f"at most {LINE_BYTES}" in event["message"]
    for _ in range(64):
        sim.send_raw(piece)
    sim.send_raw(b"]}\n")
    sim.check_good()
    assert psutil.Process(sim.process.pid).memory_info().rss - before < 3 * LINE_BYTES


def test_a_prefill_before_load_is_refused_and_load_may_follow(start: Start) -> None:
    worker = start(load=False)
    worker.send_raw(prefill(id="early") + b"\n")
    event = worker.receive()
    assert (event["event"], event["id"], event["field"]) == ("error", "early", "op")
    assert '{"op": "load"}' in event["message"]
    worker.load()
    worker.check_good()


def test_a_load_that_failed_may_be_tried_again(start: Start) -> None:
    worker = start("--factory", "tests.acceptance.stdio_devices:taken_at_first", load=False)
    worker.send(op="load")
    assert worker.receive() == {"event": "error", "id": None, "field": "", "message": "load: the chip is taken"}
    worker.load()
    worker.check_good()


@pytest.mark.parametrize(
    ("arguments", "settings", "says"),
    [
        ([], {"model": "no-such-model"}, "load: no model in"),
        ([], {"context": 1 << 20}, "load: KVR_CONTEXT=1048576"),
        (["--factory", "no_such:thing"], {}, "load: --factory=no_such:thing"),
    ],
)
def test_a_model_or_a_device_that_is_not_there_is_an_error_event(
    start: Start, arguments: list[str], settings: dict[str, Any], says: str
) -> None:
    worker = start(*arguments, load=False, **settings)
    worker.send(op="load")
    event = worker.receive()
    assert event["event"] == "error"
    assert says in event["message"]
    assert worker.close() == 0


def test_a_wrong_setting_ends_the_worker_before_any_event_with_a_sentence_on_stderr(start: Start) -> None:
    worker = start(load=False, chunk="many")
    with pytest.raises(EOFError, match="code 1"):
        worker.receive()
    assert "KVR_CHUNK=many" in worker.log.read_text()


@pytest.mark.parametrize(
    ("habit", "says"),
    [
        ("FAILS", "prefill: the chip is on fire"),
        ("BREAKS", "prefill: ZeroDivisionError: in the SDK"),
        ("SHORT_PART", "bytes, not 16 each"),
        ("PART_TWICE", "tokens 0 to 2 of layer 0 out of order"),
        ("LAYER_MISSING", "handed out 0 of 2 tokens of layer 1"),
        ("SHIFTED", "tokens 1 to 3 of layer 0 out of order"),
        ("TOO_MANY", "tokens 0 to 4 of layer 0 out of order"),
        ("NO_LAYER", "tokens 0 to 2 of layer 2 out of order"),
        ("NOT_FINITE", "not finite"),
        ("FEWER_LOGITS", "256 logits, not 257"),
    ],
)
def test_a_device_that_goes_wrong_is_an_error_event_and_the_next_prefill_works(
    faulty: Driven, habit: str, says: str
) -> None:
    with segment(5000) as (path, memory):
        *_, end = faulty.prefill([getattr(stdio_devices, habit), 1], path)
        assert (end["event"], end["field"]) == ("error", "")
        assert says in end["message"]
        assert not any(memory[: 4 * VOCAB])
    faulty.check_good()


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Driven]:
    arguments = ("--factory", "tests.acceptance.stdio_devices:faulty")
    yield from _shared(Driven(tmp_path_factory.mktemp("faulty"), *arguments, **SIM_DEVICE))


# Several at once


def test_requests_wait_in_line_and_each_has_one_end(start: Start) -> None:
    worker = start(load=False)
    prompts = {f"request {n}": PROMPT[: 5 + n] for n in range(20)}
    with contextlib.ExitStack() as stack:
        paths = [stack.enter_context(segment(5000))[0] for _ in prompts]
        worker.send(op="load")
        for (request_id, tokens), path in zip(prompts.items(), paths, strict=True):
            worker.send(op="prefill", id=request_id, tokens=tokens, segment=path)
        assert worker.receive()["event"] == "loaded"
        for request_id, tokens in prompts.items():
            assert worker.until_end(request_id)[-1]["token"] == expected(tokens, 1)[0]


def test_an_id_that_is_in_use_is_refused_without_ending_its_owner_and_free_again_afterwards(start: Start) -> None:
    worker = start(**SLOW)
    with segment(5000) as (path, _):
        for _ in range(2):
            for _ in range(2):
                worker.send(op="prefill", id="a", tokens=PROMPT, segment=path)
            events = []
            while not events or events[-1]["event"] != "done":
                events.append(worker.receive())
            (refused,) = [event for event in events if event["event"] == "error"]
            assert (refused["id"], refused["field"]) == (None, "id")
            assert "'a' is still in use" in refused["message"]
            assert events[-1]["token"] == expected(PROMPT, 1)[0]
    worker.check_good(PROMPT[:8])


@pytest.mark.parametrize(
    "shape", [{"chunk": 4}, {"chunk": 1024, "sim_layers": 512}], ids=["many chunks", "one device call"]
)
def test_a_cancel_in_the_middle_takes_effect_between_layers_and_the_next_request_is_right(
    start: Start, shape: dict[str, int]
) -> None:
    worker = start(**{**SLOW, **shape})
    with segment(worker.loaded["bytes"]) as (path, _):
        worker.send(op="prefill", id="long", tokens=[1] * 1024, segment=path)
        for _ in range(3):
            assert worker.receive()["event"] == "layer"
        worker.send(op="cancel", id="long")
        events = worker.until_end("long")
        assert events[-1] == {"event": "cancelled", "id": "long"}
        assert len(events) < 50
        worker.send(op="cancel", id="long")  # too late: no answer, for it has had its end
        worker.send(op="prefill", id="next", tokens=PROMPT[:8], segment=path)
        assert worker.until_end("next")[-1]["token"] == expected(PROMPT[:8], 1, worker.layers)[0]


def test_a_cancel_of_one_that_waits_is_answered_while_another_computes(start: Start) -> None:
    worker = start(**SLOW)
    with segment(worker.loaded["bytes"]) as (path, _):
        worker.send(op="prefill", id="long", tokens=[1] * 1024, segment=path)
        worker.send(op="prefill", id="waits", tokens=[1, 2], segment=path)
        worker.send(op="prefill", id="stays", tokens=[72, 105], segment=path)
        worker.send(op="cancel", id="waits")
        event = {"event": "layer"}
        while event["event"] == "layer":
            event = worker.receive()
            assert event["id"] != "stays"
        assert event == {"event": "cancelled", "id": "waits"}
        worker.send(op="cancel", id="long")
        assert worker.until_end("long")[-1]["event"] == "cancelled"
        assert worker.until_end("stays")[-1]["token"] == expected([72, 105], 1)[0]


def test_a_client_may_write_much_before_it_reads_and_the_line_has_an_end(start: Start) -> None:
    worker = start(**SLOW)
    with segment(worker.loaded["bytes"]) as (path, _):
        worker.send(op="prefill", id="long", tokens=[1] * 1024, segment=path)
        for number in range(WAITING + 2000):
            worker.send(op="prefill", id=f"{number:0200}", tokens=[1, 2], segment=path)
        worker.send(op="exit")
        events = [json.loads(line) for line in worker.process.stdout]
    assert worker.ended() == 0
    ends = [event for event in events if event["event"] != "layer"]
    refused = [int(end["id"]) for end in ends if end["event"] == "error"]
    assert refused == list(range(WAITING - 1, WAITING + 2000))
    assert f"{WAITING} requests are in line" in next(end["message"] for end in ends if end["event"] == "error")
    cancelled = [end["id"] for end in ends if end["event"] == "cancelled"]
    assert cancelled == ["long", *(f"{number:0200}" for number in range(WAITING - 1))]


# How it ends


@pytest.mark.parametrize("way", ["exit", "end of input", "SIGTERM", "SIGINT"])
def test_told_to_leave_it_gives_every_request_its_end_and_code_0(start: Start, way: str) -> None:
    worker = start(**SLOW)
    with segment(worker.loaded["bytes"]) as (path, _):
        for request_id in "ab":
            worker.send(op="prefill", id=request_id, tokens=[1] * 1024, segment=path)
        assert worker.receive()["event"] == "layer"
        if way == "exit":
            worker.send(op="exit")
        elif way == "end of input":
            worker.process.stdin.close()
        else:
            worker.process.send_signal(getattr(signal, way))
        events = worker.until_end("a")
        assert events[-1]["event"] == "cancelled"
        assert len(events) < 50
        assert worker.receive() == {"event": "cancelled", "id": "b"}
        with pytest.raises(EOFError, match="code 0"):
            worker.receive()
    assert "Traceback" not in worker.log.read_text()


def test_a_second_sigterm_does_not_wait_for_the_device(start: Start) -> None:
    worker = start(chunk=1024, sim_prefill_us=100_000)
    with segment(worker.size(1024)) as (path, _):
        worker.send(op="prefill", id="a", tokens=[1] * 1024, segment=path)  # two layers of 51 seconds
        wait_for(lambda: worker.process.send_signal(signal.SIGTERM) or worker.process.poll(), "it ends")
    assert worker.ended() == -signal.SIGTERM


def test_an_idle_worker_leaves_at_the_end_of_input_also_before_load(start: Start) -> None:
    for load in (False, True):
        assert start(load=load).close() == 0


def test_half_a_line_at_the_end_of_input_is_no_request(start: Start) -> None:
    worker = start(load=False)
    worker.send_raw(b'{"op": "load"}')
    worker.process.stdin.close()
    assert worker.process.stdout.read() == b""
    assert worker.ended() == 0


def test_when_nobody_reads_its_events_it_leaves_quietly(start: Start) -> None:
    worker = start(**SLOW)
    with segment(worker.loaded["bytes"]) as (path, _):
        worker.send(op="prefill", id="a", tokens=[1] * 1024, segment=path)
        worker.receive()
        worker.process.stdout.close()
        assert worker.ended() == 0
    assert "Traceback" not in worker.log.read_text()


def test_a_client_that_dies_with_all_its_pipes_leaves_no_worker_and_no_error(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "workers", "prefill", "--stdio"]
    command += ["--factory", "tests.acceptance.stdio_devices:noisy"]
    worker = Worker(command, env=environ(**{**SIM_DEVICE, **SLOW}), cwd=ROOT, stderr=subprocess.PIPE)
    worker.load()
    with segment(worker.loaded["bytes"]) as (path, _):
        for request_id in "ab":
            worker.send(op="prefill", id=request_id, tokens=[1] * 1024, segment=path)
        worker.receive()
        for pipe in (worker.process.stderr, worker.process.stdin, worker.process.stdout):
            pipe.close()
        assert worker.process.wait(20) == 0


def test_kill_9_leaves_the_client_s_segment_and_nothing_else(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    worker = start(**SLOW)
    process = psutil.Process(worker.process.pid)
    monkeypatch.undo()
    with segment(worker.loaded["bytes"]) as (path, _):
        worker.send(op="prefill", id="a", tokens=[1] * 1024, segment=path)
        assert worker.receive()["event"] == "layer"
        assert {file.path for file in process.open_files()} == {path, str(worker.log)}
        assert not [found.path for found in process.memory_maps() if found.path.startswith("/dev/shm")]
        assert not process.children(recursive=True)
        worker.process.kill()
        with pytest.raises(EOFError, match="code -9"):
            worker.until_end("a")
        assert Path(path).exists()
    assert not list((tmp_path / "temporary").iterdir())
    assert not Path(path).exists()


def test_two_hundred_requests_leave_memory_and_descriptors_as_they_were(sim: Driven) -> None:
    process = psutil.Process(sim.process.pid)

    def serve(count: int) -> None:
        for number in range(count):
            tokens = PROMPT * (1 + number % 15)
            with segment(sim.size(len(tokens))) as (path, _):
                end = list(sim.prefill(tokens if number % 3 else [*tokens, VOCAB], path))[-1]
                assert end["event"] == ("done" if number % 3 else "error")
                if number % 5 == 0:
                    assert list(sim.prefill([1], "/no/such/file"))[-1]["event"] == "error"
                    assert list(sim.prefill(tokens * 20, path))[-1]["event"] == "error"
                    assert list(sim.prefill([*tokens, 1], path))[-1]["event"] == "error"

    def figures() -> tuple[int, int, int]:
        return process.num_fds(), process.num_threads(), process.memory_info().rss

    serve(60)
    before = figures()
    serve(200)
    after = figures()
    assert after[:2] == before[:2]
    assert after[2] - before[2] < 1 << 20


# The document and the client


def test_the_document_s_commands_work_and_leave_nothing(tmp_path: Path) -> None:
    (block,) = re.findall(r"```sh\n(.*?)```", DOC, re.DOTALL)
    commands = block.strip().splitlines()
    assert len(commands) == 2
    outputs = []
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for command in commands:
        ended = subprocess.run(
            ["bash", "-c", command],
            cwd=ROOT,
            env=environ() | {"PATH": path},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert ended.returncode == 0, ended.stderr
        outputs.append(ended.stdout.splitlines())
    assert f"the next token is {expected([72, 101, 108, 108, 111], 1)[0]}, of {VOCAB}" in outputs[0]
    assert outputs[0][-1] == "the worker ended with code 0"
    assert [json.loads(line)["event"] for line in outputs[1]] == ["loaded"]


def test_the_document_s_session_is_what_a_worker_answers(tmp_path: Path) -> None:
    (session,) = re.findall(r"```text\n(.*?)```", DOC, re.DOTALL)
    (opening,) = re.findall(r"Of `(.*?)`; `>` goes in, `<` comes out", DOC)
    (name, size) = re.findall(r"made `(\S+)` with ([\d,]+) bytes", DOC)[0]
    (tmp_path / "segment").write_bytes(bytes(int(size.replace(",", ""))))
    words = shlex.split(opening)
    settings = dict(word.split("=") for word in words if word.startswith("KVR_"))
    command = [sys.executable, *words[words.index("python") + 1 :]]
    with (tmp_path / "log").open("wb") as log:
        worker = Worker(command, env=environ() | settings, cwd=ROOT, stderr=log)
    lines = session.replace(name, str(tmp_path / "segment")).splitlines()
    for line in lines:
        if line.startswith("> "):
            worker.process.stdin.write(line[2:].encode() + b"\n")
            worker.process.stdin.flush()
        else:
            assert worker.receive() == json.loads(line.removeprefix("< "))
    assert worker.process.wait(20) == 0
    worker.close()
    assert len(lines) > 10


def test_the_client_needs_a_bare_python_only() -> None:
    tree = ast.parse(CLIENT.read_text(encoding="utf-8"), feature_version=(3, 8))
    imported = {
        name.partition(".")[0]
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [str(node.module)]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    }
    assert imported <= sys.stdlib_module_names
    settings = environ(model="sim", prefill_device="sim", prefill_python=sys.executable)
    ended = subprocess.run(
        [sys.executable, "-I", "-S", CLIENT, "72", "105"], cwd=ROOT, env=settings, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert f"the next token is {expected([72, 105], 1)[0]}, of {VOCAB}" in ended.stdout


def test_the_client_s_segment_is_gone_however_the_worker_ended(start: Start) -> None:
    worker = start(**SLOW)
    paths = []

    def killed_in_the_middle() -> None:
        with segment(worker.loaded["bytes"]) as (path, _):
            paths.append(path)
            for _ in worker.prefill([1] * 1024, path):
                worker.process.kill()

    with pytest.raises(EOFError, match="code -9"):
        killed_in_the_middle()
    (path,) = paths
    assert not Path(path).exists()
    wait_for(lambda: not psutil.pid_exists(worker.process.pid), "the worker is gone")
