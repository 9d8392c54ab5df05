"""A TCP proxy between two processes, which a test can make slow, deaf or broken."""

import contextlib
import select
import socket
import struct
import threading

CHUNK = 1 << 16


class Proxy:
    """On a port of its own; forwards to `target`, host:port. Counts what goes up, and cuts everything at `cut_after` bytes."""

    def __init__(self, target: str, *, cut_after: int = 0) -> None:
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self.cut_after = cut_after
        self.cuts = 0
        self.seen = b""  # what a client said first
        self._passed = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError), socket.create_connection(self._target) as server:
            while True:
                for source in select.select([client, server], [], [])[0]:
                    data = source.recv(CHUNK)
                    if not data:
                        return
                    if source is client:
                        self._passed += len(data)
                        self.seen += data if len(self.seen) < CHUNK else b""
                    if self.cut_after and self._passed > self.cut_after:
                        self.cut_after, self.cuts = 0, self.cuts + 1
                        for side in (client, server):  # a reset, not an end
                            side.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                        return
                    (server if source is client else client).sendall(data)
