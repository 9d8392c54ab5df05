"""What a webhook says, how it is signed, and where it may go."""

import base64
import json
import time

import openai
import pytest

from api.outside import check, parse, permits
from api.requests import read_job
from api.webhooks import message, signed
from brokers.webhooks import Webhook
from pipeline.config import Config
from pipeline.errors import InvalidRequest
from tests.receiver import verify

KEY = bytes(range(32))
SHARED = f"whsec_{base64.b64encode(KEY).decode()}"
CONFIG = Config(webhook_secret=SHARED)

WEBHOOK = Webhook(
    job_id="3f",
    target="example.com",
    url="https://example.com/hook",
    tries=1,
    status="finished",
    reason="stop",
    ended=1_796_000_000_123,
    prompt_tokens=7,
    completion_tokens=5,
)


def headers_at(now: float) -> dict[str, str]:
    return {str(name): str(value) for name, value in signed(KEY, WEBHOOK, message(WEBHOOK), int(now)).items()}


def test_a_message_says_how_the_job_ended_and_nothing_of_its_text() -> None:
    assert json.loads(message(WEBHOOK)) == {
        "type": "job.finished",
        "timestamp": "2026-11-30T00:53:20.123Z",
        "data": {
            "id": "3f",
            "status": "finished",
            "reason": "stop",
            "usage": {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12},
        },
    }


def test_openai_s_client_takes_the_signature_for_good() -> None:
    verify(message(WEBHOOK), headers_at(time.time()), SHARED)


@pytest.mark.parametrize("spoilt", ["body", "id", "timestamp", "secret", "old"])
def test_nothing_of_it_can_be_changed(spoilt: str) -> None:
    """Without id and time in what is signed, a message could be sent again as another one."""
    body, shared = message(WEBHOOK), SHARED
    headers = headers_at(time.time() - (600 if spoilt == "old" else 0))
    if spoilt == "body":
        body = body.replace(b"finished", b"failed")
    elif spoilt == "secret":
        shared = f"whsec_{base64.b64encode(bytes(32)).decode()}"
    elif spoilt != "old":
        headers[f"webhook-{spoilt}"] = "1" if spoilt == "id" else str(int(time.time()) - 5)
    with pytest.raises(openai.InvalidWebhookSignatureError):
        verify(body, headers, shared)


PRIVATE = [
    *("127.0.0.1", "127.8.8.8", "0.0.0.0", "0.1.2.3", "10.1.2.3", "172.16.0.1", "192.168.1.1"),
    *("169.254.169.254", "100.64.0.1", "100.100.100.200", "192.0.0.192", "168.63.129.16", "198.18.0.1"),
    *("224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255", "192.0.2.1"),
    *("::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1", "fd00:ec2::254", "ff02::1", "2001:db8::1"),
    # an IPv4 address inside: mapped, compatible, NAT64, 6to4, Teredo
    *("::ffff:127.0.0.1", "::ffff:a9fe:a9fe", "::127.0.0.1", "64:ff9b::7f00:1", "64:ff9b:1::7f00:1"),
    *("2002:7f00:1::", "2001:0:1:2:3:4:5:6"),
]


@pytest.mark.parametrize("address", PRIVATE)
def test_what_is_not_public_is_refused(address: str) -> None:
    """Without `is_multicast`, `is_reserved`, SPECIAL and `ipv4_mapped` some of them count as global."""
    assert not permits(address, ())


@pytest.mark.parametrize("address", ["93.184.215.14", "8.8.8.8", "2606:2800:21f:cb07::1", "::ffff:8.8.8.8"])
def test_what_is_public_is_permitted(address: str) -> None:
    assert permits(address, ())


def test_a_private_network_can_be_allowed_and_no_other_is() -> None:
    allowed = Config(webhook_networks="10.0.0.0/8,fd00::/8").allowed_networks
    assert permits("10.9.8.7", allowed)
    assert permits("::ffff:10.9.8.7", allowed)
    assert permits("fd00::1", allowed)
    assert not permits("192.168.0.1", allowed)
    assert not permits("127.0.0.1", allowed)
    assert not permits("::ffff:127.0.0.1", allowed)
    assert not permits("fe80::1", allowed)


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("", "in ASCII"),
        ("example.com/hook", "must begin with http"),
        ("ftp://example.com", "must begin with http"),
        ("file:///etc/passwd", "must begin with http"),
        ("http://", "and a host"),
        ("https:///hook", "and a host"),
        ("http://user@example.com", "must hold no user"),
        ("http://example.com\\@127.0.0.1/", "in ASCII"),
        ("http://example.com/\r\nX-Evil: 1", "in ASCII"),
        ("http://example.com/a b", "in ASCII"),
        ("http://exämple.com/", "in ASCII"),
        ("http://example.com:99999/", "out of range"),
        ("http://example.com:http/", "integer"),
        ("http://[::1/", "IPv6"),
        ("http://127.0.0.1/", "private address, and KVR_WEBHOOK_NETWORKS"),
        ("http://[::ffff:169.254.169.254]/latest", "private address"),
    ],
)
def test_a_url_that_will_not_do_is_refused_by_name(url: str, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as caught:
        check(url, CONFIG)
    assert caught.value.field == "webhook"


@pytest.mark.parametrize(
    "url", ["https://example.com", "http://example.com:8080/a;b/?c=%20&d", "https://8.8.8.8/", None]
)
def test_a_url_that_will_do_is_taken(url: str | None) -> None:
    assert check(url, CONFIG) == (url or "")


def test_the_path_that_is_asked_for_is_the_one_that_was_written() -> None:
    parts = parse("http://example.com/a;b/c?d=1;2#e")
    assert (parts.path, parts.query) == ("/a;b/c", "d=1;2")


def test_without_a_secret_a_webhook_is_refused_and_its_absence_is_not() -> None:
    assert check(None, Config()) == ""
    with pytest.raises(InvalidRequest, match="KVR_WEBHOOK_SECRET") as caught:
        check("https://example.com", Config())
    assert caught.value.field == "webhook"


@pytest.mark.parametrize("job", [{"prompt": "x"}, {"messages": [{"role": "user", "content": "x"}]}])
def test_both_kinds_of_job_may_have_one(job: dict[str, object]) -> None:
    assert read_job(json.dumps({**job, "webhook": "https://example.com"}).encode()).webhook == "https://example.com"
    assert read_job(json.dumps(job).encode()).webhook is None
    with pytest.raises(InvalidRequest, match="webhook"):
        read_job(json.dumps({**job, "webhook": "https://example.com/" + "x" * 2000}).encode())
