"""Keys of stored values, read from the environment and from files."""

import base64
from pathlib import Path

import pytest

from gateway.settings.encryption_keys import encryption_keys
from gateway.settings.fields import SettingsError
from gateway.settings.operations import EncryptionSettings

OLD, NEW = (base64.b64encode(bytes([number]) * 32).decode() for number in (1, 2))


def test_keys_come_from_the_environment_and_from_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The present key is the first; space around a key does not count."""
    file = tmp_path / "key"
    file.write_text(f"{NEW}\n")
    monkeypatch.setenv("OLD_KEY", f" {OLD}")
    assert encryption_keys(EncryptionSettings(key=f"file:{file}", old_keys=("env:OLD_KEY",))) == (NEW, OLD)
    assert encryption_keys(EncryptionSettings()) == ()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"key": "env:NO_SUCH"}, "encryption.key: expected a key in the environment variable NO_SUCH"),
        ({"key": "file:/no/such"}, "encryption.key: cannot read the file /no/such: No such file"),
        (
            {"key": "env:GOOD", "old_keys": ("env:BAD",)},
            r"encryption.old_keys\[0\]: expected base64 of 32 bytes in env",
        ),
        ({"key": "env:BAD"}, "encryption.key: expected base64 of 32 bytes in env:BAD"),
        ({"old_keys": ("env:GOOD",)}, "encryption.key: expected a key, for there are old ones"),
    ],
)
def test_a_key_that_cannot_be_read_is_refused(
    settings: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names the setting, and never what stands where a key should."""
    monkeypatch.setenv("GOOD", OLD)
    monkeypatch.setenv("BAD", "hush-hush")
    with pytest.raises(SettingsError, match=message) as raised:
        encryption_keys(EncryptionSettings(**settings))  # type: ignore[arg-type]
    assert "hush" not in str(raised.value)
