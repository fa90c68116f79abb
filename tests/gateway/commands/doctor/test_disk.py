"""Folders: whether they can be written, and whether there is room."""

import os
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from gateway.commands.doctor.disk import check_disk
from gateway.settings.fields import PositiveSize
from gateway.settings.operations import LogSettings
from gateway.settings.settings import BatchSettings, Settings

Usage = namedtuple("Usage", ("total", "used", "free"))


def served(state: Path, **values: Any) -> Settings:
    return Settings(upstreams=("mock:",), redis="none", state_dir=str(state), **values)


async def test_a_folder_that_can_be_made_is_ok_and_is_not_made(tmp_path: Path) -> None:
    """The nearest folder that exists is tried; nothing is left there."""
    (only,) = await check_disk(served(tmp_path / "a" / "b"))
    assert (only.status, "can be made" in only.summary) == ("ok", True)
    assert os.listdir(tmp_path) == []
    (there,) = await check_disk(served(tmp_path))
    assert "is writable" in there.summary
    assert os.listdir(tmp_path) == []


async def test_a_file_in_the_place_of_the_folder_is_a_problem(tmp_path: Path) -> None:
    """A path below a file can never be a folder."""
    (tmp_path / "file").write_text("")
    (only,) = await check_disk(served(tmp_path / "file" / "state"))
    assert (only.status, "is a file" in only.summary, "--state-dir" in only.advice) == ("problem", True, True)


async def test_a_folder_that_refuses_files_is_a_problem() -> None:
    """A file system that takes no files, such as /proc, is found out by trying."""
    (only,) = await check_disk(served(Path("/proc/keepgate")))
    assert (only.status, "cannot be written" in only.summary) == ("problem", True)


@pytest.mark.parametrize(("free", "status"), [(2**40, "ok"), (2**30, "warning"), (2**20, "problem")])
async def test_room_is_compared_with_what_the_settings_allow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, status: str
) -> None:
    """Less than the settings allow to be kept is a warning, next to nothing a problem."""
    monkeypatch.setattr("gateway.commands.doctor.disk.shutil.disk_usage", lambda path: Usage(2**40, 0, free))
    batches = BatchSettings(max_file=PositiveSize(2 * 2**30))
    (only,) = await check_disk(served(tmp_path, batches=batches))
    assert only.status == status


async def test_what_is_kept_already_needs_no_more_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prefix store's own files count as room that it has."""
    monkeypatch.setattr("gateway.commands.doctor.disk.shutil.disk_usage", lambda path: Usage(2**40, 0, 2**40))
    (tmp_path / "prefix").mkdir()
    (tmp_path / "prefix" / "block").write_bytes(b"x" * 2**20)
    settings = Settings(redis="none", state_dir=str(tmp_path), batches=BatchSettings(enabled=False))
    state, _ = await check_disk(settings)
    assert "allow 4.0 GiB more" in state.summary  # of 4 GiB, 1 MiB less
    assert state.status == "ok"


async def test_files_that_are_appended_to_are_tried(tmp_path: Path) -> None:
    """The audit log: in a folder that is not there, a folder itself, and right."""
    for name, status in (("no/audit.log", "problem"), ("", "problem"), ("audit.log", "ok")):
        log = LogSettings(audit_file=str(tmp_path / name))
        assert [each.status for each in await check_disk(served(tmp_path, log=log))] == ["ok", status]
