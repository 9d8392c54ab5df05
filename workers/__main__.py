"""``python -m workers prefill | decode``: one worker. Everything that needs torch or a device starts here."""

import argparse
import asyncio
import importlib
import json
import logging
import os
import signal
import sys
from pathlib import Path

import dotenv
from tokenizers import Tokenizer

from pipeline.config import Config
from pipeline.errors import ConfigError, KVRelayError
from pipeline.model import Model
from workers import stdio
from workers.chips import holder
from workers.decode import DecodeWorker
from workers.devices import chips, open_decode, open_prefill
from workers.keeper import Keeper
from workers.prefill import PrefillWorker
from workers.station import Station
from workers.vitals import VitalsReader

log = logging.getLogger("workers")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m workers", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    prefill = commands.add_parser("prefill", help="lease jobs, compute their KV caches, send them")
    decode = commands.add_parser("decode", help="receive KV caches, produce tokens")
    for worker in (prefill, decode):
        worker.add_argument(
            "--factory",
            default="",
            metavar="PACKAGE.MODULE:CALLABLE",
            help="trusted code that makes the device, called with (config, model), instead of what KVR_…_DEVICE names",
        )
    prefill.add_argument(
        "--stdio", action="store_true", help="serve one program over stdin and stdout, without Redis; see docs/stdio.md"
    )
    devices = commands.add_parser(
        "devices", help="which chips a worker of a role could use, as JSON; see kvrelay devices"
    )
    devices.add_argument("role", choices=("prefill", "decode"))
    prove = commands.add_parser("checklist", help="on a machine with the chip: prove what was inferred without one")
    prove.add_argument("device", choices=("atom", "rngd"))
    alone = commands.add_parser("validate", help="a prefill device alone, next to transformers' own model")
    alone.add_argument("--report", type=Path, metavar="OUT.json")
    sweep = commands.add_parser("sweep", help="what a prefill device computes, kept in files and compared")
    sweeps = sweep.add_subparsers(dest="sweep", required=True)
    exported = sweeps.add_parser("export", help="K, V and logits of each prompt, into a new folder")
    exported.add_argument("folder", type=Path)
    causal = sweeps.add_parser("causality", help="a later token that changes must leave earlier K and V as they were")
    for one in (alone, exported, causal):
        one.add_argument("--factory", default="", metavar="PACKAGE.MODULE:CALLABLE", help="as for a worker")
        one.add_argument("--lengths", default="1,17,128,500", help="prompt tokens, as in 1,17,128,500")
    compared = sweeps.add_parser("compare", help="two exports of the same model")
    compared.add_argument("a", type=Path)
    compared.add_argument("b", type=Path)
    compared.add_argument("--least-cosine", type=float, default=0.995)
    native = commands.add_parser("baseline", help="answers of transformers' generate, for kvrelay validate")
    native.add_argument("out", type=Path, metavar="OUT.json")
    native.add_argument("--lengths", default="short,medium,long", help="of prompts; all three, unless named")
    native.add_argument("--tokens", type=int, default=24, help="new ones for each prompt, at most")
    native.add_argument("--random", action="store_true", help="random token ids, for a model with random weights")
    keeper = commands.add_parser("keeper", help="started by a worker, not by people")
    keeper.add_argument("worker")
    keeper.add_argument("vitals", type=int)
    convert = commands.add_parser("convert", help="turn a GGUF file into a model directory")
    convert.add_argument("source", type=Path)
    convert.add_argument("target", type=Path)
    arguments = parser.parse_args()
    # with furiosa-torch installed and no chip, a torch that loads it by itself dies at the first torch.compile
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    dotenv.load_dotenv(".env")
    try:
        if arguments.command == "convert":
            from workers.convert import convert as convert_model  # torch: only where it is asked for

            convert_model(arguments.source, arguments.target)
            return 0
        config = Config.from_env()
        logging.basicConfig(level=config.log_level, format="%(asctime)s %(levelname)s %(message)s")
        if arguments.command == "keeper":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it goes when its worker has gone
            asyncio.run(Keeper(config, arguments.worker, VitalsReader(arguments.vitals)).run())
            return 0
        if arguments.command == "baseline":
            from workers.baseline import write_baseline  # torch: only where it is asked for

            write_baseline(
                config,
                Model.locate(config),
                arguments.out,
                lengths=arguments.lengths.split(","),
                tokens=arguments.tokens,
                random_ids=arguments.random,
            )
            return 0
        if arguments.command == "validate":
            from workers.validate import validate  # torch: only where it is asked for

            return validate(
                config,
                Model.locate(config),
                factory=arguments.factory,
                lengths=_numbers(arguments.lengths),
                report=arguments.report,
            )
        if arguments.command == "sweep":
            return _sweep(arguments, config)
        if arguments.command == "checklist":
            device = importlib.import_module(f"workers.devices.{arguments.device}")  # torch: only where it is asked for
            return int(device.checklist(config, Model.locate(config)))
        if arguments.command == "devices":
            print(json.dumps(_devices(arguments.role, config)))
            return 0
        if arguments.command == "prefill" and arguments.stdio:
            return stdio.serve(config, arguments.factory)
        return asyncio.run(_work(arguments.command, config, arguments.factory))
    except KVRelayError as error:
        print(f"kvrelay {arguments.command}: {error}", file=sys.stderr)
        return 1


def _sweep(arguments: argparse.Namespace, config: Config) -> int:
    from workers import sweep  # torch: only where it is asked for

    if arguments.sweep == "compare":
        return sweep.compare(arguments.a, arguments.b, arguments.least_cosine)
    model, lengths = Model.locate(config), _numbers(arguments.lengths)
    if arguments.sweep == "export":
        return sweep.export(config, model, factory=arguments.factory, lengths=lengths, folder=arguments.folder)
    return sweep.causality(config, model, factory=arguments.factory, lengths=lengths)


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


def _devices(role: str, config: Config) -> list[dict[str, str | int | None]]:
    device = _device(role, config)
    return [
        {"device": device, "chip": number, "name": name, "holder": holder(config.locks, device, number)}
        for number, name in chips(role, config).items()
    ]


async def _work(role: str, config: Config, factory: str) -> int:
    model = Model.locate(config)
    tokenizer = Tokenizer.from_file(str(model.tokenizer_file))
    device = (open_prefill if role == "prefill" else open_decode)(config, model, factory)
    station = Station(role, config, factory or _device(role, config))
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, station.draining.set)

    def decode(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=True)

    worker = (PrefillWorker if role == "prefill" else DecodeWorker)(station, device, model, decode)  # type: ignore
    await worker.run()
    station.vitals.close()  # last: a device call that was still under way has noted its end
    log.info("%s has left", station.worker, extra={"action": "left", "worker": station.worker})
    return int(station.failed)


if __name__ == "__main__":
    sys.exit(main())
