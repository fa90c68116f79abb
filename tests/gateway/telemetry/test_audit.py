"""The audit log of what operators do."""

import json
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from gateway.settings.fields import Secret, SettingsError
from gateway.settings.operations import LogSettings
from gateway.settings.settings import Settings
from gateway.telemetry.audit import AUDIT, AuditLog, audit
from gateway.telemetry.record import RECORD, RequestRecord

SECRET = "pssst-tell-nobody"


async def revoke(request: web.Request) -> web.Response:
    request[RECORD] = RequestRecord("id-7", "DELETE", request.path, 0.0)
    audit(request, "key.revoke", "k1", team="red")
    return web.Response()


async def act(settings: Settings, handler: Callable[[web.Request], Awaitable[web.StreamResponse]] = revoke) -> None:
    """Send one request to a server whose handler notes an action."""
    application = web.Application()
    application[AUDIT] = AuditLog(settings)
    application.router.add_delete("/v1/keys/k1", handler)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        url = f"http://127.0.0.1:{runner.addresses[0][1]}/v1/keys/k1"
        async with aiohttp.request("DELETE", url, headers={"Authorization": f"Bearer {SECRET}"}) as response:
            assert response.status == 200
    finally:
        await runner.cleanup()


async def test_an_action_is_a_line_of_the_file(tmp_path: Path) -> None:
    """It says when, what, who, from where and in which request; the file is appended to, and the user's alone."""
    file = tmp_path / "audit.jsonl"
    settings = Settings(admin_key=Secret(SECRET), log=LogSettings(audit_file=str(file)))
    await act(settings)
    file.rename(tmp_path / "audit.1")
    await act(settings)
    await act(settings)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(lines) == 2
    assert lines[0].pop("time").endswith("Z")
    assert lines[0] == {
        "action": "key.revoke",
        "subject": "k1",
        "who": "admin key",
        "remote": "127.0.0.1",
        "request_id": "id-7",
        "team": "red",
    }
    assert SECRET not in file.read_text()
    assert file.stat().st_mode & 0o777 == 0o600


async def test_without_a_file_it_is_a_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Of a logger of its own; without an admin key a user of the loopback has done it."""
    caplog.set_level(logging.INFO)
    await act(Settings())
    (record,) = [record for record in caplog.records if record.name == "keepgate.audit"]
    assert json.loads(record.getMessage())["who"] == "loopback"
    assert record.__dict__["fields"]["action"] == "key.revoke"


async def test_what_the_file_does_not_take_is_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """An action that cannot be noted is not lost, and is told as an error."""
    folder = tmp_path / "logs"
    folder.mkdir()

    async def remove_and_revoke(request: web.Request) -> web.Response:
        (folder / "audit.jsonl").unlink()
        folder.rmdir()
        return await revoke(request)

    await act(Settings(log=LogSettings(audit_file=str(folder / "audit.jsonl"))), remove_and_revoke)
    assert next(r.levelname for r in caplog.records if r.name == "keepgate.audit") == "ERROR"
    assert caplog.records[0].__dict__["fields"]["subject"] == "k1"


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    """At the start, by the name of the setting."""
    with pytest.raises(SettingsError, match=r"log\.audit_file"):
        AuditLog(Settings(log=LogSettings(audit_file=str(tmp_path / "missing/audit"))))
