"""What `kvrelay validate` saw: answers, interruptions, counts, and the few lines that say it to people."""

import dataclasses
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

COMPARED = 14  # answers of a condition


@dataclass(slots=True, kw_only=True)
class Response:
    """One compared answer. difference: '' if it is equal. prefills: KV caches that were handed over for it."""

    how: str
    prompt_tokens: int
    through_eos: bool
    prefills_expected: int  # none, if the token that comes with the prefill is the last
    job: str = ""
    difference: str = ""
    prefills: int = 0
    fallbacks: int = 0


@dataclass(slots=True, kw_only=True)
class Interruption:
    """One job that was stopped on purpose. problem: '' if it was met. too_late: jobs of earlier tries, which were past
    the phase already; what they did is counted apart."""

    how: str
    phase: str
    prompt_tokens: int = 0
    job: str = ""
    milliseconds: int | None = None  # from the stop to its holder's word
    problem: str = ""
    too_late: list[str] = field(default_factory=list)
    prefills: int = 0
    fallbacks: int = 0


@dataclass(slots=True, kw_only=True)
class Condition:
    """prefills: KV caches handed over, of compared answers and of interrupted decodes. unclean: '' if all was free again."""

    length: str
    prompt_tokens: list[int]
    responses: list[Response]
    interruptions: list[Interruption]
    prefills: int = 0
    prefills_expected: int = 0
    prefills_too_late: int = 0
    fallbacks: int = 0
    unclean: str = ""
    seconds: float = 0.0

    @property
    def equal(self) -> int:
        return sum(not response.difference for response in self.responses)

    @property
    def through_eos(self) -> int:
        """Of those that are equal."""
        return sum(response.through_eos and not response.difference for response in self.responses)

    def problems(self) -> list[str]:
        said = [f"{r.how}, {r.prompt_tokens} tokens: {r.difference}" for r in self.responses if r.difference]
        said += [f"{i.how} not met: {i.problem}" for i in self.interruptions if i.problem]
        if self.prefills != self.prefills_expected:
            said.append(f"{self.prefills} KV caches were handed over, not {self.prefills_expected}")
        if self.fallbacks:
            said.append(f"{self.fallbacks} local fallbacks: a decode worker prefilled by itself")
        if self.unclean:
            said.append(f"not clean at the end: {self.unclean}")
        return [f"{self.length}: {sentence}" for sentence in said]

    def line(self) -> str:
        met = sum(not interruption.problem for interruption in self.interruptions)
        return (
            f"{self.length:7}{min(self.prompt_tokens):5}–{max(self.prompt_tokens):<5} tokens  "
            f"{self.equal}/{len(self.responses)} equal, {self.through_eos} of them through EOS  "
            f"{met}/{len(self.interruptions)} interruptions met  {self.prefills} prefills  {self.fallbacks} fallbacks  "
            f"{'not clean' if self.unclean else 'clean'}  {self.seconds:.1f} s"
        )

    def shown(self) -> dict[str, Any]:
        counts = {"compared": len(self.responses), "equal": self.equal, "through_eos": self.through_eos}
        return {**dataclasses.asdict(self), **counts, "problems": self.problems()}


@dataclass(slots=True, kw_only=True)
class Report:
    """Everything about one run."""

    baseline: dict[str, Any]
    lengths: list[str]
    url: str
    command: str = field(default_factory=lambda: shlex.join(["kvrelay", *sys.argv[1:]]))
    date: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    started: float = field(default_factory=time.monotonic)
    system: dict[str, Any] = field(default_factory=dict)
    conditions: list[Condition] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add(self, condition: Condition) -> None:
        self.conditions.append(condition)
        self.problems += condition.problems()

    @property
    def exit_code(self) -> int:
        """0 only if every condition was gone through, and nothing was wrong."""
        return int(bool(self.problems) or len(self.conditions) < len(self.lengths))

    def head(self) -> list[str]:
        """Lines that say what is compared with what."""
        workers = [f"{worker['role']} on {worker['device']}" for worker in self.system["workers"]]
        lines = [f"{self.baseline['model']} {self.baseline['digest']} at {self.url}: {', '.join(workers)}"]
        others = {worker["dtype"] for worker in self.system["workers"]} - {self.baseline["dtype"]}
        if others:
            dtypes = " and ".join(sorted(others))
            lines.append(
                f"KV caches are {dtypes}, the baseline {self.baseline['dtype']}: rounding alone may change a token"
            )
        return lines

    def shown(self) -> dict[str, Any]:
        return {
            "baseline": self.baseline,
            "system": self.system,
            "url": self.url,
            "command": self.command,
            "date": self.date,
            "seconds": round(time.monotonic() - self.started, 1),
            "conditions": [condition.shown() for condition in self.conditions],
            "problems": self.problems,
            "exit_code": self.exit_code,
        }


@dataclass(slots=True, kw_only=True)
class Tally:
    """Sums over reports."""

    models: set[str] = field(default_factory=set)  # digests
    lengths: set[str] = field(default_factory=set)
    conditions: int = 0
    equal: int = 0
    prefills: int = 0
    fallbacks: int = 0
    problems: int = 0

    @classmethod
    def of(cls, reports: Sequence[dict[str, Any]]) -> "Tally":
        """Raises KeyError or TypeError for what is no report."""
        tally = cls()
        for report in reports:
            tally.models.add(report["baseline"]["digest"])
            tally.problems += len(report["problems"])
            for condition in report["conditions"]:
                tally.lengths.add(condition["length"])
                tally.conditions += 1
                tally.equal += condition["equal"]
                tally.prefills += condition["prefills"]
                tally.fallbacks += condition["fallbacks"]
        return tally

    def line(self) -> str:
        what = count(len(self.models), "model")
        if self.conditions == len(self.models) * len(self.lengths):
            what += f" × {count(len(self.lengths), 'length')}"
        else:  # a model has fewer lengths than another, or was validated twice
            what += f", {count(self.conditions, 'condition')}"
        line = f"{what} × {COMPARED} = {self.equal}/{self.conditions * COMPARED} equal"
        line += f", {count(self.prefills, 'prefill')}, {count(self.fallbacks, 'fallback')}"
        return line + (f"; {count(self.problems, 'thing')} not so" if self.problems else "")


def count(number: int, noun: str) -> str:
    """As in: 1 model, 4 models."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
