"""The world outside, as far as webhooks may reach it: public addresses, and networks that the operator allows.

What a client writes is not trusted to say where it leads: a name may stand for a private address, for another one at the
second look (DNS rebinding), or be an address in disguise (`2130706433`). So nothing is decided by the text. Every connection
is made here, and to the very address that was checked; Host header, SNI and certificate go by the name all the same.
"""

import asyncio
import re
import socket
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from urllib.parse import SplitResult, urlsplit

import httpcore2

from pipeline.config import Config
from pipeline.errors import InvalidRequest, KVRelayError

Network = IPv4Network | IPv6Network

URL = re.compile(r"[A-Za-z0-9\-._~:/?#\[\]@!$&'()*+,;=%]+")  # what RFC 3986 lets a URL be written in

#: Public by the letter only: 6to4, which hides an IPv4 address; special uses that Python before 3.11.10 does not all know;
#: where Azure's hosts serve their machines.
SPECIAL = tuple(map(ip_network, ("2002::/16", "192.0.0.0/24", "168.63.129.16/32")))


class AddressRefused(KVRelayError):
    """A private address that webhooks may not go to."""


def check(url: str | None, config: Config) -> str:
    """The URL of a request's webhook, '' if it has none. Raises InvalidRequest.

    Where a name leads is seen when it is used; an address in numbers is looked at here already, to say so at once."""
    if url is None:
        return ""
    if not config.webhook_key:
        raise InvalidRequest(
            "webhook",
            "there are none here: the operator must set KVR_WEBHOOK_SECRET; /v1/jobs/{id}/events tells of the end, too",
            code="unsupported_value",
        )
    host = parse(url).hostname or ""
    try:
        permitted = permits(host, config.allowed_networks)
    except ValueError:  # a name
        permitted = True
    if not permitted:
        raise _bad(url, f"{host} is a private address, and KVR_WEBHOOK_NETWORKS does not allow it")
    return url


def parse(url: str) -> SplitResult:
    """The one reading of a URL, for the check and for the connection. Raises InvalidRequest."""
    if not URL.fullmatch(url):
        raise _bad(url, "it must be written in ASCII: percent encoding, and punycode for a host")
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises ValueError, too
    except ValueError as error:
        raise _bad(url, str(error)) from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise _bad(url, "it must begin with http:// or https:// and a host")
    if "@" in parts.netloc:
        raise _bad(url, "it must hold no user or password: the signature says who sends")
    return parts


def _bad(url: str, why: str) -> InvalidRequest:
    return InvalidRequest("webhook", f"{url[:100]!r} will not do: {why}")


def permits(text: str, allowed: Iterable[Network]) -> bool:
    """text: an address in numbers. Raises ValueError if it is none."""
    address = ip_address(text)
    address = getattr(address, "ipv4_mapped", None) or address  # ::ffff:127.0.0.1 is 127.0.0.1
    return _is_public(address) or any(address in network for network in allowed)


def _is_public(address: IPv4Address | IPv6Address) -> bool:
    """is_reserved is, among others, NAT64, which hides an IPv4 address, too."""
    special = address.is_multicast or address.is_reserved or any(address in network for network in SPECIAL)
    return address.is_global and not special


class Outside(httpcore2.AnyIOBackend):
    """What httpcore opens connections with."""

    def __init__(self, allowed: Sequence[Network], lookups: int) -> None:
        """lookups: at once. Threads of their own: a name server that hangs must not take those that tokenize prompts."""
        self._allowed = allowed
        self._resolver = ThreadPoolExecutor(lookups, "dns")

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,  # noqa: ASYNC109 - as httpcore wants it
        local_address: str | None = None,
        socket_options: Iterable[httpcore2.SOCKET_OPTION] | None = None,
    ) -> httpcore2.AsyncNetworkStream:
        """timeout: for each of the name's addresses. Raises AddressRefused if it has none but private ones."""
        failed: Exception = AddressRefused(
            f"{host} has only private addresses, and KVR_WEBHOOK_NETWORKS allows none of them"
        )
        for address in await self._look_up(host, port):
            if permits(address, self._allowed):
                try:
                    return await super().connect_tcp(address, port, timeout, local_address, socket_options)
                except (httpcore2.ConnectError, httpcore2.ConnectTimeout) as error:
                    failed = error
        raise failed

    async def _look_up(self, host: str, port: int) -> list[str]:
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(
            self._resolver, lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        )
        return [str(address[0]) for *_, address in found]
