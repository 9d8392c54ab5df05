"""Somebody who wants to hear of jobs: keeps what comes, and answers what a test says."""

import json
import ssl
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import openai

CERTIFICATE = Path(__file__).with_name("receiver.pem")  # of receiver.test, with its key


def verify(body: bytes, headers: Mapping[str, str], shared: str) -> None:
    """As a receiver does, by OpenAI's client. Raises openai.InvalidWebhookSignatureError."""
    with openai.OpenAI(api_key="-", webhook_secret=shared, base_url="http://127.0.0.1:1") as client:
        client.webhooks.verify_signature(body, headers)


@dataclass(frozen=True)
class Came:
    path: str
    headers: Message
    body: bytes

    @property
    def event(self) -> Any:
        return json.loads(self.body)


class Receiver(ThreadingHTTPServer):
    """answers: status and headers of the next ones; without more, 200. Cleared, `ready` lets requests wait."""

    request_queue_size = 128  # may wait to be accepted; with Python's 5, one of sixteen at once was dropped

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.came: list[Came] = []
        self.answers: list[tuple[int, dict[str, str]]] = []
        self.ready = threading.Event()
        self.ready.set()
        self.names: list[str | None] = []  # that clients asked for in TLS
        self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def url(self, path: str = "/hook", host: str = "127.0.0.1", scheme: str = "http") -> str:
        return f"{scheme}://{host}:{self.port}{path}"

    def with_tls(self) -> "Receiver":
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(CERTIFICATE)
        context.sni_callback = lambda _socket, name, _context: self.names.append(name)
        self.socket = context.wrap_socket(self.socket, server_side=True)
        return self

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves, or trusts no certificate, is no news."""


class Handler(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        receiver = self.server
        body = self.rfile.read(int(self.headers["Content-Length"]))
        with receiver.lock:
            receiver.came.append(Came(self.path, self.headers, body))
            receiver.at_once += 1
            receiver.most_at_once = max(receiver.most_at_once, receiver.at_once)
            status, headers = receiver.answers.pop(0) if receiver.answers else (200, {})
        receiver.ready.wait(60)
        with receiver.lock:
            receiver.at_once -= 1
        self.send_response(status)
        for name, value in ({"Content-Length": "2"} | headers).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


@contextmanager
def receiving(receiver: Receiver) -> Iterator[Receiver]:
    thread = threading.Thread(target=receiver.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield receiver
    finally:
        receiver.ready.set()
        receiver.shutdown()
        thread.join()
        receiver.server_close()
