"""``kvrelay keys``: makes, shows and revokes API keys, in Redis itself and at once. Whoever reaches Redis may."""

import argparse
import sys
from datetime import datetime

from brokers.api_keys import ApiKey, ApiKeys
from brokers.store import Store
from pipeline.errors import KVRelayError

LONGEST_NAME = 64


class Unfit(KVRelayError):
    """A name or a number that cannot be a key's, or a key that there is not."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Sets `ask`: what to do with a store."""
    commands = parser.add_subparsers(dest="keys", required=True)

    create = commands.add_parser("create", help="make a key, and print its secret, once")
    create.add_argument("name", help="whose it is")
    create.add_argument("--admin", action="store_true", help="sees everybody's jobs")
    create.add_argument("--per-minute", type=int, default=0, metavar="N", help="requests a minute; 0: any number")
    create.add_argument("--waiting", type=int, default=0, metavar="N", help="jobs that may wait; 0: any number")
    create.set_defaults(ask=_create)

    commands.add_parser("list", help="whose, since when, with which limits").set_defaults(ask=_list)

    revoke = commands.add_parser("revoke", help="from now on it is not known; its jobs go on")
    revoke.add_argument("key", help="its id or its name")
    revoke.set_defaults(ask=_revoke)


async def _create(store: Store, arguments: argparse.Namespace) -> int:
    """The secret alone on standard output, so that a script can take it; what a person should know on standard error."""
    name = arguments.name
    if not name.isprintable() or not 0 < len(name) <= LONGEST_NAME or name != name.strip():
        raise Unfit(f"{name!r} is no name for a key: 1 to {LONGEST_NAME} characters that can be printed")
    for option in ("per_minute", "waiting"):
        if not 0 <= (number := getattr(arguments, option)) < 1 << 31:
            raise Unfit(f"--{option.replace('_', '-')} {number}: must be a number from 1 on, or 0 for no limit")
    keys = ApiKeys(store)
    first = not await keys.all()
    key, secret = await keys.create(
        name, admin=arguments.admin, per_minute=arguments.per_minute, waiting=arguments.waiting
    )
    print(secret)
    print(f"key {key.name} has the id {key.id}; its secret is kept nowhere and not shown again", file=sys.stderr)
    if first:
        print("it is the first one: from now on every request needs a key", file=sys.stderr)
    return 0


async def _list(store: Store, _arguments: argparse.Namespace) -> int:
    print(f"{'id':14}{'name':24}{'admin':7}{'per minute':>10}{'waiting':>9}  {'created':18}last used")
    for key in await ApiKeys(store).all():
        print(f"{key.id:14}{key.name:24}{'yes' if key.admin else '-':7}" + _limits(key))
    return 0


def _limits(key: ApiKey) -> str:
    return f"{key.per_minute or '-':>10}{key.waiting or '-':>9}  {_minute(key.created):18}{_minute(key.used)}"


def _minute(milliseconds: int) -> str:
    return f"{datetime.fromtimestamp(milliseconds / 1000):%Y-%m-%d %H:%M}" if milliseconds else "never"


async def _revoke(store: Store, arguments: argparse.Namespace) -> int:
    keys = ApiKeys(store)
    key = await keys.revoke(arguments.key)
    if key is None:
        raise Unfit(f"there is no key {arguments.key}; `kvrelay keys list` shows {len(await keys.all())}")
    print(f"{key.name} ({key.id}) is revoked")
    if not await keys.all():
        print("it was the last one: from now on this machine alone is served, without a key", file=sys.stderr)
    return 0
