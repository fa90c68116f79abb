"""The default prefix store of the in-repo backend."""

from pathlib import Path
from typing import Any

import pytest

from gateway.settings.backend import BackendSettings
from gateway.settings.fields import PositiveSize, SettingsError, Size
from gateway.settings.prefix_defaults import with_prefix_store
from gateway.settings.settings import Settings

OWN = "unix:///run/valkey.sock"
SHARED = "redis://cache:6379/0"


def settings(state: Path, redis: str = "embedded", **backend: Any) -> Settings:
    return Settings(state_dir=str(state), redis=redis, backend=BackendSettings(**backend))


def test_the_default_prefix_store_is_in_the_state_folder(tmp_path: Path) -> None:
    """The default store has a private folder, a secret beside it, and a database of its own."""
    state = tmp_path / "not" / "there" / "yet"
    backend = with_prefix_store(settings(state), OWN)

    assert backend == BackendSettings(
        prefix_disk=f"{state}/prefix", prefix_index=f"{OWN}?db=1", prefix_secret_file=f"{state}/prefix-secret"
    )
    assert (state / "prefix").stat().st_mode & 0o777 == 0o700
    assert not (state / "prefix-secret").exists()  # the backend makes it


@pytest.mark.parametrize(("redis", "url", "index"), [(SHARED, SHARED, SHARED), ("none", "", None)])
def test_the_index_is_in_the_store_that_gateways_share(tmp_path: Path, redis: str, url: str, index: str | None) -> None:
    """The prefix index is in the store that gateways share, and is absent without one."""
    backend = with_prefix_store(settings(tmp_path, redis), url)

    assert (backend.prefix_index, backend.prefix_disk) == (index, f"{tmp_path}/prefix")


def test_explicit_options_are_kept(tmp_path: Path) -> None:
    """Explicit options are not changed by defaults."""
    said: dict[str, Any] = {
        "threads": 2,
        "prefix_memory": PositiveSize(2**30),
        "prefix_disk": "/srv/prefixes",
        "prefix_disk_size": Size(2**31),
        "prefix_index": "redis://elsewhere",
        "prefix_secret_file": "/run/secret",
        "public_prefix": ("system.txt",),
    }

    assert with_prefix_store(settings(tmp_path, **said), OWN) == BackendSettings(**said)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("said", [{"prefix_disk_size": Size(0)}, {"prefix_sharing": False}])
def test_the_prefix_store_can_be_switched_off(tmp_path: Path, said: dict[str, Any]) -> None:
    """A prefix store that is switched off gives the backend no options and makes no files."""
    backend = with_prefix_store(settings(tmp_path, **said), OWN)

    assert not any("prefix-" in option for option in backend.options() if option != "--no-prefix-sharing")
    assert list(tmp_path.iterdir()) == []


def test_memory_alone_has_an_index_and_a_secret(tmp_path: Path) -> None:
    """A memory tier without a disk tier has an index and a secret, so that other engines read its blocks."""
    backend = with_prefix_store(settings(tmp_path, prefix_disk_size=Size(0), prefix_memory=PositiveSize(2**30)), OWN)

    assert backend.options() == [
        f"--prefix-memory={2**30}",
        f"--prefix-index={OWN}?db=1",
        f"--prefix-secret-file={tmp_path}/prefix-secret",
    ]


def test_a_secret_in_the_environment_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A secret in the environment is inherited by the backend, and no file is made for one."""
    monkeypatch.setenv("KEEPGATE_PREFIX_SECRET", "thirty-two-bytes-of-a-fleet-secret")

    assert with_prefix_store(settings(tmp_path), OWN).prefix_secret_file is None


def test_a_state_folder_that_cannot_be_made_costs_the_disk_tier_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A gateway whose state folder cannot be made starts without the disk tier and logs it."""
    (tmp_path / "file").touch()
    backend = with_prefix_store(settings(tmp_path / "file" / "state", "none"), "")

    assert backend == BackendSettings()
    (record,) = caplog.records
    assert "no keys and values of prompts outlive the backend" in record.getMessage()
    assert str(tmp_path / "file" / "state" / "prefix") in record.getMessage()


def test_an_explicit_disk_tier_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    """An explicit disk tier that cannot be made is refused with the folder and the rule."""
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError) as caught:
        with_prefix_store(settings(tmp_path / "file", prefix_disk_size=Size(2**30)), OWN)

    assert str(caught.value) == (
        f"state_dir: nothing can be kept in {tmp_path}/file/prefix: Not a directory;"
        " or set backend.prefix_disk_size to 0"
    )
