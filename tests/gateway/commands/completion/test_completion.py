"""`keepgate completion`: what the shells complete with the scripts, and what the scripts are made of."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.commands.completion.bash import bash_script
from gateway.commands.completion.fish import fish_script
from gateway.commands.completion.help_text import Command, Option, read_commands, read_help
from gateway.commands.completion.zsh import zsh_script
from tests.gateway.commands.test_cli import KEEPGATE, refusal

SHELLS = {"bash": bash_script, "zsh": zsh_script, "fish": fish_script}
HERE = [shell for shell in SHELLS if shutil.which(shell)]
HELP = """\
usage: program [-h] COMMAND

Some words.

positional arguments:
  {one,two}             which

options:
  -h, --help            show this help
  --port N              port to listen on
  --a-rather-long-option {plain,int8}
                        how it is stored; see `program --help`
  --sharing, --no-sharing
                        whether
  --models MODEL [MODEL ...]
                        the only models
  -o FILE, --out FILE   where it goes
  -i, --in FILE         the same as Python 3.13 has it

commands:
  COMMAND
    make      make one; see `program make --help`
    make-many
              make some

examples:
    make      it now
"""
BASH = """
source "$1"; shift
compopt() { :; }
COMP_WORDS=("$@"); COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
_keepgate
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture(scope="module")
def program() -> Command:
    return read_commands()


@pytest.fixture(scope="module")
def scripts(program: Command, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("scripts")
    for shell, write in SHELLS.items():
        (folder / shell).write_text(write(program))
    return {shell: folder / shell for shell in SHELLS}


def in_bash(script: Path, *words: str) -> list[str]:
    """What bash completes after these words, the last of which is under the cursor."""
    command = ["bash", "--norc", "-c", BASH, "bash", str(script), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    assert done.stderr == ""
    return done.stdout.split()


def in_fish(script: Path, *words: str) -> list[str]:
    """The same of fish, without the descriptions."""
    command = ["fish", "-c", f"source {script}; complete -C '{' '.join(words)}'"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    assert done.stderr == ""
    return [word.split("\t")[0] for word in done.stdout.splitlines()]


def test_a_help_is_read_in_argparses_form() -> None:
    """Options with their values and choices, commands, arguments; nothing of the examples."""
    command = Command((), "")
    read_help(command, HELP)
    assert command.options == [
        Option(("-h", "--help"), "", "show this help"),
        Option(("--port",), "N", "port to listen on"),
        Option(
            ("--a-rather-long-option",), "{plain,int8}", "how it is stored; see `program --help`", ("plain", "int8")
        ),
        Option(("--sharing", "--no-sharing"), "", "whether"),
        Option(("--models",), "MODEL", "the only models"),
        Option(("-o", "--out"), "FILE", "where it goes"),
        Option(("-i", "--in"), "FILE", "the same as Python 3.13 has it"),
    ]
    assert [(each.path, each.help) for each in command.commands] == [
        (("make",), "make one"),
        (("make-many",), "make some"),
    ]
    assert command.arguments == ("one", "two")


def test_every_command_of_the_program_is_found(program: Command) -> None:
    """Those of other processes too, with their options and the commands below them."""
    found = {" ".join(command.path): command for command in program.all()}
    assert len(found) == len(program.all())
    for name in (
        "serve",
        "doctor",
        "backend",
        "plan",
        "quantize",
        "eval",
        "profile",
        "eval-pairs",
        "replay",
        "keys create",
    ):
        assert found[name].options, name
    names = [name for option in found["backend"].options for name in option.names]
    assert "--kv-memory" in names
    assert "--no-prefix-sharing" in names


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["keepgate", "ser"], ["serve"]),
        (["keepgate", "keys", "cr"], ["create"]),
        (["keepgate", "keys", "create", "--cach"], ["--cache"]),
        (["keepgate", "keys", "create", "--cache", ""], ["use", "read-only", "bypass"]),
        (["keepgate", "backend", "--device", "c"], ["cpu", "cuda"]),
        (["keepgate", "backend", "--device", "=", "c"], ["cpu", "cuda"]),
        (["keepgate", "backend", "--device", "="], ["auto", "cpu", "cuda"]),
        (["keepgate", "serve", "--semantic", "o"], ["off", "observe", "on"]),
        (["keepgate", "serve", "--port", ""], []),
        (["keepgate", "completion", "f"], ["fish"]),
        (["keepgate", "serve", "--no-such", "--host"], ["--host"]),
    ],
)
def test_bash_completes(scripts: dict[str, Path], words: list[str], expected: list[str]) -> None:
    """Commands, options and values, with a space or an equals sign before them."""
    assert in_bash(scripts["bash"], *words) == expected


def test_bash_completes_files_and_folders(scripts: dict[str, Path], tmp_path: Path) -> None:
    """Where a value is a file or a folder, and after a command that takes a file."""
    (tmp_path / "settings.yaml").write_text("")
    (tmp_path / "state").mkdir()
    start = f"{tmp_path}/s"
    both = {f"{tmp_path}/settings.yaml", f"{tmp_path}/state"}
    assert set(in_bash(scripts["bash"], "keepgate", "serve", "--config", start)) == both
    assert in_bash(scripts["bash"], "keepgate", "serve", "--state-dir", start) == [f"{tmp_path}/state"]
    assert set(in_bash(scripts["bash"], "keepgate", "plan", start)) == both


@pytest.mark.parametrize("shell", HERE)
def test_the_script_has_no_fault_of_syntax(scripts: dict[str, Path], shell: str) -> None:
    """Of the shells that are installed here, each reads its own."""
    done = subprocess.run([shell, "-n", scripts[shell]], capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("shell", [shell for shell in HERE if shell != "zsh"])
def test_shells_complete_alike(scripts: dict[str, Path], shell: str) -> None:
    """Commands, options and values in bash, and in fish where it is installed."""
    for words, expected in (
        (("keepgate", "ser"), ["serve"]),
        (("keepgate", "keys", "create", "--cache", ""), ["bypass", "read-only", "use"]),
        (("keepgate", "backend", "--kv-memory", "3GiB", "--devi"), ["--device"]),
        (("keepgate", "completion", ""), ["bash", "fish", "zsh"]),
    ):
        complete = in_bash if shell == "bash" else in_fish
        assert sorted(complete(scripts[shell], *words)) == expected


def test_what_a_help_says_cannot_end_a_quotation() -> None:
    """Quotes, backticks, brackets and dollar signs in a help are text in every shell."""
    hostile = 'it\'s `rm -rf` $(rm) [a:b] \\ "x"'
    program = Command((), "", [Option(("--x",), "", hostile)], [Command(("y",), hostile)])
    for shell in HERE:
        script = SHELLS[shell](program)
        done = subprocess.run([shell, "-n"], input=script, capture_output=True, text=True, timeout=20)
        assert (done.returncode, done.stderr) == (0, ""), shell
    assert "'\\''s" in zsh_script(program)
    assert "it\\'s" in fish_script(program)
    assert "rm" not in bash_script(program)


def test_a_shell_without_a_script_is_refused() -> None:
    """With those there are."""
    said = refusal("completion", "powershell")
    assert "invalid choice: 'powershell'" in said
    assert "fish" in said


def test_the_command_prints_the_script() -> None:
    """On standard output, and nothing else."""
    done = subprocess.run([KEEPGATE, "completion", "bash"], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.endswith("complete -F _keepgate keepgate\n")
    assert sys.executable not in done.stdout
