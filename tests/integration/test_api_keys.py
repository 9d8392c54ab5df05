"""API keys in Redis: what is kept of them, who is let in, and how often."""

import asyncio
import json
from dataclasses import replace

import pytest
from hands import Hands, until

from brokers.api_keys import NOBODY, Admission, ApiKey, ApiKeys, NameTaken
from brokers.audit import Audit


@pytest.fixture
def keys(hands: Hands) -> ApiKeys:
    return ApiKeys(hands.store)


async def everything(hands: Hands) -> str:
    found = []
    async for key in hands.redis.scan_iter(match=f"{hands.keys.prefix.replace('{', '?')}*"):
        found += [key, str(await hands.redis.hgetall(key))]
    return "\n".join(found)


async def test_of_a_secret_only_its_hash_is_kept(hands: Hands, keys: ApiKeys) -> None:
    key, secret = await keys.create("alice", per_minute=10)
    await keys.admit(secret, cost=1)
    stored = await everything(hands)
    assert key.id in stored
    assert secret not in stored
    assert secret.removeprefix("kvr-") not in stored
    assert len(secret) == len("kvr-") + 32, "192 bits, six a character"


async def test_a_key_is_known_by_its_secret_and_nothing_else(keys: ApiKeys) -> None:
    alice, secret = await keys.create("alice", admin=True, per_minute=5, waiting=7)
    bob, _ = await keys.create("bob")
    admission = await keys.admit(secret, cost=0)
    assert (admission.outcome, replace(admission.key, used=0)) == ("ok", alice)
    for other in ("", "kvr-", alice.id, alice.name, secret[:-1], secret + "x", secret.upper(), "\0", "é" * 9):
        assert await keys.admit(other, cost=1) == Admission(outcome="unknown"), other
    assert [key.name for key in await keys.all()] == ["alice", "bob"]
    assert bob.id != alice.id


async def test_without_any_key_the_door_is_open_and_the_first_key_shuts_it_at_once(keys: ApiKeys) -> None:
    assert await keys.admit("", cost=1) == Admission(outcome="open", key=NOBODY)
    assert (await keys.admit("whatever", cost=1)).outcome == "open"
    await keys.create("alice")
    assert (await keys.admit("", cost=1)).outcome == "unknown"


@pytest.mark.parametrize("by", ["id", "name"])
async def test_a_key_that_is_revoked_is_unknown_at_once(keys: ApiKeys, by: str) -> None:
    await keys.create("bob")
    key, secret = await keys.create("alice")
    await keys.admit(secret, cost=1)
    revoked = await keys.revoke(getattr(key, by))
    assert revoked is not None
    assert revoked.id == key.id
    assert (await keys.admit(secret, cost=1)).outcome == "unknown"
    assert await keys.revoke(getattr(key, by)) is None
    assert [other.name for other in await keys.all()] == ["bob"]


async def test_no_two_keys_have_one_name_however_many_are_made_at_once(keys: ApiKeys) -> None:
    made = await asyncio.gather(*(keys.create("alice") for _ in range(20)), return_exceptions=True)
    assert sum(isinstance(one, NameTaken) for one in made) == 19
    (key,) = await keys.all()
    with pytest.raises(NameTaken):  # which one would `revoke` mean?
        await keys.create(key.id)


async def test_the_rate_is_exact_under_a_hundred_requests_at_once(keys: ApiKeys) -> None:
    _, secret = await keys.create("alice", per_minute=10)
    admissions = await asyncio.gather(*(keys.admit(secret, cost=1) for _ in range(100)))
    outcomes = [admission.outcome for admission in admissions]
    assert (outcomes.count("ok"), outcomes.count("limited")) == (10, 90)
    assert sorted(a.remaining for a in admissions if a.outcome == "ok") == list(range(10))
    refused = next(a for a in admissions if a.outcome == "limited")
    assert 5 < refused.next_seconds <= 6, "one every six seconds"
    assert 59 < refused.full_seconds <= 60


async def test_requests_come_back_as_fast_as_they_may_be_made_and_no_more_than_a_minute_s(keys: ApiKeys) -> None:
    _, secret = await keys.create("alice", per_minute=1200)  # twenty a second
    while (await keys.admit(secret, cost=1)).outcome == "ok":
        pass

    async def again() -> bool:
        return (await keys.admit(secret, cost=1)).outcome == "ok"

    await until(again)
    assert (await keys.admit(secret, cost=0)).remaining < 1200


async def test_what_costs_nothing_is_let_in_when_nothing_is_left(keys: ApiKeys) -> None:
    _, secret = await keys.create("alice", per_minute=1)
    assert (await keys.admit(secret, cost=1)).remaining == 0
    assert (await keys.admit(secret, cost=1)).outcome == "limited"
    assert (await keys.admit(secret, cost=0)).outcome == "ok"


async def test_one_key_s_rate_is_nobody_else_s_and_a_key_without_one_leaves_nothing_behind(
    hands: Hands, keys: ApiKeys
) -> None:
    _, limited = await keys.create("alice", per_minute=1)
    bob, free = await keys.create("bob")
    await keys.admit(limited, cost=1)
    assert [(await keys.admit(free, cost=1)).outcome for _ in range(3)] == ["ok"] * 3
    assert not await hands.redis.exists(hands.keys.bucket(bob.id))


async def test_a_bucket_expires_when_it_would_be_full_again(hands: Hands, keys: ApiKeys) -> None:
    """Without an expiry each key that ever was would keep one for ever."""
    key, secret = await keys.create("alice", per_minute=60)
    await keys.admit(secret, cost=0)
    assert not await hands.redis.exists(hands.keys.bucket(key.id))
    for taken in (1, 2):
        await keys.admit(secret, cost=1)
        assert taken * 1000 - 500 < await hands.redis.pttl(hands.keys.bucket(key.id)) <= taken * 1000
    await hands.redis.persist(hands.keys.bucket(key.id))
    audit = Audit(hands.store, lease_seconds=0.02, tick_seconds=0.01)
    said = f"key {hands.keys.bucket(key.id)} would be kept for ever"
    assert [str(problem) for problem in await audit.problems()] == [said]
    assert await audit.repair() == []


async def test_when_a_key_was_used_is_noted_to_the_minute(hands: Hands, keys: ApiKeys) -> None:
    """Not each look is a write: with `appendfsync always` each would wait for the disk."""

    async def known() -> ApiKey:
        (key,) = await keys.all()
        return key

    async def used_ago(milliseconds: int) -> int:
        ((digest, record),) = (await hands.redis.hgetall(hands.keys.api_keys)).items()
        fields = json.loads(record)
        fields["used"] -= milliseconds
        await hands.redis.hset(hands.keys.api_keys, digest, json.dumps(fields))
        return int(fields["used"])

    key, secret = await keys.create("alice", admin=True, per_minute=5, waiting=7)
    assert (await known()).used == 0
    await keys.admit(secret, cost=0)
    assert abs((await known()).used - key.created) < 60_000
    then = await used_ago(30_000)
    await keys.admit(secret, cost=1)
    assert (await known()).used == then
    then = await used_ago(60_000)
    await keys.admit(secret, cost=1)
    assert (await known()).used > then
    assert replace(await known(), used=0) == key, "and everything else is as it was"


async def test_an_admin_sees_all_jobs_a_key_its_own_and_nobody_those_made_without_keys() -> None:
    admin, alice = ApiKey(id="1", admin=True), ApiKey(id="2")
    assert [admin.sees(owner) for owner in ("1", "2", NOBODY.id)] == [True, True, True]
    assert [alice.sees(owner) for owner in ("1", "2", NOBODY.id)] == [False, True, False]
