"""The ``kvrelay`` command."""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import dotenv

from api import keys_command
from api.client import Client, Refused
from api.pull import pull
from api.up import up
from api.validate import add_arguments, validate
from bench import command as bench_command
from brokers.audit import Audit, Problem
from brokers.curve import Key
from brokers.dead_letters import DeadLetter, DeadLetters
from brokers.queue import JobQueue
from brokers.registry import Registry
from brokers.store import Store
from pipeline.config import Config
from pipeline.errors import ConfigError, KVRelayError
from pipeline.job import Priority

T = TypeVar("T")


class Unknown(KVRelayError):
    """There is no such job."""


def main() -> int:
    arguments = _parser().parse_args()
    own_redis = "KVR_REDIS_URL" not in os.environ and "KVR_REDIS_URL" not in dotenv.dotenv_values(".env")
    dotenv.load_dotenv(".env")
    try:
        config = Config.from_env()
        if arguments.command == "up":
            return up(config, own_redis=own_redis, scale=arguments.c, since=arguments.since)
        run: Callable[[Config, argparse.Namespace], int] = arguments.run
        return run(config, arguments)
    except KVRelayError as error:
        print(f"kvrelay: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        return 0
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kvrelay", description="Prefill on one chip, decode on another.")
    parser.add_argument("--version", action="version", version=version("kvrelay"))
    commands = parser.add_subparsers(dest="command", required=True)

    start = commands.add_parser("up", help="start the whole system on this machine")
    start.add_argument("-c", default="", metavar="prefill=2,decode=2", help="how many of each")
    start.add_argument("--since", type=float, help="Unix time from which the time to ready counts")

    commands.add_parser("pull", help="fetch and convert the model that KVR_MODEL names").set_defaults(run=_pull)

    submit = commands.add_parser("submit", help="queue a prompt, print the job's id")
    submit.add_argument("prompt", help="the text; - reads it from standard input")
    submit.add_argument("--chat", action="store_true", help="as a user's message, through the chat template")
    submit.add_argument("--max-tokens", type=int)
    submit.add_argument("--temperature", type=float)
    submit.add_argument("--seed", type=int)
    submit.add_argument("--priority", choices=[priority.name.lower() for priority in Priority])
    submit.add_argument("--watch", action="store_true", help="print the text as it comes")
    submit.set_defaults(run=_submit)

    watch = commands.add_parser("watch", help="print a job's text as it comes")
    watch.add_argument("job")
    watch.set_defaults(run=_watch)

    cancel = commands.add_parser("cancel", help="end a job, wherever it is")
    cancel.add_argument("job")
    cancel.set_defaults(run=_cancel)

    prove = commands.add_parser("validate", help="compare the running system with a baseline: see docs/validation.md")
    add_arguments(prove)
    prove.set_defaults(run=validate)

    bench = commands.add_parser("bench", help="put load on a server, and time its answers: see docs/bench.md")
    bench_command.add_arguments(bench)
    bench.set_defaults(run=bench_command.bench)

    keygen = commands.add_parser(
        "keygen", help="write a new key for KVR_KV_KEY, which encrypts KV caches between hosts"
    )
    keygen.add_argument("file", type=Path)
    keygen.set_defaults(run=_keygen)

    keys = commands.add_parser("keys", help="who may use the API, and how much: see docs/keys.md")
    keys_command.add_arguments(keys)
    keys.set_defaults(run=_keys)

    check = commands.add_parser("check", help="prove that everything in Redis is as it must be")
    check.add_argument("--repair", action="store_true", help="mend what is not")
    check.set_defaults(run=_check)

    dead = commands.add_parser("dead", help="jobs that were given up").add_subparsers(dest="dead", required=True)
    dead.add_parser("list", help="when, after how many attempts, and why").set_defaults(run=_dead_list)
    for name, run, explained in (
        ("show", _dead_show, "the reason of every attempt, and what happened when"),
        ("requeue", _dead_requeue, "all attempts anew, after the tokens that it has; `all` for every one"),
        ("purge", _dead_purge, "forget it, with its prompt and tokens; `all` for every one"),
    ):
        one = dead.add_parser(name, help=explained)
        one.add_argument("job")
        one.set_defaults(run=run)

    commands.add_parser("queue", help="what waits and what is worked on").set_defaults(run=_queue)
    commands.add_parser("workers", help="who lives, and what they do").set_defaults(run=_workers)
    commands.add_parser("devices", help="what chips are here, and who has them").set_defaults(run=_devices)
    return parser


def _pull(config: Config, _arguments: argparse.Namespace) -> int:
    print(f"{config.name} is in {pull(config)}")
    return 0


def _submit(config: Config, arguments: argparse.Namespace) -> int:
    text = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    body: dict[str, Any] = {"messages": [{"role": "user", "content": text}]} if arguments.chat else {"prompt": text}
    for name in ("max_tokens", "temperature", "seed", "priority"):
        if (value := getattr(arguments, name)) is not None:
            body[name] = value
    job = _client(config).submit(body)
    if arguments.watch:
        return _print_events(config, job)
    print(job)
    return 0


def _watch(config: Config, arguments: argparse.Namespace) -> int:
    return _print_events(config, arguments.job)


def _cancel(config: Config, arguments: argparse.Namespace) -> int:
    answer = _client(config).cancel(arguments.job)
    if answer["status"] != "cancelled":
        raise Refused(f"the job is over: {answer['status']}")
    print(f"{answer['status']}, in phase {answer.get('stopped', {}).get('phase', '-')}")
    return 0


def _queue(config: Config, _arguments: argparse.Namespace) -> int:
    loads = _with_store(config, lambda store: JobQueue(store).load())
    print(f"{'queue':12}{'waiting':>9}{'working':>9}")
    for name, load in zip(["handed back", *(p.name.lower() for p in Priority)], loads, strict=True):
        print(f"{name:12}{load.waiting:>9}{load.working:>9}")
    return 0


def _keygen(_config: Config, arguments: argparse.Namespace) -> int:
    try:
        Key.write(arguments.file)
    except OSError as error:
        raise ConfigError("file", arguments.file, f"cannot be written ({error.strerror})") from None
    print(f"{arguments.file}: copy it to every host, and set KVR_KV_KEY to it")
    return 0


def _keys(config: Config, arguments: argparse.Namespace) -> int:
    ask: Callable[[Store, argparse.Namespace], Awaitable[int]] = arguments.ask
    return _with_store(config, lambda store: ask(store, arguments))


def _dead_list(config: Config, _arguments: argparse.Namespace) -> int:
    letters = _with_store(config, lambda store: DeadLetters(store).all())
    print(f"{'job':40}{'given up':22}{'attempts':>9}  reason")
    for letter in letters:
        at = datetime.fromtimestamp(letter.at / 1000).isoformat(" ", timespec="seconds")
        print(f"{letter.job_id:40}{at:22}{letter.attempts:>9}  {letter.reason}")
    return 0


def _dead_show(config: Config, arguments: argparse.Namespace) -> int:
    async def look(store: Store) -> list[tuple[DeadLetter, dict[str, str]]]:
        queue = JobQueue(store)
        return [(letter, await queue.record(letter.job_id)) for letter in await _letters(store, arguments.job)]

    for letter, record in _with_store(config, look):
        print(letter.job_id)
        for attempt, reason in letter.reasons.items():
            print(f"attempt {attempt}: {reason}")
        for line in record.get("timeline", "").splitlines():
            at, _, event = line.partition(" ")
            print(f"{datetime.fromtimestamp(int(at) / 1000).isoformat(' ', timespec='milliseconds')} {event}")
        if not record:
            print(f"{letter.reason}; its record has expired")
    return 0


def _dead_requeue(config: Config, arguments: argparse.Namespace) -> int:
    async def requeue(store: Store) -> int:
        failed = 0
        for letter in await _letters(store, arguments.job):
            answer = await DeadLetters(store).requeue(letter)
            failed += answer != "ok"
            said = _REQUEUED.get(answer, f"is {answer.removeprefix('over:')}, not dead")
            print(f"{letter.job_id}: {said}")
        return failed

    return int(_with_store(config, requeue) > 0)


def _dead_purge(config: Config, arguments: argparse.Namespace) -> int:
    async def purge(store: Store) -> int:
        return await DeadLetters(store).purge(await _letters(store, arguments.job))

    print(f"{_with_store(config, purge)} forgotten")
    return 0


_REQUEUED = {"ok": "queued again", "gone": "its record has expired; purge it"}


async def _letters(store: Store, job: str) -> list[DeadLetter]:
    """Of one job, or of all. Raises Unknown."""
    letters = await DeadLetters(store).all()
    found = [letter for letter in letters if job in ("all", letter.job_id)]
    if not found and job != "all":
        raise Unknown(f"no dead job {job}; kvrelay dead list shows {len(letters)}")
    return found


def _check(config: Config, arguments: argparse.Namespace) -> int:
    async def look(store: Store) -> list[Problem]:
        audit = Audit(store, lease_seconds=config.lease_seconds, tick_seconds=config.tick_seconds)
        problems = await audit.problems()
        for problem in problems:
            print(problem)
        if problems and arguments.repair:
            problems = await audit.repair()
            print("mended" if not problems else f"{len(problems)} of them could not be mended")
        return problems

    return int(bool(_with_store(config, look)))


def _workers(config: Config, _arguments: argparse.Namespace) -> int:
    living = _with_store(config, lambda store: Registry(store, config.lease_seconds).living())
    print(
        f"{'worker':18}{'state':9}{'device':8}{'host':16}{'pid':>8}{'slots':>7}{'busy':>6}{'jobs':>8}{'tokens':>10}{'seen':>8}"
    )
    for worker, facts in living.items():
        seen = time.time() - int(facts.get("seen", time.time() * 1000)) / 1000
        row = [facts.get(name, "-") for name in ("state", "device", "host", "pid", "slots", "busy", "jobs", "tokens")]
        print("{:18}{:9}{:8}{:16}{:>8}{:>7}{:>6}{:>8}{:>10}".format(worker, *row) + f"{seen:6.1f} s")
    return 0


def _devices(config: Config, _arguments: argparse.Namespace) -> int:
    """Asks the Python of each role, for only there the device's SDK can be loaded."""
    print(f"{'role':9}{'device':8}{'chip':>5}  {'name':24}holder")
    failed = False
    for role, device in (("prefill", config.prefill_device), ("decode", config.decode_device)):
        python = os.environ.get(f"KVR_{role.upper()}_PYTHON") or sys.executable
        try:
            asked = subprocess.run([python, "-m", "workers", "devices", role], capture_output=True, text=True)
        except OSError as error:
            raise ConfigError(f"KVR_{role.upper()}_PYTHON", python, f"cannot be run ({error.strerror})") from error
        if asked.returncode:
            failed = True
            said = asked.stderr.strip().splitlines() or [f"{python} ended with code {asked.returncode}"]
            print(f"{role:9}{device:8}{'-':>5}  {said[-1]}")
            continue
        for chip in json.loads(asked.stdout.splitlines()[-1]):
            print(f"{role:9}{device:8}{chip['chip']:>5}  {chip['name']:24}{chip['holder'] or '-'}")
    return int(failed)


def _with_store(config: Config, ask: Callable[[Store], Awaitable[T]]) -> T:
    """What Redis has to say, without the API."""

    async def asked() -> T:
        store = Store(config)
        try:
            return await ask(store)
        finally:
            await store.close()

    return asyncio.run(asked())


def _print_events(config: Config, job: str) -> int:
    """The text to standard output, how it ended to standard error."""
    for event, data in _client(config).events(job):
        if event == "end":
            print(f"\n[{data['status']}: {data['reason']}]", file=sys.stderr)
            return 0 if data["status"] == "finished" else 1
        if event == "error":
            raise Refused(data["error"]["message"])
        print(data["text"], end="", flush=True)
    raise Refused("the API ended the stream before the job was over")


def _client(config: Config) -> Client:
    return Client(config.api_url, config.job_seconds, config.api_key)
