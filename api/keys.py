"""Middleware: who asks, whether they may, and how often. ``req.context.key`` is the key that a request came with."""

import ipaddress
import math

from falcon.asgi import Request, Response

from api.errors import RateLimited, Unauthorized
from brokers.api_keys import Admission, ApiKey, ApiKeys

OPEN = "/health/"  # for load balancers, which have no key, and when Redis is away
COSTS = "POST"  # looking, following and cancelling are free: nobody must leave a job alone for want of requests
FORWARDED = ("Forwarded", "X-Forwarded-For", "X-Real-IP")


class Keys:
    def __init__(self, keys: ApiKeys) -> None:
        self._keys = keys

    async def process_request(self, req: Request, resp: Response) -> None:
        """Before the route is looked for: a path that does not exist says no more than one that does.

        Raises Unauthorized, RateLimited.
        """
        if req.path.startswith(OPEN):
            return
        req.context.key = await self._admit(req, resp)

    async def _admit(self, req: Request, resp: Response) -> ApiKey:
        secret = _secret(req)
        admission = await self._keys.admit(secret, cost=int(req.method == COSTS))
        if admission.outcome == "open" and not _is_local(req):
            raise Unauthorized(
                "there are no API keys yet, so only clients on the API's own machine are served; "
                "`kvrelay keys create NAME` there makes a key"
            )
        if admission.outcome == "unknown":
            said = "the API key is not known here, or was revoked" if secret else "an API key is needed"
            raise Unauthorized(f"{said}: send `Authorization: Bearer …`; `kvrelay keys create NAME` makes one")
        if admission.key.per_minute:
            _tell(resp, admission)
        if admission.outcome == "limited":
            raise RateLimited(f"this key has {admission.key.per_minute} requests a minute", admission.next_seconds)
        return admission.key


def _secret(req: Request) -> str:
    scheme, _, secret = (req.get_header("Authorization") or "").partition(" ")
    return secret.strip() if scheme.lower() == "bearer" else ""


def _tell(resp: Response, admission: Admission) -> None:
    resp.set_header("X-RateLimit-Limit", str(admission.key.per_minute))
    resp.set_header("X-RateLimit-Remaining", str(admission.remaining))
    resp.set_header("X-RateLimit-Reset", str(math.ceil(admission.full_seconds)))


def _is_local(req: Request) -> bool:
    """Of this machine, and not through a proxy on it, which asks for others."""
    client = req.scope.get("client")
    if not client or any(req.get_header(name) is not None for name in FORWARDED):
        return False
    host, _port = client
    address = ipaddress.ip_address(host)
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback
