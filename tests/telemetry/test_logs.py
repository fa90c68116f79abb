"""Logs: their two forms, and that nothing waits for whoever reads them."""

import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from telemetry.logs import CURRENT_REQUEST, BackgroundHandler, HumanFormatter, JsonFormatter, rfc3339


@dataclass(frozen=True)
class Ids:
    request_id: str
    trace_id: str = ""


@pytest.fixture
def within_a_request() -> Iterator[None]:
    token = CURRENT_REQUEST.set(Ids("abc-1", "f" * 32))
    yield
    CURRENT_REQUEST.reset(token)


def record(message: str, *arguments: object, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord("gateway.x", logging.WARNING, "", 0, message, arguments, None)
    made.__dict__.update(extra)
    return made


@pytest.mark.usefixtures("within_a_request")
def test_a_json_line_names_the_request() -> None:
    """With time, level, logger, message, and the fields that were given."""
    line = json.loads(JsonFormatter().format(record("%s is down\nnow", "Redis", fields={"tier": "redis"})))
    assert line.pop("time").endswith("Z")
    assert line == {
        "level": "warning",
        "logger": "gateway.x",
        "message": "Redis is down\nnow",
        "request_id": "abc-1",
        "trace_id": "f" * 32,
        "tier": "redis",
    }


def test_a_json_line_is_one_line() -> None:
    """Whatever is in a message or a traceback."""
    try:
        raise ValueError("two\nlines")
    except ValueError:
        failed = logging.LogRecord("x", logging.ERROR, "", 0, "bad \u2028 \x00", (), sys.exc_info())
    text = JsonFormatter().format(failed)
    assert "\n" not in text
    assert "ValueError: two" in json.loads(text)["exception"]


@pytest.mark.usefixtures("within_a_request")
def test_a_line_for_people_names_the_request_too() -> None:
    """After the message."""
    assert HumanFormatter().format(record("slow")) == "WARNING gateway.x: slow [abc-1]"


def test_a_time_is_as_rfc_3339_has_it() -> None:
    """In UTC, with milliseconds."""
    assert rfc3339(1_764_043_200.9999) == "2025-11-25T04:00:00.999Z"


def test_nobody_waits_for_a_full_pipe() -> None:
    """Lines that nobody reads are dropped, and their number is the next thing that a reader learns."""
    reading, writing = os.pipe()
    handler = BackgroundHandler(writing)
    handler.setFormatter(HumanFormatter())
    began = time.monotonic()
    for _ in range(30_000):
        handler.handle(record("x" * 100))
    assert time.monotonic() - began < 5
    text = b""
    while b"were dropped" not in text or not text.endswith(b"\n"):
        text += os.read(reading, 2**16)
    lines = text.decode().splitlines()
    notices = [line for line in lines if "were dropped" in line]
    dropped = sum(int(line.split(": ")[1].split()[0]) for line in notices)
    assert dropped > 10_000
    assert len(lines) - len(notices) + dropped <= 30_000


def test_the_last_lines_are_written_before_a_process_ends() -> None:
    """In the order in which they were logged, at the level that was asked for."""
    program = (
        "import logging; from telemetry.logs import configure_logging; configure_logging('json', 'info')\n"
        "logging.debug('no')\nfor number in range(500): logging.info('line %d', number)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert [json.loads(line)["message"] for line in run.stderr.splitlines()] == [f"line {n}" for n in range(500)]
