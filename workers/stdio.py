"""The pipe: one prefill worker for one program, over stdin and stdout. No Redis, no keeper; docs/stdio.md has the protocol.

A thread turns lines into requests and does nothing else. Everything is decided, computed and said in the main thread, which
looks into the inbox between layers: so there are no locks, the vendor's SDK sees one thread, and a client that writes without
reading can block nothing but its own answers.

KV goes into a file of the client's. It is written to, not mapped: when /dev/shm is full, or the client has shortened the
file, a write is an error of that request, where a store into a map would be the end of the process (SIGBUS).
"""

import json
import logging
import os
import queue
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from reprlib import repr as short
from typing import Any

import numpy as np
from typing_extensions import Buffer

from pipeline.config import Config
from pipeline.errors import Cancelled, DeviceError, InvalidRequest, KVRelayError
from pipeline.geometry import Geometry
from pipeline.model import Model
from workers.devices import Logits, PrefillDevice, open_prefill

log = logging.getLogger(__name__)

PROTOCOL = 1
LINE_BYTES = 16 << 20  # of one request: two million token ids, more than any context
WAITING = 1000  # requests in line; more of them would only fill memory
ALIGNED = 64  # bytes, of the KV cache in a segment: a cache line, and what vectorised readers ask for

#: The fields of each request besides `op`; all are needed.
FIELDS = {"load": (), "prefill": ("id", "tokens", "segment"), "cancel": ("id",), "exit": ()}
WANTED = {
    "id": "a string of 1 to 200 characters",
    "tokens": "a list of token ids, as in [1, 2, 3]",
    "segment": "the absolute path of a file, as in /dev/shm/name",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One line. With a fault nothing of it counts but the id, which only a prefill has: its end will bear it."""

    op: str = ""
    id: str | None = None
    tokens: Sequence[Any] = ()  # checked where max_tokens is known
    segment: str = ""
    fault: InvalidRequest | None = None


LEAVE = Request(op="exit")


def parse(line: bytes) -> Request:
    """Never raises: what is wrong with a line is the request's fault."""
    if len(line) > LINE_BYTES:
        return _faulty("", f"a line of more than {LINE_BYTES} bytes; at most {LINE_BYTES} are allowed")
    try:
        value = json.loads(line.decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:  # ValueError: also bytes that are not UTF-8, and endless numbers
        return _faulty("", f"{line[:40]!r} is not JSON ({error}); a line must be one JSON object")
    if not isinstance(value, dict):
        return _faulty("", f"{short(value)} is not a request; a line must be one JSON object")
    fault = _fault(value)
    op, request_id = value.get("op"), value.get("id")
    if fault is not None:
        return Request(id=request_id if op == "prefill" and _fits("id", request_id) else None, fault=fault)
    return Request(**value)


def _fault(value: dict[str, Any]) -> InvalidRequest | None:
    op = value.get("op")
    if not isinstance(op, str) or op not in FIELDS:
        return InvalidRequest("op", f"{short(op)} is none of {', '.join(FIELDS)}")
    for name in value:
        if name not in ("op", *FIELDS[op]):
            return InvalidRequest(name[:100], f"{op} has no such field, only {', '.join(('op', *FIELDS[op]))}")
    for name in FIELDS[op]:
        if name not in value:
            return InvalidRequest(name, f"{op} needs it: {WANTED[name]}")
        if not _fits(name, value[name]):
            return InvalidRequest(name, f"{short(value[name])} is not {WANTED[name]}")
    return None


def _fits(name: str, value: Any) -> bool:
    if name == "tokens":
        return isinstance(value, list)
    if name == "id":
        return isinstance(value, str) and 0 < len(value) <= 200
    return isinstance(value, str) and value.startswith("/")


def _faulty(field: str, message: str) -> Request:
    return Request(fault=InvalidRequest(field, message))


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


@dataclass(frozen=True, slots=True)
class Layout:
    """What stands where in a segment. vocabulary: logits that the device answers.

    The logits, float32 `[vocabulary]`, from 0; then, from `kv`, each layer's K and each layer's V. Of a prompt of P tokens
    a layer has those that its next token can still see, [first, P). A part of them, tokens [start, start + n), stands
    (start − first) · token_bytes after the beginning of the layer's K or V, as `[kv_heads, n, head_dim]`.
    """

    geometry: Geometry
    vocabulary: int

    @property
    def kv(self) -> int:
        """Byte at which layer 0 begins."""
        return -(-4 * self.vocabulary // ALIGNED) * ALIGNED

    def edges(self, tokens: int) -> list[int]:
        """Byte at which each layer's K begins, and last the size of the segment. V begins in the middle between two."""
        both = 2 * self.geometry.token_bytes
        held = (both * (tokens - layer.first_token(tokens)) for layer in self.geometry.layers)
        return list(accumulate(held, initial=self.kv))


class Segment:
    """The client's file while one request runs. Parts of a layer come in order, without gaps."""

    def __init__(self, path: str, layout: Layout, tokens: int) -> None:
        """tokens: of the prompt. Raises InvalidRequest if the file cannot take them."""
        self._geometry, self._vocabulary = layout.geometry, layout.vocabulary
        self._tokens = tokens
        self._edges = layout.edges(tokens)
        self._first = [layer.first_token(tokens) for layer in layout.geometry.layers]
        self._next = list(self._first)  # token that each layer's next part begins with
        self._descriptor = _open(path, self._edges[-1])

    def __enter__(self) -> "Segment":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def put(self, layer: int, start: int, tokens: int, k: Buffer, v: Buffer) -> tuple[int, int]:
        """K and V of tokens [start, start + tokens), `[kv_heads, tokens, head_dim]`; answers at which bytes they stand.

        Raises DeviceError if that is not what comes next, InvalidRequest if the file does not take it.
        """
        size = tokens * self._geometry.token_bytes
        parts = [np.frombuffer(memoryview(side), dtype=np.uint8) for side in (k, v)]
        if not 0 <= layer < len(self._next) or start != self._next[layer] or not 0 < tokens <= self._tokens - start:
            raise DeviceError(f"the device handed out tokens {start} to {start + tokens} of layer {layer} out of order")
        if any(len(part) != size for part in parts):
            raise DeviceError(f"the device handed out {len(parts[0])} and {len(parts[1])} bytes, not {size} each")
        begin, end = self._edges[layer : layer + 2]
        at = begin + (start - self._first[layer]) * self._geometry.token_bytes
        places = at, at + (end - begin) // 2
        for part, place in zip(parts, places, strict=True):
            self._write(part.data, place)
        self._next[layer] += tokens
        return places

    def put_logits(self, logits: Logits) -> None:
        """float32 `[vocabulary]`, last. Raises DeviceError if they, or a layer, are not whole."""
        if len(logits) != self._vocabulary:
            raise DeviceError(f"the device answered {len(logits)} logits, not {self._vocabulary} as before")
        for layer, end in enumerate(self._next):
            if end != self._tokens:
                raise DeviceError(f"the device handed out {end} of {self._tokens} tokens of layer {layer}")
        self._write(np.ascontiguousarray(logits, dtype="<f4").view(np.uint8).data, 0)

    def _write(self, data: memoryview, at: int) -> None:
        try:
            while data:
                count = os.pwrite(self._descriptor, data, at)
                data, at = data[count:], at + count
        except OSError as error:
            reason = f"{len(data)} bytes cannot be written at byte {at} ({error.strerror})"
            raise InvalidRequest("segment", f"{reason}; make room for them, or use another file") from error


def _open(path: str, size: int) -> int:
    shown = repr(path[:200])
    wanted = f"it must be a file of at least {size} bytes that this worker may write"
    try:
        # neither waits for the other end of a named pipe nor makes a terminal ours
        descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError as error:
        raise InvalidRequest("segment", f"{shown} cannot be opened ({error.strerror}); {wanted}") from error
    except ValueError as error:  # a NUL, or half a surrogate pair
        raise InvalidRequest("segment", f"{shown} can be no file's name; {wanted}") from error
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise InvalidRequest("segment", f"{shown} is not a file; {wanted}")
    if found.st_size < size:
        os.close(descriptor)
        raise InvalidRequest("segment", f"{shown} has {found.st_size} bytes; {wanted}")
    return descriptor


class Pipe:
    """Requests in, events out, until the client says exit, closes its end or is gone."""

    def __init__(
        self, open_device: Callable[[], PrefillDevice], requests: int, events: int, *, model: str, device: str
    ) -> None:
        """requests, events: descriptors. model, device: names, for people."""
        self._open_device = open_device
        self._requests = requests
        self._events = events
        self._names = {"model": model, "device": device}
        self._inbox: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._device: PrefillDevice | None = None
        self._layout: Layout | None = None  # there is one once the device has shown that it computes
        self._line: dict[str, Request] = {}  # prefills by id, in order; the first may be running
        self._running: str | None = None
        self._cancelled = False  # the running one
        self._leaving = False

    def run(self) -> int:
        """The exit code. Every prefill that was taken has been given its end by then, if anybody listens."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._told_to_leave)
        threading.Thread(target=self._read, name="requests", daemon=True).start()
        while not self._leaving:
            self._take(self._inbox.get())
            while self._line and not self._leaving:
                self._serve(next(iter(self._line.values())))
        for request_id in list(self._line):
            self._end(request_id, "cancelled")
        log.info("the pipe is closed", extra={"action": "left"})
        return 0

    def _read(self) -> None:
        try:
            for line in _lines(self._requests):
                self._inbox.put(parse(line))
        finally:
            self._inbox.put(LEAVE)

    def _told_to_leave(self, number: int, _frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)  # a second one ends a device call, or a write that nobody reads
        self._inbox.put(LEAVE)

    def _take(self, request: Request) -> None:
        """Whatever is not computing is done at once; a prefill goes to the end of the line."""
        try:
            if request.id in self._line and request.op != "cancel":
                # without the id: it belongs to the other one, which has not ended
                self._say(
                    "error", id=None, field="id", message=f"id: {short(request.id)} is still in use; choose another"
                )
            elif request.fault is not None:
                raise request.fault
            elif request.op == "load":
                self._load()
            elif request.op == "prefill":
                self._queue(request)
            elif request.op == "cancel":
                self._cancel(request)
            else:
                self._leaving = True
        except InvalidRequest as error:
            self._say("error", id=request.id, field=error.field, message=str(error))

    def _load(self) -> None:
        if self._layout is not None:
            raise InvalidRequest("op", "'load' was done before; a worker loads one model, once")
        began = time.monotonic()
        try:
            self._device = self._device or self._open_device()
            layout = Layout(self._device.geometry, _vocabulary(self._device))
        except KVRelayError as error:
            raise InvalidRequest("", f"load: {error}") from error
        except Exception as error:
            log.exception("load failed", extra={"action": "load_failed"})
            raise InvalidRequest("", f"load: {type(error).__name__}: {error}") from error
        self._layout = layout
        log.info("loaded %s in %.1f s", self._names["model"], time.monotonic() - began, extra={"action": "loaded"})
        self._say(
            "loaded",
            protocol=PROTOCOL,
            **self._names,
            max_tokens=self._device.max_tokens,
            vocabulary=layout.vocabulary,
            kv=layout.kv,
            token_bytes=layout.geometry.token_bytes,
            bytes=layout.edges(self._device.max_tokens)[-1],
            geometry=layout.geometry.fingerprint(),
        )

    def _loaded(self) -> tuple[PrefillDevice, Layout]:
        if self._device is None or self._layout is None:
            raise InvalidRequest("op", 'there is no model yet; send {"op": "load"} before a prefill')
        return self._device, self._layout

    def _queue(self, request: Request) -> None:
        device, layout = self._loaded()
        if len(self._line) >= WAITING:
            raise InvalidRequest("", f"{WAITING} requests are in line; wait for one to end")
        _check_tokens(request.tokens, device.max_tokens, layout.vocabulary)
        self._line[str(request.id)] = request

    def _cancel(self, request: Request) -> None:
        if request.id is not None and request.id == self._running:
            self._cancelled = True
        elif request.id in self._line:
            self._end(request.id, "cancelled")
        else:  # no error: it crossed the request's end, which the client will find
            log.info("nothing to cancel: %s has ended, or never was", short(request.id), extra={"action": "cancel"})

    def _serve(self, request: Request) -> None:
        """One prefill, and what each way of failing means. The segment is closed before the client learns of the end."""
        request_id = str(request.id)
        self._running, self._cancelled = request_id, False
        event, facts = "error", {}
        try:
            facts = self._prefill(request)
            event = "done"
        except Cancelled:
            event = "cancelled"
        except InvalidRequest as error:
            facts = {"field": error.field, "message": str(error)}
        except KVRelayError as error:
            facts = {"field": "", "message": f"prefill: {error}"}
        except Exception as error:
            log.exception("a prefill failed", extra={"action": "prefill_failed", "job": request_id})
            facts = {"field": "", "message": f"prefill: {type(error).__name__}: {error}"}
        self._running = None
        self._end(request_id, event, **facts)

    def _prefill(self, request: Request) -> dict[str, Any]:
        """What the client is told at the end."""
        device, layout = self._loaded()
        with Segment(request.segment, layout, len(request.tokens)) as segment:

            def on_layer(layer: int, start: int, tokens: int, k: Buffer, v: Buffer) -> None:
                at_k, at_v = segment.put(layer, start, tokens, k, v)
                self._say("layer", id=request.id, layer=layer, start=start, tokens=tokens, k=at_k, v=at_v)

            running = device.begin(request.tokens)
            logits = None
            while logits is None:
                if self._look():
                    raise Cancelled
                logits = running.advance(on_layer, self._look)
            best = int(logits.argmax())
            if not np.isfinite(logits[best]):
                raise DeviceError("the device answered logits that are not finite")
            segment.put_logits(logits)
        return {"logits": 0, "vocabulary": len(logits), "token": best}

    def _look(self) -> bool:
        """Takes what has come in meanwhile. True: the running prefill is to stop."""
        while not self._leaving and not self._inbox.empty():
            self._take(self._inbox.get())
        return self._cancelled or self._leaving

    def _end(self, request_id: str, event: str, **facts: Any) -> None:
        """After the one event that ends a request its id is free again."""
        del self._line[request_id]
        self._say(event, id=request_id, **facts)
        log.info("prefill %s: %s", short(request_id), event, extra={"action": event, "job": request_id})

    def _say(self, event: str, **facts: Any) -> None:
        data = json.dumps({"event": event, **facts}, separators=(",", ":")).encode() + b"\n"
        try:
            while data:
                data = data[os.write(self._events, data) :]
        except ConnectionError:  # the client is gone; no exception, for we are called from within a vendor's code
            self._leaving = True


def serve(config: Config, factory: str = "") -> int:
    """The exit code. factory: as for `open_prefill`. Takes over this process's stdin and stdout."""
    requests, events = _take_over()
    pipe = Pipe(
        lambda: open_prefill(config, Model.locate(config), factory),
        *(requests, events),
        model=config.name,
        device=factory or config.prefill_device,
    )
    code = pipe.run()
    _hang_up()
    return code


def _take_over() -> tuple[int, int]:
    """The pipe's two ends. Libraries print, and start children that print or read: from now on to stderr, from nothing."""
    requests, events = os.dup(0), os.dup(1)  # not inherited by children
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    sys.stdout = sys.stderr
    return requests, events


def _hang_up() -> None:
    """When stderr's reader has gone too, what is left for it in a buffer would make Python's exit code 120."""
    try:
        sys.stderr.flush()
    except OSError:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, 2)


def _lines(descriptor: int) -> Iterator[bytes]:
    """Whole lines. Of one that is too long just its beginning, as soon as it is too long for `parse`."""
    held, skipping = bytearray(), False
    while data := os.read(descriptor, 1 << 16):
        *ends, rest = data.split(b"\n")
        for end in ends:
            if not skipping:
                yield bytes(held + end)
            held, skipping = bytearray(), False
        if not skipping:
            held += rest
        if len(held) > LINE_BYTES:
            yield bytes(held)
            held, skipping = bytearray(), True


def _check_tokens(tokens: Sequence[Any], max_tokens: int, vocabulary: int) -> None:
    if not tokens:
        raise InvalidRequest("tokens", f"[] is empty; a prompt has 1 to {max_tokens} token ids")
    if len(tokens) > max_tokens:
        raise InvalidRequest("tokens", f"{len(tokens)} token ids; this worker takes at most {max_tokens}")
    for index, token in enumerate(tokens):
        if type(token) is not int or not 0 <= token < vocabulary:  # True is an int to isinstance
            raise InvalidRequest("tokens", f"{short(token)} at index {index} is no token id; 0 to {vocabulary - 1} are")


def _vocabulary(device: PrefillDevice) -> int:
    """How many logits the device answers. Asked with a prompt of one token, so `loaded` also means that it computes."""
    running = device.begin([0])
    logits = None
    while logits is None:
        logits = running.advance(lambda *_: None, bool)
    return len(logits)
