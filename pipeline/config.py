"""Every setting: one environment variable ``KVR_…`` each, with its default, checked once."""

import base64
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from ipaddress import IPv4Network, IPv6Network, ip_network
from pathlib import Path
from typing import Any
from urllib.parse import quote

from pipeline.errors import ConfigError

PREFILL_DEVICES = ("cpu", "cuda", "rngd", "sim")
DECODE_DEVICES = ("atom", "cpu", "cuda", "sim")
DEFAULT_MODEL = "smollm2-135m"


def _setting(default: Any, explain: str) -> Any:
    return field(default=default, metadata={"explain": explain})


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """One per process. The metadata of each field is its line in ``.env.example``."""

    model: str = _setting(
        DEFAULT_MODEL, "smollm2-135m, qwen2.5-coder-0.5b, gemma-3-270m, sim, a directory, or a hub id (owner/name)"
    )
    served_name: str = _setting("", "the model's name in the API and in Redis; empty: from KVR_MODEL")
    aliases: str = _setting("", "other names that the API serves the model under, as in gpt-4o,my-model")
    cache: str = _setting("~/.cache/kvrelay", "where fetched and converted models are kept")
    context: int = _setting(8192, "tokens of prompt and answer together; every worker must hold it")

    redis_url: str = _setting("redis://127.0.0.1:6379/0", "set it, and `make run` starts no Redis")
    host: str = _setting("127.0.0.1", "address that the API listens on")
    port: int = _setting(8000, "port that the API listens on")
    api_workers: int = _setting(1, "API processes")
    connections: int = _setting(2000, "connections that an API process holds; the next one is answered 503")
    request_seconds: float = _setting(30.0, "how long a request's head, and then its body, may take to arrive: 408")
    stall_seconds: float = _setting(30.0, "a client that reads nothing of its answer for so long counts as gone")
    idle_seconds: float = _setting(75.0, "how long a connection may be idle between two requests")
    url: str = _setting("", "where the kvrelay command finds the API; empty: from host and port")
    api_key: str = _setting("", "the secret that the kvrelay command shows to the API; see `kvrelay keys`")

    prefill_device: str = _setting("cpu", "cpu, cuda, rngd or sim")
    decode_device: str = _setting("cpu", "cpu, cuda, atom or sim")
    dtype: str = _setting("auto", "auto (bfloat16 where the device has it), bfloat16 or float32")
    prefill_threads: int = _setting(
        0, "compute threads of a prefill worker; 0: half of the cores, and all while nothing else computes on the CPU"
    )
    decode_threads: int = _setting(0, "compute threads of a decode worker; 0: half of the cores")
    prefill_nice: int = _setting(
        0,
        "niceness of a prefill worker's compute threads (Linux), so that tokens of running answers go first; 0: none",
    )
    chunk: int = _setting(512, "prompt tokens per device call; a cancel is seen between layers")
    slots: int = _setting(8, "jobs that a decode worker steps together")
    waiting: int = _setting(2, "KV caches that may wait in a decode worker for a slot")
    fallback: str = _setting(
        "", "local: a decode chip that cannot import a KV cache prefills again itself; empty: never"
    )
    kv_host: str = _setting("127.0.0.1", "address that decode workers receive KV caches on")
    kv_key: str = _setting("", "file with the key that encrypts KV caches, the same on all hosts; see `kvrelay keygen`")
    kv_buffer_mib: int = _setting(64, "MiB of KV cache computed but not yet sent, per transfer")

    queue_bound: int = _setting(1000, "jobs that may wait; the next one is answered 429")
    attempts: int = _setting(3, "leases of one job before it is given up")
    job_seconds: float = _setting(600.0, "a job's deadline, unless the request says `timeout`")
    keep_seconds: float = _setting(3600.0, "how long an ended job and its tokens are kept")
    dead_seconds: float = _setting(604800.0, "how long a job that was given up is kept, for `kvrelay dead`")
    lease_seconds: float = _setting(5.0, "a worker silent for so long loses its jobs")
    heartbeat_seconds: float = _setting(1.0, "how often a worker says that it lives")
    device_call_seconds: float = _setting(120.0, "a device call older than this counts as wedged")
    open_seconds: float = _setting(2.0, "how long a decode worker may take to answer OPEN or use a credit")
    part_seconds: float = _setting(30.0, "a transfer without a frame for so long is dropped")
    no_worker_seconds: float = _setting(10.0, "how long a waiting client waits for a worker to appear: 503")
    grace_seconds: float = _setting(3.0, "running jobs may finish for so long after SIGTERM")
    files: str = _setting(
        "", "folder of uploaded files and of batches' results, the same for all API processes; empty: in KVR_CACHE"
    )
    file_mib: int = _setting(200, "MiB that an uploaded file may have")
    file_seconds: float = _setting(2592000.0, "how long files and ended batches are kept, unless the client says")
    batch_window: int = _setting(64, "lines of one batch that are worked on at once")

    webhook_secret: str = _setting(
        "", "signs webhooks: whsec_ and the base64 of 24 to 64 random bytes; empty: there are no webhooks"
    )
    webhook_networks: str = _setting(
        "", "private networks that webhooks may go to, as in 10.0.0.0/8,127.0.0.1/32; empty: none"
    )

    locks: str = _setting(
        "/run/lock", "folder of the locks that say who has which chip, and who computes; one for the whole machine"
    )
    rngd_widths: str = _setting("128,512,2048,8192", "rngd: tokens of a chunk that graphs are compiled for")
    rngd_compiled: str = _setting("", "rngd: folder of compiled graphs; empty: the vendor's, ~/.cache/furiosa")
    rngd_chips: str = _setting("all", "rngd: numbers of the chips that workers may take, as in 0,1; or all")
    rngd_fusion: int = _setting(8, "rngd: processing elements that work as one device; a chip has 8")
    atom_compiled: str = _setting(
        "", "atom: directory of the compiled model; empty: in KVR_CACHE, compiled when missing"
    )
    atom_chips: str = _setting("all", "atom: numbers of the chips that workers may take, as in 0,1; or all")
    atom_chips_per_worker: int = _setting(1, "atom: chips that one model is spread over")
    atom_partition: int = _setting(
        0, "atom: flash attention with KV blocks of so many tokens; 0: eager, one block a job"
    )
    atom_dtype: str = _setting("auto", "atom: what to compile in: auto (the model's own), float32, float16 or bfloat16")
    atom_import: str = _setting("auto", "atom: route of a KV cache: graph, private, or auto (the first that works)")

    sim_prefill_us: float = _setting(50.0, "sim: microseconds of prefill per prompt token")
    sim_step_ms: float = _setting(5.0, "sim: milliseconds of one decode step")
    sim_row_ms: float = _setting(0.0, "sim: milliseconds more of it for each job that it steps")
    sim_insert_us: float = _setting(0.0, "sim: microseconds of putting a prompt token's KV into the decode chip")
    sim_chip: str = _setting(
        "", "sim: name of a chip that all workers with this name in KVR_LOCKS use by turns; empty: each has its own"
    )
    sim_layers: int = _setting(2, "sim: layers of its KV cache")

    log_level: str = _setting("INFO", "DEBUG, INFO, WARNING or ERROR")

    def __post_init__(self) -> None:
        for name in ("model", "served_name"):
            if any(c in getattr(self, name) for c in "{}\0\n"):
                raise _wrong(name, getattr(self, name), "must not contain braces or line ends")
        if not self.model:
            raise _wrong("model", self.model, "must name a model")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise _wrong(name, getattr(self, name), f"must be one of {', '.join(filter(None, choices))}")
        for name in ("atom_chips", "rngd_chips"):
            if not re.fullmatch(r"all|\d+(,\d+)*", getattr(self, name)):
                raise _wrong(name, getattr(self, name), "must be all, or numbers as in 0,1,2")
        if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", self.rngd_widths):
            raise _wrong("rngd_widths", self.rngd_widths, "must be numbers of tokens, as in 128,512,2048")
        if self.rngd_fusion not in (1, 2, 4, 8, 16, 32):
            raise _wrong("rngd_fusion", self.rngd_fusion, "must be 1, 2, 4, 8, 16 or 32")
        for setting in fields(self):
            value, least = getattr(self, setting.name), _LEAST.get(setting.name)
            if isinstance(value, (int, float)) and not (least or 0) <= value < 1 << 40:
                raise _wrong(setting.name, value, f"must be at least {least or 0} and below 2^40")
        if not re.fullmatch(r"[\w-]*", self.sim_chip):
            raise _wrong("sim_chip", self.sim_chip, "must be a name of letters, digits, - and _")
        if self.prefill_nice > 19:
            raise _wrong("prefill_nice", self.prefill_nice, "must be 0 to 19")
        if not 0 < self.port < 65536:
            raise _wrong("port", self.port, "must be a port number, 1 to 65535")
        if not self.redis_url.startswith(("redis://", "rediss://", "unix://")):
            raise _wrong("redis_url", self.redis_url, "must begin with redis://, rediss:// or unix://")
        _webhook_key(self.webhook_secret)
        _networks(self.webhook_networks)
        if self.heartbeat_seconds > self.lease_seconds / 2:
            raise _wrong(
                "heartbeat_seconds",
                self.heartbeat_seconds,
                f"must be at most half of KVR_LEASE_SECONDS ({self.lease_seconds})",
            )

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> "Config":
        """Reads ``KVR_…``. Raises ConfigError that names the variable, its value and what would do."""
        known = {setting.name: setting for setting in fields(cls)}
        values = {}
        for variable, text in environ.items():
            if not variable.startswith("KVR_") or variable.startswith("KVR_TEST_") or variable in ELSEWHERE:
                continue
            setting = known.get(variable.removeprefix("KVR_").lower())
            if setting is None:
                raise ConfigError(variable, text, "there is no such setting; .env.example lists them all")
            if text == "" and setting.default != "":
                continue  # `KVR_X=` in a .env file means: as if it were not there
            kind: Any = type(setting.default)
            try:
                values[setting.name] = kind(text)
            except ValueError:
                what = "a whole number" if kind is int else "a number"
                raise ConfigError(variable, text, f"must be {what}, as in {setting.default}") from None
        return cls(**values)

    @property
    def names(self) -> list[str]:
        """All names that requests may use, its own first."""
        return [self.name, *(alias.strip() for alias in self.aliases.split(",") if alias.strip())]

    @property
    def name(self) -> str:
        """What the API and the Redis keys call the model."""
        return self.served_name or (Path(self.model).name if Path(self.model).is_dir() else self.model)

    @property
    def prefix(self) -> str:
        """Of every Redis key; the braces keep one model's keys in one Cluster slot."""
        return f"kvr:{{{self.name}}}:"

    @property
    def files_folder(self) -> Path:
        """One for each served name, as the keys of Redis, which know what is in it."""
        root = Path(self.files) if self.files else Path(self.cache) / "files"
        return root.expanduser() / f"kvr-{quote(self.name, safe='')}"

    @property
    def api_url(self) -> str:
        host = "127.0.0.1" if self.host == "0.0.0.0" else self.host  # noqa: S104 - compared, not bound
        return self.url or f"http://{host}:{self.port}"

    @property
    def webhook_key(self) -> bytes:
        """What KVR_WEBHOOK_SECRET stands for; empty: there are no webhooks."""
        return _webhook_key(self.webhook_secret)

    @property
    def allowed_networks(self) -> tuple[IPv4Network | IPv6Network, ...]:
        """Private networks that webhooks may go to all the same."""
        return _networks(self.webhook_networks)

    @property
    def tick_seconds(self) -> float:
        """How often a keeper renews leases, says that its worker lives, and sweeps."""
        return min(self.heartbeat_seconds, self.lease_seconds / 3)


#: Read by the Procfile, before there is a Config.
ELSEWHERE = frozenset({"KVR_PREFILL_PYTHON", "KVR_DECODE_PYTHON", "KVR_API_PYTHON"})

_CHOICES = {
    "prefill_device": PREFILL_DEVICES,
    "decode_device": DECODE_DEVICES,
    "dtype": ("auto", "bfloat16", "float32"),
    "fallback": ("", "local"),
    "atom_dtype": ("auto", "bfloat16", "float16", "float32"),
    "atom_import": ("auto", "graph", "private"),
    "log_level": ("DEBUG", "INFO", "WARNING", "ERROR"),
}

_LEAST = {
    "context": 16,
    "api_workers": 1,
    "connections": 1,
    "request_seconds": 0.1,
    "stall_seconds": 0.1,
    "idle_seconds": 1,
    "chunk": 1,
    "slots": 1,
    "kv_buffer_mib": 1,
    "queue_bound": 1,
    "attempts": 1,
    "job_seconds": 0.001,
    "keep_seconds": 1,
    "dead_seconds": 1,
    "file_mib": 1,
    "file_seconds": 1,
    "batch_window": 1,
    "lease_seconds": 0.2,
    "heartbeat_seconds": 0.05,
    "device_call_seconds": 0.1,
    "open_seconds": 0.1,
    "part_seconds": 0.1,
    "atom_chips_per_worker": 1,
    "sim_layers": 1,
}


def _wrong(name: str, value: object, remedy: str) -> ConfigError:
    return ConfigError(f"KVR_{name.upper()}", value, remedy)


def _webhook_key(secret: str) -> bytes:
    """As Standard Webhooks writes secrets. Nothing of it is shown: messages end in logs."""
    if not secret:
        return b""
    try:
        key = base64.b64decode(secret.removeprefix("whsec_"), validate=True)
    except ValueError:
        key = b""
    if not secret.startswith("whsec_") or not 24 <= len(key) <= 64:
        raise _wrong("webhook_secret", "…", "must be whsec_ and the base64 of 24 to 64 bytes")
    return key


def _networks(text: str) -> tuple[IPv4Network | IPv6Network, ...]:
    try:
        return tuple(ip_network(part.strip()) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise _wrong("webhook_networks", text, f"must be networks, as in 10.0.0.0/8,127.0.0.1/32 ({error})") from None


def env_example() -> str:
    """The text of ``.env.example``."""
    lines = ["# Every setting with its default. Copy to .env and change what you need."]
    for setting in fields(Config):
        shown = str(setting.default).removesuffix(".0")
        lines += ["", f"# {setting.metadata['explain']}", f"#KVR_{setting.name.upper()}={shown}"]
    lines += ["", "# which Python starts each role (a device's SDK lives in an environment of its own)"]
    lines += [f"#{variable}=python" for variable in sorted(ELSEWHERE)]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(env_example(), end="")
