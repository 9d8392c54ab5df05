"""From traces that are known to figures that are known."""

import json

import pytest

from bench.client import Server
from bench.errors import Unfit
from bench.measurement import Round
from bench.report import Measured, Report
from bench.summary import Slo, Spread, Summary, over_rounds
from bench.trace import Trace

NONE = Slo.parse("")


def trace(due: float, *chunks: float, end: float, tokens: int, asked: int = 4, failure: str = "") -> Trace:
    return Trace(
        due=due,
        sent=due + 0.25,
        asked=asked,
        prompt_tokens=10,
        chunks=list(chunks),
        end=end,
        tokens=tokens,
        failure=failure,
        said="so it goes" if failure else "",
    )


ONE = trace(1.0, 1.5, 1.6, 1.8, 2.0, end=2.0, tokens=4)
THREE_TOGETHER = trace(2.0, 2.25, 2.5, end=2.5, tokens=4)  # one token, then three in one piece
SHORT = trace(3.0, 3.5, end=4.0, tokens=1)
LOST = trace(4.0, 4.125, 4.25, end=9.0, tokens=2, failure="429 queue_full")


def test_a_known_trace_gives_known_numbers() -> None:
    summary = Summary.of([ONE], NONE)
    assert summary.ttft == Spread(1, *[500.0] * 6)
    assert summary.e2e == Spread(1, *[1000.0] * 6)
    assert summary.tpot == Spread(1, *[pytest.approx(500 / 3, abs=1e-3)] * 6)
    assert summary.itl is not None
    assert (summary.itl.count, summary.itl.mean, summary.itl.p50, summary.itl.max) == (3, 166.667, 200.0, 200.0)
    assert summary.seconds == 1.0
    assert summary.rates() == {"output tokens/s": 4.0, "total tokens/s": 14.0, "requests/s": 1.0}
    assert (summary.late, summary.short, summary.failures, summary.good) == (0.25, 0, {}, None)


def test_percentiles_lie_on_the_line_between_two_values() -> None:
    """Hyndman and Fan's seventh, as numpy and most tools have it."""
    spread = Spread.of([number / 1000 for number in range(101)][::-1])
    assert spread == Spread(101, 50.0, 50.0, 90.0, 95.0, 99.0, 100.0)
    assert Spread.of([0.001, 0.002]) == Spread(2, 1.5, 1.5, 1.9, 1.95, 1.99, 2.0)
    assert Spread.of([]) is None


def test_several_tokens_in_one_piece_are_one_gap_and_several_tokens() -> None:
    """Without the server's own count a server that sends tokens in bundles would look slow, or fast."""
    summary = Summary.of([THREE_TOGETHER], NONE)
    assert (summary.output_tokens, summary.chunks) == (4, 2)
    assert summary.itl == Spread(1, *[250.0] * 6)
    assert summary.tpot == Spread(1, *[pytest.approx(250 / 3, abs=1e-3)] * 6)


def test_a_failure_is_counted_and_is_in_no_latency() -> None:
    whole, all_of_them = Summary.of([ONE], NONE), Summary.of([ONE, LOST], NONE)
    assert all_of_them.failures == {"429 queue_full": 1}
    assert all_of_them.said == {"429 queue_full": "so it goes"}
    assert (all_of_them.requests, all_of_them.output_tokens) == (2, 4)
    assert [all_of_them.ttft, all_of_them.itl, all_of_them.e2e] == [whole.ttft, whole.itl, whole.e2e]
    assert all_of_them.seconds == 8.0  # its time is not taken out
    assert all_of_them.rates()["requests/s"] == 0.125


def test_only_failures_are_no_figures_and_no_crash() -> None:
    summary = Summary.of([LOST], NONE)
    assert [summary.ttft, summary.itl, summary.tpot, summary.e2e] == [None] * 4
    assert summary.rates()["output tokens/s"] == 0.0


def test_an_answer_of_one_token_has_no_time_between_tokens_and_is_short() -> None:
    summary = Summary.of([SHORT], NONE)
    assert (summary.tpot, summary.itl, summary.short) == (None, None, 1)


def test_an_answer_without_text_has_its_first_token_at_its_end() -> None:
    assert trace(1.0, end=3.0, tokens=1).ttft == 2.0


@pytest.mark.parametrize(
    ("text", "good"),
    [("ttft=500ms", 3), ("ttft=499", 1), ("itl=200ms", 2), ("itl=199", 1), ("tpot=100", 2), ("e2e=500,ttft=300", 1)],
)
def test_goodput_counts_the_answers_that_kept_to_all_of_it(text: str, good: int) -> None:
    """itl: the longest pause of an answer. A request that failed kept to nothing."""
    summary = Summary.of([ONE, THREE_TOGETHER, SHORT, LOST], Slo.parse(text))
    assert summary.good == good
    assert summary.rates()["goodput share"] == good / 4
    assert summary.rates()["goodput requests/s"] == good / 8


@pytest.mark.parametrize("text", ["ttft", "ttft=fast", "speed=3", "ttft=1s"])
def test_objectives_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(Unfit, match=f"^--slo {text}: must be bounds in milliseconds"):
        Slo.parse(text)


def test_over_rounds_stands_the_median_and_the_worst_of_maxima() -> None:
    rounds = [{"ITL p50 ms": 1.0, "ITL max ms": 9.0, "x": 1.0}, {"ITL p50 ms": 2.0, "ITL max ms": 5.0}]
    rounds.append({"ITL p50 ms": 8.0, "ITL max ms": 7.0})
    assert over_rounds(rounds) == {"ITL p50 ms": 2.0, "ITL max ms": 9.0}


def report(**servers: list[Round]) -> Report:
    made = Report({"seed": 1}, NONE)
    for name, rounds in servers.items():
        made.servers[name] = Measured(server=Server(name=name, url=f"http://{name}"), model="m")
        for taken in rounds:
            made.servers[name].add(taken, NONE)
    return made


def test_rivals_stand_beside_each_other_with_how_many_times_as_much() -> None:
    ours = Round(traces=[ONE], intruders=[], started=1.0, cpu=0.1)
    theirs = Round(traces=[trace(1.0, 2.0, 2.5, 3.0, end=3.0, tokens=3)], intruders=[], started=1.0, cpu=0.1)
    lines = report(us=[ours, ours], them=[theirs, theirs]).comparison()
    assert lines[0].split() == ["median", "of", "2", "rounds", "us", "them", "÷", "us"]
    rows = {line[:28].strip(): line[28:].split() for line in lines[1:]}
    assert rows["output tokens/s"] == ["4.00", "1.50", "0.38"]
    assert rows["TTFT p50 ms"] == ["500.00", "1000.00", "2.00"]
    assert report(us=[ours]).comparison() == []


def test_intruders_are_told_apart_and_their_failures_count() -> None:
    made = report(us=[Round(traces=[ONE], intruders=[THREE_TOGETHER, LOST], started=1.0, cpu=0.1)])
    assert made.failed == 1
    figures = made.servers["us"].figures()
    assert (figures["TTFT max ms"], figures["intruders' TTFT max ms"]) == (500.0, 250.0)
    lines = made.round_lines(made.servers["us"])
    assert "failed: 1 of 2: 429 queue_full: so it goes" in lines
    shown = json.loads(json.dumps(made.shown()))["servers"][0]["rounds"][0]
    assert shown["itl"]["max"] == 200.0
    assert shown["intruders"]["failures"] == {"429 queue_full": 1}
    assert [row["due"] for row in shown["intruders"]["answers"]] == [1.0, 3.0]
