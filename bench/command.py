"""``kvrelay bench``: its options, and the one place where its parts are put together. docs/bench.md explains it."""

import argparse
import asyncio
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlsplit

from tokenizers import Tokenizer

from bench import plot, rival
from bench.client import PATHS, Client, Server
from bench.errors import Unfit
from bench.lengths import lengths
from bench.measurement import Intrusion, Plan, Round, measure
from bench.prompts import Prompts
from bench.report import Report, machine
from bench.suite import POINTS, row
from bench.summary import Slo
from bench.workload import Request, conversations, random_words
from pipeline.config import Config
from pipeline.model import Model

INTRUSION = re.compile(r"prompt=(?P<prompt>\d+),output=(?P<output>\d+),every=(?P<every>\d+(\.\d+)?)")
NOT_SHOWN = ("api_key", "run", "command")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    where = parser.add_argument_group("where; of several servers each has a name, and `NAME=` says whose an option is")
    where.add_argument("--url", default="", metavar="[NAME=]URL", help="of the server; otherwise as in the settings")
    where.add_argument(
        "--rival",
        action="append",
        default=[],
        metavar="NAME=URL",
        help=f"measured in turns with it; may be repeated. {rival.NAME}: its server is started here",
    )
    where.add_argument("--endpoint", choices=list(PATHS), default="completions")
    where.add_argument(
        "--model", action="append", default=[], metavar="[NAME=]MODEL", help="otherwise the first of /v1/models"
    )
    where.add_argument("--api-key", action="append", default=[], metavar="[NAME=]KEY")
    where.add_argument(
        "--extra",
        action="append",
        default=[],
        metavar="[NAME=]JSON",
        help="fields of every request's body; null takes one out",
    )
    where.add_argument("--timeout", type=float, default=300.0, metavar="SECONDS", help="of a request")

    what = parser.add_argument_group("what is asked")
    what.add_argument("--prompt", default="128", metavar="TOKENS", help="128, uniform:64-256 or lognormal:128,0.5")
    what.add_argument("--output", default="64", metavar="TOKENS", help="likewise")
    what.add_argument("--sharegpt", type=Path, metavar="FILE", help="conversations, instead of random words")
    what.add_argument("--shared-prefix", type=int, default=0, metavar="TOKENS", help="that all prompts begin with")
    what.add_argument("--longest", type=int, default=0, metavar="TOKENS", help="of prompt and answer; else KVR_CONTEXT")
    what.add_argument("--tokenizer", type=Path, metavar="DIRECTORY", help="otherwise KVR_MODEL's")
    what.add_argument("--seed", type=int, default=1)
    what.add_argument(
        "--ignore-eos",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="ask for answers of just that length, with ignore_eos and min_tokens",
    )

    what.add_argument(
        "--suite", action="store_true", help="the points that kvrelay is judged by, instead of what else is said here"
    )

    when = parser.add_argument_group("when")
    when.add_argument("--streams", type=int, default=1, help="so many requests at once, one after the other in each")
    when.add_argument("--rate", type=float, default=0.0, help="a second, as in a Poisson process; inf: all at once")
    when.add_argument("--interfere", default="", metavar="prompt=1500,output=8,every=4", help="among the streams")
    when.add_argument("--requests", type=int, default=32, help="that count, in each round")
    when.add_argument("--warmup", type=int, default=-1, help="requests before them; otherwise as many as streams")
    when.add_argument("--rounds", type=int, default=1)

    out = parser.add_argument_group("what is made of it")
    out.add_argument("--slo", default="", metavar="ttft=500ms,itl=100ms", help="how many answers keep to it")
    out.add_argument("--json", type=Path, metavar="FILE")
    out.add_argument("--plot", type=Path, metavar="FILE.svg", help="or .png")
    out.add_argument("--allow-failures", action="store_true", help="exit with 0 even if requests failed")


def bench(config: Config, arguments: argparse.Namespace) -> int:
    """The exit code: 1 if a request failed. Raises Unfit, Away, WarmupFailed, and ModelMissing without a tokenizer."""
    _check(arguments)
    slo = Slo.parse(arguments.slo)
    if arguments.plot:
        plot.check(arguments.plot)
    with ExitStack() as stack:
        asked = servers(config, arguments)
        if rival.NAME in arguments.rival:
            asked.append(stack.enter_context(rival.transformers_serve(Model.locate(config).directory)))
        reports = _reports(config, arguments, slo, asked)
    if arguments.json:
        _write(reports, arguments.json)
    return int(any(report.failed for report in reports) and not arguments.allow_failures)


def _reports(config: Config, arguments: argparse.Namespace, slo: Slo, asked: Sequence[Server]) -> list[Report]:
    if arguments.suite:
        return _suite(config, arguments, slo, asked)
    report = _measured(config, arguments, slo, asked, tell=True)
    for line in report.comparison():
        print(line)
    if arguments.plot:
        plot.draw(arguments.plot, list(report.servers.values()))
    return [report]


def _measured(
    config: Config, arguments: argparse.Namespace, slo: Slo, asked: Sequence[Server], *, tell: bool
) -> Report:
    """tell: of each round, when it is over."""
    clients = [
        Client(server, arguments.endpoint, timeout=arguments.timeout, ignore_eos=arguments.ignore_eos)
        for server in asked
    ]
    plan = _plan(config, arguments)
    report = Report({name: _plain(value) for name, value in vars(arguments).items() if name not in NOT_SHOWN}, slo)

    def over(client: Client, taken: Round) -> None:
        lines = report.round_lines(report.add(client, taken))
        if tell:
            print("\n".join(lines), flush=True)

    asyncio.run(measure(plan, clients, allow_failures=arguments.allow_failures, over=over))
    return report


def _suite(config: Config, arguments: argparse.Namespace, slo: Slo, asked: Sequence[Server]) -> list[Report]:
    """Another seed at each point, so that no prompt comes twice."""
    print(f"{machine()['cpu']}, {machine()['cores']} cores; TTFT and ITL: p50 and p99 in ms; (targets)", flush=True)
    reports = []
    for number, point in enumerate(POINTS):
        words = vars(arguments) | {
            "prompt": str(point.prompt),
            "output": str(point.output),
            "streams": point.streams,
            "requests": point.requests,
            "interfere": point.interfere,
            "seed": arguments.seed * len(POINTS) + number,
        }
        report = _measured(config, argparse.Namespace(**words), slo, asked, tell=False)
        print(f"\n{point.title}")
        for name, measured in report.servers.items():
            print(row(name, measured.figures(), point), flush=True)
            for line in measured.failures():
                print(f"    {line}", flush=True)
        reports.append(report)
    return reports


def _check(arguments: argparse.Namespace) -> None:
    least = {"requests": 1, "streams": 1, "rounds": 1, "warmup": -1, "shared_prefix": 0, "longest": 0}
    for name, number in least.items():
        if (value := getattr(arguments, name)) < number:
            raise Unfit(f"--{name.replace('_', '-')}", value, f"must be at least {number}")
    for name in ("json", "plot"):
        path = getattr(arguments, name)
        if path and not path.parent.is_dir():
            raise Unfit(f"--{name}", path, "cannot be written: there is no such folder")
    if not arguments.rate >= 0:
        raise Unfit("--rate", arguments.rate, "must be requests a second, or inf for all at once")
    if not (math.isfinite(arguments.timeout) and arguments.timeout > 0):
        raise Unfit("--timeout", arguments.timeout, "must be more than 0 seconds")
    if arguments.suite and (arguments.rate or arguments.interfere or arguments.sharegpt or arguments.plot):
        raise Unfit("--suite", "", "has loads of its own: no --rate, --interfere, --sharegpt and --plot beside it")
    if arguments.rate and (arguments.streams > 1 or arguments.interfere):
        raise Unfit("--rate", arguments.rate, "is an open loop, and --streams and --interfere are a closed one: choose")


# Servers


def servers(config: Config, arguments: argparse.Namespace) -> list[Server]:
    """The one that is measured, and its rivals. kvrelay's own key goes to kvrelay alone. Raises Unfit."""
    name, url = _named(arguments.url or config.api_url)
    named = {name or urlsplit(url).netloc or url: url}
    for other in arguments.rival:
        if other == rival.NAME:
            continue
        name, url = _named(other)
        if not name or name in named:
            raise Unfit("--rival", other, "must be a new name and an address, as in other=http://127.0.0.1:8001")
        named[name] = url
    first = next(iter(named))
    models = _by_name("--model", arguments.model, named)
    keys = ({} if arguments.url else {first: config.api_key}) | _by_name("--api-key", arguments.api_key, named)
    extras = _by_name("--extra", arguments.extra, named)
    return [
        Server(
            name=name,
            url=address,
            model=models.get(name, ""),
            api_key=keys.get(name, ""),
            extra=_object(extras.get(name, "{}")),
        )
        for name, address in named.items()
    ]


def _named(text: str) -> tuple[str, str]:
    """(name or '', the rest)"""
    name, equals, rest = text.partition("=")
    return (name, rest) if equals and re.fullmatch(r"[\w.-]+", name) else ("", text)


def _by_name(option: str, values: Sequence[str], names: Mapping[str, str]) -> dict[str, str]:
    """Without a known name in front, a value is the first server's. Raises Unfit for two of the same."""
    chosen: dict[str, str] = {}
    for value in values:
        name, _, rest = value.partition("=")
        if name not in names:
            name, rest = next(iter(names)), value
        if name in chosen:
            raise Unfit(option, value, f"{name} has one already; the servers are {', '.join(names)}")
        chosen[name] = rest
    return chosen


def _object(text: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        raise Unfit("--extra", text, 'must be a JSON object, as in {"ignore_eos": null}')
    return fields


# What is asked of them


@dataclass(frozen=True, slots=True, kw_only=True)
class _Words:
    """What makes requests of random words: a tokenizer, and the bounds."""

    tokenizer: Tokenizer
    special: bool
    longest: int
    seed: int

    def random(self, of: str) -> Random:
        """One for each purpose, so that none changes another's numbers."""
        return Random(f"{self.seed} {of}")

    def requests(self, prompt: str, output: str, of: str, *, shared: int) -> Iterator[Request]:
        prompts = Prompts(self.tokenizer, self.random(f"{of} words"), special=self.special, shared=shared)
        drawn = lengths("--prompt", prompt), lengths("--output", output)
        return random_words(prompts, *drawn, self.random(f"{of} lengths"), self.longest)


def _plan(config: Config, arguments: argparse.Namespace) -> Plan:
    words = _Words(
        tokenizer=_tokenizer(config, arguments.tokenizer),
        special=arguments.endpoint == "completions",
        longest=arguments.longest or config.context,
        seed=arguments.seed,
    )
    return Plan(
        workload=_workload(words, arguments),
        requests=arguments.requests,
        warmup=arguments.streams if arguments.warmup < 0 else arguments.warmup,
        streams=arguments.streams,
        rate=arguments.rate,
        rounds=arguments.rounds,
        seed=arguments.seed,
        intrusion=_intrusion(words, arguments.interfere) if arguments.interfere else None,
    )


def _workload(words: _Words, arguments: argparse.Namespace) -> Iterator[Request]:
    if arguments.sharegpt is None:
        return words.requests(arguments.prompt, arguments.output, "requests", shared=arguments.shared_prefix)
    if arguments.shared_prefix:
        raise Unfit("--shared-prefix", arguments.shared_prefix, "is for random words, not for conversations")
    random = words.random("conversations")
    return conversations(arguments.sharegpt, words.tokenizer, random, words.longest, special=words.special)


def _intrusion(words: _Words, text: str) -> Intrusion:
    found = INTRUSION.fullmatch(text)
    if not found:
        raise Unfit("--interfere", text, "must be tokens, tokens and seconds, as in prompt=1500,output=8,every=4")
    requests = words.requests(found["prompt"], found["output"], "intruders", shared=0)
    return Intrusion(requests=requests, every=float(found["every"]))


def _tokenizer(config: Config, directory: Path | None) -> Tokenizer:
    """Raises Unfit, or ModelMissing for a model that was not fetched."""
    if directory is None:
        return Tokenizer.from_file(str(Model.locate(config).tokenizer_file))
    try:
        return Tokenizer.from_file(str(directory / "tokenizer.json"))
    except Exception as error:  # the library raises nothing narrower
        raise Unfit("--tokenizer", directory, f"must be a directory with a tokenizer.json ({error})") from None


def _write(reports: Sequence[Report], path: Path) -> None:
    """One as it is, those of a suite in a list."""
    found = [report.shown() for report in reports]
    try:
        path.write_text(json.dumps(found if len(found) > 1 else found[0], indent=1, ensure_ascii=False) + "\n", "utf-8")
    except OSError as error:
        raise Unfit("--json", path, f"cannot be written ({error.strerror})") from None


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) or value == math.inf else value
