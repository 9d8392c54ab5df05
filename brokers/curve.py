"""Encryption of KV caches between hosts, and who may send one: CurveZMQ (RFC 26 of ZeroMQ), one key for the whole system.

All workers have the same secret key, and both ends of a connection derive the same pair from it. A client of CurveZMQ must
know the server's public key before it can say a word, and ours is published nowhere: so whoever lacks the file can neither
read nor speak.
"""

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio
from zmq.utils import z85

from pipeline.errors import ConfigError

SETTING = "KVR_KV_KEY"
#: Handshakes that came to nothing, as libzmq's monitor names them.
FAILURES = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


@dataclass(frozen=True, slots=True)
class Key:
    public: bytes
    secret: bytes

    @classmethod
    def read(cls, path: str) -> "Key | None":
        """None without a path. Raises ConfigError for a file that is no key, or that others may read."""
        if not path:
            return None
        try:
            secret = Path(path).expanduser().read_bytes().strip()
            mode = Path(path).expanduser().stat().st_mode
        except OSError as error:
            raise ConfigError(
                SETTING, path, f"cannot be read ({error.strerror}); `kvrelay keygen` writes one"
            ) from None
        if mode & 0o077:
            raise ConfigError(SETTING, path, f"others may read it, too: chmod 600 {path}")
        try:
            if len(z85.decode(secret)) != 32:
                raise ValueError
            return cls(zmq.curve_public(secret), secret)
        except (ValueError, KeyError, struct.error, zmq.ZMQError):
            raise ConfigError(SETTING, path, "is no key; `kvrelay keygen` writes one") from None

    @staticmethod
    def write(path: Path) -> None:
        """A new one, for its owner's eyes only. Raises FileExistsError rather than replace one."""
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(zmq.curve_keypair()[1] + b"\n")

    def serve(self, socket: "zmq.Socket[Any]") -> None:
        """Before it is bound."""
        self._take(socket)
        socket.setsockopt(zmq.CURVE_SERVER, 1)

    def call(self, socket: "zmq.Socket[Any]") -> None:
        """Before it connects."""
        self._take(socket)
        socket.setsockopt(zmq.CURVE_SERVERKEY, self.public)

    def _take(self, socket: "zmq.Socket[Any]") -> None:
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.public)
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.secret)
