"""The command `keepgate`."""

import ast
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

KEEPGATE = Path(sys.executable).with_name("keepgate")


def keepgate(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the command to its end, with no KEEPGATE_ variable but these."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith("KEEPGATE_")}
    environment = {**plain, "COLUMNS": "120", **variables}
    return subprocess.run([KEEPGATE, *words], env=environment, capture_output=True, text=True, timeout=30)


def refusal(*words: str, **variables: str) -> str:
    """The one line on standard error of a refusal; checks the status, too."""
    done = keepgate(*words, **variables)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    return done.stderr.strip()


def test_help_shows_the_first_commands() -> None:
    """The output of `keepgate --help` shows the first commands."""
    done = keepgate("--help")
    assert done.returncode == 0
    assert "caching gateway in front of LLM backends" in done.stdout
    assert "keepgate serve --upstream http://" in done.stdout
    assert "keepgate serve --help" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 120


def test_help_of_serve_names_every_option_and_its_other_sources() -> None:
    """The output of `keepgate serve --help` has all options, their defaults and their other sources."""
    text = keepgate("serve", "--help").stdout
    for words in ("--upstream URL", "mock:", "--port N", "(8080)", "--workers N", "--redis URL", "--config FILE"):
        assert words in text
    for words in ("--model PATH_OR_ID", "--quantization {none,auto,int8,", "--kv-memory SIZE", "--max-batch N"):
        assert words in text
    assert "KEEPGATE_CACHE_TTL" in text
    assert "KEEPGATE_BACKEND_THREADS" in text
    assert max(map(len, text.splitlines())) <= 120
    assert "http://HOST:PORT/v1" in text


def test_the_backend_gets_its_own_arguments() -> None:
    """The command `keepgate backend --help` shows the help of the backend."""
    done = keepgate("backend", "--help")
    assert done.returncode == 0
    assert "keepgate backend" in done.stdout
    assert "--kv-memory" in done.stdout


@pytest.mark.parametrize("words", [["--help"], ["serve", "--help"], ["backend", "--help"], ["--version"], []])
def test_a_closed_pipe_ends_the_command_quietly(words: list[str]) -> None:
    """A closed pipe on stdout ends the command without a message."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([KEEPGATE, *words], stdout=writer, stderr=subprocess.PIPE, timeout=30)
    os.close(writer)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, b"")


def test_without_arguments_the_help_is_shown() -> None:
    """The command without arguments shows the help and ends with a status other than 0."""
    done = keepgate()
    assert done.returncode == 2
    assert "keepgate serve" in done.stdout


def test_the_version_is_one_line() -> None:
    """The output of `keepgate --version` is one line."""
    done = keepgate("--version")
    assert (done.returncode, done.stdout.split()[0]) == (0, "keepgate")


def test_the_help_loads_nothing_that_takes_time() -> None:
    """Only Python's own modules and the command's: what a server needs takes a second to import."""
    script = (
        "import sys, sysconfig\nfrom gateway.commands.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "site = sysconfig.get_path('purelib')\n"
        "print([name for name, module in sys.modules.items()"
        " if (getattr(module, '__file__', None) or '').startswith(site) and '.' not in name])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    loaded = set(ast.literal_eval(done.stdout.splitlines()[-1]))
    assert not loaded & {"aiohttp", "msgspec", "redis", "uvloop", "yarl", "torch", "numpy"}, loaded


def test_help_imports_nothing_heavy() -> None:
    """The help loads the command's own module only."""
    script = """
import json, sys
from gateway.commands.cli import main
try:
    main(["serve", "--help"])
except SystemExit:
    print("\\n" + json.dumps(sorted({name.partition(".")[0] for name in sys.modules})))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = set(json.loads(done.stdout.splitlines()[-1]))
    assert not loaded & {"torch", "numpy", "transformers", "aiohttp", "redis", "yaml", "msgspec", "uvloop", "cache"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sevre"], "keepgate: 'sevre' is not a command; did you mean serve? (see keepgate --help)"),
        (["run"], "keepgate: 'run' is not a command (see keepgate --help)"),
        (["--prot"], "keepgate: --prot is not an option (see keepgate --help)"),
        (
            ["serve", "--prot", "80"],
            "keepgate serve: --prot is not an option; did you mean --port? (see keepgate serve --help)",
        ),
        (
            ["serve", "--upstreams=http://a"],
            "keepgate serve: --upstreams is not an option; did you mean --upstream? (see keepgate serve --help)",
        ),
        # An abbreviation would change its meaning with a new option of the same prefix.
        (
            ["serve", "--por", "80"],
            "keepgate serve: --por is not an option; did you mean --port? (see keepgate serve --help)",
        ),
        (
            ["serve", "8080"],
            "keepgate serve: '8080' is not expected here; options begin with -- (see keepgate serve --help)",
        ),
        (["serve", "--port"], "keepgate serve: argument --port: expected one argument (see keepgate serve --help)"),
        (
            ["serve", "--port", "http"],
            "keepgate: command line: --port: expected a port from 1 to 65535, or 0 for any free one, got 'http'",
        ),
        (
            ["serve", "--quantization", "int3"],
            "keepgate: command line: --quantization: expected one of none, auto, int8, int4, fp8, nf4, gptq-int4, "
            "awq-int4 and mixed, got 'int3'",
        ),
        (
            ["serve", "--quantisation", "int4"],
            "keepgate serve: --quantisation is not an option; did you mean --quantization? (see keepgate serve --help)",
        ),
        (
            ["serve", "--config", "no.yaml"],
            "keepgate: no.yaml: cannot be read: No such file or directory",
        ),
    ],
)
def test_an_invalid_argument_is_reported_in_one_line(words: list[str], message: str) -> None:
    """An invalid argument gives one line, with the nearest right one if there is any."""
    assert refusal(*words) == message


def test_a_bad_variable_is_refused_before_anything_starts() -> None:
    """An invalid variable of the environment is refused before a process starts."""
    said = refusal("serve", KEEPGATE_PORT="eighty")
    assert said.startswith("keepgate: environment: KEEPGATE_PORT: expected a port")


def test_the_settings_file_may_be_named_by_a_variable(tmp_path: Path) -> None:
    """The variable KEEPGATE_CONFIG names the settings file unless --config does."""
    wrong, right = tmp_path / "wrong.yaml", tmp_path / "right.yaml"
    wrong.write_text("port: x")
    right.write_text("workers: y")
    assert refusal("serve", KEEPGATE_CONFIG=str(wrong)).startswith(f"keepgate: {wrong}, line 1: port: expected")
    said = refusal("serve", "--config", str(right), KEEPGATE_CONFIG=str(wrong))
    assert said.startswith(f"keepgate: {right}, line 1: workers: expected")


def test_python_m_gateway_is_the_same_command() -> None:
    """The command `python -m gateway` does the same as `keepgate`."""
    done = subprocess.run([sys.executable, "-m", "gateway", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == keepgate("--version").stdout
