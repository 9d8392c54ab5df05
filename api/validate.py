"""``kvrelay validate``: a running system, from outside and over HTTP only, against answers of transformers' `generate`.

For each length of prompt that the baseline has, one *condition*: 14 compared answers and four interruptions.

    4  serial, one prompt each
    4  at once, from four clients
    4  one after each interruption: cancel and disconnect, in prefill and in decode
    2  at once, when all that is over

A system passes if every answer has the baseline's tokens, every interruption was met and confirmed by its holder, no decode
worker prefilled by itself, and at the end each worker is there and free as before.
"""

import argparse
import json
import statistics
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from api.client import Client, Refused
from api.report import Condition, Interruption, Report, Response, Tally, count
from pipeline.config import Config
from pipeline.errors import KVRelayError
from pipeline.states import TERMINAL, Status

PROMPTS = 4  # of each length
WAYS = {"cancel": "asked by the client", "disconnect": "client left"}  # and the reason in the job's record
INTERRUPTIONS = [(way, phase) for phase in ("prefill", "decode") for way in WAYS]

TRIES = 16  # at an interruption: a prefill may be over before it could be interrupted
GROWS_AFTER = 6  # tries with a prompt of the condition's own length; then each is twice as long as the one before
INTO_DECODE = 3  # tokens after which a decode is interrupted
LEAST_ROOM = 16  # tokens that a decode to be interrupted must be able to produce

BEATS = 4  # of each worker, at rest: the figures of a beat may be as old as two
LOOK = 0.05  # seconds between looks at what takes its time
SECONDS = 3600.0  # for one job: a long prompt on a CPU takes minutes
PATIENCE = 30.0  # seconds for a stopped job to be confirmed, and for the system to come to rest


class Unfit(KVRelayError):
    """There is nothing to compare: no baseline, not of the same model, a system that has other things to do."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("baseline", nargs="?", help="a file of `python -m workers baseline`")
    parser.add_argument("--report", type=Path, metavar="OUT.json", help="write everything that was seen into a file")
    parser.add_argument("--url", default="", help="of the API; otherwise as in the settings")
    parser.add_argument("--lengths", default="", metavar="short,medium,long", help="only these of the baseline's")
    parser.add_argument(
        "--patience", type=float, default=PATIENCE, metavar="SECONDS", help="for a confirmation, and for rest"
    )
    parser.add_argument("--merge", nargs="+", type=Path, metavar="REPORT", help="sum up reports, and do nothing else")


def validate(config: Config, arguments: argparse.Namespace) -> int:
    """The exit code: 0 only if everything is as it should be. Raises Unfit, or Refused and Away of `api.client`."""
    if bool(arguments.merge) == bool(arguments.baseline):
        raise Unfit("name a baseline, or reports after --merge")
    if arguments.merge:
        return _merge(arguments.merge)
    baseline = Baseline.read(Path(arguments.baseline), arguments.lengths)
    client = Client(arguments.url or config.api_url, SECONDS, config.api_key)
    report = Report(baseline=baseline.header, lengths=list(baseline.lengths), url=client.url)
    try:
        _run(Validation(baseline, client, arguments.patience), report)
    except KVRelayError as error:
        report.problems.append(str(error))
        raise
    finally:
        if arguments.report:
            _write(report, arguments.report)
    for problem in report.problems:
        print(f"not so: {problem}")
    print(Tally.of([report.shown()]).line())
    return report.exit_code


def _merge(paths: Sequence[Path]) -> int:
    """The last line over several reports; 1 if one of them did not pass. Raises Unfit for a file that is no report."""
    reports, code = [], 0
    for path in paths:
        try:
            report = json.loads(path.read_text(encoding="utf-8"))
            for problem in report["problems"]:
                print(f"not so: {path}: {problem}")
            reports.append(report)
            tally, code = Tally.of(reports), code or int(report["exit_code"] != 0)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise Unfit(f"{path} is no report of kvrelay validate ({type(error).__name__}: {error})") from None
    print(tally.line())
    return code


def _run(validation: "Validation", report: Report) -> None:
    """Each condition is in the report as soon as it is over: an interrupted run shows how far it came."""
    report.system = validation.enter()
    print("\n".join(report.head()), flush=True)
    for length in validation.baseline.lengths:
        condition = validation.condition(length)
        report.add(condition)
        print(condition.line(), flush=True)


def _write(report: Report, path: Path) -> None:
    try:
        path.write_text(json.dumps(report.shown(), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise Unfit(f"the report cannot be written: {error}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """One prompt, and what `generate` answered. margin: by how much the best logit of a step led, at the least."""

    prompt: list[int]
    tokens: list[int]
    finish_reason: str
    margin: float

    def difference(self, answer: Any, job: Any) -> str:
        """'' if an answer of /v1/completions and the job's record say the same, otherwise the first that differs."""
        tokens = job["token_ids"]
        if tokens != self.tokens:
            pairs = zip(tokens, self.tokens, strict=False)
            at = next(
                (i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), min(len(tokens), len(self.tokens))
            )
            ours, theirs = (str(ids[at]) if at < len(ids) else "the end" for ids in (tokens, self.tokens))
            return f"token {at} is {ours}, not {theirs} (its logit led by {self.margin} at the least)"
        usage = {
            "prompt_tokens": len(self.prompt),
            "completion_tokens": len(self.tokens),
            "total_tokens": len(self.prompt) + len(self.tokens),
        }
        reasons = (answer["choices"][0]["finish_reason"], job["finish_reason"])
        if reasons != (self.finish_reason, self.finish_reason):
            return f"finish_reason is {' and '.join(map(str, reasons))}, not {self.finish_reason}"
        if answer["usage"] != usage or job["usage"] != usage:
            return f"usage is {answer['usage']} and {job['usage']}, not {usage}"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """header: everything in the file but prompts and tokens."""

    header: dict[str, Any]
    lengths: dict[str, list[Expected]]

    @classmethod
    def read(cls, path: Path, only: str = "") -> "Baseline":
        """only: names of lengths, separated by commas; '' for all. Raises Unfit."""
        try:
            header = json.loads(path.read_text(encoding="utf-8"))
            lengths = {
                name: [Expected(**answer) for answer in answers] for name, answers in header.pop("lengths").items()
            }
            cls(header=header, lengths=lengths)._check()
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise Unfit(
                f"{path} is no baseline of `python -m workers baseline` ({type(error).__name__}: {error})"
            ) from None
        wanted = only.split(",") if only else list(lengths)
        if missing := sorted(set(wanted) - lengths.keys()):
            raise Unfit(f"{path} has no {missing[0]} prompts, only {', '.join(lengths)}")
        return cls(header={"file": str(path), **header}, lengths={name: lengths[name] for name in wanted})

    def _check(self) -> None:
        if not self.lengths or any(len(answers) != PROMPTS for answers in self.lengths.values()):
            raise ValueError(f"{PROMPTS} prompts of each length are needed")
        if not all(isinstance(self.header[name], str) for name in ("model", "digest", "dtype")):
            raise TypeError("model, digest and dtype are text")
        if not isinstance(self.header["max_tokens"], int):
            raise TypeError("max_tokens is a number")

    @property
    def model(self) -> str:
        return str(self.header["model"])

    @property
    def max_tokens(self) -> int:
        return int(self.header["max_tokens"])

    @property
    def longest(self) -> int:
        """Tokens of its longest prompt."""
        return max(len(answer.prompt) for answers in self.lengths.values() for answer in answers)


class Validation:
    """One run against one system, which must have nothing else to do."""

    def __init__(self, baseline: Baseline, client: Client, patience: float) -> None:
        self.baseline = baseline
        self._client = client
        self._patience = patience
        self._context = 0
        self._before: dict[str, Any] | None = None  # worker → what must be the same at the end
        self._fallbacks = 0  # that workers had counted before

    def enter(self) -> Any:
        """What /v1/system says before the first job. Raises Unfit, with a sentence, for a system that cannot be compared."""
        self._check(self._client.system())
        if reason := self._come_to_rest():
            raise Unfit(f"the system does not come to rest: {reason}")
        system = self._client.system()
        self._check(system)
        self._before, self._fallbacks = _standing(system), _fallbacks_of(system)
        self._context = system["max_model_len"]
        return system

    def _check(self, system: Any) -> None:
        header = self.baseline.header
        for worker in system["workers"]:
            if worker.get("model") != header["digest"]:
                raise Unfit(
                    f"{worker['id']} serves a model with digest {worker.get('model')}; "
                    f"the baseline is of {self.baseline.model}, with digest {header['digest']}"
                )
        needed = self.baseline.longest + max(self.baseline.max_tokens, LEAST_ROOM)
        if needed > system["max_model_len"]:
            raise Unfit(
                f"the baseline needs a context of {needed} tokens; KVR_CONTEXT is {system['max_model_len']} there"
            )

    def condition(self, length: str) -> Condition:
        """All of one length. Raises Away if the system goes away."""
        started = time.monotonic()
        prompts = self.baseline.lengths[length]
        responses = [self._answer("serial", expected) for expected in prompts]
        responses += self._at_once("four at once", prompts)
        seconds = self._prefill_seconds(responses)
        interruptions = []
        for (way, phase), expected in zip(INTERRUPTIONS, prompts, strict=True):
            interruptions.append(self._interrupt(way, phase, prompts[-1].prompt, seconds))
            responses.append(self._answer(f"after the {way} in {phase}", expected))
        responses += self._at_once("two at once", [prompts[0], prompts[-1]])
        condition = Condition(
            length=length,
            prompt_tokens=[len(expected.prompt) for expected in prompts],
            responses=responses,
            interruptions=interruptions,
            unclean=self._come_to_rest(),
        )
        self._count(condition)
        condition.seconds = round(time.monotonic() - started, 1)
        return condition

    # Compared answers

    def _answer(self, how: str, expected: Expected) -> Response:
        body = {"prompt": expected.prompt, "max_tokens": self.baseline.max_tokens, "temperature": 0, "timeout": SECONDS}
        response = Response(
            how=how,
            prompt_tokens=len(expected.prompt),
            through_eos=expected.finish_reason == "stop",
            prefills_expected=int(len(expected.tokens) > 1),
        )
        try:
            response.job, answer = self._client.complete(body)
            response.difference = expected.difference(answer, self._client.job(response.job))
        except Refused as error:
            response.difference = str(error)
        return response

    def _at_once(self, how: str, prompts: Sequence[Expected]) -> list[Response]:
        together = threading.Barrier(len(prompts))

        def answer(expected: Expected) -> Response:
            together.wait()
            return self._answer(how, expected)

        with ThreadPoolExecutor(len(prompts)) as clients:
            return list(clients.map(answer, prompts))

    def _prefill_seconds(self, responses: Sequence[Response]) -> float:
        """From lease to first token, as the timelines of compared answers have it."""
        took = []
        for response in responses:
            if response.job:
                at = {event["event"]: event["at"] for event in self._client.job(response.job)["timeline"]}
                if "first_token" in at and Status.PREFILLING in at:
                    took.append((at["first_token"] - at[Status.PREFILLING]) / 1000)
        return statistics.median(took) if took else 0.0

    # Interruptions

    def _interrupt(self, way: str, phase: str, prompt: list[int], prefill_seconds: float) -> Interruption:
        """Stops a job in a phase. A try that comes too late is repeated, with less delay and then with more tokens."""
        interruption = Interruption(how=f"{way} in {phase}", phase=phase)
        # its own prompt, so that nothing that it leaves behind could pass for what the next job needs
        own = prompt[len(prompt) // 2 :] + prompt[: len(prompt) // 2]
        for attempt in range(TRIES):
            tokens = own * 2 ** max(0, attempt - GROWS_AFTER) if phase == "prefill" else own
            tokens = tokens[: self._context - LEAST_ROOM]
            interruption.prompt_tokens = len(tokens)
            try:
                interruption.problem, too_late = self._try(interruption, way, tokens, prefill_seconds / 3 / 2**attempt)
            except Refused as error:
                interruption.problem, too_late = str(error), False
            if not too_late:
                return interruption
            interruption.too_late.append(interruption.job)
        interruption.problem = f"{TRIES} tries, the last: {interruption.problem}"
        interruption.job = ""
        return interruption

    def _try(self, interruption: Interruption, way: str, prompt: list[int], delay: float) -> tuple[str, bool]:
        """(what is not as it should be, whether it came too late)"""
        phase = interruption.phase
        body = {
            "prompt": prompt,
            "max_tokens": self._context - len(prompt),
            "temperature": 0,
            "ignore_eos": True,
            "timeout": SECONDS,
        }
        if way == "cancel":
            job_id = interruption.job = self._client.submit(body)

            def leave() -> None:
                self._client.cancel(job_id)
        else:
            job_id, leave = self._client.stream(body)
            interruption.job = job_id
        try:
            where = self._wait_for_phase(job_id, phase)
            if phase == "prefill" and where == Status.PREFILLING:
                time.sleep(delay)  # into the middle of it, when a part of the KV cache is on its way
            leave()
            shown = self._wait_for_confirmation(job_id)
        finally:
            self._client.cancel(job_id)  # whatever went wrong, it must not go on
        stopped = shown.get("stopped") or {}
        interruption.milliseconds = stopped.get("milliseconds")
        if shown["status"] not in TERMINAL:
            return f"still {shown['status']} {self._patience:g} s later", False
        if shown["status"] != Status.CANCELLED:
            return f"it had {shown['status']} already ({shown['reason']})", shown["status"] == Status.FINISHED
        if shown["reason"] != WAYS[way]:
            return f"it was cancelled for another reason: {shown['reason']}", False
        if interruption.milliseconds is None:
            return f"cancelled, and its holder said nothing for {self._patience:g} s", False
        if stopped["phase"] != phase:
            return f"it was in {stopped['phase']} already", True
        return "", False

    def _wait_for_phase(self, job_id: str, phase: str) -> str:
        """Its status, when it is in the phase or past it."""
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            shown = self._client.job(job_id)
            status = str(shown["status"])
            if status in TERMINAL:
                return status
            if phase == "prefill" and status != Status.QUEUED:
                return status
            if status == Status.DECODING and len(shown["token_ids"]) >= INTO_DECODE:
                return status
            time.sleep(0.001)
        raise Unfit(f"job {job_id} did not come to {phase} within {SECONDS:g} s")

    def _wait_for_confirmation(self, job_id: str) -> Any:
        """The job's record, when its holder has undone its side or patience is over."""
        deadline = time.monotonic() + self._patience
        while True:
            shown = self._client.job(job_id)
            confirmed = (shown.get("stopped") or {}).get("milliseconds") is not None
            if confirmed or shown["status"] in TERMINAL - {Status.CANCELLED} or time.monotonic() > deadline:
                return shown
            time.sleep(LOOK)

    # Counting

    def _count(self, condition: Condition) -> None:
        """From the timelines, when all is over: a worker's note may come after the job's end."""
        counted: list[Response | Interruption] = [*condition.responses, *condition.interruptions]
        for one in counted:
            one.prefills, one.fallbacks = self._events(one.job)
        late = [self._events(job_id) for i in condition.interruptions for job_id in i.too_late]
        condition.prefills = sum(one.prefills for one in counted)
        condition.prefills_too_late = sum(prefills for prefills, _ in late)
        condition.prefills_expected = sum(
            response.prefills_expected for response in condition.responses if response.job
        )
        condition.prefills_expected += sum(i.phase == "decode" for i in condition.interruptions if i.job)
        noted = sum(one.fallbacks for one in counted) + sum(fallbacks for _, fallbacks in late)
        total = _fallbacks_of(self._client.system())
        condition.fallbacks = max(noted, total - self._fallbacks)
        self._fallbacks = total

    def _events(self, job_id: str) -> tuple[int, int]:
        """(KV caches handed over, local fallbacks) in a job's timeline"""
        if not job_id:
            return 0, 0
        events = [event["event"] for event in self._client.job(job_id)["timeline"]]
        return events.count(Status.DECODING), events.count("local_fallback")

    def _come_to_rest(self) -> str:
        """Waits until nothing is in use and every worker is as it was; answers what is not so when patience is over.

        The workers' figures are some beats old, so rest must last for some.
        """
        deadline = time.monotonic() + self._patience
        beats: dict[str, set[int]] = {}
        while True:
            system = self._client.system()
            reason = self._unrest(system)
            for worker in system["workers"]:
                beats.setdefault(worker["id"], set()).add(worker.get("seen", 0))
            if reason:
                beats = {}
            elif all(len(seen) >= BEATS for seen in beats.values()):
                return ""
            if time.monotonic() > deadline:
                return reason or "a worker says nothing"
            time.sleep(LOOK)

    def _unrest(self, system: Any) -> str:
        jobs = system["jobs"]["waiting"] + system["jobs"]["working"]
        if jobs:
            return f"{count(jobs, 'job')} unfinished"
        for worker in system["workers"]:
            if worker["state"] != "alive":
                return f"{worker['id']} is {worker['state']}"
            if worker["busy"]:
                return f"{worker['id']} has {worker['busy']} busy"
            if worker["role"] == "decode" and worker["places"] < worker["slots"]:
                return f"{worker['id']} offers {worker['places']} places and has {worker['slots']} slots"
        if missing := sorted({"prefill", "decode"} - {worker["role"] for worker in system["workers"]}):
            return f"there is no {missing[0]} worker"
        return "" if self._before is None else _change(self._before, _standing(system))


def _change(before: dict[str, Any], now: dict[str, Any]) -> str:
    for worker_id, was in before.items():
        if worker_id not in now:
            return f"{worker_id} is gone"
        if now[worker_id] != was:
            return f"{worker_id} was {was} and is {now[worker_id]}"
    new = sorted(now.keys() - before.keys())
    return f"{new[0]} is new" if new else ""


def _standing(system: Any) -> dict[str, Any]:
    names = ("role", "device", "chips", "slots", "places")
    return {worker["id"]: {name: worker[name] for name in names if name in worker} for worker in system["workers"]}


def _fallbacks_of(system: Any) -> int:
    return sum(worker.get("local_fallbacks", 0) for worker in system["workers"])
