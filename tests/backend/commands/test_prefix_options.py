"""Prefix store options that cannot be met are refused before a model is loaded."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from backend.commands.prefix_options import add_prefix_arguments, read_prefix_arguments
from prefix_store.store.config import StoreConfig


def read(*options: str) -> StoreConfig | None:
    parser = argparse.ArgumentParser()
    add_prefix_arguments(parser)
    return read_prefix_arguments(parser.parse_args(options))


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KEEPGATE_PREFIX_SECRET", "KEEPGATE_PREFIX_INDEX"):
        monkeypatch.delenv(name, raising=False)


def test_there_is_no_store_without_a_tier() -> None:
    """Without a tier there is no prefix store, even with an audit option."""
    assert read() is None
    assert read("--prefix-audit", "5") is None


def test_the_folder_and_the_secret_are_created_at_the_first_start(tmp_path: Path) -> None:
    """The first start creates the folder with its parents and a secret for the owner only; the next start uses both."""
    folder, secret = tmp_path / "a" / "b" / "kv", tmp_path / "secret"
    options = ("--prefix-disk", str(folder), "--prefix-secret-file", str(secret))
    first = read(*options)
    assert first is not None
    assert (folder / "identity").is_file()
    assert secret.stat().st_mode & 0o777 == 0o600
    assert read(*options) == first


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--prefix-secret-file", "{here}/none/secret"), "there is no prefix store; expected it with --prefix-memory"),
        (
            ("--prefix-name", "a"),
            "--prefix-name: there is no prefix store; expected it with --prefix-memory, ",
        ),
        (("--prefix-mooncake-codec", "fp8"), "--prefix-mooncake-codec: there is no such tier; expected it with"),
        (("--prefix-mooncake", "/no/such.json"), "--prefix-mooncake: /no/such.json: No such file or directory"),
        (("--prefix-address", "http://a:1"), "--prefix-address: there is no prefix store"),
        (("--prefix-disk-size", "1GiB"), "--prefix-disk-size: there is no such tier; expected it with --prefix-disk"),
        (
            ("--prefix-memory", "1MiB", "--prefix-secret-file", "{here}/none/secret"),
            "--prefix-secret-file {here}/none/secret: it cannot be read or made (there is no directory {here}/none)",
        ),
        (
            ("--prefix-memory", "1MiB", "--prefix-secret-file", "{here}/short"),
            "--prefix-secret-file {here}/short: the secret has 5 bytes, expected 16 or more",
        ),
        (("--prefix-memory", "90000GiB"), "--prefix-memory is 96,636,764,160,000, expected at most the "),
        (("--prefix-disk", "{here}/short/kv"), "--prefix-disk {here}/short/kv: Not a directory"),
        (("--prefix-disk", "{here}"), "--prefix-disk {here}: {here} is not a folder of KV blocks: it has 'short'"),
    ],
)
def test_options_that_cannot_be_met_are_refused_by_name(tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    """An option that cannot be met is refused in one line with what would be right, and leaves no files behind."""
    (tmp_path / "short").write_text("short")
    with pytest.raises(ValueError, match=re.escape(message.format(here=tmp_path))):
        read(*(option.format(here=tmp_path) for option in options))
    assert [file.name for file in tmp_path.iterdir()] == ["short"]
