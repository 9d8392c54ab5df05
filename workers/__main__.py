"""``python -m workers prefill | decode``: one worker. Everything that needs torch or a device starts here."""

import argparse
import asyncio
import importlib
import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import dotenv
from tokenizers import Tokenizer

from pipeline.config import Config
from pipeline.errors import ConfigError, KVRelayError
from pipeline.model import Model
from pipeline.vocabulary import Vocabulary
from workers import stdio
from workers.chips import holder
from workers.decode import DecodeWorker
from workers.devices import chips, open_decode, open_prefill
from workers.keeper import Keeper
from workers.prefill import PrefillWorker
from workers.station import Station
from workers.vitals import VitalsReader

log = logging.getLogger("workers")

#: After so long a thread that wants the interpreter gets it. A device call takes it up again after each of its loops, several
#: hundred times a step, and with Python's 5 ms it would stand behind whatever else the worker does.
SWITCH_SECONDS = 0.0002

Run = Callable[[Config, argparse.Namespace], int | None]


def main() -> int:
    arguments = _parser().parse_args()
    # with furiosa-torch installed and no chip, a torch that loads it by itself dies at the first torch.compile
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    dotenv.load_dotenv(".env")
    try:
        config = Config.from_env()
        logging.basicConfig(level=config.log_level, format="%(asctime)s %(levelname)s %(message)s")
        return int(arguments.run(config, arguments) or 0)
    except KVRelayError as error:
        print(f"kvrelay {arguments.command}: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m workers", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)

    def command(run: Run, name: str, explained: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=explained)
        added.set_defaults(run=run)
        return added

    prefill = command(_prefill, "prefill", "lease jobs, compute their KV caches, send them")
    prefill.add_argument(
        "--stdio", action="store_true", help="serve one program over stdin and stdout, without Redis; see docs/stdio.md"
    )
    decode = command(_decode, "decode", "receive KV caches, produce tokens")
    devices = command(_devices, "devices", "which chips a worker of a role could use, as JSON; see kvrelay devices")
    devices.add_argument("role", choices=("prefill", "decode"))
    prove = command(_checklist, "checklist", "on a machine with the chips: prove what was inferred without them")
    prove.add_argument("device", choices=("atom", "rngd", "pair"))
    alone = command(_validate, "validate", "a prefill device alone, next to transformers' own model")
    alone.add_argument("--report", type=Path, metavar="OUT.json")
    sweep = command(_sweep, "sweep", "what a prefill device computes, kept in files and compared")
    sweeps = sweep.add_subparsers(dest="sweep", required=True)
    exported = sweeps.add_parser("export", help="K, V and logits of each prompt, into a new folder")
    exported.add_argument("folder", type=Path)
    causal = sweeps.add_parser("causality", help="a later token that changes must leave earlier K and V as they were")
    for one in (alone, exported, causal):
        one.add_argument("--lengths", default="1,17,128,500", help="prompt tokens, as in 1,17,128,500")
    compared = sweeps.add_parser("compare", help="two exports of the same model")
    compared.add_argument("a", type=Path)
    compared.add_argument("b", type=Path)
    compared.add_argument("--least-cosine", type=float, default=0.995)
    for one in (prefill, decode, prove, alone, exported, causal):
        one.add_argument(
            "--factory",
            default="",
            metavar="PACKAGE.MODULE:CALLABLE",
            help="trusted code that makes the device, called with (config, model), instead of what KVR_…_DEVICE names",
        )
    native = command(_baseline, "baseline", "answers of transformers' generate, for kvrelay validate")
    native.add_argument("out", type=Path, metavar="OUT.json")
    native.add_argument("--lengths", default="short,medium,long", help="of prompts; all three, unless named")
    native.add_argument("--tokens", type=int, default=24, help="new ones for each prompt, at most")
    native.add_argument("--random", action="store_true", help="random token ids, for a model with random weights")
    keeper = command(_keeper, "keeper", "started by a worker, not by people")
    keeper.add_argument("worker")
    keeper.add_argument("vitals", type=int)
    convert = command(_convert, "convert", "turn a GGUF file into a model directory")
    convert.add_argument("source", type=Path)
    convert.add_argument("target", type=Path)
    return parser


# Each command is a function of the settings and of its arguments. torch is imported only by those that need it.


def _prefill(config: Config, arguments: argparse.Namespace) -> int:
    _with_huge_pages(config.prefill_device)
    if arguments.stdio:
        return stdio.serve(config, arguments.factory)
    return asyncio.run(_work("prefill", config, arguments.factory))


def _decode(config: Config, arguments: argparse.Namespace) -> int:
    _with_huge_pages(config.decode_device)
    return asyncio.run(_work("decode", config, arguments.factory))


def _keeper(config: Config, arguments: argparse.Namespace) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it goes when its worker has gone
    asyncio.run(Keeper(config, arguments.worker, VitalsReader(arguments.vitals)).run())


def _devices(config: Config, arguments: argparse.Namespace) -> None:
    device = _device(arguments.role, config)
    found = [
        {"device": device, "chip": number, "name": name, "holder": holder(config.locks, device, number)}
        for number, name in chips(arguments.role, config).items()
    ]
    print(json.dumps(found))


def _checklist(config: Config, arguments: argparse.Namespace) -> int:
    model = Model.locate(config)
    if arguments.device == "pair":
        from workers import pair

        return pair.run(config, model, arguments.factory)
    if arguments.factory:
        raise ConfigError("--factory", arguments.factory, f"is for a pair; {arguments.device} is what is proved")
    return int(importlib.import_module(f"workers.devices.{arguments.device}").checklist(config, model))


def _validate(config: Config, arguments: argparse.Namespace) -> int:
    from workers.validate import validate

    return validate(
        config,
        Model.locate(config),
        factory=arguments.factory,
        lengths=_numbers(arguments.lengths),
        report=arguments.report,
    )


def _sweep(config: Config, arguments: argparse.Namespace) -> int:
    from workers import sweep

    if arguments.sweep == "compare":
        return sweep.compare(arguments.a, arguments.b, arguments.least_cosine)
    model, lengths = Model.locate(config), _numbers(arguments.lengths)
    if arguments.sweep == "export":
        return sweep.export(config, model, factory=arguments.factory, lengths=lengths, folder=arguments.folder)
    return sweep.causality(config, model, factory=arguments.factory, lengths=lengths)


def _baseline(config: Config, arguments: argparse.Namespace) -> None:
    from workers.baseline import write_baseline

    write_baseline(
        config,
        Model.locate(config),
        arguments.out,
        lengths=arguments.lengths.split(","),
        tokens=arguments.tokens,
        random_ids=arguments.random,
    )


def _convert(_config: Config, arguments: argparse.Namespace) -> None:
    from workers.convert import convert

    convert(arguments.source, arguments.target)


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = [0]
    if min(numbers) < 1:
        raise ConfigError("--lengths", text, "must be numbers of prompt tokens, as in 1,17,128,500")
    return numbers


def _device(role: str, config: Config) -> str:
    return config.prefill_device if role == "prefill" else config.decode_device


def _with_huge_pages(device: str) -> None:
    """Weights in pages of 2 MB: a decode step of few rows takes a fifth less. glibc wants to know before the process begins."""
    if device == "cpu" and sys.platform == "linux" and "GLIBC_TUNABLES" not in os.environ:
        os.environ["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
        os.execv(sys.executable, sys.orig_argv)  # noqa: S606 - this program again


async def _work(role: str, config: Config, factory: str) -> int:
    sys.setswitchinterval(SWITCH_SECONDS)
    model = Model.locate(config)
    tokenizer = Tokenizer.from_file(str(model.tokenizer_file))
    device = (open_prefill if role == "prefill" else open_decode)(config, model, factory)
    vocabulary = Vocabulary(tokenizer, model.eos)
    station = Station(role, config, factory or _device(role, config))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, station.draining.set)

    def decode(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=True)

    worker = (PrefillWorker if role == "prefill" else DecodeWorker)(station, device, vocabulary, decode)  # type: ignore
    await worker.run()
    station.vitals.close()  # last: a device call that was still under way has noted its end
    log.info("%s has left", station.worker, extra={"action": "left", "worker": station.worker})
    return int(station.failed)


if __name__ == "__main__":
    sys.exit(main())
