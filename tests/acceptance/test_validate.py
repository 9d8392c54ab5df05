"""`kvrelay validate` against real systems: it passes where all is right, counts exactly, and sees what is wrong."""

import contextlib
import json
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from api.validate import Expected
from brokers.queue import JobQueue
from brokers.store import Store
from pipeline.config import Config
from pipeline.model import SIM
from tests.acceptance.system import System, free_port, wait_for
from tests.unit.test_torch_device import FAMILIES
from workers.devices.sim import expected

pytestmark = pytest.mark.timeout(240)

EOS = 7
SHORT = (23, 63, 103, 143)
WAYS = [f"{way} in {phase}" for phase in ("prefill", "decode") for way in ("cancel", "disconnect")]


COMMAND = [sys.executable, "-c", "import sys; from api.command import main; sys.exit(main())", "validate"]


def validate(system: System, *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([*COMMAND, *words], env=system.environ, capture_output=True, text=True, timeout=200)


@contextlib.contextmanager
def validating(system: System, *words: str) -> Iterator["subprocess.Popen[str]"]:
    """While it runs; what it prints is read with `communicate`."""
    with subprocess.Popen([*COMMAND, *words], env=system.environ, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with random weights, large enough ones that every cached token matters, for which EOS ends a text."""
    folder = tmp_path_factory.mktemp("llama")
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(FAMILIES["llama"])
    model.generation_config.eos_token_id = EOS
    model.generation_config.repetition_penalty = 1.3  # of a chat model's file; no job has it, so no baseline may
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes((SIM / "tokenizer.json").read_bytes())
    return folder


@pytest.fixture(scope="module")
def system(redis_url: str, llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    settings = {"model": llama, "served_name": f"validate-{secrets.token_hex(4)}", "cache": llama / "cache"}
    quick = {"context": 512, "chunk": 8, "slots": 4, "heartbeat_seconds": 0.5, "lease_seconds": 3}
    system = System(redis_url, tmp_path_factory.mktemp("system"), **settings, **quick, dtype="float32")
    yield system.start_all()
    system.close()


@pytest.fixture(scope="module")
def baseline(system: System, llama: Path) -> Path:
    """As its command makes it."""
    path = llama / "baseline.json"
    command = [sys.executable, "-m", "workers", "baseline", str(path), "--lengths", "short", "--random"]
    made = subprocess.run(command, env=system.environ, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    return path


def changed(baseline: Path, folder: Path, change: Any) -> str:
    content = json.loads(baseline.read_text())
    change(content)
    path = folder / "changed.json"
    path.write_text(json.dumps(content))
    return str(path)


def test_a_baseline_says_how_it_was_made_and_holds_an_answer_that_ends_by_eos(baseline: Path, llama: Path) -> None:
    content = json.loads(baseline.read_text())
    assert [len(answer["prompt"]) for answer in content["lengths"]["short"]] == list(SHORT)
    assert (content["dtype"], content["max_tokens"], content["eos"]) == ("float32", 24, [EOS])
    assert {"python", "torch", "transformers", "kvrelay"} <= content["versions"].keys()
    assert content["command"].startswith("python -m workers baseline ")
    assert content["ended_by_eos"]["short"][-1] == SHORT[-1]
    for answer in content["lengths"]["short"]:
        ended = answer["tokens"][-1] == EOS
        assert answer["finish_reason"] == ("stop" if ended else "length")
        assert ended or len(answer["tokens"]) == 24
        assert EOS not in answer["tokens"][:-1]


def test_a_healthy_system_passes_and_everything_is_counted(system: System, baseline: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    done = validate(system, str(baseline), "--report", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "1 model × 1 length × 14 = 14/14 equal, 16 prefills, 0 fallbacks"
    report = json.loads(out.read_text())
    assert (report["exit_code"], report["problems"]) == (0, [])
    assert report["baseline"]["digest"] == json.loads(baseline.read_text())["digest"]
    assert report["command"].startswith("kvrelay validate ")
    for worker in report["system"]["workers"]:
        assert worker["model"] == report["baseline"]["digest"]
        assert worker["versions"]["torch"] == torch.__version__
    (condition,) = report["conditions"]
    hows = ["serial"] * 4 + ["four at once"] * 4 + [f"after the {way}" for way in WAYS] + ["two at once"] * 2
    assert [response["how"] for response in condition["responses"]] == hows
    assert [response["prefills"] for response in condition["responses"]] == [1] * 14
    assert sum(response["through_eos"] for response in condition["responses"]) == condition["through_eos"] >= 4
    assert [interruption["how"] for interruption in condition["interruptions"]] == WAYS
    assert [interruption["prefills"] for interruption in condition["interruptions"]] == [0, 0, 1, 1]
    for interruption in condition["interruptions"]:
        record = system.job(interruption["job"])
        assert (record["status"], record["stopped"]["phase"]) == ("cancelled", interruption["phase"])
        assert record["reason"] == ("client left" if "disconnect" in interruption["how"] else "asked by the client")
    jobs = {one["job"] for one in (*condition["responses"], *condition["interruptions"])}
    assert len(jobs) == 18
    system.wait_idle()


def test_one_wrong_token_is_found_at_its_place(system: System, baseline: Path, tmp_path: Path) -> None:
    def spoil(content: Any) -> None:
        content["lengths"]["short"][1]["tokens"][20] += 1

    out = tmp_path / "report.json"
    done = validate(system, changed(baseline, tmp_path, spoil), "--report", str(out))
    assert done.returncode == 1
    # the second prompt is asked serially, among four, and after an interruption
    assert "14 = 11/14 equal, 16 prefills, 0 fallbacks; 3 things not so" in done.stdout.splitlines()[-1]
    right = json.loads(baseline.read_text())["lengths"]["short"][1]["tokens"][20]
    assert f"not so: short: serial, 63 tokens: token 20 is {right}, not {right + 1}" in done.stdout
    report = json.loads(out.read_text())
    assert [bool(response["difference"]) for response in report["conditions"][0]["responses"]].count(True) == 3
    merged = validate(system, "--merge", str(out))
    assert (merged.returncode, merged.stdout.splitlines()[-1]) == (1, done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda content: content.update(digest="0" * 32), "serves a model with digest"),
        (lambda content: content["lengths"]["short"].pop(), "is no baseline"),
        (lambda content: content["lengths"]["short"][3]["prompt"].extend([1] * 400), "needs a context of 567 tokens"),
    ],
    ids=["other model", "three prompts", "too long"],
)
def test_what_cannot_be_compared_is_refused_with_a_sentence(
    system: System, baseline: Path, tmp_path: Path, change: Any, sentence: str
) -> None:
    done = validate(system, changed(baseline, tmp_path, change))
    assert done.returncode == 1
    assert sentence in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_a_length_that_the_baseline_lacks_is_refused(system: System, baseline: Path) -> None:
    done = validate(system, str(baseline), "--lengths", "short,long")
    assert (done.returncode, done.stdout) == (1, "")
    assert "has no long prompts, only short" in done.stderr


def test_a_system_that_does_not_answer_is_a_failure_that_the_report_shows(
    system: System, baseline: Path, tmp_path: Path
) -> None:
    out = tmp_path / "report.json"
    done = validate(system, str(baseline), "--url", f"http://127.0.0.1:{free_port()}", "--report", str(out))
    assert done.returncode == 1
    assert "is it running?" in done.stderr
    report = json.loads(out.read_text())
    assert report["exit_code"] == 1
    assert "is it running?" in report["problems"][0]


def test_a_system_with_other_work_is_refused(system: System, baseline: Path) -> None:
    job = system.submit([5] * 20, max_tokens=400, ignore_eos=True)
    for _ in range(6):  # some seconds of work
        system.submit([5] * 20, max_tokens=450, ignore_eos=True)
    done = validate(system, str(baseline), "--patience", "0.2")
    assert done.returncode == 1
    assert re.search(r"does not come to rest: \d jobs? unfinished", done.stderr)
    assert system.job(job)["status"] in ("decoding", "finished")
    wait_for(lambda: system.unfinished() == 0, "it has done them", 60)
    system.wait_idle()


@pytest.mark.parametrize(
    ("tokens", "reasons", "completion", "sentence"),
    [
        ([5, 6, 7], ("stop", "stop"), 3, ""),
        ([5, 6], ("stop", "stop"), 3, "token 2 is the end, not 7"),
        ([5, 6, 7, 8], ("stop", "stop"), 3, "token 3 is 8, not the end"),
        ([5, 6, 7], ("stop", "length"), 3, "finish_reason is stop and length, not stop"),
        ([5, 6, 7], ("stop", "stop"), 4, "usage is"),
    ],
    ids=["equal", "shorter", "longer", "other end", "other usage"],
)
def test_an_answer_must_agree_in_tokens_end_and_usage(
    tokens: list[int], reasons: tuple[str, str], completion: int, sentence: str
) -> None:
    usage = {"prompt_tokens": 2, "completion_tokens": completion, "total_tokens": 2 + completion}
    answer = {"choices": [{"finish_reason": reasons[0]}], "usage": usage}
    job = {"token_ids": tokens, "finish_reason": reasons[1], "usage": usage}
    said = Expected(prompt=[1, 2], tokens=[5, 6, 7], finish_reason="stop", margin=0.1).difference(answer, job)
    assert said.startswith(sentence)
    assert bool(said) == bool(sentence)


# On the sim device, whose baseline is a formula: what is wrong here is the system


def sim_baseline(folder: Path) -> Path:
    answers = []
    for length in SHORT:
        prompt = [(length * 31 + index * 7) % 200 for index in range(length)]
        answers.append({"prompt": prompt, "tokens": expected(prompt, 8), "finish_reason": "length", "margin": 1})
    header = {"model": "sim", "digest": "sim", "dtype": "bfloat16", "max_tokens": 8}
    path = folder / "sim.json"
    path.write_text(json.dumps({**header, "lengths": {"short": answers}}))
    return path


@pytest.fixture
def sim(config: Config, redis_url: str, tmp_path: Path) -> Iterator[System]:
    settings = {"model": "sim", "prefill_device": "sim", "decode_device": "sim", "context": 512, "slots": 2}
    quick = {
        "heartbeat_seconds": 0.5,
        "lease_seconds": 3,
        "sim_prefill_us": 500,
        "sim_step_ms": 2,
        "chunk": 16,
        "part_seconds": 2,
    }
    system = System(redis_url, tmp_path, **settings, **quick, served_name=config.name)
    yield system
    system.close()


def sabotage(system: System, code: str) -> None:
    """Code that decode workers and their like run before anything else."""
    (system.folder / "sitecustomize.py").write_text(code)
    system.environ["PYTHONPATH"] = f"{system.folder}:{Path(__file__).parents[2]}"


def test_an_interruption_that_its_holder_does_not_confirm_is_not_met(sim: System, tmp_path: Path) -> None:
    sabotage(
        sim,
        "import sys\n"
        "if 'decode' in sys.orig_argv:\n"
        "    import brokers.queue\n"
        "    async def settle(self, job_id, phase): pass\n"
        "    brokers.queue.JobQueue.settle = settle\n",
    )
    done = validate(sim.start_all(), str(sim_baseline(tmp_path)), "--patience", "5")
    assert done.returncode == 1
    for way in ("cancel", "disconnect"):
        sentence = f"not so: short: {way} in decode not met: cancelled, and its holder said nothing for 5 s"
        assert sentence in done.stdout.splitlines()
    assert done.stdout.splitlines()[-1].endswith("14/14 equal, 16 prefills, 0 fallbacks; 2 things not so")


def test_a_client_that_leaves_unnoticed_is_not_met_and_its_job_is_not_left_over(sim: System, tmp_path: Path) -> None:
    sabotage(
        sim,
        "import sys\n"
        "if 'gunicorn' in sys.orig_argv:\n"
        "    import brokers.queue\n"
        "    stop = brokers.queue.JobQueue.stop\n"
        "    async def deaf(self, job_id, status, reason):\n"
        "        if reason != 'client left':\n"
        "            return await stop(self, job_id, status, reason)\n"
        "    brokers.queue.JobQueue.stop = deaf\n",
    )
    sim.environ["KVR_SIM_STEP_MS"] = "40"  # 14 s until the interrupted job would end
    done = validate(sim.start_all(), str(sim_baseline(tmp_path)), "--patience", "5")
    assert done.returncode == 1
    assert "disconnect in decode not met: still decoding 5 s later" in done.stdout
    assert "not clean" not in done.stdout
    sim.wait_idle()


def test_prefills_that_are_always_over_before_they_can_be_interrupted_are_said_to_be_so(
    sim: System, tmp_path: Path
) -> None:
    sim.environ["KVR_SIM_PREFILL_US"] = "0"
    sim.environ["KVR_CHUNK"] = "512"
    out = tmp_path / "report.json"
    sabotage(  # by the time it can be seen that a job is in prefill, it decodes
        sim,
        "import sys\n"
        "if 'gunicorn' in sys.orig_argv:\n"
        "    import asyncio, brokers.queue\n"
        "    stop = brokers.queue.JobQueue.stop\n"
        "    async def late(self, *args):\n"
        "        await asyncio.sleep(0.1)\n"
        "        return await stop(self, *args)\n"
        "    brokers.queue.JobQueue.stop = late\n",
    )
    done = validate(sim.start_all(), str(sim_baseline(tmp_path)), "--report", str(out))
    assert done.returncode == 1
    assert "cancel in prefill not met: 16 tries, the last: it had finished already" in done.stdout
    (condition,) = json.loads(out.read_text())["conditions"]
    assert len(condition["interruptions"][0]["too_late"]) == 16
    assert condition["prefills_too_late"] >= 32
    assert (condition["equal"], condition["prefills"], condition["unclean"]) == (14, 16, "")


async def test_a_fallback_that_a_worker_notes_late_is_counted(sim: System, store: Store, tmp_path: Path) -> None:
    """As a decode worker would: a line in the timeline, which may come after the job's end."""
    with validating(sim.start_all(), str(sim_baseline(tmp_path))) as running:
        job = wait_for(lambda: next(sim.redis.scan_iter(sim.key("job:*")), None), "a first job").rpartition(":")[2]
        wait_for(lambda: sim.job(job)["status"] == "finished", "it has ended")
        await JobQueue(store).note(job, "", "local_fallback", "no route")
        said = running.communicate(timeout=100)[0]
    assert running.returncode == 1
    assert "not so: short: 1 local fallbacks: a decode worker prefilled by itself" in said
    assert "14/14 equal, 16 prefills, 1 fallback; 1 thing not so" in said


def test_a_worker_that_leaves_meanwhile_is_no_clean_end(sim: System, tmp_path: Path) -> None:
    sim.start_all(decode=2)
    with validating(sim, str(sim_baseline(tmp_path)), "--patience", "6") as running:
        wait_for(lambda: next(sim.redis.scan_iter(sim.key("job:*")), None), "a first job")
        sim.stop(sim.processes[-1])
        said = running.communicate(timeout=100)[0]
    assert running.returncode == 1
    assert "is gone" in said


def report(digest: str, lengths: list[str], exit_code: int = 0) -> dict[str, Any]:
    conditions = [{"length": length, "equal": 14, "prefills": 16, "fallbacks": 0} for length in lengths]
    problems = ["short: something"] * exit_code
    return {
        "baseline": {"digest": digest},
        "conditions": conditions,
        "problems": problems,
        "exit_code": exit_code,
    }


def test_reports_are_summed_up_and_one_that_failed_fails_them_all(sim: System, tmp_path: Path) -> None:
    three = ["short", "medium", "long"]
    paths = [tmp_path / f"{number}.json" for number in range(4)]
    for number, path in enumerate(paths):
        path.write_text(json.dumps(report(str(number), three)))
    done = validate(sim, "--merge", *map(str, paths))
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "4 models × 3 lengths × 14 = 168/168 equal, 192 prefills, 0 fallbacks\n"
    paths[2].write_text(json.dumps(report("2", ["short"], exit_code=1)))
    done = validate(sim, "--merge", *map(str, paths))
    assert done.returncode == 1
    line = "4 models, 10 conditions × 14 = 140/140 equal, 160 prefills, 0 fallbacks; 1 thing not so"
    assert done.stdout.splitlines() == [f"not so: {paths[2]}: short: something", line]
    paths[1].write_text("{}")
    done = validate(sim, "--merge", *map(str, paths))
    assert done.returncode == 1
    assert f"{paths[1]} is no report" in done.stderr
