"""The messages between a prefill and a decode worker: one msgpack header, and for PART one raw tensor frame.

    prefill                          decode
    OPEN(nonce, lease, fingerprint) ─▶   is the credit mine, is the geometry the same?
                                     ◀─ OK | NACK(reason)
    PART(layer, k|v, tokens) + bytes ─▶  digest of its own copy
    …
    COMMIT(nonce, lease, tokens)     ─▶  everything there? then handover in Redis
                                     ◀─ ACK | NACK(reason)
    ABORT(nonce)                    ◀─▶  from either side, any time

A header is hostile until `decode` has checked it. There is no pickle anywhere.
"""

from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, get_args, get_origin

import msgpack

from pipeline.errors import FrameError
from pipeline.geometry import ITEM_BYTES

VERSION = 1
#: COMMIT carries the tokens so far: 128k ids of 5 bytes each, and room for the rest.
HEADER_LIMIT = 1 << 20
ARRAY_LIMIT = 1 << 18
#: A PART is about 1 MB: on loopback 0.5 to 4 MB frames run at 1.9 GB/s, 32 MB ones at 0.7.
PART_BYTES = 1 << 20
#: A frame beyond this is not ours; libzmq closes the connection before it takes the memory.
FRAME_LIMIT = 16 << 20
DIGEST = "xxh3_128"


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """Asks for the place that the credit `nonce` promised. tokens: how many the KV cache will hold."""

    kind: ClassVar[str] = "open"
    nonce: str
    job: str
    lease: str
    tokens: int
    fingerprint: dict[str, Any]
    digest: str = DIGEST
    version: int = VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Ok:
    kind: ClassVar[str] = "ok"
    nonce: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """K or V of one layer for tokens [start, start + tokens); the tensor frame follows."""

    kind: ClassVar[str] = "part"
    nonce: str
    layer: int
    tensor: str  # "k" or "v"
    start: int
    tokens: int
    dtype: str
    shape: tuple[int, ...]  # [kv_heads, tokens, head_dim]
    digest: bytes

    @property
    def size(self) -> int:
        heads, tokens, dim = self.shape
        return heads * tokens * dim * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """Everything was sent. tokens: what the job has generated so far, the newest not yet in the KV cache."""

    kind: ClassVar[str] = "commit"
    nonce: str
    lease: str
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    kind: ClassVar[str] = "ack"
    nonce: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Nack:
    """void: the place was gone before anything was sent, so the attempt does not count."""

    kind: ClassVar[str] = "nack"
    nonce: str
    reason: str
    void: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    kind: ClassVar[str] = "abort"
    nonce: str
    reason: str


Message = Open | Ok | Part | Commit | Ack | Nack | Abort
_KINDS: dict[str, type[Message]] = {cls.kind: cls for cls in get_args(Message)}


def encode(message: Message) -> bytes:
    """The header frame."""
    header: bytes = msgpack.packb({"kind": message.kind, **asdict(message)})
    return header


def decode(frame: bytes | memoryview) -> Message:
    """The message of a header frame, every field of the right type and in range.

    Raises FrameError for anything else; the sentence says what was wrong, and never echoes the bytes.
    """
    if len(frame) > HEADER_LIMIT:
        raise FrameError(f"a header of {len(frame)} bytes; at most {HEADER_LIMIT} are allowed")
    try:
        header = msgpack.unpackb(frame, max_array_len=ARRAY_LIMIT, max_map_len=4096)
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise FrameError(f"a header that is not msgpack ({type(error).__name__})") from error
    if not isinstance(header, dict):
        raise FrameError("a header that is not a map")
    kind = header.pop("kind", None)
    cls = _KINDS.get(kind) if isinstance(kind, str) else None
    if cls is None:
        raise FrameError("a message of unknown kind")
    known = {field.name: field for field in fields(cls)}
    if header.keys() != known.keys():
        raise FrameError(f"{cls.kind}: fields must be {sorted(known)}, and no others")
    values = {name: _typed(cls.kind, name, known[name].type, header[name]) for name in known}
    message: Message = cls(**values)
    if isinstance(message, Part):
        _check_part(message)
    return message


def _typed(kind: str, name: str, expected: Any, value: Any) -> Any:
    if get_origin(expected) is tuple:  # every tuple here is tuple[int, ...]
        if isinstance(value, list) and all(type(item) is int and item >= 0 for item in value):
            return tuple(value)
    elif get_origin(expected) is dict or expected is dict:
        if isinstance(value, dict):
            return value
    elif type(value) is expected and not (expected is int and value < 0):
        return value
    raise FrameError(f"{kind}.{name} is not a valid {getattr(expected, '__name__', expected)}")


def _check_part(part: Part) -> None:
    if part.tensor not in ("k", "v"):
        raise FrameError("part.tensor is neither k nor v")
    if part.dtype not in ITEM_BYTES:
        raise FrameError("part.dtype is unknown")
    if len(part.shape) != 3 or part.shape[1] != part.tokens or part.tokens == 0:
        raise FrameError(f"part.shape does not hold {part.tokens} tokens")
