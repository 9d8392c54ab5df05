"""The table of moves, read as a graph."""

import pytest

from pipeline.states import MOVES, OPEN, TERMINAL, Status, diagram

LEASED = (Status.PREFILLING, Status.DECODING)


def reachable(start: Status) -> set[Status]:
    seen, frontier = {start}, [start]
    while frontier:
        here = frontier.pop()
        for (source, _), target in MOVES.items():
            if source == here and target not in seen:
                seen.add(target)
                frontier.append(target)
    return seen


def test_every_status_can_be_reached_from_queued() -> None:
    assert reachable(Status.QUEUED) == set(Status)


def test_every_status_is_either_open_or_terminal() -> None:
    assert set(Status) == OPEN | TERMINAL
    assert not OPEN & TERMINAL


def test_no_move_leaves_a_terminal_status() -> None:
    assert [move for move in MOVES if move[0] in TERMINAL] == []


@pytest.mark.parametrize("status", sorted(OPEN))
def test_from_every_open_status_every_end_can_be_reached(status: Status) -> None:
    assert reachable(status) >= TERMINAL


@pytest.mark.parametrize("status", sorted(OPEN))
@pytest.mark.parametrize(("event", "end"), [("cancel", Status.CANCELLED), ("expire", Status.EXPIRED)])
def test_cancel_and_expire_are_legal_in_every_open_status(status: Status, event: str, end: Status) -> None:
    assert MOVES[status, event] == end


@pytest.mark.parametrize("status", LEASED)
def test_a_holder_can_give_its_job_back_for_another_attempt(status: Status) -> None:
    assert MOVES[status, "release"] == Status.QUEUED


def test_only_a_leased_job_can_finish() -> None:
    assert {source for (source, event) in MOVES if event == "finish"} == set(LEASED)


def test_a_status_prints_and_travels_as_its_value() -> None:
    assert [str(status) for status in Status] == [status.value for status in Status]
    assert f"{Status.QUEUED}" == "queued"


def test_the_diagram_draws_every_move_and_the_end_of_every_terminal_status() -> None:
    lines = diagram().splitlines()
    assert lines[0] == "stateDiagram-v2"
    for (source, event), target in MOVES.items():
        arrow = f"    {source} --> {target}: "
        drawn = [line.removeprefix(arrow).split(", ") for line in lines if line.startswith(arrow)]
        assert len(drawn) == 1, arrow
        assert event in drawn[0]
    assert {f"    {status} --> [*]" for status in TERMINAL} == {line for line in lines if line.endswith("--> [*]")}
