"""`keepgate doctor` as an operator runs it."""

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from gateway.commands.doctor.finding import Finding
from gateway.commands.doctor.report import as_table
from tests.gateway.commands.test_cli import KEEPGATE, keepgate, refusal
from tests.gateway.processes.serving import free_port


def test_a_machine_that_is_well_ends_with_status_0(tmp_path: Path) -> None:
    """The findings are a table; standard error is empty, and nothing is left in the state folder."""
    state = tmp_path / "state"
    done = keepgate("doctor", "--upstream", "mock:", "--port", "0", "--state-dir", str(state))
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0].split()[:2] == ["ok", "settings"]
    assert any("a scripted upstream" in line for line in lines)
    assert lines[-1].startswith("0 problems, ")
    assert not state.exists()


def test_a_problem_ends_with_status_1_and_says_what_to_do() -> None:
    """The line of the problem is followed by what to do about it."""
    url = f"redis://127.0.0.1:{free_port()}/0"
    done = keepgate("doctor", "--upstream", "mock:", "--port", "0", "--redis", url)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    (at,) = (number for number, line in enumerate(lines) if line.startswith("PROBLEM"))
    assert url in lines[at]
    assert lines[at + 1].strip().startswith("→ start it, or correct the URL of redis")


def test_json_is_for_machines() -> None:
    """The same as an object: version, the worst status, and findings with four fields each."""
    done = keepgate("doctor", "--upstream", "mock:", "--port", "0", "--redis", "none", "--workers", "200", "--json")
    report = json.loads(done.stdout)
    assert done.returncode == 0
    assert report["status"] == "warning"
    assert {frozenset(each) for each in report["findings"]} == {frozenset({"check", "status", "summary", "advice"})}
    assert all(bool(each["advice"]) == (each["status"] != "ok") for each in report["findings"])


def test_it_reads_the_settings_of_serve(tmp_path: Path) -> None:
    """File, environment and command line, the last of which wins; unknown variables are warnings."""
    file = tmp_path / "keepgate.yaml"
    file.write_text("redis: none\nupstreams: ['mock:']\nhost: 192.0.2.7\nworkers: 1\n")
    done = keepgate("doctor", "--config", str(file), "--host", "127.0.0.1", KEEPGATE_PORT="0", KEEPGATE_PROT="1")
    assert done.returncode == 0
    assert "any free port of 127.0.0.1" in done.stdout
    assert "KEEPGATE_PROT is not a setting; did you mean KEEPGATE_PORT?" in done.stdout


def test_settings_that_cannot_be_read_are_a_problem_with_their_line(tmp_path: Path) -> None:
    """Where it is said and what would be right; the machine is looked at all the same."""
    file = tmp_path / "keepgate.yaml"
    file.write_text("redis: none\ncache: {ttll: 3}\n")
    done = keepgate("doctor", "--config", str(file))
    assert done.returncode == 1
    assert f"{file}, line 2: cache.ttll is not a setting; did you mean cache.ttl?" in done.stdout
    assert "processor" in done.stdout


def test_a_password_in_a_url_is_not_shown() -> None:
    """URLs of Redis are masked, in the table and in JSON."""
    url = f"redis://user:pass-word-1@127.0.0.1:{free_port()}/0"
    done = keepgate(
        "doctor", "--upstream", "mock:", "--port", "0", "--redis", url, "--json", KEEPGATE_ADMIN_KEY="adm-2"
    )
    assert done.returncode == 1
    assert "pass-word-1" not in done.stdout + done.stderr
    assert "adm-2" not in done.stdout + done.stderr


def test_an_unknown_option_is_refused_in_one_line() -> None:
    """With the nearest one there is."""
    said = refusal("doctor", "--jsno")
    assert said == "keepgate doctor: --jsno is not an option; did you mean --json? (see keepgate doctor --help)"


def test_the_help_says_that_requests_cost_money() -> None:
    """The option that asks for a token says so, and the others are those of `keepgate serve`."""
    text = keepgate("doctor", "--help").stdout
    assert "which costs money" in text
    assert "--redis URL" in text
    assert max(map(len, text.splitlines())) <= 120


def test_a_closed_pipe_ends_the_command_quietly() -> None:
    """`keepgate doctor | head -1` has no traceback."""
    reader, writer = os.pipe()
    os.close(reader)
    words = ["doctor", "--upstream", "mock:", "--port", "0", "--redis", "none"]
    done = subprocess.run([KEEPGATE, *words], stdout=writer, stderr=subprocess.PIPE, timeout=60)
    os.close(writer)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, b"")


@pytest.mark.parametrize("width", [20, 80])
def test_a_narrow_terminal_breaks_lines_below_their_column(width: int) -> None:
    """No line is longer than the terminal, from 60 characters on; what is broken goes on below its beginning."""
    summary = " ".join(["word"] * 40)
    table = as_table([Finding("redis memory", "warning", summary, "do this or that " * 5)], width)
    lines = table.splitlines()[:-2]
    assert max(map(len, lines)) <= max(60, width)
    assert len({len(line) - len(line.lstrip()) for line in lines[1:] if "→" not in line}) <= 2
