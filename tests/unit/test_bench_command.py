"""What is typed: every command of docs/bench.md is one that `kvrelay bench` understands."""

import argparse
import re
import shlex
from pathlib import Path

import pytest

from bench.command import add_arguments, servers
from bench.errors import Unfit
from pipeline.config import Config

DOCUMENT = (Path(__file__).parents[2] / "docs/bench.md").read_text()


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(words)


def commands() -> list[str]:
    lines = DOCUMENT.replace("\\\n", " ").splitlines()
    return [line.strip().removeprefix("kvrelay bench ") for line in lines if line.startswith("    kvrelay bench ")]


def test_the_document_has_commands() -> None:
    assert len(commands()) >= 5


@pytest.mark.parametrize("command", commands())
def test_a_command_of_the_document_is_understood(command: str) -> None:
    typed = arguments(*shlex.split(command))
    assert len(servers(Config(), typed)) == 1 + len(typed.rival)


def test_every_option_of_the_document_exists() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    prose = "\n".join(line for line in DOCUMENT.splitlines() if not line.startswith("    "))
    named = set(re.findall(r"`(--[a-z-]+)", prose)) - {"--continuous-batching"}  # which is transformers'
    assert len(named) >= 15
    assert named <= parser._option_string_actions.keys()


def test_a_name_in_front_says_whose_an_option_is() -> None:
    words = [
        "--rival",
        "b=http://b/v1",
        "--rival",
        "c=http://c",
        "--model",
        "b=m=1",
        "--model",
        "org/x=y",
        "--api-key",
        "c=k",
    ]
    first, second, third = servers(
        Config(), arguments("--url", "a=http://a", *words, "--extra", 'b={"x": "=", "y": null}')
    )
    assert [(it.name, it.root) for it in (first, second, third)] == [
        ("a", "http://a"),
        ("b", "http://b"),
        ("c", "http://c"),
    ]
    assert [it.model for it in (first, second, third)] == ["org/x=y", "m=1", ""]
    assert [it.api_key for it in (first, second, third)] == ["", "", "k"]
    assert [it.extra for it in (first, second, third)] == [{}, {"x": "=", "y": None}, {}]


def test_the_key_of_the_settings_goes_to_the_server_of_the_settings_alone() -> None:
    """Without that a rival, or whoever a URL leads to, would be told it."""
    config = Config(api_key="secret", port=8123)
    mine, rival = servers(config, arguments("--rival", "b=http://b"))
    assert (mine.url, mine.name, mine.api_key) == ("http://127.0.0.1:8123", "127.0.0.1:8123", "secret")
    assert rival.api_key == ""
    assert [it.api_key for it in servers(config, arguments("--url", "http://a"))] == [""]


@pytest.mark.parametrize("rival", ["b=http://b", "http://c"])
def test_a_rival_needs_a_name_of_its_own(rival: str) -> None:
    with pytest.raises(Unfit, match=f"^--rival {rival}: must be a new name and an address"):
        servers(Config(), arguments("--rival", "b=http://b", "--rival", rival))
