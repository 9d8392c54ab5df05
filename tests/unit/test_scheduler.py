"""Places in a decode worker: each is in one state, none is lost, none is promised twice."""

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from pipeline.scheduler import Scheduler

OPEN_SECONDS = 2.0


class Places(RuleBasedStateMachine):
    """A decode loop, its Redis and its senders, doing anything in any order; a second account is kept beside."""

    @initialize(slots=st.integers(1, 4), waiting=st.integers(0, 3))
    def begin(self, slots: int, waiting: int) -> None:
        self.scheduler: Scheduler[str] = Scheduler(slots=slots, waiting=waiting)
        self.slots, self.capacity = slots, slots + waiting
        self.now = 0.0
        self.names = itertools.count()
        self.redis: set[str] = set()
        self.gone: dict[str, float] = {}  # taken from Redis and not opened: when the audit first missed it
        self.listed: set[str] = set()
        self.arriving: set[str] = set()
        self.waiting: list[str] = []
        self.running: dict[int, str] = {}

    def nonces(self, where: set[str]) -> st.SearchStrategy[str]:
        return st.sampled_from(sorted(where))

    @rule()
    def publish_all_that_is_owed(self) -> None:
        for _ in range(self.scheduler.owed):
            nonce = f"n{next(self.names)}"
            self.scheduler.publish(nonce)
            self.listed.add(nonce)
            self.redis.add(nonce)

    @precondition(lambda self: self.redis)
    @rule(data=st.data())
    def a_lease_takes_a_credit(self, data: st.DataObject) -> None:
        self.redis.remove(data.draw(self.nonces(self.redis)))

    @rule(data=st.data())
    def an_open_comes(self, data: st.DataObject) -> None:
        nonce = data.draw(self.nonces(self.listed | self.arriving | {"unknown"}))
        assert self.scheduler.open(nonce) == (nonce in self.listed)
        if nonce in self.listed:
            self.listed.remove(nonce)
            self.gone.pop(nonce, None)
            self.arriving.add(nonce)

    @precondition(lambda self: self.arriving)
    @rule(data=st.data(), name=st.integers())
    def a_cache_is_whole(self, data: st.DataObject, name: int) -> None:
        nonce, sequence = data.draw(self.nonces(self.arriving)), f"s{next(self.names)}"
        self.scheduler.arrived(nonce, sequence)
        self.arriving.remove(nonce)
        self.waiting.append(sequence)

    @rule(data=st.data())
    def a_transfer_is_dropped(self, data: st.DataObject) -> None:
        nonce = data.draw(self.nonces(self.arriving | {"unknown"}))
        self.scheduler.drop(nonce)
        self.arriving.discard(nonce)

    @rule()
    def free_slots_are_filled(self) -> None:
        expected = []
        for slot in range(self.slots):
            if slot not in self.running and self.waiting:
                self.running[slot] = self.waiting.pop(0)
                expected.append((slot, self.running[slot]))
        assert self.scheduler.admit() == expected

    @rule(data=st.data())
    def a_sequence_ends_wherever_it_is(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from([*self.waiting, *self.running.values(), "unknown"]))
        slot = next((slot for slot, other in self.running.items() if other == sequence), None)
        assert self.scheduler.remove(sequence) == slot
        if slot is not None:
            del self.running[slot]
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    @rule(seconds=st.sampled_from([0.0, 0.5, OPEN_SECONDS - 0.001, OPEN_SECONDS]), stray=st.booleans())
    def the_heartbeat_audits(self, seconds: float, stray: bool) -> None:
        self.now += seconds
        in_redis = self.redis | ({"stray"} if stray else set())
        for nonce in sorted(self.listed):
            if nonce in self.redis:
                self.gone.pop(nonce, None)
            elif self.now - self.gone.setdefault(nonce, self.now) >= OPEN_SECONDS:
                self.listed.remove(nonce)
                del self.gone[nonce]
        unknown = sorted(in_redis - self.listed)
        assert self.scheduler.audit(in_redis, self.now, OPEN_SECONDS) == unknown
        self.redis -= set(unknown)

    @invariant()
    def every_place_is_in_exactly_one_state(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        scheduler = self.scheduler
        assert set(scheduler.listed) == self.listed
        assert scheduler.arriving == self.arriving
        assert list(scheduler.waiting) == self.waiting
        assert scheduler.running == self.running
        assert scheduler.busy == len(self.arriving) + len(self.waiting) + len(self.running)
        assert 0 <= scheduler.owed <= self.capacity
        assert scheduler.owed + len(self.listed) + scheduler.busy == self.capacity
        assert set(self.running) <= set(range(self.slots))


TestPlaces = Places.TestCase
TestPlaces.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)


def filled(slots: int, *sequences: str) -> Scheduler[str]:
    scheduler: Scheduler[str] = Scheduler(slots=slots, waiting=4)
    for sequence in sequences:
        scheduler.publish(sequence)
        assert scheduler.open(sequence)
        scheduler.arrived(sequence, sequence)
    return scheduler


def test_sequences_go_into_the_lowest_free_slots_in_the_order_they_came() -> None:
    scheduler = filled(3, "a", "b", "c", "d", "e")
    assert scheduler.admit() == [(0, "a"), (1, "b"), (2, "c")]
    assert [scheduler.remove(name) for name in ("c", "a")] == [2, 0]
    assert scheduler.admit() == [(0, "d"), (2, "e")]
    assert scheduler.admit() == []


def test_a_waiting_sequence_can_be_removed_and_has_no_slot_to_evict() -> None:
    scheduler = filled(1, "a", "b")
    scheduler.admit()
    assert scheduler.remove("b") is None
    assert scheduler.remove("a") == 0
    assert scheduler.remove("a") is None
    assert scheduler.busy == 0


def test_a_credit_is_used_up_by_the_first_open() -> None:
    scheduler: Scheduler[str] = Scheduler(slots=1, waiting=0)
    scheduler.publish("n")
    assert scheduler.open("n")
    assert not scheduler.open("n")


def test_a_credit_gone_without_an_open_is_void_after_the_time_to_open_and_not_before() -> None:
    scheduler: Scheduler[str] = Scheduler(slots=1, waiting=0)
    scheduler.publish("n")
    scheduler.audit(set(), 100.0, OPEN_SECONDS)
    scheduler.audit(set(), 101.9, OPEN_SECONDS)
    assert scheduler.owed == 0
    scheduler.audit(set(), 102.0, OPEN_SECONDS)
    assert scheduler.owed == 1
    assert not scheduler.open("n")


def test_a_credit_seen_again_in_redis_starts_its_time_anew() -> None:
    scheduler: Scheduler[str] = Scheduler(slots=1, waiting=0)
    scheduler.publish("n")
    scheduler.audit(set(), 100.0, OPEN_SECONDS)
    scheduler.audit({"n"}, 101.0, OPEN_SECONDS)
    scheduler.audit(set(), 103.0, OPEN_SECONDS)
    assert scheduler.open("n")


def test_credits_in_redis_that_are_not_ours_are_named_to_be_withdrawn() -> None:
    scheduler: Scheduler[str] = Scheduler(slots=1, waiting=0)
    scheduler.publish("mine")
    assert scheduler.audit({"mine", "old", "older"}, 0.0, OPEN_SECONDS) == ["old", "older"]


def test_a_place_is_owed_again_when_its_transfer_comes_to_nothing() -> None:
    scheduler: Scheduler[str] = Scheduler(slots=1, waiting=1)
    scheduler.publish("n")
    scheduler.open("n")
    assert (scheduler.owed, scheduler.busy) == (1, 1)
    scheduler.drop("n")
    assert (scheduler.owed, scheduler.busy) == (2, 0)


@pytest.mark.parametrize(("slots", "waiting"), [(1, 0), (1, 2), (8, 2)])
def test_an_idle_worker_owes_a_credit_for_every_place(slots: int, waiting: int) -> None:
    assert Scheduler[str](slots=slots, waiting=waiting).owed == slots + waiting
