"""The API's door, in one process and without a port: who is let in, to what, and what a request under a key may see."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from typing import Any

import falcon.inspect
import pytest
from falcon.testing import ASGIConductor, Result
from hands import Hands

from api.app import create_app
from brokers.api_keys import ApiKeys
from brokers.store import Store
from pipeline.config import Config

REMOTE = "203.0.113.7"
KEY = "Idempotency-Key"


class Door:
    """Asks as from this machine, or as from elsewhere, with a secret or without."""

    def __init__(self, conductor: ASGIConductor) -> None:
        self._conductor = conductor

    async def ask(
        self, method: str, path: str, secret: str = "", *, client: str = "127.0.0.1", body: Any = None, **headers: str
    ) -> Result:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if secret:
            sent["Authorization"] = f"Bearer {secret}"
        result = await self._conductor.simulate_request(method, path, headers=sent, json=body, remote_addr=client)
        assert isinstance(result, Result)
        return result

    async def submit(self, secret: str = "", **fields: Any) -> str:
        result = await self.ask("POST", "/v1/jobs", secret, body={"prompt": [1, 2, 3], **fields})
        assert result.status_code == 202, result.json
        return str(result.json["id"])


@pytest.fixture
async def door(config: Config) -> AsyncIterator[Door]:
    async with ASGIConductor(create_app(replace(config, no_worker_seconds=0))) as conductor:
        yield Door(conductor)


@pytest.fixture
def keys(hands: Hands) -> ApiKeys:
    return ApiKeys(hands.store)


def refusal(result: Result, status: int, code: str) -> str:
    """Its message."""
    error = result.json["error"]
    assert (result.status_code, error["code"]) == (status, code), error
    assert set(error) == {"message", "type", "param", "code"}
    return str(error["message"])


# Who is let in


def routes(config: Config) -> Iterator[tuple[str, str]]:
    """Every method of every route that the application has, its parameters filled in."""
    app: Any = create_app(config)
    for route in falcon.inspect.inspect_routes(app._app):
        for method in route.methods:
            if method.method == "WEBSOCKET":
                assert method.internal, "a resource with on_websocket needs a middleware's process_request_ws"
                continue
            yield method.method, route.path.replace("{job_id}", "x").replace("{name:path}", "a/b")


async def test_every_route_needs_a_key_but_health(config: Config, door: Door, keys: ApiKeys) -> None:
    """H10. Taken from the router, so that a new route is looked at, too."""
    await keys.create("alice")
    asked = list(routes(config))
    assert ("POST", "/v1/completions") in asked
    assert len(asked) > 20
    for method, path in asked:
        for headers in ({}, {"Authorization": "Bearer kvr-wrong"}, {"Authorization": "Basic YTpi"}):
            result = await door.ask(method, path, **headers)
            if path.startswith("/health/"):
                assert result.status_code != 401, path
            else:
                assert result.status_code == 401, (method, path, headers)
                assert result.headers["WWW-Authenticate"] == "Bearer"


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/", "/nothing", "/v1/jobs/", "//v1/jobs", "/health", "/v1/x/health/"])
async def test_a_path_that_does_not_exist_needs_a_key_as_well(door: Door, keys: ApiKeys, path: str) -> None:
    """Without, whoever has none could still learn what is there."""
    _, secret = await keys.create("alice")
    refusal(await door.ask("GET", path), 401, "invalid_api_key")
    assert (await door.ask("GET", path, secret)).status_code in (404, 405)  # to the router // is /


async def test_a_wrong_key_is_told_apart_from_none_and_a_right_one_is_served(door: Door, keys: ApiKeys) -> None:
    _, secret = await keys.create("alice")
    assert "is needed" in refusal(await door.ask("GET", "/v1/models"), 401, "invalid_api_key")
    assert "not known here" in refusal(await door.ask("GET", "/v1/models", "kvr-x"), 401, "invalid_api_key")
    for scheme in ("Bearer", "bearer", "BEARER"):
        assert (await door.ask("GET", "/v1/models", Authorization=f"{scheme} {secret}")).status_code == 200


async def test_a_revoked_key_is_refused_at_its_next_request(door: Door, keys: ApiKeys) -> None:
    await keys.create("other")
    _, secret = await keys.create("alice")
    assert (await door.ask("GET", "/v1/models", secret)).status_code == 200
    await keys.revoke("alice")
    assert (await door.ask("GET", "/v1/models", secret)).status_code == 401


@pytest.mark.parametrize("client", ["127.0.0.1", "127.8.9.10", "::1", "::ffff:127.0.0.1"])
async def test_without_keys_this_machine_is_served_whatever_key_it_sends(door: Door, client: str) -> None:
    assert (await door.ask("GET", "/v1/models", client=client)).status_code == 200
    assert (await door.ask("GET", "/v1/models", "kvr-any", client=client)).status_code == 200


@pytest.mark.parametrize("client", [REMOTE, "10.0.0.1", "0.0.0.0", "::", "2001:db8::1", "::ffff:10.0.0.1"])
async def test_without_keys_nobody_else_is_and_the_answer_says_what_would_do(door: Door, client: str) -> None:
    said = refusal(await door.ask("GET", "/v1/models", client=client), 401, "invalid_api_key")
    assert "kvrelay keys create" in said
    assert (await door.ask("GET", "/health/live", client=client)).status_code == 200


@pytest.mark.parametrize("header", ["Forwarded", "X-Forwarded-For", "X-Real-IP"])
async def test_without_keys_a_proxy_on_this_machine_is_not_this_machine(door: Door, header: str) -> None:
    """Without this, a proxy in front of an API without keys would make everybody local, and an admin."""
    refusal(await door.ask("GET", "/v1/models", **{header: "for=203.0.113.7"}), 401, "invalid_api_key")


async def test_with_a_key_it_does_not_matter_from_where(door: Door, keys: ApiKeys) -> None:
    _, secret = await keys.create("alice")
    assert (await door.ask("GET", "/v1/models", secret, client=REMOTE)).status_code == 200


async def test_without_redis_nobody_is_let_in_and_health_says_why(config: Config) -> None:
    async with ASGIConductor(create_app(replace(config, redis_url="redis://127.0.0.1:1/0"))) as conductor:
        door = Door(conductor)
        refusal(await door.ask("GET", "/v1/models", "kvr-x"), 503, "queue_away")
        assert (await door.ask("GET", "/health/live")).status_code == 200
        assert (await door.ask("GET", "/health/ready")).json["redis"] is False


async def test_a_request_costs_one_question_to_redis_before_it_is_served(
    door: Door, keys: ApiKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, secret = await keys.create("alice", per_minute=100)
    asked: list[str] = []
    run = Store.run

    async def counted(store: Store, script: str, *args: Any, **how: Any) -> Any:
        asked.append(script)
        return await run(store, script, *args, **how)

    monkeypatch.setattr(Store, "run", counted)
    assert (await door.ask("GET", "/v1/models", secret)).status_code == 200
    assert (await door.ask("GET", "/v1/models")).status_code == 401
    assert asked == ["admit", "admit"]


# How often


async def test_every_answer_of_a_limited_key_says_what_is_left_and_the_last_one_when_to_come_again(
    door: Door, keys: ApiKeys
) -> None:
    _, secret = await keys.create("alice", per_minute=2)
    body = {"prompt": [1], "max_tokens": 1}
    answers = [await door.ask("POST", "/v1/jobs", secret, body=body) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [202, 202, 429]
    assert [answer.headers["X-RateLimit-Limit"] for answer in answers] == ["2"] * 3
    assert [answer.headers["X-RateLimit-Remaining"] for answer in answers] == ["1", "0", "0"]
    assert [answer.headers["X-RateLimit-Reset"] for answer in answers] == ["30", "60", "60"]
    refusal(answers[2], 429, "rate_limit_exceeded")
    assert answers[2].headers["Retry-After"] == "30"
    for method, path, status in (("GET", "/v1/models", 200), ("GET", "/v1/x", 404), ("DELETE", "/v1/jobs/x", 404)):
        answer = await door.ask(method, path, secret)
        assert (answer.status_code, answer.headers["X-RateLimit-Remaining"]) == (status, "0")
    refusal(await door.ask("POST", "/v1/jobs", secret, body={"prompt": 5}), 429, "rate_limit_exceeded")


async def test_a_key_without_a_rate_hears_nothing_of_rates(door: Door, keys: ApiKeys) -> None:
    _, secret = await keys.create("alice")
    assert not [name for name in (await door.ask("GET", "/v1/models", secret)).headers if "ratelimit" in name.lower()]


async def test_a_full_queue_says_when_to_come_again_and_whose_it_is(
    hands: Hands, config: Config, keys: ApiKeys
) -> None:
    """The number grows with what a place takes: a constant would be too soon for slow systems, and late for quick ones."""
    _, alice = await keys.create("alice", waiting=2)
    _, bob = await keys.create("bob")
    async with ASGIConductor(create_app(replace(config, queue_bound=4))) as conductor:
        door = Door(conductor)
        jobs = [await door.submit(alice), await door.submit(alice)]
        full = await door.ask("POST", "/v1/jobs", alice, body={"prompt": [1]})
        assert "2 jobs of this key" in refusal(full, 429, "queue_full")
        assert full.headers["Retry-After"] == "1"
        for job in jobs:  # as if nobody had taken one for half a minute
            await hands.redis.hincrby(hands.keys.job(job), "submitted", -30_000)
        full = await door.ask("POST", "/v1/jobs", alice, body={"prompt": [1]})
        assert 30 <= int(full.headers["Retry-After"]) <= 33
        for _ in range(2):
            await door.submit(bob)
        full = await door.ask("POST", "/v1/jobs", bob, body={"prompt": [1]})
        assert "4 jobs may wait" in refusal(full, 429, "queue_full")
        assert 8 <= int(full.headers["Retry-After"]) <= 10, "for any of four, of which two are new"


# What it may see


async def test_a_job_is_there_for_the_key_that_made_it_and_for_an_admin_only(door: Door, keys: ApiKeys) -> None:
    """Without, whoever learns an id could read another's answer, or cancel it; a 403 would say that the id is in use."""
    before = await door.submit()  # while there were no keys
    secrets = {name: (await keys.create(name, admin=name == "admin"))[1] for name in ("alice", "bob", "admin")}
    job = await door.submit(secrets["alice"])
    for method, path in (("GET", ""), ("GET", "/events"), ("DELETE", "")):
        for job_id, name in ((job, "bob"), (before, "alice"), (before, "bob")):
            other = await door.ask(method, f"/v1/jobs/{job_id}{path}", secrets[name])
            unknown = await door.ask(method, f"/v1/jobs/{'0' * 32}{path}", secrets[name])
            assert other.json == {"error": {**unknown.json["error"], "message": f"there is no job {job_id}"}}
            assert other.status_code == unknown.status_code == 404
            assert set(other.headers) == set(unknown.headers)
    for name in ("alice", "admin"):
        assert (await door.ask("GET", f"/v1/jobs/{job}", secrets[name])).json["status"] == "queued"
    assert (await door.ask("DELETE", f"/v1/jobs/{job}", secrets["alice"])).json["status"] == "cancelled"
    assert (await door.ask("GET", f"/v1/jobs/{job}/events", secrets["alice"])).status_code == 200
    assert (await door.ask("DELETE", f"/v1/jobs/{before}", secrets["admin"])).json["status"] == "cancelled"


async def test_another_s_job_whose_answer_has_expired_is_unknown_and_not_gone(
    hands: Hands, door: Door, keys: ApiKeys
) -> None:
    (_, alice), (_, bob) = await keys.create("alice"), await keys.create("bob")
    job = await door.submit(alice)
    await door.ask("DELETE", f"/v1/jobs/{job}", alice)
    await hands.redis.delete(hands.keys.tokens(job))
    for path in ("", "/events"):
        assert (await door.ask("GET", f"/v1/jobs/{job}{path}", alice)).status_code == 410
        assert (await door.ask("GET", f"/v1/jobs/{job}{path}", bob)).status_code == 404


async def test_jobs_of_a_key_that_was_revoked_go_on_and_an_admin_sees_them(door: Door, keys: ApiKeys) -> None:
    (_, alice), (_, admin) = await keys.create("alice"), await keys.create("admin", admin=True)
    job = await door.submit(alice)
    await keys.revoke("alice")
    assert (await door.ask("GET", f"/v1/jobs/{job}", admin)).json["status"] == "queued"


# Requests that come again


async def test_a_request_that_comes_again_is_the_same_job_until_its_record_goes(
    hands: Hands, door: Door, keys: ApiKeys
) -> None:
    """Without the seed from the id, what is drawn anew would be another text."""
    _, alice = await keys.create("alice")
    body, same = {"prompt": [1, 2], "max_tokens": 3}, {"max_tokens": 3, "prompt": [1, 2]}
    first = await door.ask("POST", "/v1/jobs", alice, body=body, Idempotency_Key="k1")
    again = await door.ask("POST", "/v1/jobs", alice, body=same, Idempotency_Key="k1")
    assert again.json == first.json == {"id": first.json["id"], "object": "job", "status": "queued"}
    assert await hands.unfinished() == 1
    await door.ask("DELETE", f"/v1/jobs/{first.json['id']}", alice)
    again = await door.ask("POST", "/v1/jobs", alice, body=same, Idempotency_Key="k1")
    assert again.json == {**first.json, "status": "cancelled"}
    request = await hands.field(first.json["id"], "request")
    await hands.redis.delete(hands.keys.job(first.json["id"]))
    await door.ask("POST", "/v1/jobs", alice, body=same, Idempotency_Key="k1")
    assert await hands.field(first.json["id"], "request") == request
    assert await hands.unfinished() == 1


async def test_requests_without_a_seed_or_a_key_of_their_own_are_drawn_differently(hands: Hands, door: Door) -> None:
    requests = [await hands.field(await door.submit(), "request") for _ in range(2)]
    assert requests[0] != requests[1]


async def test_another_body_under_the_same_key_is_refused_on_every_route(
    hands: Hands, door: Door, keys: ApiKeys
) -> None:
    await hands.registry.announce("p1", {"role": "prefill", "state": "alive"})
    await hands.registry.announce("d1", {"role": "decode", "state": "alive"})
    _, alice = await keys.create("alice")
    await door.ask("POST", "/v1/jobs", alice, body={"prompt": [1]}, Idempotency_Key="k1")
    for path, body in (
        ("/v1/jobs", {"prompt": [2]}),
        ("/v1/completions", {"prompt": [1], "temperature": 0}),
        ("/v1/completions", {"prompt": [1], "stream": True}),
    ):
        refusal(await door.ask("POST", path, alice, body=body, Idempotency_Key="k1"), 422, "idempotency_key_reused")
    assert await hands.unfinished() == 1


async def test_tenants_who_chose_the_same_key_have_jobs_of_their_own(hands: Hands, door: Door, keys: ApiKeys) -> None:
    secrets = [(await keys.create(name))[1] for name in ("alice", "bob")]
    ids = [
        (await door.ask("POST", "/v1/jobs", secret, body={"prompt": [number]}, Idempotency_Key="same")).json["id"]
        for number, secret in enumerate(secrets)
    ]
    assert len(set(ids)) == 2
    assert await hands.unfinished() == 2


async def test_a_hundred_at_once_under_one_key_are_one_job(hands: Hands, door: Door) -> None:
    answers = await asyncio.gather(
        *(door.ask("POST", "/v1/jobs", body={"prompt": [1, 2]}, Idempotency_Key="k") for _ in range(100))
    )
    assert {answer.status_code for answer in answers} == {202}
    assert len({answer.json["id"] for answer in answers}) == 1
    assert await hands.unfinished() == 1


async def test_a_repeat_finds_its_job_though_the_queue_is_full(config: Config) -> None:
    async with ASGIConductor(create_app(replace(config, queue_bound=1))) as conductor:
        door = Door(conductor)
        asked = [
            await door.ask("POST", "/v1/jobs", body={"prompt": [1]}, Idempotency_Key=key) for key in ("a", "b", "a")
        ]
    assert [answer.status_code for answer in asked] == [202, 429, 202]


@pytest.mark.parametrize("key", ["", " ", "a b", "a\tb", "x" * 256, "schlüssel"])
async def test_a_key_that_is_none_is_a_clear_400(door: Door, key: str) -> None:
    result = await door.ask("POST", "/v1/jobs", body={"prompt": [1]}, Idempotency_Key=key)
    assert "1 to 255 visible ASCII characters" in refusal(result, 400, "invalid_value")
    assert result.json["error"]["param"] == KEY


@pytest.mark.parametrize("key", ["x", "x" * 255, "8e03978e-40d5-43dd-bc93-6894a57f9324", '"quoted"', "!#$%&'*+-.^_`|~"])
async def test_any_visible_ascii_is_a_key(door: Door, key: str) -> None:
    assert (await door.ask("POST", "/v1/jobs", body={"prompt": [1]}, Idempotency_Key=key)).status_code == 202
