"""Settings: read once, checked once, and every refusal says what would do."""

import base64
from dataclasses import fields
from pathlib import Path

import dotenv
import pytest

from pipeline.config import ELSEWHERE, Config, env_example
from pipeline.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]

#: variable, value, a part of the remedy
BAD = [
    ("KVR_MODEL", "a{b}", "braces"),
    ("KVR_SERVED_NAME", "two\nlines", "line ends"),
    ("KVR_SERVED_NAME", "}", "braces"),
    ("KVR_PREFILL_DEVICE", "tpu", "one of cpu, cuda"),
    ("KVR_DECODE_DEVICE", "CPU", "one of atom, cpu, cuda, sim"),
    ("KVR_SIM_CHIP", "../a", "must be a name of letters, digits, - and _"),
    ("KVR_PREFILL_DEVICE", "atom", "one of cpu, cuda, rngd, sim"),
    ("KVR_RNGD_WIDTHS", "128;512", "numbers of tokens, as in 128,512,2048"),
    ("KVR_RNGD_FUSION", "3", "1, 2, 4, 8, 16 or 32"),
    ("KVR_RNGD_CHIPS", "one", "all, or numbers as in 0,1"),
    ("KVR_FALLBACK", "remote", "one of local"),
    ("KVR_ATOM_CHIPS", "0, 1", "all, or numbers as in 0,1"),
    ("KVR_ATOM_CHIPS_PER_WORKER", "0", "at least 1"),
    ("KVR_DTYPE", "fp8", "auto, bfloat16, float32"),
    ("KVR_LOG_LEVEL", "loud", "DEBUG, INFO, WARNING, ERROR"),
    ("KVR_PORT", "0", "1 to 65535"),
    ("KVR_PORT", "65536", "1 to 65535"),
    ("KVR_PORT", "http", "a whole number, as in 8000"),
    ("KVR_SLOTS", "0", "at least 1"),
    ("KVR_SLOTS", "2.5", "a whole number, as in 8"),
    ("KVR_WAITING", "-1", "at least 0"),
    ("KVR_CONTEXT", "15", "at least 16"),
    ("KVR_CHUNK", "0", "at least 1"),
    ("KVR_ATTEMPTS", "0", "at least 1"),
    ("KVR_QUEUE_BOUND", "0", "at least 1"),
    ("KVR_FILE_MIB", "0", "at least 1"),
    ("KVR_BATCH_WINDOW", "0", "at least 1"),
    ("KVR_KEEP_SECONDS", "0", "at least 1"),
    ("KVR_LEASE_SECONDS", "0.1", "at least 0.2"),
    ("KVR_HEARTBEAT_SECONDS", "0.01", "at least 0.05"),
    ("KVR_HEARTBEAT_SECONDS", "3", "at most half of KVR_LEASE_SECONDS (5.0)"),
    ("KVR_JOB_SECONDS", "soon", "a number, as in 600.0"),
    ("KVR_JOB_SECONDS", "0", "at least 0.001"),
    ("KVR_OPEN_SECONDS", "nan", "must be"),
    ("KVR_PART_SECONDS", "inf", "must be"),
    ("KVR_SIM_STEP_MS", "-1", "at least 0"),
    ("KVR_REDIS_URL", "localhost:6379", "redis://, rediss:// or unix://"),
    ("KVR_WEBHOOK_NETWORKS", "10.0.0.1/8", "networks, as in 10.0.0.0/8,127.0.0.1/32"),
    ("KVR_WEBHOOK_NETWORKS", "intranet", "networks, as in 10.0.0.0/8,127.0.0.1/32"),
    ("KVR_NO_SUCH_THING", "1", ".env.example lists them all"),
]


@pytest.mark.parametrize(("variable", "value", "remedy"), BAD)
def test_a_bad_value_is_refused_with_its_variable_the_value_and_what_would_do(
    variable: str, value: str, remedy: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        Config.from_env({variable: value})
    assert caught.value.variable == variable
    shown = str(caught.value).removeprefix(f"{variable}=")
    assert shown.startswith((value, f"{value}.0"))
    assert remedy in str(caught.value)


@pytest.mark.parametrize("path", sorted((ROOT / "deploy").glob("*.env")), ids=lambda path: path.name)
def test_the_examples_for_chips_and_hosts_are_good_settings(path: Path) -> None:
    values = {name: value or "" for name, value in dotenv.dotenv_values(path).items()}
    config = Config.from_env(values)
    assert config.dtype == "bfloat16", "both halves must say what travels"


def test_an_empty_environment_gives_the_defaults() -> None:
    assert Config.from_env({}) == Config()


def test_variables_of_others_and_those_of_the_procfile_are_passed_over() -> None:
    assert Config.from_env({"PATH": "/bin", **dict.fromkeys(ELSEWHERE, "python3")}) == Config()


def test_an_empty_variable_is_as_good_as_none() -> None:
    assert Config.from_env({"KVR_PORT": "", "KVR_MODEL": "", "KVR_LEASE_SECONDS": ""}) == Config()


def test_values_take_the_type_of_their_default() -> None:
    config = Config.from_env({"KVR_PORT": "9000", "KVR_LEASE_SECONDS": "7", "KVR_MODEL": "sim"})
    assert (config.port, config.lease_seconds, config.model) == (9000, 7.0, "sim")
    assert type(config.lease_seconds) is float


@pytest.mark.parametrize("secret", ["c2hvcnQ=", "whsec_c2hvcnQ=", "whsec_not base64 at all", "A" * 32])
def test_a_bad_secret_is_refused_and_not_shown(secret: str) -> None:
    """Without the rule of its own it would stand in the log of every start."""
    with pytest.raises(ConfigError, match="KVR_WEBHOOK_SECRET=…: must be whsec_ and the base64 of") as caught:
        Config.from_env({"KVR_WEBHOOK_SECRET": secret})
    assert secret not in str(caught.value)


def test_a_webhook_secret_stands_for_its_bytes_and_networks_for_themselves() -> None:
    secret = base64.b64encode(bytes(range(32))).decode()
    config = Config(webhook_secret=f"whsec_{secret}", webhook_networks="10.0.0.0/8, ::1/128")
    assert config.webhook_key == bytes(range(32))
    assert [str(network) for network in config.allowed_networks] == ["10.0.0.0/8", "::1/128"]
    assert (Config().webhook_key, Config().allowed_networks) == (b"", ())


def test_the_example_file_is_what_the_settings_say() -> None:
    assert (ROOT / ".env.example").read_text(encoding="utf-8") == env_example()


def test_the_example_uncommented_gives_the_defaults_and_names_every_setting() -> None:
    pairs = dict(line[1:].split("=", 1) for line in env_example().splitlines() if line.startswith("#KVR_"))
    assert Config.from_env(pairs) == Config()
    assert pairs.keys() == {f"KVR_{setting.name.upper()}" for setting in fields(Config)} | ELSEWHERE


def test_the_prefix_of_the_keys_has_one_pair_of_braces_around_the_name() -> None:
    assert Config(model="owner/name").prefix == "kvr:{owner/name}:"
    assert Config(model="owner/name", served_name="short").prefix == "kvr:{short}:"


def test_a_directory_is_called_by_its_last_part(tmp_path: Path) -> None:
    assert Config(model=str(tmp_path)).name == tmp_path.name


def test_a_keeper_looks_at_least_three_times_a_lease() -> None:
    assert Config(lease_seconds=3.0, heartbeat_seconds=1.5).tick_seconds == 1.0
    assert Config(lease_seconds=30.0, heartbeat_seconds=1.0).tick_seconds == 1.0


def test_the_command_does_not_call_the_address_that_means_all() -> None:
    assert Config(host="0.0.0.0", port=81).api_url == "http://127.0.0.1:81"
    assert Config(url="https://elsewhere").api_url == "https://elsewhere"
