"""The command: which checks there are, and what is printed."""

import logging
import shutil
import signal
import sys
from collections.abc import Callable

import uvloop

from gateway.commands.doctor.children import DEADLINE as CHILD_DEADLINE
from gateway.commands.doctor.children import check_engine, check_semantic_cache
from gateway.commands.doctor.configuration import check_settings, refused
from gateway.commands.doctor.disk import check_disk
from gateway.commands.doctor.execution import Check, run_checks
from gateway.commands.doctor.exposure import check_exposure
from gateway.commands.doctor.finding import Finding
from gateway.commands.doctor.listening import check_listening
from gateway.commands.doctor.machine import check_memory, check_open_files, check_processor
from gateway.commands.doctor.redis_server import check_redis
from gateway.commands.doctor.report import as_json, as_table, worst_of
from gateway.commands.doctor.upstreams import DEADLINE as UPSTREAM_DEADLINE
from gateway.commands.doctor.upstreams import check_upstreams
from gateway.settings.fields import SettingsError
from gateway.settings.settings import Settings

# A look at files and sockets of this machine, and one at a server that may be far away, in seconds.
_NEAR = 10.0
_FAR = 45.0


def run(read: Callable[[], tuple[Settings, list[str]]], *, as_json: bool, paid_requests: bool) -> int:
    """Check, print, and return the exit status: 1 where there is a problem. `read` reads the settings."""
    # What parts of the gateway would log, findings say.
    logging.disable(logging.CRITICAL)
    findings = uvloop.run(diagnose(read, paid_requests))
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends the command quietly
    print(_printed(findings, as_json))
    return int(worst_of(findings) == "problem")


async def diagnose(read: Callable[[], tuple[Settings, list[str]]], paid_requests: bool = False) -> list[Finding]:
    """All findings. With settings that cannot be read, those of the machine and of the default settings' places."""
    try:
        settings, warnings = read()
    except SettingsError as error:
        machine = await _with_progress(_of_machine(Settings()))
        return [refused(error), *machine]
    checks = [
        Check("settings", _NEAR, lambda: check_settings(settings, warnings)),
        Check("exposure", _NEAR, lambda: check_exposure(settings)),
        Check("port", _FAR, lambda: check_listening(settings)),
        *_of_machine(settings),
        Check("disk", _NEAR, lambda: check_disk(settings)),
        Check("redis", _FAR, lambda: check_redis(settings)),
        Check("upstream", UPSTREAM_DEADLINE, lambda: check_upstreams(settings, paid_requests)),
        Check("engine", CHILD_DEADLINE, lambda: check_engine(settings)),
        Check("semantic cache", CHILD_DEADLINE, lambda: check_semantic_cache(settings)),
    ]
    return await _with_progress(checks)


def _of_machine(settings: Settings) -> list[Check]:
    return [
        Check("processor", _NEAR, lambda: check_processor(settings)),
        Check("memory", _NEAR, lambda: check_memory(settings)),
        Check("open files", _NEAR, lambda: check_open_files(settings)),
    ]


async def _with_progress(checks: list[Check]) -> list[Finding]:
    """Say on a terminal what is waited for."""
    if not sys.stderr.isatty():
        return await run_checks(checks)
    waiting = [check.name for check in checks]

    def show(check: Check) -> None:
        waiting.remove(check.name)
        # A line that the terminal breaks could not be taken back.
        line = f"checking {', '.join(waiting)} …"[: shutil.get_terminal_size().columns - 1]
        sys.stderr.write(f"\r\x1b[K{line}" if waiting else "\r\x1b[K")
        sys.stderr.flush()

    return await run_checks(checks, show)


def _printed(findings: list[Finding], is_json: bool) -> str:
    if is_json:
        return as_json(findings)
    return as_table(findings, shutil.get_terminal_size().columns if sys.stdout.isatty() else None)
