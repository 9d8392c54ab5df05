"""Clients that send too much, too slowly or nothing, that do not read, or that are too many: real sockets, small bounds."""

import contextlib
import json
import os
import resource
import secrets
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from api.connection import REFUSED_SECONDS, SPARE, UNREAD
from tests.acceptance.system import WAYS_TO_LEAVE, System, free_port, leave, wait_for
from workers.devices.sim import expected

SIM = {"model": "sim", "prefill_device": "sim", "decode_device": "sim"}
BOUND, IDLE = 1.0, 3.0  # seconds
SLACK = 10.0
CONNECTIONS = 40
GIB = 1 << 30
GROWTH = 24 << 20  # bytes, of the API
HEAD = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def system(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    bounds = {"request_seconds": BOUND, "stall_seconds": BOUND, "idle_seconds": IDLE}
    folder, name = tmp_path_factory.mktemp("connections"), f"connections-{secrets.token_hex(4)}"
    system = System(
        redis_url, folder, **SIM, **bounds, served_name=name, connections=CONNECTIONS, sim_step_ms=1, slots=8, waiting=8
    )
    yield system.start_all()
    system.close()


@pytest.fixture(autouse=True)
def _in_order(system: System) -> Iterator[None]:
    """After each of them the API serves, and nothing went wrong in it."""
    yield
    assert system.complete([1, 2, 3], max_tokens=3)["usage"]["completion_tokens"] == 3
    system.wait_idle()
    for trouble in ("Traceback", "Error in ASGI", "never retrieved"):
        assert trouble not in system.logs()


def request(path: str, body: Any = None) -> str:
    """Without a body, a GET."""
    said = "" if body is None else json.dumps(body)
    head = HEAD.replace("/v1/completions", path) if said else f"GET {path} HTTP/1.1\r\nHost: localhost\r\n"
    return f"{head}Content-Length: {len(said)}\r\n\r\n{said}"


class Connection:
    """A client's side, by hand."""

    def __init__(self, port: int, said: bytes | str = b"") -> None:
        self.socket = socket.socket()
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # what it does not read stays with the API
        self.socket.settimeout(SLACK)
        self.socket.connect(("127.0.0.1", port))
        self.began = time.monotonic()
        self.heard = b""
        with contextlib.suppress(ConnectionError):  # nobody listens: that is heard, too
            self.say(said)

    def say(self, said: bytes | str) -> None:
        self.socket.sendall(said.encode() if isinstance(said, str) else said)

    def hear(self, until: bytes = b"") -> bytes:
        """All that came until the other side has ended, or has said that."""
        while not (until and until in self.heard) and (piece := self.socket.recv(65536)):
            self.heard += piece
        return self.heard

    def refused(self) -> tuple[int, str]:
        """(status, code) of an answer after which the connection ends."""
        head, _, body = self.hear().partition(b"\r\n\r\n")
        assert b"connection: close" in head.lower()
        return int(head.split()[1]), json.loads(body)["error"]["code"]

    def dropped(self) -> bool:
        """By a reset, whatever came before."""
        with contextlib.suppress(ConnectionResetError):
            self.hear()
            return False
        return True

    def unsent(self) -> int:
        """Bytes that the other side's kernel has for us. Lines: number, its address, ours, state, what it sends, …"""
        here = f":{self.socket.getsockname()[1]:04X}"
        for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
            if (fields := line.split())[2].endswith(here):
                return int(fields[4].partition(":")[0], 16)
        return 0

    def seconds(self) -> float:
        return time.monotonic() - self.began

    def insist(self, said: bytes, until: float) -> None:
        """Says it again and again."""
        while self.seconds() < until:
            self.say(said)


Connect = Callable[..., Connection]


@pytest.fixture
def connect(system: System) -> Iterator[Connect]:
    made: list[Connection] = []

    def make(said: bytes | str = b"", port: int = system.port) -> Connection:
        made.append(Connection(port, said))
        return made[-1]

    yield make
    for connection in made:
        connection.socket.close()


def dribble(connection: Connection, said: str) -> None:
    """A byte at a time, each long before any bound, until the other side has had enough."""
    for letter in said:
        if select.select([connection.socket], [], [], BOUND / 10)[0]:
            return
        connection.say(letter)
        assert connection.seconds() < BOUND + SLACK, "nobody minds"


# A client that leaves


def serve(port: int, log: Path, files: tuple[int, int]) -> "subprocess.Popen[bytes]":
    """The API's server with another application in it. files: it may open, soft and hard."""
    command = [sys.executable, "-m", "gunicorn", "-c", "python:api.server", "-k", "asgi", "--no-control-socket"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("KVR_")}
    with log.open("wb") as output:
        return subprocess.Popen(
            [*command, "tests.acceptance.probe:app"],
            env=environ | {"KVR_PORT": str(port)},
            stdout=output,
            stderr=output,
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, files),
        )


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Its port."""
    port, (_, hard) = free_port(), resource.getrlimit(resource.RLIMIT_NOFILE)
    process = serve(port, tmp_path_factory.mktemp("server") / "log", (256, hard))

    def listens() -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return True
        return False

    wait_for(listens, "the server listens")
    assert psutil.Process(process.pid).rlimit(resource.RLIMIT_NOFILE)[0] > 2000, "it took what it needs"
    yield port
    process.send_signal(signal.SIGQUIT)
    process.wait(20)


def test_a_server_that_may_not_open_its_files_says_so(tmp_path: Path) -> None:
    """Without the check connections beyond the limit would be neither taken nor refused, and a traceback a second be logged."""
    log = tmp_path / "log"
    assert serve(free_port(), log, (300, 300)).wait(20) != 0
    assert "KVR_CONNECTIONS=2000: needs 2200 open files, and `ulimit -Hn` is 300" in log.read_text()


@pytest.mark.parametrize("way", WAYS_TO_LEAVE)
def test_the_server_tells_the_application_that_a_client_has_left(
    connect: Connect, server: int, tmp_path: Path, way: str
) -> None:
    """H1. Without gunicorn's `http.disconnect` nobody would hear of it before the next send."""
    note = tmp_path / "note"
    connection = connect(request("/left", str(note)), server)
    wait_for(lambda: note.exists(), "the application waits")
    leave(connection.socket, way)
    wait_for(lambda: note.read_text() == "left", "the application knows", 2)


def test_the_server_does_not_take_a_cancelled_wait_for_a_client_that_left(connect: Connect, server: int) -> None:
    """H1. With gunicorn 26.0 it does: `receive` swallows the cancel and answers http.disconnect."""
    assert connect(request("/cancelled", "x"), server).socket.recv(65536).endswith(b"cancelled")


# Bodies


def chunked(size: int = 1 << 16) -> bytes:
    return b"%x\r\n" % size + b" " * size + b"\r\n"


def test_a_body_without_end_is_refused_early_and_the_refusal_can_be_read(
    system: System, connect: Connect, capsys: pytest.CaptureFixture[str]
) -> None:
    """H2. Without the count while reading two gigabytes would be in memory; without the lingering the connection would be
    reset as soon as the answer is out, and the answer lost."""
    connection = connect(f"{HEAD}Transfer-Encoding: chunked\r\n\r\n")
    chunk, sent, answer, memory = chunked(), 0, b"", system.memory(system.processes[0])
    while sent < 2 * GIB and not answer:
        connection.say(chunk)
        sent += len(chunk)
        if select.select([connection.socket], [], [], 0)[0]:
            answer = connection.socket.recv(65536)
    with capsys.disabled():
        print(f"\n2 GiB: 413 after {sent >> 20} MiB and {connection.seconds() * 1000:.0f} ms")
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in answer.lower()
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "body_too_large"
    assert sent < 64 << 20
    now = connection.seconds()
    connection.insist(chunk, now + 1)  # a client that does not listen while it speaks: no reset yet
    assert system.memory(system.processes[0]) - memory < GROWTH
    with pytest.raises(ConnectionError):
        connection.insist(chunk, now + SLACK)  # but not for ever


def test_a_body_that_announces_too_much_is_refused_before_it_comes(connect: Connect) -> None:
    """H2. Without the look at Content-Length eight megabytes would be read first."""
    connection = connect(f"{HEAD}Content-Length: {2 * GIB}\r\n\r\n ")
    connection.socket.settimeout(BOUND / 2)
    assert b"body_too_large" in connection.socket.recv(65536)


@pytest.mark.parametrize("length", ["Content-Length: 1000", "Transfer-Encoding: chunked"], ids=["announced", "chunked"])
@pytest.mark.parametrize("begun", [True, False])
def test_a_body_that_stops_half_way_is_given_up(connect: Connect, length: str, begun: bool) -> None:
    """H2. Without the clock in `body.read` the server would wait, and then say 500."""
    said = ' {"prompt"' if begun else ""
    if said and "chunked" in length:
        said = f"{len(said):x}\r\n{said}\r\n"
    connection = connect(f"{HEAD}{length}\r\n\r\n{said}")
    assert connection.refused() == (408, "request_timeout")
    assert connection.seconds() > BOUND * 0.9


def test_a_body_that_comes_a_byte_at_a_time_is_given_up(connect: Connect) -> None:
    """Without a clock for all of it, each byte would win more time."""
    connection = connect(f"{HEAD}Content-Length: 1000\r\n\r\n")
    dribble(connection, " " * 1000)
    assert connection.refused() == (408, "request_timeout")


@pytest.mark.parametrize("way", WAYS_TO_LEAVE)
def test_half_a_body_makes_no_job_even_if_it_is_json(system: System, connect: Connect, way: str) -> None:
    """Without the look at `whole` a job would be made of what came: Falcon ends the stream of a body without a word."""
    jobs = set(system.redis.scan_iter(system.key("job:*")))
    body = json.dumps({"prompt": [1, 2, 3], "max_tokens": 5})
    head = HEAD.replace("/v1/completions", "/v1/jobs")
    connection = connect(f"{head}Content-Length: {len(body) + 1}\r\n\r\n{body}")
    answered = system.logs().count("POST /v1/jobs 4")
    time.sleep(BOUND / 4)  # it has come
    leave(connection.socket, way)
    wait_for(lambda: system.logs().count("POST /v1/jobs 4") > answered, "the request is over")
    assert set(system.redis.scan_iter(system.key("job:*"))) == jobs


def test_who_is_refused_for_the_head_need_not_send_the_body(connect: Connect) -> None:
    """Without the event that stands in for the first of a body, Falcon would wait for it before it looks at the route."""
    connection = connect("POST /v1/nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\n")
    connection.socket.settimeout(BOUND / 2)
    assert b"unknown_url" in connection.socket.recv(65536)


def test_bodies_that_come_together_are_bounded_together(system: System, connect: Connect) -> None:
    """Without `Bodies.held` a process would hold eight megabytes for each connection."""
    before = system.memory(system.processes[0])
    connections = [connect(f"{HEAD}Content-Length: {7 << 20}\r\n\r\n") for _ in range(30)]
    for connection in connections:
        with contextlib.suppress(ConnectionError):
            connection.say(b" " * (7 << 20 - 1))
    most = system.memory(system.processes[0])
    codes = {connection.refused() for connection in connections}
    assert codes == {(503, "too_many_bodies"), (408, "request_timeout")}
    assert most - before < 128 << 20


# Heads, silence, numbers


def test_a_connection_that_says_nothing_is_closed(connect: Connect) -> None:
    """Without the clock that runs from the connection's beginning it would stay for ever."""
    connection = connect()
    assert connection.hear() == b""
    assert connection.seconds() > BOUND * 0.9


def test_a_head_that_comes_a_byte_at_a_time_is_given_up(connect: Connect) -> None:
    """Slowloris. Without the clock for all of it, each byte would win more time."""
    connection = connect()
    dribble(connection, f"GET /health/live HTTP/1.1\r\nHost: localhost\r\nX: {'y' * 1000}")
    assert connection.refused() == (408, "request_timeout")


def test_a_second_head_that_comes_a_byte_at_a_time_is_given_up(connect: Connect) -> None:
    """On a connection that has served already. Without its clock the pause between two requests would be its only bound."""
    connection = connect(request("/health/live"))
    assert b"200 OK" in connection.socket.recv(65536)
    dribble(connection, f"GET /health/live HTTP/1.1\r\nHost: localhost\r\nX: {'y' * 1000}")
    assert connection.refused() == (408, "request_timeout")


def test_a_connection_is_kept_for_another_request_but_not_for_long(connect: Connect) -> None:
    """Without the server's keep-alive it would be closed at once, without its bound, never."""
    connection = connect()
    for _ in range(3):
        connection.say(request("/health/live"))
        assert connection.socket.recv(65536).endswith(b"true}")
    assert connection.hear() == b""
    assert connection.seconds() > IDLE * 0.9


@pytest.mark.parametrize(
    ("line", "fields", "status"),
    [
        (f"/{'x' * 9000}", "\r\n", b"414"),
        ("/", f"X: {'y' * 9000}\r\n\r\n", b"431"),
        ("/", "y" * 9000, b"431"),
        ("/", "X: y\r\n" * 101 + "\r\n", b"431"),
    ],
    ids=["line", "field", "unfinished", "fields"],
)
def test_a_head_that_is_too_large_is_refused(connect: Connect, line: str, fields: str, status: bytes) -> None:
    """With gunicorn's limits at 0, which is none, it would be taken in whole."""
    assert connect(f"GET {line} HTTP/1.1\r\nHost: localhost\r\n{fields}").hear()[9:12] == status


SECOND = "DELETE /v1/jobs/smuggled HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize(
    "lines",
    [
        "Content-Length: 5\r\nTransfer-Encoding: chunked",
        "Transfer-Encoding: chunked\r\nContent-Length: 5",
        "Content-Length: 5\r\nContent-Length: 6",
        "Content-Length: 5, 5",
        "Content-Length: +5",
        "Content-Length: 0x5",
        "Content-Length : 5",
        "Transfer-Encoding : chunked",
        "Transfer-Encoding: xchunked",
        "Transfer-Encoding: chunked, identity",
        "Transfer-Encoding: \x0bchunked",
        "X: y\nTransfer-Encoding: chunked",
        "X: y\r\n Transfer-Encoding: chunked",
    ],
)
def test_a_body_of_two_lengths_is_no_body(system: System, connect: Connect, lines: str) -> None:
    """Request smuggling: a proxy in front that sees another end than the server lets a stranger's request through. Without
    the server's strictness the second one would be answered."""
    connection = connect(f"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\n{lines}\r\n\r\n0\r\n\r\n{SECOND}")
    heard = connection.hear()
    assert heard[9:12] in (b"400", b"501")
    assert heard.count(b"HTTP/1.1 ") == 1
    assert "DELETE /v1/jobs/smuggled" not in system.logs()


@pytest.fixture
def small(redis_url: str, tmp_path: Path) -> Iterator[System]:
    """An API alone, with the usual patience."""
    name = f"small-{secrets.token_hex(4)}"
    system = System(redis_url, tmp_path, **SIM, served_name=name, connections=CONNECTIONS)
    system.start("api")
    wait_for(system.answers, "the API answers")
    yield system
    system.close()


def test_connections_beyond_the_bound_are_told_so_and_those_within_it_are_served(
    small: System, connect: Connect
) -> None:
    """Without the bound an API process takes connections until it has no files left, and then nobody hears a word. Without
    the spare ones nobody would be told, without their bound it would be none."""
    job = small.submit([1, 2, 3])
    followers = [connect(request(f"/v1/jobs/{job}/events"), small.port) for _ in range(CONNECTIONS)]
    assert all(follower.hear(b"\r\n\r\n") for follower in followers)
    refused = [connect(request("/health/live"), small.port) for _ in range(3 * SPARE)]
    time.sleep(REFUSED_SECONDS / 4)
    told = [connection for connection in refused if not connection.dropped()]
    assert SPARE <= len(told) < len(refused)
    assert {connection.refused() for connection in told} == {(503, "too_many_connections")}
    for number, follower in enumerate(followers[1:]):
        leave(follower.socket, WAYS_TO_LEAVE[number % 3])
    wait_for(small.answers, "there is room again")
    small.call("DELETE", f"/v1/jobs/{job}")
    assert followers[0].hear(b"event: end"), "who was in stayed"


# Clients that do not read


def test_a_client_that_never_reads_its_stream_has_left(
    system: System, connect: Connect, capsys: pytest.CaptureFixture[str]
) -> None:
    """H7, C10. Without the clock on a paused transport `send` waits for ever, and the jobs run to their ends; without the
    bound on what the kernel takes, megabytes go there first."""
    before, memory = set(system.redis.scan_iter(system.key("job:*"))), system.memory(system.processes[0])
    connection = connect(request("/v1/completions", {"prompt": [1, 2, 3], "max_tokens": 8000, "n": 8, "stream": True}))
    wait_for(lambda: system.unfinished() == 8, "it streams")
    in_kernel = 0

    def over() -> bool:
        nonlocal in_kernel
        in_kernel = max(in_kernel, connection.unsent())
        return system.unfinished() == 0

    wait_for(over, "its jobs are over", 60)
    took, growth = connection.seconds(), (system.memory(system.processes[0]) - memory) / (1 << 20)
    jobs = set(system.redis.scan_iter(system.key("job:*"))) - before
    written = sum(system.redis.xlen(job.replace(":job:", ":tokens:")) for job in jobs)
    with capsys.disabled():
        print(f"\nnever read: tombstone after {took:.1f} s (bound {BOUND} s) and {written} tokens")
        print(f"the API grew by {growth:.1f} MiB, the kernel held {in_kernel >> 10} KiB")
    for job in jobs:
        assert system.redis.hmget(job, "status", "reason") == ["cancelled", "client left"]
    assert written < 8 * 8000 / 4
    assert growth < GROWTH >> 20
    assert in_kernel < 4 * UNREAD
    assert connection.dropped()


def test_a_follower_that_never_reads_is_disconnected_and_the_job_goes_on(system: System, connect: Connect) -> None:
    """H7. Without the clock its connection stays for ever; with a cancel, others would lose the job."""
    job = system.submit([1, 2, 3], max_tokens=3000)
    wait_for(lambda: len(system.tokens(job)) > 1000, "there is more than a kernel holds")
    stalled = system.logs().count("read nothing of its answer")
    connection = connect(request(f"/v1/jobs/{job}/events"))
    wait_for(lambda: system.logs().count("read nothing of its answer") > stalled, "it is disconnected")
    assert connection.dropped()
    assert system.job(job)["status"] == "decoding"
    assert system.finished(job)["status"] == "finished"
    assert system.tokens(job) == expected([1, 2, 3], 3000)


def test_a_short_answer_that_nobody_reads_is_not_kept_either(connect: Connect) -> None:
    """Without the write buffer's bound of nothing the server would take it for sent, and wait for ever to close."""
    connection = connect(request("/v1/tokenize", {"prompt": "x" * 15_000}))
    time.sleep(BOUND + IDLE + 1)
    assert connection.dropped()


def test_a_client_that_reads_slowly_gets_all_of_it(connect: Connect) -> None:
    """Without the look at what was taken meanwhile, who is slow would be taken for gone."""
    connection = connect(request("/v1/detokenize", {"tokens": [65] * 400_000}))
    heard = b""
    while not heard.endswith(b"}") and connection.seconds() < 6 * SLACK:
        heard += connection.socket.recv(16384)
        time.sleep(BOUND / 50)
    assert json.loads(heard.partition(b"\r\n\r\n")[2])["prompt"] == "A" * 400_000
    assert connection.seconds() > 2 * BOUND, "it was slow"
