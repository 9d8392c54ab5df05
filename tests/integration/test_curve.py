"""The key that encrypts KV caches: how it is kept, and what is refused."""

import os
from pathlib import Path

import pytest

from brokers.curve import Key
from pipeline.errors import ConfigError


def test_a_new_key_is_for_its_owner_only_and_replaces_none(tmp_path: Path) -> None:
    path = tmp_path / "kv.key"
    Key.write(path)
    assert path.stat().st_mode & 0o777 == 0o600
    key = Key.read(str(path))
    assert key is not None
    assert (len(key.public), len(key.secret)) == (40, 40)
    with pytest.raises(FileExistsError):
        Key.write(path)
    assert Key.read(str(path)) == key


def test_without_a_path_there_is_no_key() -> None:
    assert Key.read("") is None


@pytest.mark.parametrize(
    ("content", "mode", "sentence"),
    [
        (None, 0, "cannot be read"),
        (b"", 0o600, "is no key"),
        (b"x" * 40, 0o644, "others may read it"),
        (b"short", 0o600, "is no key"),
        (b"\xff\x00" * 20, 0o600, "is no key"),
        (b"y" * 45, 0o600, "is no key"),
        (b"#" * 40, 0o600, "is no key"),
    ],
)
def test_a_file_that_will_not_do_is_refused_by_name(
    tmp_path: Path, content: bytes | None, mode: int, sentence: str
) -> None:
    path = tmp_path / "kv.key"
    if content is not None:
        path.write_bytes(content)
        os.chmod(path, mode)
    with pytest.raises(ConfigError, match=f"KVR_KV_KEY={path}: .*{sentence}"):
        Key.read(str(path))
