"""`kvrelay bench` as it is typed, against whole systems whose steps take a known time."""

import json
import secrets
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from bench.arrivals import poisson
from tests.acceptance.system import System, free_port, wait_for

COMMAND = [sys.executable, "-c", "import sys; from api.command import main; sys.exit(main())", "bench"]
STEP_MS = 20.0


def make(redis_url: str, folder: Path, **settings: object) -> System:
    sim = {
        "model": "sim",
        "prefill_device": "sim",
        "decode_device": "sim",
        "served_name": f"bench-{secrets.token_hex(4)}",
    }
    return System(redis_url, folder, **{**sim, "sim_step_ms": STEP_MS, "sim_prefill_us": 100, **settings})


@pytest.fixture(scope="module")
def system(redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    system = make(redis_url, tmp_path_factory.mktemp("system"))
    yield system.start_all()
    system.close()


def run(system: System, *words: str, code: int = 0) -> str:
    done = subprocess.run([*COMMAND, *words], env=system.environ, capture_output=True, text=True, timeout=100)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


def report(path: Path) -> Any:
    return json.loads(path.read_text())


def test_a_closed_loop_is_measured_and_its_json_says_all_of_it(system: System, tmp_path: Path) -> None:
    """The steps' time is a bound from below: what a server waits cannot be missing in what its client sees."""
    out = tmp_path / "report.json"
    words = ("--streams", "3", "--requests", "6", "--prompt", "uniform:20-40", "--output", "16", "--seed", "5")
    said = run(system, *words, "--slo", "e2e=60000ms", "--json", str(out))
    found = report(out)
    assert {"date", "kvrelay", "machine", "parameters", "servers"} == found.keys()
    assert "api_key" not in found["parameters"]
    assert found["machine"]["cores"] > 0
    assert found["machine"]["cpu"]
    assert (found["parameters"]["streams"], found["parameters"]["seed"]) == (3, 5)
    (server,) = found["servers"]
    assert (server["model"], server["url"]) == (system.name, f"http://127.0.0.1:{system.port}")
    (one,) = server["rounds"]
    assert (one["requests"], one["failures"], one["short"], one["good"]) == (6, {}, 0, 6)
    assert one["output_tokens"] == 6 * 16
    assert one["prompt_tokens"] == sum(row["prompt_tokens"] for row in one["answers"])
    assert all(20 <= row["prompt_tokens"] <= 40 for row in one["answers"])  # as the server counted them
    assert one["chunks"] <= one["output_tokens"]
    assert one["itl"]["count"] == one["chunks"] - 6
    assert [one[name]["count"] for name in ("ttft", "tpot", "e2e")] == [6, 6, 6]
    to_the_last = one["ttft"]["mean"] * 6 + one["itl"]["mean"] * one["itl"]["count"]
    assert to_the_last >= 6 * 15 * STEP_MS
    assert all(row["end"] - row["due"] >= 15 * STEP_MS / 1000 for row in one["answers"])
    assert one["output tokens/s"] == pytest.approx(6 * 16 / one["seconds"], rel=0.01)
    for shown in ("TTFT", "ITL", "TPOT", "e2e", "output tokens/s", "kept to e2e ≤ 60000 ms: 6 of 6"):
        assert shown in said


def test_the_suite_says_target_beside_figure_at_every_point(redis_url: str, tmp_path: Path) -> None:
    out = tmp_path / "suite.json"
    fast = make(redis_url, tmp_path, sim_step_ms=1, sim_prefill_us=5, slots=16)
    try:
        said = run(fast.start_all(), "--suite", "--json", str(out))
    finally:
        fast.close()
    for target in ("≥ 60", "≥ 117", "≥ 157", "≥ 195", "≤ 150"):
        assert target in said
    found = [(report["parameters"], report["servers"][0]["rounds"][0]) for report in report(out)]
    assert [(asked["prompt"], asked["streams"]) for asked, _ in found][:5] == [
        *(("128", streams) for streams in (1, 4, 8, 16)),
        ("1500", 1),
    ]
    assert all(measured["requests"] == asked["requests"] and not measured["failures"] for asked, measured in found)
    assert [asked["interfere"] != "" for asked, _ in found] == [False] * 6 + [True] * 2
    assert len({asked["seed"] for asked, _ in found}) == len(found)


def test_a_seed_asks_the_same_and_the_server_counts_the_tokens_that_were_meant(system: System, tmp_path: Path) -> None:
    asked = []
    for seed in ("1", "1", "2"):
        out = tmp_path / f"{len(asked)}.json"
        words = ("--requests", "4", "--prompt", "uniform:2-300", "--output", "uniform:1-5", "--warmup", "0")
        run(system, *words, "--seed", seed, "--json", str(out))
        rows = report(out)["servers"][0]["rounds"][0]["answers"]
        asked.append([(row["prompt_tokens"], row["tokens"]) for row in rows])
    assert asked[0] == asked[1] != asked[2]
    out = tmp_path / "fixed.json"
    run(system, "--requests", "3", "--prompt", "77", "--output", "3", "--json", str(out))
    assert report(out)["servers"][0]["rounds"][0]["prompt_tokens"] == 3 * 77


def test_an_open_loop_sends_when_the_seed_says_and_counts_from_then(system: System, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    run(system, "--rate", "20", "--requests", "10", "--output", "4", "--endpoint", "chat", "--json", str(out))
    one = report(out)["servers"][0]["rounds"][0]
    due = [row["due"] for row in one["answers"]]
    wanted = poisson(20, 10, Random("1 arrivals 0"))
    assert [at - due[0] for at in due] == pytest.approx([at - wanted[0] for at in wanted], abs=1e-4)
    assert all(row["due"] <= row["sent"] <= row["first"] <= row["end"] for row in one["answers"])
    ttft = [1000 * (row["first"] - row["due"]) for row in one["answers"]]
    assert one["ttft"]["max"] == pytest.approx(max(ttft), abs=0.01)


def test_intruders_are_measured_apart_from_the_streams_they_disturb(system: System, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    words = ("--streams", "2", "--requests", "4", "--output", "30", "--interfere", "prompt=400,output=2,every=0.2")
    said = run(system, *words, "--json", str(out), "--plot", str(tmp_path / "plot.png"))
    one = report(out)["servers"][0]["rounds"][0]
    assert (one["requests"], one["output_tokens"]) == (4, 120)
    assert one["itl"]["count"] == one["chunks"] - 4
    assert {row["prompt_tokens"] for row in one["intruders"]["answers"]} == {400}
    assert one["intruders"]["requests"] == len(one["intruders"]["answers"]) >= 2
    assert one["intruders"]["ttft"]["max"] >= 40.0  # 400 tokens of 100 µs
    assert "intruders: " in said
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_rival_is_measured_in_turns_and_stands_beside_it(system: System, redis_url: str, tmp_path: Path) -> None:
    """What is said with its name goes to the rival alone: kvrelay would refuse a field that it does not know."""
    folder = tmp_path / "rival"
    folder.mkdir()
    rival = make(redis_url, folder, sim_step_ms=3 * STEP_MS)
    out, picture = tmp_path / "report.json", tmp_path / "plot.svg"
    try:
        rival.start_all()
        words = [
            "--rival",
            f"slow=http://127.0.0.1:{rival.port}/v1",
            "--rounds",
            "2",
            "--streams",
            "2",
            "--requests",
            "4",
        ]
        words += ["--output", "8", "--json", str(out), "--plot", str(picture)]
        said = run(
            system, *words, "--extra", 'slow={"timeout": 50, "min_tokens": null}', "--model", f"slow={rival.name}"
        )
        refused = run(system, *words, "--extra", 'slow={"nonsense": 1}', code=1)
    finally:
        rival.close()
    assert "2 of 2 first requests to slow: 400 " in refused
    ours, theirs = report(out)["servers"]
    assert (ours["model"], theirs["name"], theirs["model"]) == (system.name, "slow", rival.name)
    for number in range(2):
        rounds = ours["rounds"][number], theirs["rounds"][number]
        assert [one["output_tokens"] for one in rounds] == [32, 32]
        assert all(row["end"] - row["due"] >= 7 * 3 * STEP_MS / 1000 for row in rounds[1]["answers"])
    shown = [line.split(", round")[0] for line in said.splitlines() if ", round " in line]
    assert shown == [ours["name"], "slow"] * 2
    assert "median of 2 rounds" in said
    assert f"÷ {ours['name']}" in said
    assert ET.parse(picture).getroot().tag.endswith("svg")


def test_conversations_of_a_file_are_asked_with_the_length_of_their_answers(system: System, tmp_path: Path) -> None:
    items = [
        {"conversations": [{"from": "human", "value": "?" * (5 + n)}, {"from": "gpt", "value": "!" * (2 + n)}]}
        for n in range(5)
    ]
    path, out = tmp_path / "sharegpt.json", tmp_path / "report.json"
    path.write_text(json.dumps(items))
    run(system, "--sharegpt", str(path), "--requests", "5", "--warmup", "0", "--json", str(out))
    rows = report(out)["servers"][0]["rounds"][0]["answers"]
    assert sorted((row["prompt_tokens"], row["tokens"]) for row in rows) == [(5 + n, 2 + n) for n in range(5)]
    assert "has only 5: 6 requests more were needed" in run(
        system, "--sharegpt", str(path), "--requests", "6", "--warmup", "0", code=1
    )


def test_a_request_that_fails_is_counted_and_is_the_exit_code(system: System, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    words = ("--requests", "3", "--warmup", "0", "--output", "2", "--extra", '{"nonsense": 1}', "--json", str(out))
    said = run(system, *words, code=1)
    assert "failed: 3 of 3: 400 " in said
    assert "nonsense: is not a known parameter" in said
    assert run(system, *words, "--allow-failures")
    one = report(out)["servers"][0]["rounds"][0]
    assert list(one["failures"].values()) == [3]
    assert (one["ttft"], one["output tokens/s"]) == (None, 0.0)


def test_an_answer_that_takes_too_long_is_left_and_counted(system: System) -> None:
    said = run(system, "--timeout", "0.3", "--output", "400", "--requests", "1", "--warmup", "0", code=1)
    assert "failed: 1 of 1: timeout: not over after 0.3 s" in said
    system.wait_idle(5)


def test_what_a_full_queue_refuses_is_counted_beside_what_it_served(redis_url: str, tmp_path: Path) -> None:
    system, out = make(redis_url, tmp_path, queue_bound=1, sim_prefill_us=2000), tmp_path / "report.json"
    try:
        system.start_all()
        run(system, "--rate", "inf", "--requests", "12", "--output", "2", "--warmup", "1", "--json", str(out), code=1)
    finally:
        system.close()
    one = report(out)["servers"][0]["rounds"][0]
    (kind,) = one["failures"]
    assert kind.startswith("429 ")
    assert 0 < one["failures"][kind] < 12
    assert one["ttft"]["count"] == 12 - one["failures"][kind]


def test_a_server_that_is_not_there_is_said_to_be_so(system: System) -> None:
    gone = f"http://127.0.0.1:{free_port()}"
    assert f"kvrelay: no answer from {gone} (ConnectError" in run(system, "--url", gone, code=1)
    assert "is it running?" in run(system, "--rival", f"gone={gone}", "--model", "gone=x", code=1)


def test_a_server_that_goes_away_fails_the_requests_that_it_had(redis_url: str, tmp_path: Path) -> None:
    system = make(redis_url, tmp_path)
    try:
        system.start_all()
        words = [*COMMAND, "--requests", "2", "--output", "4000", "--warmup", "0"]
        with subprocess.Popen(words, env=system.environ, stdout=subprocess.PIPE, text=True) as process:
            wait_for(lambda: system.unfinished() == 1, "it is asked")
            system.stop(system.processes[0], 9)
            said = process.communicate(timeout=60)[0]
        assert process.returncode == 1
        assert "failed: " in said
    finally:
        system.close()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--requests", "0"], "--requests 0: must be at least 1"),
        (["--rate", "5", "--streams", "2"], "--rate 5.0: is an open loop"),
        (["--rate", "-1"], "--rate -1.0: must be requests a second"),
        (["--timeout", "0"], "--timeout 0.0: must be more than 0"),
        (["--interfere", "1500"], "--interfere 1500: must be tokens, tokens and seconds"),
        (["--plot", "picture.pdf"], "--plot picture.pdf: must end in .svg or .png"),
        (["--url", "a=localhost:1"], "a at localhost:1: must be an address as in http://127.0.0.1:8000"),
        (["--rival", "http://127.0.0.1:1"], "--rival http://127.0.0.1:1: must be a new name and an address"),
        (["--extra", "[]"], "--extra []: must be a JSON object"),
        (["--model", "a", "--model", "b"], "has one already"),
        (["--tokenizer", "nowhere"], "--tokenizer nowhere: must be a directory with a tokenizer.json"),
        (["--prompt", "9000"], "--longest 8192: prompt and answer are longer"),
        (["--json", "no/where.json"], "--json no/where.json: cannot be written"),
    ],
)
def test_an_option_that_cannot_work_says_what_would(system: System, words: list[str], said: str) -> None:
    assert said in run(system, *words, code=1)
