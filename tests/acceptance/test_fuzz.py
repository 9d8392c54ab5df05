"""Bytes that are no HTTP, or nearly: nothing dies, nothing is left over, and in between good requests are served.

Five seconds as a rule; KVR_TEST_FUZZ_SECONDS for longer. KVR_TEST_FUZZ_SEED repeats a run.
"""

import contextlib
import json
import os
import random
import secrets
import socket
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from tests.acceptance.system import WAYS_TO_LEAVE, System, leave, wait_for

SECONDS = float(os.environ.get("KVR_TEST_FUZZ_SECONDS", "5"))
pytestmark = pytest.mark.timeout(SECONDS + 120)

BODY = json.dumps({"prompt": [1, 2, 3], "max_tokens": 2}).encode()
PATHS = (
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/jobs",
    "/v1/jobs/x/events",
    "/v1/models/x",
    "/health/ready",
    "/",
)
HOST = b"Host: localhost\r\n"
JSON = b"Content-Type: application/json\r\n"


def head(draw: random.Random, *headers: bytes) -> bytes:
    method = draw.choice((b"GET", b"POST", b"DELETE", b"HEAD", b"OPTIONS", b"PATCH", b"CONNECT", b"TRACE"))
    return method + b" " + draw.choice(PATHS).encode() + b" HTTP/1.1\r\n" + HOST + b"".join(headers) + b"\r\n"


def noise(draw: random.Random) -> bytes:
    return draw.randbytes(draw.randrange(1, 5000))


def broken(draw: random.Random) -> bytes:
    """A good request with some bytes changed, lost, doubled or put in."""
    request = bytearray(good(draw))
    for _ in range(draw.randrange(1, 8)):
        at = draw.randrange(len(request))
        do = draw.randrange(4)
        if do == 0:
            request[at] = draw.randrange(256)
        elif do == 1:
            del request[at : at + draw.randrange(1, 20)]
        elif do == 2:
            request[at:at] = request[at : at + draw.randrange(1, 200)]
        else:
            request[at:at] = draw.choice((b"\r\n", b"\n", b"\0", b"\r", b" ", b":", b"\xff", b"\r\n\r\n"))
        request = request or bytearray(b"\r")
    return bytes(request)


def good(draw: random.Random) -> bytes:
    return b"POST /v1/jobs HTTP/1.1\r\n" + HOST + JSON + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY


def http2(draw: random.Random) -> bytes:
    return b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0" + noise(draw)


def upgrades(draw: random.Random) -> bytes:
    protocol, connection = (
        draw.choice((b"websocket", b"h2c", b"x")),
        draw.choice((b"Upgrade", b"upgrade, HTTP2-Settings")),
    )
    key = b"Sec-WebSocket-Version: %d\r\nSec-WebSocket-Key: %s\r\n" % (
        draw.choice((13, 8, 99)),
        draw.choice((b"dGhlIHNhbXBsZSBub25jZQ==", b"x")),
    )
    settings = b"HTTP2-Settings: AAMAAABkAAQAAP__\r\n"
    request = head(draw, b"Upgrade: " + protocol + b"\r\nConnection: " + connection + b"\r\n", key, settings)
    return request + draw.choice((b"", noise(draw), b"\x81\x85\0\0\0\0hello"))


def smuggled(draw: random.Random) -> bytes:
    """Two lengths, or a length that is none: what one reads as a body, another would take for a request."""
    length = draw.choice(
        (b"0", b"4", b"%d" % len(BODY), b"-1", b"+5", b"1e3", b"99999999999999999999", b"0x10", b" 7", b"5, 6")
    )
    coding = draw.choice(
        (b"chunked", b"Chunked", b"identity", b"gzip, chunked", b"chunked, chunked", b"xchunked", b"\x0bchunked")
    )
    lines = [b"Content-Length: %s\r\n" % length, b"Transfer-Encoding: %s\r\n" % coding, b"Content-Length : 3\r\n"]
    lines += [b"Content-Length: 3\r\n", b"Transfer-Encoding : chunked\r\n", b" folded: yes\r\n"]
    chosen = draw.sample(lines, draw.randrange(1, 4))
    body = draw.choice(
        (b"0\r\n\r\n", b"%x\r\n" % len(BODY) + BODY + b"\r\n0\r\n\r\n", BODY, b"ffffffffffffffffffff\r\n", b"-1\r\n")
    )
    return b"POST /v1/jobs HTTP/1.1\r\n" + HOST + JSON + b"".join(chosen) + b"\r\n" + body + good(draw)


def pipelined(draw: random.Random) -> bytes:
    requests = [draw.choice((good, broken, uris))(draw) for _ in range(draw.randrange(2, 40))]
    return b"".join(requests)[: draw.randrange(100, 40_000)]


def huge(draw: random.Random) -> bytes:
    size = draw.choice((4_000, 8_200, 70_000, 1_000_000))
    return draw.choice(
        (
            head(draw, b"x" * size + b": y\r\n"),
            head(draw, b"X: " + b"y" * size + b"\r\n"),
            head(draw, *(b"X-%d: y\r\n" % number for number in range(size // 100))),
            b"GET /" + b"z" * size + b" HTTP/1.1\r\n\r\n",
            b"G" * size,
            b"POST /v1/jobs HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1;" + b"e" * size,
            b"POST /v1/jobs HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + b"trailer: x\r\n" * (size // 12),
        )
    )


def uris(draw: random.Random) -> bytes:
    target = draw.choice(
        (
            b"http://elsewhere.example/v1/models",
            b"*",
            b"//v1/models",
            b"/v1/../v1/models",
            b"/v1/models/%00%ff%0d%0a",
            b"/v1/jobs/%7B%7D/events?x=%",
            b"elsewhere.example:443",
            b"/v1/jobs/" + b"%F0%9F%98%80" * 50,
            "/v1/models/é".encode(),
            b"/health/live?" + b"a=b&" * 500,
        )
    )
    version = draw.choice((b"HTTP/1.1", b"HTTP/1.0", b"HTTP/0.9", b"HTTP/3", b"http/1.1", b""))
    return draw.choice((b"GET", b"DELETE", b"CONNECT")) + b" " + target + b" " + version + b"\r\n" + HOST + b"\r\n"


def bodies(draw: random.Random) -> bytes:
    body = draw.choice(
        (noise(draw), b"[" * 5000, b'{"prompt":' * 500, BODY[: draw.randrange(len(BODY))], b"\xef\xbb\xbf" + BODY)
    )
    return (
        b"POST %s HTTP/1.1\r\n" % draw.choice(PATHS).encode()
        + HOST
        + JSON
        + b"Content-Length: %d\r\n\r\n" % len(body)
        + body
    )


SHAPES: list[Callable[[random.Random], bytes]] = [
    *(noise, broken, http2, upgrades, smuggled, pipelined, huge, uris, bodies)
]


@pytest.fixture
def system(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    settings = {"model": "sim", "prefill_device": "sim", "decode_device": "sim", "request_seconds": 1, "slots": 8}
    settings |= {"sim_prefill_us": 10, "sim_step_ms": 1, "queue_bound": 100_000, "keep_seconds": 5}
    system = System(redis_url, tmp_path_factory.mktemp("fuzz"), served_name=f"fuzz-{secrets.token_hex(4)}", **settings)
    yield system.start_all()
    system.close()


def throw(system: System, draw: random.Random) -> None:
    """One connection: says something in pieces, listens for a moment or not at all, and leaves somehow."""
    said = draw.choice(SHAPES)(draw)
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", system.port), timeout=2) as connection:
        cut = draw.randrange(len(said) + 1)
        connection.sendall(said[:cut])
        connection.sendall(said[cut:])
        connection.settimeout(draw.choice((0.001, 0.02, 0.1)))
        with contextlib.suppress(TimeoutError):
            while draw.random() < 0.9 and connection.recv(65536):
                pass
        leave(connection, draw.choice(WAYS_TO_LEAVE))


def test_no_bytes_kill_the_api_or_make_it_grow(system: System, capsys: pytest.CaptureFixture[str]) -> None:
    """Without the bounds on heads, bodies and times that the other tests name, one of the shapes would stay and grow."""
    seed = int(os.environ.get("KVR_TEST_FUZZ_SEED", str(secrets.randbelow(1 << 32))))
    with capsys.disabled():
        print(f"\nfuzz of raw bytes: seed {seed}")
    draw = random.Random(seed)
    api = psutil.Process(system.processes[0].pid)
    (serving,) = api.children()

    def some(seconds: float) -> int:
        """Answers how many."""
        thrown, until = 0, time.monotonic() + seconds
        while time.monotonic() < until:
            throw(system, draw)
            thrown += 1
            if thrown % 50 == 0:
                assert system.complete([1, 2, 3], max_tokens=3)["usage"]["completion_tokens"] == 3
        return thrown

    some(SECONDS / 4)  # caches and pools have their size then
    before, descriptors = system.memory(system.processes[0]), serving.num_fds()
    thrown = some(SECONDS)
    with capsys.disabled():
        print(f"{thrown} connections, {(system.memory(system.processes[0]) - before) / (1 << 20):.1f} MiB more")
    assert api.children() == [serving], "it is the same process"
    assert system.memory(system.processes[0]) - before < 16 << 20
    wait_for(lambda: serving.num_fds() <= descriptors + 5, "the connections are gone")
    for trouble in ("Traceback", "Error in ASGI", "never retrieved", "unexpected"):
        assert trouble not in system.logs()
    system.wait_idle()
