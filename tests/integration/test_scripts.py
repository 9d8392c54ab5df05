"""The job protocol, script by script, on a real Redis: who may do what to a job, and what a repeated call does."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from hands import JOB, OTHER_JOB, WAIT_SECONDS, Hands, until

from brokers.credits import Credits
from brokers.keys import GROUP
from brokers.queue import Lease, Nothing, Standing, Stopped
from brokers.store import Store
from brokers.token_log import Append
from pipeline.config import Config
from pipeline.errors import Cancelled, RedisRefused
from pipeline.job import Priority
from pipeline.logprobs import TokenLogprobs
from pipeline.states import OPEN, Status

LONG_AGO = 1  # milliseconds of Redis time
SILENT_SECONDS = 0.5


@pytest.fixture
async def one_attempt(config: Config) -> AsyncIterator[Hands]:
    """The same keys, in the hands of a process that allows one attempt only."""
    store = Store(replace(config, attempts=1))
    yield Hands(store)
    await store.close()


async def is_late(hands: Hands, job_id: str) -> bool:
    standing = await hands.queue.standing(job_id)
    assert standing is not None
    return standing.late


# submit


async def test_a_job_is_queued_once_however_often_it_is_submitted(hands: Hands) -> None:
    assert await hands.submit("a") == "ok"
    assert await hands.submit("a") == "exists"
    assert (await hands.unfinished(), await hands.status("a")) == (1, "queued")


async def test_another_request_under_the_same_id_is_a_conflict_and_changes_nothing(hands: Hands) -> None:
    await hands.submit("a")
    assert await hands.submit("a", OTHER_JOB) == "conflict"
    assert await hands.field("a", "request") == JOB.encode()
    assert await hands.unfinished() == 1


async def test_the_bound_of_waiting_jobs_is_exact_and_a_repeat_is_not_counted_against_it(hands: Hands) -> None:
    assert await hands.submit("a", bound=2) == "ok"
    assert await hands.submit("b", bound=2, priority=Priority.LOW) == "ok"
    assert await hands.submit("c", bound=2) == "full"
    assert await hands.submit("a", bound=1) == "exists"
    assert await hands.unfinished() == 2
    assert await hands.status("c") is None


async def test_a_job_that_is_worked_on_does_not_wait_and_leaves_room_under_the_bound(hands: Hands) -> None:
    await hands.leased("a")
    assert await hands.submit("b", bound=1) == "ok"
    assert await hands.submit("c", bound=1) == "full"


async def test_a_hundred_submitters_at_once_stay_within_the_bound(hands: Hands) -> None:
    outcomes = await asyncio.gather(*(hands.submit(f"j{number}", bound=10) for number in range(100)))
    assert (outcomes.count("ok"), outcomes.count("full")) == (10, 90)


async def test_a_submission_that_comes_after_its_time_is_late(hands: Hands) -> None:
    assert await hands.submit("a", valid_until=LONG_AGO) == "late"
    assert await hands.status("a") is None
    await hands.submit("b")
    assert await hands.submit("b", valid_until=LONG_AGO) == "exists"


async def test_priorities_are_served_in_order_and_each_queue_first_come_first_served(hands: Hands) -> None:
    for job_id, priority in (
        ("l", Priority.LOW),
        ("n1", Priority.NORMAL),
        ("n2", Priority.NORMAL),
        ("h", Priority.HIGH),
    ):
        await hands.submit(job_id, priority=priority)
        await hands.credit()
    assert [(await hands.lease()).job_id for _ in range(4)] == ["h", "n1", "n2", "l"]


async def test_one_lease_takes_one_entry_though_several_queues_have_some(hands: Hands) -> None:
    await hands.submit("low", priority=Priority.LOW)
    await hands.submit("high", priority=Priority.HIGH)
    await hands.credit()
    await hands.lease()
    assert await hands.working() == 1


# lease


async def test_without_a_credit_nobody_gets_a_job(hands: Hands) -> None:
    await hands.submit("a")
    await hands.no_lease()
    assert (await hands.status("a"), await hands.working()) == ("queued", 0)


async def test_without_a_job_nobody_takes_a_credit(hands: Hands) -> None:
    credit = await hands.credit()
    await hands.no_lease()
    assert await hands.credits() == [credit]


async def test_a_job_of_low_priority_leaves_the_last_place_of_a_busy_worker_to_others(hands: Hands) -> None:
    """Without it a batch would fill every place, and a chat had to wait for the end of one of its jobs."""
    for job in ("low 1", "low 2", "low 3"):
        await hands.submit(job, priority=Priority.LOW)
    await hands.credit("d1", busy=4)
    await hands.credit("d2", busy=5)
    await hands.no_lease()
    await hands.credit("d1", busy=4)
    assert (await hands.lease()).job_id == "low 1"
    mark = await hands.no_lease()
    await hands.submit("chat")
    assert (await hands.lease()).job_id == "chat"
    assert len(await hands.credits()) == 1
    await hands.credit("d2", busy=5)
    await asyncio.wait_for(hands.queue.wait(mark), 0.5)
    assert (await hands.lease()).job_id == "low 2"
    await hands.redis.zadd(hands.keys.credits, {(await hands.credits())[0]: 0})
    assert (await hands.lease()).job_id == "low 3", "of a worker that has nothing to do"


async def test_a_credit_published_twice_is_one_credit(hands: Hands) -> None:
    await hands.credit("d1", "n")
    await hands.credit("d1", "n")
    assert await hands.credits() == ["d1/n"]


async def test_credits_of_a_worker_that_is_gone_are_removed_and_the_next_one_is_taken(hands: Hands) -> None:
    for number in range(3):
        await hands.credit("a-dead", f"n{number}")
    await hands.registry.leave("a-dead")
    await hands.credit("d1", "n")
    await hands.submit("a")
    lease = await hands.lease()
    assert (lease.decode_worker, lease.nonce) == ("d1", "n")
    assert await hands.credits() == []


async def test_the_emptiest_decode_worker_is_fed_first(hands: Hands) -> None:
    await hands.credit("a-full", busy=5)
    await hands.credit("z-empty", busy=1)
    await hands.submit("a")
    assert (await hands.lease()).decode_worker == "z-empty"


async def test_a_lease_brings_the_job_its_credit_and_where_to_send_the_cache(hands: Hands) -> None:
    await hands.submit("a")
    await hands.credit("d7", "nonce")
    lease = await hands.lease("p3")
    assert lease == Lease(
        job_id="a",
        lease_id=lease.lease_id,
        attempt=1,
        job=JOB,
        decode_worker="d7",
        nonce="nonce",
        endpoint="tcp://d7:1",
        log_length=0,
    )
    worker, _, random = lease.lease_id.partition("#")
    assert worker == "p3"
    assert len(random) >= 12
    assert await hands.field("a", "lease") == lease.lease_id
    assert (await hands.status("a"), await hands.field("a", "attempt")) == ("prefilling", "1")
    assert await hands.credits() == []


async def several(hands: Hands, most: int = 8, tokens: int = 100, **how: bool) -> list[str]:
    answer = await hands.queue.lease("p1", most=most, tokens=tokens, **how)
    return [lease.job_id for lease in answer] if isinstance(answer, list) else []


async def test_short_jobs_are_leased_together_as_many_as_asked_for_and_as_have_credits(hands: Hands) -> None:
    for number in range(20):
        await hands.submit(f"{number:02}")
    for _ in range(7):
        await hands.credit()
    answer = await hands.queue.lease("p1", most=3, tokens=100)
    assert isinstance(answer, list)
    assert [lease.job_id for lease in answer] == ["00", "01", "02"]
    assert len({lease.lease_id for lease in answer}) == len({lease.nonce for lease in answer}) == 3
    for lease in answer:
        assert await hands.append(lease.job_id, lease.lease_id, 0, 10) == "1"
    assert len(await several(hands)) == 4
    assert await several(hands) == []


async def test_jobs_are_leased_together_only_if_their_prompts_are_short(hands: Hands) -> None:
    """Without, jobs would wait in a worker's hands behind long ones, and another worker could begin with them."""
    for number in range(9):
        await hands.submit(f"{number}", replace(JOB, prompt=(1,) * 40))
        await hands.credit()
    assert await several(hands, tokens=100) == ["0", "1"]
    assert await several(hands, tokens=0) == ["2"]


async def test_only_a_short_job_is_leased_to_pass_a_long_one(hands: Hands) -> None:
    """Without, a second long prompt would pass the first one, and wait in hand behind its next slice."""
    for job_id, length in (("short", 40), ("long", 41), ("other", 40)):
        await hands.submit(job_id, replace(JOB, prompt=(1,) * length))
        await hands.credit()
    assert await several(hands, tokens=40, others=True, short=True) == ["short"]
    assert await several(hands, tokens=40, others=True, short=True) == [], "nor does it pass others in the line"
    assert await several(hands, tokens=40, others=True) == ["long"]


async def test_a_worker_takes_no_more_jobs_at_once_than_its_share_of_the_line(hands: Hands) -> None:
    """Without, one worker would compute all of a few jobs one after the other, and others would idle."""
    for worker in ("p1", "p2", "p3"):
        await hands.registry.announce(worker, {"role": "prefill"})
    for number in range(8):
        await hands.submit(f"{number}")
        await hands.credit()
    assert await several(hands) == ["0", "1"]
    assert await several(hands) == ["2"]


async def test_a_job_that_was_begun_before_is_taken_alone(hands: Hands) -> None:
    """Without, one that ends every worker would use up the attempts of those beside it."""
    for job_id in ("again", "a", "b", "c", "d"):
        await hands.submit(job_id)
        await hands.credit()
    lease = await hands.lease()
    await hands.queue.release("again", lease.lease_id, "x")
    await hands.credit()
    answer = await hands.queue.lease("p1", most=8, tokens=100, others=True)
    assert isinstance(answer, Nothing)
    assert answer.alone
    assert await several(hands) == ["again"]
    assert await several(hands, others=True) == ["a", "b", "c", "d"]


async def test_a_job_whose_record_somebody_has_spoilt_takes_none_of_those_before_it_along(hands: Hands) -> None:
    """Without, they would be leased to a worker that never hears of them."""
    for job_id in ("a", "b", "spoilt", "c"):
        await hands.submit(job_id)
        await hands.credit()
    await hands.redis.delete(hands.keys.job("spoilt"))
    await hands.redis.set(hands.keys.job("spoilt"), "text")
    assert await several(hands) == ["a", "b"]
    with pytest.raises(RedisRefused, match="WRONGTYPE"):
        await several(hands)
    assert len(await hands.credits()) == 2


async def test_jobs_that_are_given_out_at_once_go_to_the_emptiest_workers_in_turn(hands: Hands) -> None:
    """With one score for all credits of a worker, it would get them all before it could say that it is busy."""
    for worker, busy in (("d1", 0), ("d2", 1)):
        await hands.credit(worker, busy=busy)
        await Credits(hands.store, worker).publish(["x", "y"], busy + 1)
    for number in range(20):
        await hands.submit(f"{number}")
    answer = await hands.queue.lease("p1", most=4, tokens=100)
    assert isinstance(answer, list)
    assert [lease.decode_worker for lease in answer] == ["d1", "d1", "d2", "d1"]


async def test_every_lease_id_is_new(hands: Hands) -> None:
    first = await hands.leased("a")
    await hands.queue.release("a", first.lease_id, "again")
    await hands.credit()
    assert (await hands.lease()).lease_id != first.lease_id


async def test_a_job_that_was_deleted_is_passed_over_and_its_entry_swept(hands: Hands) -> None:
    await hands.submit("a")
    await hands.redis.delete(hands.keys.job("a"))
    await hands.credit()
    await hands.no_lease()
    await hands.queue.sweep(60.0)
    assert await hands.idle()


async def test_an_old_entry_of_a_job_that_was_queued_anew_is_swept(hands: Hands) -> None:
    await hands.submit("a")
    await hands.redis.delete(hands.keys.job("a"))
    await hands.submit("a")
    await hands.credit()
    await hands.credit()
    assert (await hands.lease()).job_id == "a"
    await hands.no_lease()
    await hands.queue.sweep(60.0)
    assert await hands.unfinished() == 1


async def leased_in_turn(hands: Hands, count: int) -> list[str]:
    for _ in range(count):
        await hands.credit()
    return [(await hands.lease()).job_id for _ in range(count)]


async def test_a_tenant_with_many_jobs_holds_up_another_s_one_for_a_turn_only(hands: Hands) -> None:
    """Without turns the one would wait for the thousand."""
    for number in range(1000):
        await hands.submit(f"many-{number}", owner="many", bound=2000)
    assert await leased_in_turn(hands, 5) == [f"many-{number}" for number in range(5)]
    await hands.submit("one", owner="one", bound=2000)
    assert "one" in await leased_in_turn(hands, 2)


async def test_a_tenant_that_comes_back_has_saved_up_no_turns(hands: Hands) -> None:
    for number in range(20):
        await hands.submit(f"many-{number:02}", owner="many")
    await leased_in_turn(hands, 10)
    for number in range(10):
        await hands.submit(f"late-{number:02}", owner="late")
    order = await leased_in_turn(hands, 10)
    assert 4 <= sum(job.startswith("late") for job in order) <= 6, order


async def test_jobs_of_high_priority_pass_another_tenant_s_normal_one_and_only_so_many(hands: Hands) -> None:
    """Without the bound who marks everything as high would starve everybody else."""
    await hands.submit("before", owner="one", bound=2000)
    for number in range(200):
        await hands.submit(f"high-{number}", owner="many", priority=Priority.HIGH, bound=2000)
    await hands.submit("low", owner="one", priority=Priority.LOW, bound=2000)
    assert await leased_in_turn(hands, 100) == [f"high-{number}" for number in range(100)]
    await hands.submit("after", owner="one", bound=2000)
    order = await leased_in_turn(hands, 103)
    assert (order.index("before"), order.index("low")) == (28, 102)


async def test_short_prompts_pass_a_long_one_and_only_so_many(hands: Hands) -> None:
    """Without the length in its place the short ones would wait; with length alone the long one would wait for ever."""
    long = replace(JOB, prompt=(1,) * 256 * 5)
    await hands.submit("long", long)
    for number in range(20):
        await hands.submit(f"short-{number:02}")
    order = await leased_in_turn(hands, 21)
    assert order.index("long") == 4  # the fifth comes after it, by its own three tokens


async def test_the_bound_of_a_tenant_is_exact_and_leaves_others_alone(hands: Hands) -> None:
    outcomes = await asyncio.gather(*(hands.submit(f"j{number}", owner="a", owner_bound=10) for number in range(100)))
    assert (outcomes.count("ok"), outcomes.count("owner_full")) == (10, 90)
    assert await hands.submit("other", owner="b", owner_bound=10) == "ok"
    await leased_in_turn(hands, 1)
    assert await hands.submit("next", owner="a", owner_bound=10) == "ok"
    await hands.cancel("next")
    assert await hands.submit("another", owner="a", owner_bound=10) == "ok"


async def test_a_tenant_s_jobs_are_counted_anew_when_somebody_has_deleted_one_or_the_count(hands: Hands) -> None:
    """Without the sweep's look the tenant would have a place less, or any number, until nobody waits."""

    async def noted() -> str | None:
        return await hands.redis.hget(hands.keys.tenants, "waiting:a")

    for job_id in ("x", "y", "z"):
        await hands.submit(job_id, owner="a")
    await hands.redis.delete(hands.keys.job("x"))
    assert await leased_in_turn(hands, 1) == ["y"]
    await hands.queue.sweep(60.0)
    assert await noted() == "1"
    await hands.redis.delete(hands.keys.tenants)
    await hands.queue.sweep(60.0)
    assert await noted() == "1"


async def test_when_nobody_waits_nothing_is_remembered_of_turns(hands: Hands) -> None:
    await hands.submit("a", owner="x")
    await leased_in_turn(hands, 1)
    assert await hands.redis.exists(hands.keys.line, hands.keys.tenants) == 0


async def test_a_line_that_was_deleted_is_made_anew_from_the_queues_and_the_other_way_round(hands: Hands) -> None:
    await hands.submit("a")
    await hands.submit("b")
    await hands.redis.delete(hands.keys.line, hands.keys.tenants)
    await hands.queue.sweep(60.0)
    assert await leased_in_turn(hands, 1) == ["a"]
    await hands.redis.delete(*hands.keys.queues)
    await hands.queue.sweep(60.0)
    assert await leased_in_turn(hands, 1) == ["b"]
    assert await hands.working() == 1, "a's clock comes back when its holder renews"
    lease = await hands.field("a", "lease")
    assert await hands.queue.renew({"a": lease or ""}) == []
    assert await hands.working() == 2


async def test_a_job_past_its_deadline_expires_when_it_would_be_leased(hands: Hands) -> None:
    await hands.submit("a", lifetime=0.001)
    await until(lambda: is_late(hands, "a"))
    credit = await hands.credit()
    await hands.no_lease()
    assert await hands.status("a") == "expired"
    assert await hands.entries("a") == [("1-0", "END expired")]
    assert await hands.idle()
    assert await hands.credits() == [credit]


async def test_a_job_that_was_leased_too_often_is_given_up_when_it_would_be_leased(
    hands: Hands, one_attempt: Hands
) -> None:
    lease = await hands.leased("a")
    assert await hands.queue.release("a", lease.lease_id, "x") == "queued"
    await hands.credit()
    await one_attempt.no_lease()
    assert await hands.status("a") == "failed"
    assert await hands.redis.xlen(hands.keys.dead) == 1
    assert await hands.idle()


async def test_a_wake_up_between_a_failed_lease_and_the_wait_is_not_lost(hands: Hands) -> None:
    for ring in (lambda: hands.submit("a"), hands.credit):
        mark = await hands.no_lease("p1")
        await ring()
        await asyncio.wait_for(hands.queue.wait(mark), 0.8)  # the wait itself would take a second
        await hands.redis.delete(hands.keys.credits, *hands.keys.queues)


async def test_a_credit_that_no_job_waits_for_wakes_nobody(hands: Hands) -> None:
    """Without the look at the line, every end of a job would send all idle prefill workers to ask for another one."""
    mark = await hands.no_lease()
    await hands.credit()
    assert await hands.no_lease() == mark


async def test_a_job_that_is_given_back_wakes_those_who_wait(hands: Hands) -> None:
    lease = await hands.leased("a")
    mark = await hands.no_lease()
    waiting = asyncio.create_task(hands.queue.wait(mark))
    await hands.queue.release("a", lease.lease_id, "x")
    await asyncio.wait_for(waiting, 0.8)


# the token log


async def test_tokens_are_appended_once_however_often_they_are_sent(hands: Hands) -> None:
    lease = await hands.leased("a")
    assert await hands.append("a", lease.lease_id, 0, 10) == "1"
    assert await hands.append("a", lease.lease_id, 0, 10) == "1"
    assert await hands.append("a", lease.lease_id, 0, 10, 11) == "2"
    assert await hands.entries("a") == [("1-0", "10"), ("2-0", "11")]


async def test_a_gap_is_refused_with_the_length_of_the_log(hands: Hands) -> None:
    lease = await hands.leased("a")
    await hands.append("a", lease.lease_id, 0, 10)
    assert await hands.append("a", lease.lease_id, 5, 15) == "gap:1"
    assert await hands.append("a", lease.lease_id, 2, 12, end="finished", reason="stop") == "gap:1"
    assert await hands.entries("a") == [("1-0", "10")]
    assert await hands.status("a") == "prefilling"


async def test_several_tokens_and_the_end_are_one_step_and_its_repeat_is_fenced(hands: Hands) -> None:
    lease = await hands.leased("a")
    end = {"end": "finished", "reason": "length"}
    assert await hands.append("a", lease.lease_id, 0, 10, 11, 12, **end) == "3"
    assert await hands.append("a", lease.lease_id, 0, 10, 11, 12, **end) == "lost:finished"
    assert await hands.entries("a") == [("1-0", "10"), ("2-0", "11"), ("3-0", "12"), ("4-0", "END finished")]
    assert (await hands.status("a"), await hands.field("a", "reason")) == ("finished", "length")
    assert await hands.field("a", "lease") == ""
    assert await hands.idle()


async def test_a_batch_answers_for_each_job_by_itself(hands: Hands) -> None:
    good, bad = await hands.leased("good"), await hands.leased("bad")
    await hands.cancel("bad")
    answers = await hands.log.append(
        [
            Append(job_id="bad", lease_id=bad.lease_id, start=0, tokens=[(1, "x", ""), (2, "y", "")]),
            Append(job_id="good", lease_id=good.lease_id, start=0, tokens=[(3, "", ""), (4, "z\n'\"", "")]),
            Append(job_id="none", lease_id="p1#x", start=0, tokens=[]),
            Append(job_id="good", lease_id=good.lease_id, start=3, tokens=[(9, "", "")]),
        ]
    )
    assert answers == ["lost:cancelled", "2", "lost:gone", "gap:2"]
    assert [(entry.index, entry.token, entry.text) for entry in await hands.log.read("good")] == [
        (0, 3, ""),
        (1, 4, "z\n'\""),
    ]


async def test_logprobs_are_written_for_the_tokens_that_have_them_and_for_no_others(hands: Hands) -> None:
    lease = await hands.leased("a")
    logprobs = TokenLogprobs(-0.5, ((3, -0.5), (9, -1.25)))
    tokens = [(3, "x", logprobs.encode()), (4, "y", ""), (5, "z", TokenLogprobs(-2.0).encode())]
    append = Append(job_id="a", lease_id=lease.lease_id, start=0, tokens=tokens)
    assert await hands.log.append([append, append]) == ["3", "3"]  # the second as after a lost reply
    entries = await hands.log.read("a")
    assert [entry.logprobs for entry in entries] == [logprobs, None, TokenLogprobs(-2.0)]
    assert [(entry.token, entry.text) for entry in entries] == [(3, "x"), (4, "y"), (5, "z")]
    written = [set(fields) for _, fields in await hands.redis.xrange(hands.keys.tokens("a"))]
    assert written == [{"t", "x", "p"}, {"t", "x"}, {"t", "x", "p"}]


async def test_an_empty_lease_id_holds_nothing(hands: Hands) -> None:
    await hands.submit("a")
    assert await hands.append("a", "", 0, 1) == "lost:queued"
    assert await hands.queue.renew({"a": ""}) == ["a"]
    assert await hands.queue.release("a", "", "x") == "lost:queued"
    with pytest.raises(Cancelled, match="lost:queued"):
        await hands.queue.handover("a", "", "d1#x")


async def test_an_append_past_the_deadline_expires_the_job(hands: Hands) -> None:
    lease = await hands.leased("a", lifetime=0.3)
    assert await hands.append("a", lease.lease_id, 0, 10) in ("1", "lost:expired")
    await until(lambda: is_late(hands, "a"))
    await hands.append("a", lease.lease_id, 1, 11)
    assert await hands.append("a", lease.lease_id, 1, 11) == "lost:expired"
    assert (await hands.entries("a"))[-1][1] == "END expired"
    assert await hands.idle()


# handover and the fence


async def test_a_handover_may_be_repeated_when_its_answer_was_lost(hands: Hands) -> None:
    lease = await hands.leased("a")
    for _ in range(2):
        assert await hands.queue.handover("a", lease.lease_id, "d1#x") == JOB
    assert (await hands.status("a"), await hands.field("a", "lease")) == ("decoding", "d1#x")
    assert (await hands.field("a", "timeline") or "").count("decoding") == 1


async def test_a_job_is_handed_over_to_one_decode_worker_only(hands: Hands) -> None:
    lease = await hands.leased("a")
    await hands.queue.handover("a", lease.lease_id, "d1#x")
    with pytest.raises(Cancelled, match="lost:decoding"):
        await hands.queue.handover("a", lease.lease_id, "d2#y")
    assert await hands.field("a", "lease") == "d1#x"


async def test_after_the_handover_the_prefill_worker_can_do_nothing_to_the_job(hands: Hands) -> None:
    lease = await hands.leased("a")
    await hands.append("a", lease.lease_id, 0, 10)
    await hands.queue.handover("a", lease.lease_id, "d1#x")
    assert await hands.queue.renew({"a": lease.lease_id}) == ["a"]
    assert await hands.queue.release("a", lease.lease_id, "x") == "lost:decoding"
    assert await hands.append("a", lease.lease_id, 1, 11) == "lost:decoding"
    assert await hands.append("a", lease.lease_id, 1, end="failed", reason="x") == "lost:decoding"
    assert (await hands.status("a"), await hands.entries("a")) == ("decoding", [("1-0", "10")])


async def test_the_pending_list_follows_the_lease(hands: Hands) -> None:
    lease = await hands.leased("a", worker="p1")
    assert await hands.owner("a") == "p1"
    await hands.queue.handover("a", lease.lease_id, "d1#x")
    assert await hands.owner("a") == "d1"


async def test_a_worker_that_owns_something_is_not_retired_and_an_idle_one_is(hands: Hands) -> None:
    await hands.decoding("a")
    queue = hands.keys.queues[Priority.NORMAL]
    assert await hands.queue.retire("d1") is False
    assert await hands.queue.retire("p1") is True
    assert [consumer["name"] for consumer in await hands.redis.xinfo_consumers(queue, GROUP)] == ["d1"]
    assert await hands.owner("a") == "d1"


async def test_the_id_used_again_after_its_record_is_another_job_and_the_old_holder_is_fenced(hands: Hands) -> None:
    old = await hands.leased("a")
    await hands.append("a", old.lease_id, 0, 666)
    await hands.redis.delete(hands.keys.job("a"))
    new = await hands.leased("a", worker="p2")
    assert new.log_length == 0
    assert await hands.field("a", "attempt") == "1"
    assert await hands.append("a", old.lease_id, 0, 666) == "lost:prefilling"
    assert await hands.entries("a") == []


async def test_a_holder_goes_on_when_the_queues_are_deleted_under_it(hands: Hands) -> None:
    lease = await hands.leased("a")
    await hands.redis.delete(*hands.keys.queues)
    assert await hands.queue.renew({"a": lease.lease_id}) == []
    assert await hands.append("a", lease.lease_id, 0, 10, end="finished", reason="stop") == "1"


async def test_a_holder_of_a_group_that_was_destroyed_gets_its_entry_back_and_no_attempt_is_burnt(hands: Hands) -> None:
    lease_id = await hands.decoding("a")
    await hands.redis.xgroup_destroy(hands.keys.queues[Priority.NORMAL], GROUP)
    credit = await hands.credit()
    await hands.no_lease("p2")
    assert await hands.queue.sweep(60.0) == []
    assert await hands.owner("a") == "d1"
    assert await hands.queue.renew({"a": lease_id}) == []
    assert await hands.credits() == [credit]
    assert (await hands.field("a", "attempt"), await hands.status("a")) == ("1", "decoding")


async def test_a_job_whose_holder_died_when_its_group_was_destroyed_is_swept(hands: Hands) -> None:
    """Without a clock that is started anew nobody would ever see that the holder is gone."""
    await hands.decoding("a")
    await hands.redis.xgroup_destroy(hands.keys.queues[Priority.NORMAL], GROUP)
    await hands.sweep(["a:queued"])


async def test_a_clock_that_runs_is_not_set_back_when_another_is_started(hands: Hands) -> None:
    """Without the look before, a job that lost its clock would keep alive all those whose holders are gone."""
    for job_id in ("a", "b"):
        await hands.leased(job_id)
    entry = await hands.field("a", "entry")
    queue = hands.keys.queues[Priority.NORMAL]
    await hands.redis.xclaim(queue, GROUP, "p1", 0, [await hands.field("b", "entry")], idle=30_000)
    await hands.redis.xack(queue, GROUP, entry)
    assert await hands.queue.sweep(60.0) == []
    idle = [item["time_since_delivered"] for item in await hands.redis.xpending_range(queue, GROUP, "-", "+", 10)]
    assert sorted(time > 20_000 for time in idle) == [False, True]


async def test_waiting_jobs_of_a_group_that_was_destroyed_run_once(hands: Hands) -> None:
    await hands.leased("a")
    await hands.submit("b")
    await hands.redis.xgroup_destroy(hands.keys.queues[Priority.NORMAL], GROUP)
    await hands.credit()
    await hands.credit()
    assert (await hands.lease("p2")).job_id == "b"
    await hands.no_lease("p2")


# renew


async def test_renew_answers_the_jobs_that_are_not_ours_any_more(hands: Hands) -> None:
    held = {job_id: (await hands.leased(job_id)).lease_id for job_id in "abc"}
    await hands.cancel("b")
    assert await hands.queue.renew({**held, "unknown": "p1#x"}) == ["b", "unknown"]
    assert await hands.queue.renew({}) == []


async def test_a_renewed_job_is_not_swept(hands: Hands) -> None:
    lease = await hands.leased("a")
    await hands.leased("b")

    async def both_silent_for_a_while() -> bool:
        found = await hands.redis.xpending_range(hands.keys.queues[Priority.NORMAL], GROUP, "-", "+", 10)
        return min(item["time_since_delivered"] for item in found) >= SILENT_SECONDS * 1000

    await until(both_silent_for_a_while)
    assert await hands.queue.renew({"a": lease.lease_id}) == []
    assert await hands.queue.sweep(SILENT_SECONDS) == ["b:queued"]
    assert await hands.status("a") == "prefilling"


async def test_renewing_a_job_past_its_deadline_expires_it(hands: Hands) -> None:
    lease = await hands.leased("a", lifetime=0.3)
    await until(lambda: is_late(hands, "a"))
    assert await hands.queue.renew({"a": lease.lease_id}) == ["a"]
    assert (await hands.status("a"), await hands.entries("a")) == ("expired", [("1-0", "END expired")])
    assert await hands.idle()


# release and sweep


async def test_a_job_that_is_given_back_goes_before_all_others(hands: Hands) -> None:
    lease = await hands.leased("a", priority=Priority.LOW)
    await hands.submit("high", priority=Priority.HIGH)
    assert await hands.queue.release("a", lease.lease_id, "device lost") == "queued"
    assert (await hands.status("a"), await hands.field("a", "lease")) == ("queued", "")
    assert await hands.field("a", "why:1") == "device lost"
    await hands.credit()
    assert (await hands.lease()).job_id == "a"


async def test_a_release_may_be_repeated_and_does_nothing_more(hands: Hands) -> None:
    lease = await hands.leased("a")
    assert await hands.queue.release("a", lease.lease_id, "x") == "queued"
    assert await hands.queue.release("a", lease.lease_id, "x") == "lost:queued"
    assert await hands.unfinished() == 1


async def test_a_refunded_attempt_does_not_count(hands: Hands, one_attempt: Hands) -> None:
    lease = await hands.leased("a")
    assert await one_attempt.queue.release("a", lease.lease_id, "void", refund=True) == "queued"
    assert await hands.field("a", "attempt") == "0"


async def test_after_the_last_attempt_a_job_is_dead_and_every_reason_is_kept(hands: Hands, config: Config) -> None:
    await hands.submit("a")
    for attempt in range(1, config.attempts + 1):
        await hands.credit()
        lease = await hands.lease()
        outcome = await hands.queue.release("a", lease.lease_id, f"reason {attempt}")
        assert outcome == ("queued" if attempt < config.attempts else "dead")
    record = await hands.queue.record("a")
    assert [record[f"why:{attempt}"] for attempt in (1, 2, 3)] == ["reason 1", "reason 2", "reason 3"]
    assert (record["status"], record["reason"]) == ("failed", "reason 3")
    ((_, dead),) = await hands.redis.xrange(hands.keys.dead)
    assert dead == {"job": "a", "attempts": "3", "reason": "reason 3"}
    assert await hands.idle()


async def test_a_job_that_is_given_back_too_late_expires(hands: Hands) -> None:
    lease = await hands.leased("a", lifetime=0.3)
    await until(lambda: is_late(hands, "a"))
    assert await hands.queue.release("a", lease.lease_id, "x") == "expired"
    assert await hands.idle()


async def test_a_silent_holder_loses_its_job_and_is_fenced_when_it_comes_back(hands: Hands) -> None:
    lease_id = await hands.decoding("a")
    await hands.sweep(["a:queued"])
    assert await hands.redis.xlen(hands.keys.queues[0]) == 1
    assert await hands.field("a", "why:1") == "lease of d1 ran out"
    assert await hands.append("a", lease_id, 1, 11) == "lost:queued"
    assert await hands.queue.renew({"a": lease_id}) == ["a"]


async def test_the_second_attempt_sees_the_log_of_the_first_and_goes_on_from_it(hands: Hands) -> None:
    await hands.decoding("a")
    await hands.sweep(["a:queued"])
    await hands.credit()
    lease = await hands.lease("p2")
    assert (lease.log_length, await hands.field("a", "attempt")) == (1, "2")
    assert [entry.token for entry in await hands.log.read("a")] == [100]
    assert await hands.append("a", lease.lease_id, 0, 100, 101, 102, end="finished", reason="stop") == "3"
    assert await hands.entries("a") == [("1-0", "100"), ("2-0", "101"), ("3-0", "102"), ("4-0", "END finished")]


async def test_a_sweep_gives_a_job_up_after_its_last_attempt(hands: Hands, one_attempt: Hands) -> None:
    await hands.leased("a")
    await one_attempt.sweep(["a:dead"])
    assert await hands.status("a") == "failed"


async def test_a_sweep_passes_over_holders_that_were_heard_of_within_a_lease(hands: Hands) -> None:
    await hands.leased("a")
    assert await hands.queue.sweep(60.0) == []


async def test_a_sweep_clears_what_an_operator_deleted(hands: Hands) -> None:
    await hands.leased("a")
    await hands.redis.xdel(hands.keys.queues[Priority.NORMAL], await hands.field("a", "entry"))

    async def cleared() -> bool:
        assert await hands.queue.sweep(0.01) == []
        return await hands.working() == 0

    await until(cleared)


async def test_a_sweep_without_any_group_does_nothing(hands: Hands) -> None:
    assert await hands.queue.sweep(0.0) == []
    assert await hands.queue.retire("p1") is True
    assert [(load.unfinished, load.working, load.waiting) for load in await hands.queue.load()] == [(0, 0, 0)] * 4


# stop


async def test_a_job_that_is_cancelled_while_it_waits_is_gone_at_once(hands: Hands) -> None:
    await hands.submit("a")
    assert await hands.cancel("a") == Stopped(outcome="ok", status="queued")
    assert await hands.idle()
    await hands.credit()
    await hands.no_lease()


async def test_a_job_that_is_cancelled_during_prefill_can_neither_go_on_nor_be_handed_over(hands: Hands) -> None:
    lease = await hands.leased("a")
    assert await hands.cancel("a") == Stopped(outcome="ok", status="prefilling")
    with pytest.raises(Cancelled, match="lost:cancelled"):
        await hands.queue.handover("a", lease.lease_id, "d1#x")
    assert await hands.append("a", lease.lease_id, 0, 10) == "lost:cancelled"
    assert await hands.queue.release("a", lease.lease_id, "x") == "lost:cancelled"
    assert await hands.idle()


async def test_a_job_that_is_cancelled_during_decode_ends_after_its_last_token(hands: Hands) -> None:
    lease_id = await hands.decoding("a")
    assert await hands.cancel("a") == Stopped(outcome="ok", status="decoding")
    assert await hands.append("a", lease_id, 1, 11) == "lost:cancelled"
    assert await hands.entries("a") == [("1-0", "100"), ("2-0", "END cancelled")]
    assert await hands.idle()


async def test_a_cancel_after_the_end_changes_nothing(hands: Hands) -> None:
    lease = await hands.leased("a")
    await hands.append("a", lease.lease_id, 0, 10, end="finished", reason="stop")
    assert await hands.cancel("a") == Stopped(outcome="over", status="finished")
    assert await hands.entries("a") == [("1-0", "10"), ("2-0", "END finished")]
    assert not await hands.redis.exists(hands.keys.tombstone("a"))


async def test_a_cancel_of_an_unknown_job_is_not_remembered(hands: Hands) -> None:
    assert await hands.cancel("a") == Stopped(outcome="unknown")
    assert await hands.submit("a") == "ok"
    await hands.credit()
    assert (await hands.lease()).job_id == "a"


async def test_a_job_can_be_stopped_because_it_expired(hands: Hands) -> None:
    await hands.submit("a")
    assert (await hands.queue.stop("a", Status.EXPIRED, "deadline")).outcome == "ok"
    assert (await hands.status("a"), await hands.field("a", "reason")) == ("expired", "deadline")


async def test_a_cancel_of_a_waiting_job_took_no_time_and_needs_nobody_to_settle_it(hands: Hands) -> None:
    await hands.submit("a")
    await hands.cancel("a")
    assert (await hands.field("a", "stop_phase"), await hands.field("a", "stop_ms")) == ("queued", "0")
    await hands.queue.settle("a", "decoding")
    assert (await hands.field("a", "stop_phase"), await hands.field("a", "stop_ms")) == ("queued", "0")


async def test_the_first_holder_to_undo_its_side_notes_phase_and_milliseconds_and_no_other(hands: Hands) -> None:
    await hands.decoding("a")
    await hands.cancel("a")
    assert (await hands.field("a", "stop_phase"), await hands.field("a", "stop_ms")) == ("decode", "")
    await hands.queue.settle("a", "waiting")
    noted = await hands.queue.record("a")
    assert noted["stop_phase"] == "waiting"
    assert 0 <= int(noted["stop_ms"]) < WAIT_SECONDS * 1000
    tombstone = await hands.redis.get(hands.keys.tombstone("a"))
    assert tombstone == f"{noted['stop_asked']} user waiting {noted['stop_ms']} ms"
    await hands.queue.settle("a", "decoding")
    assert await hands.queue.record("a") == noted
    assert await hands.redis.get(hands.keys.tombstone("a")) == tombstone


async def test_settling_a_job_that_was_not_stopped_or_is_gone_leaves_no_trace(hands: Hands) -> None:
    await hands.leased("a")
    before = await hands.queue.record("a")
    await hands.queue.settle("a", "prefilling")
    await hands.queue.settle("unknown", "prefilling")
    assert await hands.queue.record("a") == before
    assert await hands.queue.record("unknown") == {}
    assert not await hands.redis.exists(hands.keys.tombstone("a"), hands.keys.tombstone("unknown"))


# what is kept


async def test_nothing_of_a_job_expires_before_its_end_and_all_of_it_after(hands: Hands, config: Config) -> None:
    keep_ms = config.keep_seconds * 1000
    await hands.decoding("a")
    job, log, tombstone = hands.keys.job("a"), hands.keys.tokens("a"), hands.keys.tombstone("a")
    assert [await hands.redis.pttl(key) for key in (job, log)] == [-1, -1]
    assert await hands.redis.exists(tombstone) == 0
    await hands.cancel("a")
    await hands.queue.settle("a", "decoding")
    remaining = [await hands.redis.pttl(key) for key in (job, log, tombstone)]
    for left, kept in zip(remaining, (keep_ms + 60_000, keep_ms, keep_ms), strict=True):
        assert kept - WAIT_SECONDS * 1000 < left <= kept


async def test_a_job_that_is_queued_again_keeps_its_log_for_ever(hands: Hands) -> None:
    lease_id = await hands.decoding("a")
    await hands.queue.release("a", lease_id, "x")
    assert await hands.redis.pttl(hands.keys.tokens("a")) == -1


async def test_the_timeline_has_one_line_for_every_event_of_a_life(hands: Hands) -> None:
    lease = await hands.leased("a", worker="p1")
    await hands.queue.release("a", lease.lease_id, "device lost")
    await hands.credit()
    lease = await hands.lease("p2")
    await hands.append("a", lease.lease_id, 0, 10)
    await hands.append("a", lease.lease_id, 0, 10)
    await hands.queue.handover("a", lease.lease_id, "d1#x")
    await hands.append("a", "d1#x", 1, 11, 12, end="finished", reason="stop")
    lines = [line.split(" ", 1) for line in (await hands.field("a", "timeline") or "").split("\n")]
    assert [event for _, event in lines] == [
        "queued",
        "prefilling p1",
        "queued device lost",
        "prefilling p2",
        "first_token",
        "decoding d1",
        "finished stop",
    ]
    times = [int(at) for at, _ in lines]
    assert times == sorted(times)
    assert int(await hands.field("a", "submitted") or 0) <= times[0]
    assert int(await hands.field("a", "ended") or 0) <= times[-1]


async def test_a_holder_s_note_is_one_line_and_nobody_else_s_is_taken(hands: Hands) -> None:
    lease_id = await hands.decoding("a")
    await hands.queue.note("a", "d1#other", "local_fallback", "not mine")
    await hands.queue.note("a", lease_id, "local_fallback", "KV of layer 3\n  is\tnone")
    await hands.append("a", lease_id, 1, 101, end="finished", reason="stop")
    await hands.queue.note("a", lease_id, "local_fallback", "said late")
    lines = (await hands.field("a", "timeline") or "").split("\n")
    assert [line.split(" ", 1)[1] for line in lines[-3:]] == [
        "local_fallback KV of layer 3 is none",
        "finished stop",
        "local_fallback said late",
    ]
    await hands.queue.note("a", lease_id, "local_fallback", "said late")
    assert (await hands.field("a", "timeline") or "").count("said late") == 1, "a repeat, for its reply was lost"
    await hands.queue.note("b", lease_id, "local_fallback", "no such job")
    assert await hands.redis.exists(hands.keys.job("b")) == 0


async def test_standing_tells_status_and_lateness_by_the_clock_of_redis(hands: Hands) -> None:
    assert await hands.queue.standing("a") is None
    await hands.submit("a", lifetime=60.0)
    assert await hands.queue.standing("a") == Standing(status=Status.QUEUED, late=False, owner="-")
    await hands.submit("b", lifetime=0.0, owner="me")
    assert await hands.queue.standing("b") == Standing(status=Status.QUEUED, late=False, owner="me")
    await hands.submit("c", lifetime=0.001)
    await until(lambda: is_late(hands, "c"))


async def test_leases_tells_the_holder_of_each_job(hands: Hands) -> None:
    lease = await hands.leased("a")
    await hands.submit("b")
    assert await hands.queue.leases(["a", "b", "unknown"]) == [lease.lease_id, "", None]
    assert await hands.queue.leases([]) == []


@pytest.mark.parametrize("status", sorted(OPEN))
async def test_over_means_an_end_in_the_log_no_queue_entry_and_no_lease(hands: Hands, status: Status) -> None:
    reach = {Status.QUEUED: hands.submit, Status.PREFILLING: hands.leased, Status.DECODING: hands.decoding}
    await reach[status]("a")
    assert await hands.status("a") == status
    assert await hands.unfinished() == 1
    assert not [entry for entry in await hands.log.read("a") if entry.end]
    await hands.cancel("a")
    assert (await hands.log.read("a"))[-1].end == "cancelled"
    assert await hands.field("a", "lease") == ""
    assert await hands.idle()


# credits and the registry


async def test_a_credit_that_was_taken_does_not_come_back_to_life_when_the_others_are_rescored(hands: Hands) -> None:
    credits = Credits(hands.store, "d1")
    await hands.credit("d1", "taken")
    await hands.submit("a")
    await hands.lease()
    await hands.credit("d1", "listed")
    await credits.publish([], 3, listed=["listed", "taken"])
    assert await hands.credits() == ["d1/listed"]
    assert await hands.redis.zscore(hands.keys.credits, "d1/listed") == 3.0


async def test_a_credit_s_score_is_how_many_places_are_in_use_when_its_turn_comes(hands: Hands) -> None:
    """Without, a worker that is busier than it seems would be fed before an emptier one."""
    credits = Credits(hands.store, "d1")

    async def scores() -> list[tuple[str, float]]:
        scored: list[tuple[str, float]] = await hands.redis.zrange(hands.keys.credits, 0, -1, withscores=True)
        return [(name.removeprefix("d1/"), score) for name, score in scored]

    await credits.publish(["a", "b", "c"], 0)
    assert await scores() == [("a", 0), ("b", 1), ("c", 2)]
    await hands.redis.zrem(hands.keys.credits, "d1/a")  # as a lease does
    await credits.publish([], 1, listed=["b", "c"])
    assert await scores() == [("b", 1), ("c", 2)]
    await credits.publish(["d"], 0, listed=["b", "c"])
    assert await scores() == [("d", 0), ("b", 1), ("c", 2)]
    await credits.publish(["e"], 3, listed=["d", "b", "c"])  # jobs came on other ways than credits
    assert [score for _, score in await scores()] == [3, 4, 5, 6]


async def test_a_worker_lists_and_withdraws_its_own_credits_only(hands: Hands) -> None:
    mine = Credits(hands.store, "d1")
    await hands.credit("d1", "a")
    await hands.credit("d1", "b")
    await hands.credit("d11", "a")
    assert await mine.listed() == {"a", "b"}
    await mine.withdraw(["a", "unknown"])
    await mine.withdraw([])
    await mine.publish([], 1)
    assert await hands.credits() == ["d1/b", "d11/a"]


async def test_a_worker_lives_as_long_as_it_is_announced(hands: Hands) -> None:
    await hands.registry.announce("d1", {"role": "decode", "slots": 8})
    await hands.registry.announce("p1", {"role": "prefill"})
    assert await hands.registry.living() == {"d1": {"role": "decode", "slots": "8"}, "p1": {"role": "prefill"}}
    assert 0 < await hands.redis.pttl(hands.keys.worker("d1")) <= 60_000
    await hands.registry.leave("p1")
    await hands.redis.pexpire(hands.keys.worker("d1"), 1)

    async def nobody() -> bool:
        return await hands.registry.living() == {}

    await until(nobody)
    assert await hands.redis.exists(hands.keys.workers) == 0


async def test_a_mark_neither_prolongs_a_life_nor_wakes_the_dead(hands: Hands) -> None:
    await hands.registry.announce("d1", {"role": "decode"})
    await hands.redis.pexpire(hands.keys.worker("d1"), 30_000)
    await hands.registry.mark("d1", "wedged")
    await hands.registry.mark("dead", "wedged")
    assert (await hands.registry.living())["d1"]["state"] == "wedged"
    assert await hands.redis.pttl(hands.keys.worker("d1")) <= 30_000
    assert await hands.redis.exists(hands.keys.worker("dead")) == 0


async def test_a_worker_that_dies_while_it_is_marked_does_not_live_for_ever(
    hands: Hands, monkeypatch: pytest.MonkeyPatch
) -> None:
    await hands.registry.announce("d1", {"role": "decode"})
    exists = hands.redis.exists

    async def exists_and_then_expires(key: str) -> int:
        answer: int = await exists(key)
        await hands.redis.delete(key)
        return answer

    monkeypatch.setattr(hands.redis, "exists", exists_and_then_expires)
    await hands.registry.mark("d1", "stopped")
    assert await hands.redis.pttl(hands.keys.worker("d1")) != -1  # there is none, or it expires
